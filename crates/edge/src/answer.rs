//! Answers the edge gives itself.

use bytes::Bytes;
use http::header::{ACCESS_CONTROL_ALLOW_ORIGIN, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};
use serde::Serialize;

use crate::body::Body;

/// Body of every answer of the edge. Clients read `message` and `code`, and tell two kinds of 502 apart by the text.
#[derive(Serialize)]
struct Report<'a> {
    #[serde(rename = "sandboxId", skip_serializing_if = "Option::is_none")]
    sandbox_id: Option<&'a str>,
    message: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
    code: u16,
}

fn report(
    status: StatusCode,
    sandbox_id: Option<&str>,
    port: Option<u16>,
    message: &str,
) -> Response<Body> {
    let report = Report {
        sandbox_id,
        message,
        port,
        code: status.as_u16(),
    };
    let mut response = json(status, &report);
    if sandbox_id.is_some() {
        // A page on another origin must be able to read why its sandbox does not answer.
        response
            .headers_mut()
            .insert(ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
    }
    response
}

pub fn json<T: Serialize>(status: StatusCode, value: &T) -> Response<Body> {
    // Serialising our own plain structures cannot fail; an empty body would be the result if it did.
    let text = serde_json::to_vec(value).unwrap_or_default();
    let mut response = Response::new(Body::full(Bytes::from(text)));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

pub fn empty(status: StatusCode) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = status;
    response
}

/// A plain error that concerns no sandbox.
pub fn error(status: StatusCode, message: &str) -> Response<Body> {
    report(status, None, None, message)
}

fn retry_soon(mut response: Response<Body>) -> Response<Body> {
    response
        .headers_mut()
        .insert(RETRY_AFTER, HeaderValue::from_static("1"));
    response
}

pub fn not_found(id: &str) -> Response<Body> {
    report(
        StatusCode::BAD_GATEWAY,
        Some(id),
        None,
        "The sandbox was not found",
    )
}

pub fn port_closed(id: &str, port: u16) -> Response<Body> {
    let message = "The sandbox is running but port is not open";
    report(StatusCode::BAD_GATEWAY, Some(id), Some(port), message)
}

/// The guest took the connection but did not answer in HTTP.
pub fn guest_failed(id: &str, port: u16, cause: &str) -> Response<Body> {
    let message = format!("The sandbox is running but its server on this port failed: {cause}");
    report(StatusCode::BAD_GATEWAY, Some(id), Some(port), &message)
}

pub fn guest_timeout(id: &str, port: u16) -> Response<Body> {
    let message =
        "The sandbox did not accept the connection in time; it may be overloaded, try again";
    report(StatusCode::GATEWAY_TIMEOUT, Some(id), Some(port), message)
}

/// We are out of something the kernel gives out; the guest has no part in it.
pub fn node_exhausted(id: &str, cause: &str) -> Response<Body> {
    let message = format!("The node cannot open more connections ({cause}); try again");
    retry_soon(report(
        StatusCode::SERVICE_UNAVAILABLE,
        Some(id),
        None,
        &message,
    ))
}

pub fn token_refused(id: &str) -> Response<Body> {
    let message = "This sandbox is private; send its traffic access token in the header e2b-traffic-access-token";
    report(StatusCode::FORBIDDEN, Some(id), None, message)
}

pub fn internal_route(id: &str) -> Response<Body> {
    report(
        StatusCode::NOT_FOUND,
        Some(id),
        None,
        "This path is internal to the sandbox",
    )
}

pub fn sandbox_full(id: &str) -> Response<Body> {
    let message = "Too many requests to this sandbox are open at once; close some and try again";
    retry_soon(report(
        StatusCode::TOO_MANY_REQUESTS,
        Some(id),
        None,
        message,
    ))
}

pub fn api_down() -> Response<Body> {
    let message = "The control plane is not running or restarting; try again";
    retry_soon(error(StatusCode::SERVICE_UNAVAILABLE, message))
}

pub fn api_failed(cause: &str) -> Response<Body> {
    error(
        StatusCode::BAD_GATEWAY,
        &format!("The control plane failed to answer: {cause}"),
    )
}

/// Written as it is to a connection beyond the limit, before any request was read.
pub const SERVER_FULL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n\
connection: close\r\ncontent-length: 84\r\n\r\n{\"message\":\"Too many connections are open on this node; try again later\",\"code\":503}";

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt;

    async fn text(response: Response<Body>) -> String {
        String::from_utf8(
            response
                .into_body()
                .collect()
                .await
                .unwrap()
                .to_bytes()
                .to_vec(),
        )
        .unwrap()
    }

    #[tokio::test]
    async fn bodies_have_the_agreed_form() {
        assert_eq!(
            text(not_found("abc")).await,
            r#"{"sandboxId":"abc","message":"The sandbox was not found","code":502}"#
        );
        assert_eq!(
            text(port_closed("abc", 80)).await,
            r#"{"sandboxId":"abc","message":"The sandbox is running but port is not open","port":80,"code":502}"#
        );
        assert_eq!(
            text(error(StatusCode::BAD_REQUEST, "no")).await,
            r#"{"message":"no","code":400}"#
        );
    }

    #[test]
    fn the_canned_answer_counts_its_bytes() {
        let canned = std::str::from_utf8(SERVER_FULL).unwrap();
        let (head, body) = canned.split_once("\r\n\r\n").unwrap();
        assert!(
            head.ends_with(&format!("content-length: {}", body.len())),
            "{}",
            body.len()
        );
    }
}
