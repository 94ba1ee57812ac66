//! The control socket: how the control plane writes the route table and asks for the state of the edge.

use std::convert::Infallible;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;
use std::time::Duration;

use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;

use crate::answer;
use crate::body::Body;
use crate::edge::Edge;
use crate::log::Level;
use crate::routes::{Route, Spec, Stale};
use crate::target::is_id;

/// Largest body of a call, in bytes: some hundred thousand routes.
const MAX_BODY: usize = 64 << 20;
/// Time for calls in progress to get their answer at the end.
const FAREWELL: Duration = Duration::from_secs(1);

/// Binds the socket, mode 0600. A socket file nobody listens on is a leftover and is replaced; anything else is not ours
/// to remove. Must run before other threads create files, because it changes the umask for a moment.
pub fn bind(path: &Path) -> io::Result<std::os::unix::net::UnixListener> {
    use std::os::unix::net::{UnixListener, UnixStream};
    if let Ok(found) = std::fs::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "a file that is not a socket is in the way",
            ));
        }
        match UnixStream::connect(path) {
            Ok(_) => {
                return Err(io::Error::new(
                    io::ErrorKind::AddrInUse,
                    "another process listens on it",
                ))
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path)?
            }
            Err(error) => return Err(error),
        }
    }
    let previous = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let listener = UnixListener::bind(path);
    rustix::process::umask(previous);
    let listener = listener?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Serves the control socket until the edge shuts down, and then a moment longer for the calls in progress.
pub async fn serve(edge: Arc<Edge>, listener: UnixListener) {
    let mut calls = JoinSet::new();
    loop {
        tokio::select! {
            () = edge.shutdown.cancelled() => break,
            Some(_) = calls.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((socket, _)) => {
                    calls.spawn(connection(edge.clone(), socket));
                }
                Err(error) => {
                    edge.log.write(
                        Level::Error,
                        "cannot accept on the control socket",
                        json!({ "cause": error.to_string() }),
                    );
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            },
        }
    }
    let _ = tokio::time::timeout(FAREWELL, async {
        while calls.join_next().await.is_some() {}
    })
    .await;
}

