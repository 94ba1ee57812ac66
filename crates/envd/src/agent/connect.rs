//! The Connect protocol, as far as the SDKs use it: JSON, HTTP/1.1, unary and streaming calls.
//!
//! A streaming body is a row of envelopes: one byte of flags, four bytes of big-endian length, and
//! that many bytes of JSON. Flag 0 is a message, flag 2 ends a response stream.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body as _, Incoming};
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::{Request, Response, StatusCode};
use serde::de::DeserializeOwned;
use serde::Serialize;
use std::time::Duration;

use super::http::{self, Body};

/// Largest unary request and largest message of a request stream, in bytes.
pub const MESSAGE_LIMIT: usize = 4 << 20;

const END_OF_STREAM: u8 = 2;
const UNARY: &str = "application/json";
const STREAM: &str = "application/connect+json";

/// Error codes of the protocol that this server uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    InvalidArgument,
    DeadlineExceeded,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    FailedPrecondition,
    Unimplemented,
    Internal,
    Unauthenticated,
}

impl Code {
    pub fn name(self) -> &'static str {
        match self {
            Code::InvalidArgument => "invalid_argument",
            Code::DeadlineExceeded => "deadline_exceeded",
            Code::NotFound => "not_found",
            Code::AlreadyExists => "already_exists",
            Code::PermissionDenied => "permission_denied",
            Code::ResourceExhausted => "resource_exhausted",
            Code::FailedPrecondition => "failed_precondition",
            Code::Unimplemented => "unimplemented",
            Code::Internal => "internal",
            Code::Unauthenticated => "unauthenticated",
        }
    }

    fn status(self) -> StatusCode {
        match self {
            Code::InvalidArgument | Code::FailedPrecondition => StatusCode::BAD_REQUEST,
            Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            Code::NotFound => StatusCode::NOT_FOUND,
            Code::AlreadyExists => StatusCode::CONFLICT,
            Code::PermissionDenied => StatusCode::FORBIDDEN,
            Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
            Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
            Code::Internal => StatusCode::INTERNAL_SERVER_ERROR,
            Code::Unauthenticated => StatusCode::UNAUTHORIZED,
        }
    }
}

/// Why a call failed, in the words the client sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    pub code: Code,
    pub message: String,
}

impl Error {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Error {
            code,
            message: message.into(),
        }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Error::new(Code::InvalidArgument, message)
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Error::new(Code::NotFound, message)
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Error::new(Code::Internal, message)
    }

    fn json(&self) -> serde_json::Value {
        serde_json::json!({ "code": self.code.name(), "message": self.message })
    }
}

/// What kind of call a `Content-Type` announces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Unary,
    Stream,
}

/// The response for a content type this server does not speak.
fn unsupported(kind: Kind) -> Response<Body> {
    let accepted = match kind {
        Kind::Unary => UNARY,
        Kind::Stream => STREAM,
    };
    let message = format!("this procedure takes content type {accepted}");
    let mut response = http::error(StatusCode::UNSUPPORTED_MEDIA_TYPE, &message);
    response
        .headers_mut()
        .insert("accept-post", HeaderValue::from_static(accepted));
    response
}

fn content_type(headers: &HeaderMap) -> &str {
    let value = headers
        .get(header::CONTENT_TYPE)
        .and_then(|v| v.to_str().ok())
        .unwrap_or("");
    value.split(';').next().unwrap_or("").trim()
}

/// Checks what must hold before a request body is read.
pub fn check(headers: &HeaderMap, kind: Kind) -> Result<(), Box<Response<Body>>> {
    let expected = match kind {
        Kind::Unary => UNARY,
        Kind::Stream => STREAM,
    };
    if !content_type(headers).eq_ignore_ascii_case(expected) {
        return Err(Box::new(unsupported(kind)));
    }
    let encoding = match kind {
        Kind::Unary => "content-encoding",
        Kind::Stream => "connect-content-encoding",
    };
    let fail = |e: Error| match kind {
        Kind::Unary => Box::new(unary_error(&e)),
        Kind::Stream => Box::new(stream_error(&e)),
    };
    if let Some(value) = headers.get(encoding) {
        if !value.as_bytes().eq_ignore_ascii_case(b"identity") && !value.is_empty() {
            return Err(fail(Error::new(
                Code::Unimplemented,
                format!("{encoding} {value:?} is not supported, send identity"),
            )));
        }
    }
    match headers.get("connect-protocol-version") {
        Some(v) if v != "1" => Err(fail(Error::invalid("connect-protocol-version must be 1"))),
        _ => Ok(()),
    }
}

