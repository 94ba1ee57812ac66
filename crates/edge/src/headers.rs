//! What may pass from one connection to the next.
//!
//! Both sides of the edge speak HTTP/1.1 with framing of their own, so everything that describes one connection is
//! taken off each message. What is left means the same to every reader.

use std::net::IpAddr;

use http::header::{
    HeaderName, CONNECTION, CONTENT_LENGTH, HOST, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE,
    TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, HeaderValue};

/// Authorises internal calls to the agent; never accepted from a client.
pub static AGENT_CONTROL: HeaderName = HeaderName::from_static("x-aenv-control");
pub static TRAFFIC_TOKEN: HeaderName = HeaderName::from_static("e2b-traffic-access-token");
static FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
static FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
static KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
static PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// The protocol a message wants to change to, if `Connection: upgrade` announces one.
pub fn upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    let announced = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|token| token.trim().eq_ignore_ascii_case("upgrade"));
    headers.get(UPGRADE).filter(|_| announced).cloned()
}

/// Removes what belongs to one connection only, including the headers `Connection` names, and leaves at most one
/// `Content-Length`, none when the message was chunked: the HTTP library has checked and decoded the framing, and
/// frames the message again.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    if headers.contains_key(CONNECTION) {
        let named: Vec<HeaderName> = headers
            .get_all(CONNECTION)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .filter_map(|token| token.trim().parse().ok())
            // Names that carry the request itself are not for `Connection` to remove.
            .filter(|name| *name != HOST && *name != CONTENT_LENGTH)
            .collect();
        for name in named {
            headers.remove(name);
        }
        headers.remove(CONNECTION);
    }
    if headers.remove(TRANSFER_ENCODING).is_some() {
        headers.remove(CONTENT_LENGTH);
    } else if headers.get_all(CONTENT_LENGTH).iter().nth(1).is_some() {
        if let Some(length) = headers.get(CONTENT_LENGTH).cloned() {
            headers.insert(CONTENT_LENGTH, length);
        }
    }
    for name in [&KEEP_ALIVE, &PROXY_CONNECTION, &TE, &TRAILER, &UPGRADE] {
        headers.remove(name);
    }
}

/// Makes the headers of a request fit for a guest or the control API. `host` stands in when the client sent none.
pub fn prepare_request(headers: &mut HeaderMap, client: IpAddr, host: &HeaderValue) {
    strip_hop_by_hop(headers);
    headers.remove(PROXY_AUTHORIZATION);
    headers.remove(&AGENT_CONTROL);
    // Replaced, not extended: what a client claims about its own address is worth nothing.
    if let Ok(client) = HeaderValue::try_from(client.to_canonical().to_string()) {
        headers.insert(&FORWARDED_FOR, client);
    }
    if !headers.contains_key(HOST) {
        headers.insert(HOST, host.clone());
    }
}

/// Shows a guest another host name than the one the client used.
pub fn mask_host(headers: &mut HeaderMap, mask: HeaderValue) {
    if let Some(original) = headers.insert(HOST, mask) {
        headers.insert(&FORWARDED_HOST, original);
    }
}

pub fn prepare_response(headers: &mut HeaderMap) {
    strip_hop_by_hop(headers);
    headers.remove(PROXY_AUTHENTICATE);
}

/// False when the body of a request is coded in a way that would be lost by framing it again.
pub fn transfer_coding_is_plain(headers: &HeaderMap) -> bool {
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => true,
        (Some(coding), None) => coding.as_bytes().eq_ignore_ascii_case(b"chunked"),
        _ => false,
    }
}

/// Puts the announcement of a protocol change back on a message.
pub fn announce_upgrade(headers: &mut HeaderMap, protocol: HeaderValue) {
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, protocol);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut map = HeaderMap::new();
        for (name, value) in pairs {
            map.append(*name, HeaderValue::from_static(value));
        }
        map
    }

    #[test]
    fn connection_headers_go() {
        let mut headers = map(&[
            ("connection", "keep-alive, X-One"),
            ("connection", "x-two, host, content-length"),
            ("x-one", "1"),
            ("x-two", "2"),
            ("keep-alive", "timeout=5"),
            ("proxy-connection", "x"),
            ("te", "trailers"),
            ("trailer", "x-sum"),
            ("upgrade", "h2c"),
            ("host", "h"),
            ("content-length", "3"),
            ("accept", "a"),
        ]);
        strip_hop_by_hop(&mut headers);
        let mut left: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(left, ["accept", "content-length", "host"]);
    }

    #[test]
    fn one_length_at_most() {
        let mut headers = map(&[("content-length", "3"), ("content-length", "3")]);
        strip_hop_by_hop(&mut headers);
        assert_eq!(headers.get_all("content-length").iter().count(), 1);
        let mut headers = map(&[("content-length", "3"), ("transfer-encoding", "chunked")]);
        strip_hop_by_hop(&mut headers);
        assert!(headers.is_empty());
    }

    #[test]
    fn clients_cannot_claim_an_address_or_control() {
        let mut headers = map(&[
            ("x-forwarded-for", "1.1.1.1"),
            ("X-Aenv-Control", "t"),
            ("proxy-authorization", "b"),
        ]);
        prepare_request(
            &mut headers,
            "::ffff:10.0.0.7".parse().unwrap(),
            &HeaderValue::from_static("fallback"),
        );
        assert_eq!(headers.get("x-forwarded-for").unwrap(), "10.0.0.7");
        assert_eq!(headers.get("host").unwrap(), "fallback");
        assert_eq!(headers.len(), 2);
    }

    #[test]
    fn upgrades_need_both_headers() {
        assert!(upgrade(&map(&[("upgrade", "websocket")])).is_none());
        assert!(upgrade(&map(&[("connection", "upgrade")])).is_none());
        let both = map(&[
            ("connection", "keep-alive, Upgrade"),
            ("upgrade", "websocket"),
        ]);
        assert_eq!(upgrade(&both).unwrap(), "websocket");
    }

    #[test]
    fn only_plain_chunked_passes() {
        assert!(transfer_coding_is_plain(&map(&[])));
        assert!(transfer_coding_is_plain(&map(&[(
            "transfer-encoding",
            "Chunked"
        )])));
        assert!(!transfer_coding_is_plain(&map(&[(
            "transfer-encoding",
            "gzip, chunked"
        )])));
        assert!(!transfer_coding_is_plain(&map(&[
            ("transfer-encoding", "gzip"),
            ("transfer-encoding", "chunked")
        ])));
    }
}