async fn connection(edge: Arc<Edge>, socket: UnixStream) {
    let shutdown = edge.shutdown.clone();
    let service = service_fn(move |request| {
        let edge = edge.clone();
        async move { Ok::<_, Infallible>(call(&edge, request).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        // A control plane may keep its connection open for as long as it likes.
        .header_read_timeout(None)
        .serve_connection(TokioIo::new(socket), service);
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        _ = connection.as_mut() => return,
        () = shutdown.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}

#[derive(Serialize)]
struct Status<'a> {
    version: &'a str,
    pid: u32,
    listen: String,
    uptime_ms: u64,
    routes: usize,
    connections: usize,
    requests_total: u64,
    upstream_errors_total: u64,
}

#[derive(Serialize, Deserialize)]
struct Table {
    routes: Vec<Spec>,
}

async fn call(edge: &Edge, request: Request<Incoming>) -> Response<Body> {
    let path = request.uri().path().to_owned();
    let answer = match (request.method(), path.as_str()) {
        (&Method::GET, "/v1/status") => Ok(status(edge)),
        (&Method::GET, "/v1/routes") => Ok(routes(edge)),
        (&Method::PUT, "/v1/routes") => replace(edge, request).await,
        (&Method::POST, "/v1/shutdown") => {
            edge.shutdown.cancel();
            Ok(answer::empty(StatusCode::NO_CONTENT))
        }
        (method, path) => match path.strip_prefix("/v1/routes/") {
            Some(id) if !is_id(id) => Err((
                StatusCode::BAD_REQUEST,
                format!("{id:?} is not a sandbox id"),
            )),
            Some(id) if method == Method::PUT => put(edge, id, request).await,
            Some(id) if method == Method::DELETE => {
                edge.routes.delete(id).await;
                Ok(answer::empty(StatusCode::NO_CONTENT))
            }
            _ => Err(unknown(method, path)),
        },
    };
    answer.unwrap_or_else(|(status, message)| answer::error(status, &message))
}

type Failure = (StatusCode, String);

fn unknown(method: &Method, path: &str) -> Failure {
    let known = matches!(path, "/v1/status" | "/v1/routes" | "/v1/shutdown")
        || path.starts_with("/v1/routes/");
    if known {
        (
            StatusCode::METHOD_NOT_ALLOWED,
            format!("{path} does not know {method}"),
        )
    } else {
        (
            StatusCode::NOT_FOUND,
            format!("there is no {path} on this socket"),
        )
    }
}

fn status(edge: &Edge) -> Response<Body> {
    let status = Status {
        version: env!("CARGO_PKG_VERSION"),
        pid: std::process::id(),
        listen: edge.listen.to_string(),
        uptime_ms: edge.started.elapsed().as_millis() as u64,
        routes: edge.routes.len(),
        connections: edge.clients.len(),
        requests_total: edge.requests.load(Relaxed),
        upstream_errors_total: edge.upstream_errors.load(Relaxed),
    };
    answer::json(StatusCode::OK, &status)
}

fn routes(edge: &Edge) -> Response<Body> {
    let mut routes: Vec<Spec> = edge
        .routes
        .all()
        .iter()
        .map(|route| route.spec.clone())
        .collect();
    routes.sort_by(|a, b| a.sandbox_id.cmp(&b.sandbox_id));
    answer::json(StatusCode::OK, &Table { routes })
}

async fn put(edge: &Edge, id: &str, request: Request<Incoming>) -> Result<Response<Body>, Failure> {
    let spec: Spec = read(request).await?;
    if spec.sandbox_id != id {
        let message = format!("the path names {id}, the body {:?}", spec.sandbox_id);
        return Err((StatusCode::BAD_REQUEST, message));
    }
    let route = open(edge, spec).await?;
    let generation = route.spec.generation;
    match edge.routes.put(route).await {
        Ok(()) => Ok(answer::empty(StatusCode::NO_CONTENT)),
        Err(Stale(have)) => {
            let message =
                format!("route {id} has generation {have}; {generation} is older and was ignored");
            Err((StatusCode::CONFLICT, message))
        }
    }
}

async fn replace(edge: &Edge, request: Request<Incoming>) -> Result<Response<Body>, Failure> {
    let table: Table = read(request).await?;
    let mut seen = std::collections::HashSet::new();
    if let Some(twice) = table
        .routes
        .iter()
        .find(|spec| !seen.insert(&spec.sandbox_id))
    {
        return Err((
            StatusCode::BAD_REQUEST,
            format!("route {} is listed twice", twice.sandbox_id),
        ));
    }
    let mut routes = Vec::with_capacity(table.routes.len());
    for spec in table.routes {
        routes.push(open(edge, spec).await?);
    }
    edge.routes.replace(routes).await;
    Ok(answer::empty(StatusCode::NO_CONTENT))
}

async fn open(edge: &Edge, spec: Spec) -> Result<Route, Failure> {
    let bad_request = |message| (StatusCode::BAD_REQUEST, message);
    spec.check().map_err(bad_request)?;
    Route::open(spec, &edge.namespaces, &edge.idle_places)
        .await
        .map_err(bad_request)
}

async fn read<T: DeserializeOwned>(request: Request<Incoming>) -> Result<T, Failure> {
    let bad_request = |message| (StatusCode::BAD_REQUEST, message);
    let body = Limited::new(request.into_body(), MAX_BODY)
        .collect()
        .await
        .map_err(|error| bad_request(format!("cannot read the body: {error}")))?;
    serde_json::from_slice(&body.to_bytes())
        .map_err(|error| bad_request(format!("the body is not valid: {error}")))
}
