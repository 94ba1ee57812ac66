//! From a request to its handler: CORS, access token, path.

use hyper::body::Incoming;
use hyper::header::{HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use std::sync::Arc;

use super::http::{self, Body};
use super::{control, files, filesystem, process, token, Agent};

/// Answers a request. Never fails: what goes wrong becomes a response.
pub async fn route(agent: Arc<Agent>, request: Request<Incoming>) -> Response<Body> {
    let asked = request
        .headers()
        .get("access-control-request-headers")
        .cloned();
    let mut response = if is_preflight(&request) {
        http::empty(StatusCode::NO_CONTENT)
    } else {
        dispatch(agent, request).await
    };
    let allow = |response: &mut Response<Body>, name: &'static str, value: &'static str| {
        response.headers_mut().insert(
            HeaderName::from_static(name),
            HeaderValue::from_static(value),
        );
    };
    // Browsers may call from any page: what protects a sandbox is its token, not the origin.
    allow(&mut response, "access-control-allow-origin", "*");
    // A star would not cover Authorization, so the headers asked for are given back.
    let headers = asked.unwrap_or(HeaderValue::from_static("*"));
    response
        .headers_mut()
        .insert("access-control-allow-headers", headers);
    allow(
        &mut response,
        "access-control-allow-methods",
        "GET, HEAD, POST, PUT, PATCH, DELETE",
    );
    allow(&mut response, "access-control-expose-headers", "*");
    allow(&mut response, "access-control-max-age", "7200");
    response
}

fn is_preflight(request: &Request<Incoming>) -> bool {
    request.method() == Method::OPTIONS
        && request
            .headers()
            .contains_key("access-control-request-method")
}

async fn dispatch(agent: Arc<Agent>, request: Request<Incoming>) -> Response<Body> {
    let path = request.uri().path().to_owned();
    let method = request.method().clone();
    match (&method, &*path) {
        (&Method::GET, "/health") => return http::empty(StatusCode::NO_CONTENT),
        (_, "/files") => return files::serve(agent, request).await,
        (&Method::POST, "/init") => return control::init(agent, request).await,
        (&Method::POST, "/freeze") => return control::freeze(&agent, request.headers()),
        (&Method::POST, "/shutdown") => return control::shutdown(agent, request).await,
        _ => {}
    }
    if let Err(response) = authorize(&agent, &request) {
        return *response;
    }
    if let Some((service, procedure)) = path.strip_prefix('/').and_then(|p| p.split_once('/')) {
        if matches!(service, "process.Process" | "filesystem.Filesystem") && method != Method::POST
        {
            return not_allowed("POST");
        }
        let response = match service {
            "process.Process" => process::rpc::serve(agent, procedure, request).await,
            "filesystem.Filesystem" => filesystem::rpc::serve(agent, procedure, request).await,
            _ => None,
        };
        return response.unwrap_or_else(|| not_found(&path));
    }
    match (&method, &*path) {
        (&Method::GET, "/metrics") => match agent.cpu.collect(agent.kernel.proc()) {
            Ok(metrics) => http::json(StatusCode::OK, &metrics),
            Err(message) => http::error(StatusCode::INTERNAL_SERVER_ERROR, &message),
        },
        (&Method::GET, "/envs") => http::json(StatusCode::OK, &agent.identity().environment()),
        (_, "/health" | "/metrics" | "/envs") => not_allowed("GET"),
        (_, "/init" | "/freeze" | "/shutdown") => not_allowed("POST"),
        _ => not_found(&path),
    }
}

fn authorize(agent: &Agent, request: &Request<Incoming>) -> Result<(), Box<Response<Body>>> {
    let identity = agent.identity();
    let given = request
        .headers()
        .get(token::ACCESS_HEADER)
        .map_or(&b""[..], |v| v.as_bytes());
    if identity.access_token.is_empty() || token::equal(given, identity.access_token.as_bytes()) {
        return Ok(());
    }
    let message =
        "unauthorized access, please provide a valid access token or method signing if supported";
    Err(Box::new(http::error(StatusCode::UNAUTHORIZED, message)))
}

fn not_found(path: &str) -> Response<Body> {
    http::error(
        StatusCode::NOT_FOUND,
        &format!("there is nothing at {path}"),
    )
}

fn not_allowed(allowed: &'static str) -> Response<Body> {
    let mut response = http::error(StatusCode::METHOD_NOT_ALLOWED, &format!("use {allowed}"));
    response
        .headers_mut()
        .insert(hyper::header::ALLOW, HeaderValue::from_static(allowed));
    response
}