/// The time the client allows for a call: `Connect-Timeout-Ms`; absent or 0 is no limit.
pub fn timeout(headers: &HeaderMap) -> Result<Option<Duration>, Error> {
    let Some(value) = headers.get("connect-timeout-ms") else {
        return Ok(None);
    };
    let ms = value
        .to_str()
        .ok()
        .filter(|v| v.len() <= 10 && v.bytes().all(|b| b.is_ascii_digit()));
    match ms.and_then(|v| v.parse::<u64>().ok()) {
        Some(0) => Ok(None),
        Some(ms) => Ok(Some(Duration::from_millis(ms))),
        None => Err(Error::invalid(
            "connect-timeout-ms must be 1 to 10 decimal digits",
        )),
    }
}

/// Reads a body of at most `limit` bytes.
pub async fn collect(mut body: Incoming, limit: usize) -> Result<Bytes, Error> {
    let too_big = || {
        Error::new(
            Code::ResourceExhausted,
            format!("the request is larger than {limit} bytes"),
        )
    };
    if body.size_hint().lower() > limit as u64 {
        return Err(too_big());
    }
    let mut all = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame =
            frame.map_err(|e| Error::invalid(format!("the request body broke off: {e}")))?;
        if let Ok(data) = frame.into_data() {
            if all.len() + data.len() > limit {
                return Err(too_big());
            }
            all.extend_from_slice(&data);
        }
    }
    Ok(all.freeze())
}

/// Parses one JSON message; an empty body is the empty message.
pub fn parse<T: DeserializeOwned>(json: &[u8]) -> Result<T, Error> {
    let json = if json.iter().all(u8::is_ascii_whitespace) {
        b"{}"
    } else {
        json
    };
    serde_json::from_slice(json)
        .map_err(|e| Error::invalid(format!("the request is not a valid message: {e}")))
}

/// Reads the one message of a unary request.
pub async fn read_unary<T: DeserializeOwned>(request: Request<Incoming>) -> Result<T, Error> {
    parse(&collect(request.into_body(), MESSAGE_LIMIT).await?)
}

/// The response of a unary call.
pub fn unary<T: Serialize>(result: Result<T, Error>) -> Response<Body> {
    match result {
        Ok(message) => http::json(StatusCode::OK, &message),
        Err(error) => unary_error(&error),
    }
}

pub fn unary_error(error: &Error) -> Response<Body> {
    http::json(error.code.status(), &error.json())
}

/// A streaming response; the status is 200 whatever happens, outcomes are in the stream.
pub fn stream(body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    // Exactly this value: a charset parameter makes clients refuse the response.
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static(STREAM));
    response
}

/// A stream that consists of its end.
pub fn stream_error(error: &Error) -> Response<Body> {
    stream(http::full(end(Err(error))))
}

/// A stream of one message, which is how a client-streaming call is answered.
pub fn stream_single<T: Serialize>(result: Result<T, Error>) -> Response<Body> {
    match result {
        Ok(message) => {
            let mut bytes = BytesMut::from(&envelope(&message)[..]);
            bytes.extend_from_slice(&end(Ok(())));
            stream(http::full(bytes.freeze()))
        }
        Err(error) => stream_error(&error),
    }
}

fn seal(flags: u8, payload: &[u8]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(5 + payload.len());
    bytes.put_u8(flags);
    bytes.put_u32(payload.len() as u32);
    bytes.extend_from_slice(payload);
    bytes.freeze()
}

/// One message as an envelope.
pub fn envelope<T: Serialize>(message: &T) -> Bytes {
    // Our messages are maps with string keys, which always serialise.
    seal(0, &serde_json::to_vec(message).unwrap_or_default())
}

/// One message, already JSON, as an envelope.
pub fn envelope_raw(json: &[u8]) -> Bytes {
    seal(0, json)
}

/// The envelope that ends a response stream.
pub fn end(result: Result<(), &Error>) -> Bytes {
    match result {
        Ok(()) => seal(END_OF_STREAM, b"{}"),
        Err(error) => seal(
            END_OF_STREAM,
            serde_json::json!({ "error": error.json() })
                .to_string()
                .as_bytes(),
        ),
    }
}

