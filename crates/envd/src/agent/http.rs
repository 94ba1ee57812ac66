//! Small building blocks of HTTP responses and requests.

use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Body as HttpBody;
use hyper::header::{HeaderValue, CONTENT_TYPE};
use hyper::{Response, StatusCode};
use serde::Serialize;
use std::io;

/// Every response body. An error aborts the connection, so that a cut body is never taken for a whole one.
pub type Body = UnsyncBoxBody<Bytes, io::Error>;

pub fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into())
        .map_err(|never| match never {})
        .boxed_unsync()
}

pub fn boxed(body: impl HttpBody<Data = Bytes, Error = io::Error> + Send + 'static) -> Body {
    body.boxed_unsync()
}

pub fn empty(status: StatusCode) -> Response<Body> {
    let mut response = Response::new(full(Bytes::new()));
    *response.status_mut() = status;
    response
}

pub fn json<T: Serialize>(status: StatusCode, value: &T) -> Response<Body> {
    // Our values are maps with string keys, which always serialise.
    let mut response = Response::new(full(serde_json::to_vec(value).unwrap_or_default()));
    *response.status_mut() = status;
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// The error form of every plain HTTP endpoint: `{"code": <status>, "message": <text>}`.
pub fn error(status: StatusCode, message: &str) -> Response<Body> {
    json(
        status,
        &serde_json::json!({ "code": status.as_u16(), "message": message }),
    )
}

/// Decodes a query string (`+` is a space). Fails on broken escapes and on text that is not UTF-8.
pub fn query(raw: &str) -> Result<Vec<(String, String)>, String> {
    raw.split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            Ok((decode(key)?, decode(value)?))
        })
        .collect()
}

fn decode(text: &str) -> Result<String, String> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'+' => b' ',
            b'%' => {
                let digit = |b: Option<u8>| b.and_then(|b| char::from(b).to_digit(16));
                match (digit(bytes.next()), digit(bytes.next())) {
                    (Some(high), Some(low)) => (high * 16 + low) as u8,
                    _ => return Err("the query has a broken percent escape".into()),
                }
            }
            other => other,
        });
    }
    String::from_utf8(out).map_err(|_| "the query is not UTF-8".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn both_spellings_of_a_space_are_read() {
        let pairs = query("path=/a%20b&username=x+y&&flag").unwrap();
        let expected = [("path", "/a b"), ("username", "x y"), ("flag", "")];
        assert_eq!(pairs, expected.map(|(k, v)| (k.to_owned(), v.to_owned())));
        assert!(query("path=%2").is_err());
        assert!(query("path=%ff").is_err());
    }

    proptest! {
        #[test]
        fn every_text_survives_escaping(text in "\\PC*") {
            let escaped: String = text.bytes().map(|b| format!("%{b:02X}")).collect();
            prop_assert_eq!(decode(&escaped).unwrap(), text);
        }

        #[test]
        fn arbitrary_queries_do_not_panic(text in "\\PC*") {
            let _ = query(&text);
        }
    }
}