/// Takes one envelope off `buffer` if it is complete. A length above `limit` is refused before any
/// of it is awaited.
fn take_envelope(buffer: &mut BytesMut, limit: usize) -> Result<Option<Bytes>, Error> {
    if buffer.len() < 5 {
        return Ok(None);
    }
    let flags = buffer[0];
    let length = u32::from_be_bytes([buffer[1], buffer[2], buffer[3], buffer[4]]) as usize;
    if flags & 1 != 0 {
        return Err(Error::invalid(
            "compressed messages are not supported, send identity",
        ));
    }
    if flags != 0 {
        return Err(Error::invalid(format!(
            "envelope flags {flags:#04x} are not valid in a request"
        )));
    }
    if length > limit {
        let message = format!("message of {length} bytes is larger than {limit} bytes");
        return Err(Error::new(Code::ResourceExhausted, message));
    }
    if buffer.len() < 5 + length {
        return Ok(None);
    }
    buffer.advance(5);
    Ok(Some(buffer.split_to(length).freeze()))
}

/// The messages of a streaming request, read as they arrive.
pub struct Messages {
    body: Incoming,
    buffer: BytesMut,
}

impl Messages {
    pub fn new(body: Incoming) -> Self {
        Messages {
            body,
            buffer: BytesMut::new(),
        }
    }

    /// The next message, or `None` after the last one.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, Error> {
        loop {
            if let Some(message) = take_envelope(&mut self.buffer, MESSAGE_LIMIT)? {
                return parse(&message).map(Some);
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                }
                Some(Err(e)) => {
                    return Err(Error::invalid(format!("the request body broke off: {e}")))
                }
                None if self.buffer.is_empty() => return Ok(None),
                None => return Err(Error::invalid("the request body ends inside an envelope")),
            }
        }
    }

    /// The only message of a server-streaming request. The rest of the body is returned, so that
    /// its end can be awaited while the response runs.
    pub async fn single<T: DeserializeOwned>(mut self) -> Result<(T, Incoming), Error> {
        match self.next().await? {
            Some(message) if self.buffer.is_empty() => Ok((message, self.body)),
            Some(_) => Err(Error::invalid("this procedure takes exactly one message")),
            None => Err(Error::invalid("the request message is missing")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(k, v)| (k.parse().unwrap(), HeaderValue::from_static(v)))
            .collect()
    }

    #[test]
    fn timeouts_are_milliseconds_and_zero_is_none() {
        assert_eq!(timeout(&headers(&[])), Ok(None));
        assert_eq!(timeout(&headers(&[("connect-timeout-ms", "0")])), Ok(None));
        assert_eq!(
            timeout(&headers(&[("connect-timeout-ms", "1500")])),
            Ok(Some(Duration::from_millis(1500)))
        );
        for bad in ["", "-1", "1.5", "12345678901", "1s"] {
            assert!(
                timeout(&headers(&[("connect-timeout-ms", bad)])).is_err(),
                "{bad}"
            );
        }
    }

    #[test]
    fn content_types_are_compared_without_parameters() {
        assert!(check(
            &headers(&[("content-type", "application/json; charset=utf-8")]),
            Kind::Unary
        )
        .is_ok());
        assert!(check(
            &headers(&[("content-type", "application/json")]),
            Kind::Stream
        )
        .is_err());
        assert!(check(
            &headers(&[("content-type", "application/connect+json")]),
            Kind::Stream
        )
        .is_ok());
        let identity = [
            ("content-type", "application/json"),
            ("content-encoding", "identity"),
        ];
        assert!(check(&headers(&identity), Kind::Unary).is_ok());
        let gzip = [
            ("content-type", "application/json"),
            ("content-encoding", "gzip"),
        ];
        assert!(check(&headers(&gzip), Kind::Unary).is_err());
    }

    proptest! {
        #[test]
        fn envelopes_survive_any_split(messages in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..8), step in 1usize..64) {
            let wire: Vec<u8> = messages.iter().flat_map(|m| seal(0, m).to_vec()).collect();
            let mut buffer = BytesMut::new();
            let mut got = Vec::new();
            for part in wire.chunks(step) {
                buffer.extend_from_slice(part);
                while let Some(message) = take_envelope(&mut buffer, 1000).unwrap() {
                    got.push(message.to_vec());
                }
            }
            prop_assert!(buffer.is_empty());
            prop_assert_eq!(got, messages);
        }

        #[test]
        fn arbitrary_bytes_never_yield_more_than_the_limit(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            let mut buffer = BytesMut::from(&bytes[..]);
            while let Ok(Some(message)) = take_envelope(&mut buffer, 100) {
                prop_assert!(message.len() <= 100);
            }
        }
    }
}
