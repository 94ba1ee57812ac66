//! Where a request goes: read from its `Host` and routing headers, without looking at any table.

use http::header::{HeaderName, HOST};
use http::request::Parts;
use http::{HeaderMap, Method, Version};

/// Port of the agent inside every guest.
pub const AGENT_PORT: u16 = 49983;
/// Longest sandbox id.
pub const MAX_ID: usize = 64;

pub static SANDBOX_ID: HeaderName = HeaderName::from_static("e2b-sandbox-id");
pub static SANDBOX_PORT: HeaderName = HeaderName::from_static("e2b-sandbox-port");

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    Api,
    Sandbox { id: String, port: u16 },
}

/// Decides where a request goes. The error is the message of a 400.
pub fn of_request(head: &Parts) -> Result<Target, String> {
    if head.method == Method::CONNECT {
        return Err("CONNECT is not supported; this server is not a forward proxy".into());
    }
    let host = one(&head.headers, &HOST)?;
    match (host, head.uri.authority()) {
        (None, None) if head.version >= Version::HTTP_11 => {
            return Err("the Host header is missing".into())
        }
        (Some(host), Some(authority)) if !host.eq_ignore_ascii_case(authority.as_str()) => {
            return Err("the request target and the Host header name different hosts".into())
        }
        _ => {}
    }
    let host = host
        .or(head.uri.authority().map(|a| a.as_str()))
        .unwrap_or("");
    if let Some((id, port)) = of_host(host)? {
        return Ok(Target::Sandbox { id, port });
    }
    of_headers(&head.headers)
}

/// The sandbox and port named by the left-most label of a host name, `<port>-<sandbox id>`; `None` when the label has
/// another form. A second hyphen ends the id: older clients append the id of a client there.
pub fn of_host(host: &str) -> Result<Option<(String, u16)>, String> {
    let label = host.split(['.', ':']).next().unwrap_or("");
    let Some((port, rest)) = label.split_once('-') else {
        return Ok(None);
    };
    if port.is_empty() || !port.bytes().all(|b| b.is_ascii_digit()) {
        return Ok(None);
    }
    let id = rest.split('-').next().unwrap_or("").to_ascii_lowercase();
    Ok(Some((checked_id(&id)?, checked_port(port)?)))
}

fn of_headers(headers: &HeaderMap) -> Result<Target, String> {
    match (one(headers, &SANDBOX_ID)?, one(headers, &SANDBOX_PORT)?) {
        (None, None) => Ok(Target::Api),
        (Some(id), Some(port)) => Ok(Target::Sandbox {
            id: checked_id(id)?,
            port: checked_port(port)?,
        }),
        (Some(_), None) => {
            Err("the header E2b-Sandbox-Port is missing beside E2b-Sandbox-Id".into())
        }
        (None, Some(_)) => {
            Err("the header E2b-Sandbox-Id is missing beside E2b-Sandbox-Port".into())
        }
    }
}

/// The only value of a header. A second value would let two readers of one request disagree.
fn one<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, String> {
    let mut values = headers.get_all(name).iter();
    let first = values.next();
    if values.next().is_some() {
        return Err(format!("the header {name} is given twice"));
    }
    first
        .map(|value| {
            value
                .to_str()
                .map_err(|_| format!("the header {name} is not ASCII"))
        })
        .transpose()
}

pub fn is_id(id: &str) -> bool {
    !id.is_empty()
        && id.len() <= MAX_ID
        && id
            .bytes()
            .all(|b| b.is_ascii_digit() || b.is_ascii_lowercase())
}

fn checked_id(id: &str) -> Result<String, String> {
    if is_id(id) {
        Ok(id.to_owned())
    } else {
        Err(format!(
            "a sandbox id is 1 to {MAX_ID} characters of a-z and 0-9"
        ))
    }
}

fn checked_port(port: &str) -> Result<u16, String> {
    let digits = !port.is_empty() && port.len() <= 5 && port.bytes().all(|b| b.is_ascii_digit());
    match port.parse::<u16>() {
        Ok(port) if digits && port > 0 => Ok(port),
        _ => Err("a sandbox port is a number from 1 to 65535".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;
    use proptest::prelude::*;

    fn parts(uri: &str, headers: &[(&str, &str)]) -> Parts {
        let mut request = Request::builder().uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    fn sandbox(id: &str, port: u16) -> Result<Target, String> {
        Ok(Target::Sandbox {
            id: id.into(),
            port,
        })
    }

    #[test]
    fn host_labels() {
        let of = |host: &str| of_request(&parts("/", &[("host", host)]));
        assert_eq!(of("49983-abc.example.com"), sandbox("abc", 49983));
        assert_eq!(of("8080-i1.example.com:3000"), sandbox("i1", 8080));
        assert_eq!(of("8080-ABC"), sandbox("abc", 8080));
        assert_eq!(of("8080-abc-client.example.com"), sandbox("abc", 8080));
        for host in [
            "example.com",
            "api.example.com",
            "127.0.0.1:3000",
            "[::1]:80",
            "a-b.example.com",
            "-a.b",
            "",
        ] {
            assert_eq!(of(host), Ok(Target::Api), "{host}");
        }
        for host in [
            "0-abc.x",
            "65536-abc.x",
            "999999-abc.x",
            "80-.x",
            "80--a.x",
            "80-a_b.x",
        ] {
            assert!(of(host).is_err(), "{host}");
        }
        assert!(of(&format!("80-{}.x", "a".repeat(65))).is_err());
    }

    #[test]
    fn routing_headers() {
        let of = |headers: &[(&str, &str)]| of_request(&parts("/", headers));
        let (id, port) = (("e2b-sandbox-id", "abc"), ("e2b-sandbox-port", "80"));
        assert_eq!(of(&[("host", "x"), id, port]), sandbox("abc", 80));
        assert_eq!(
            of(&[("host", "81-other.x"), id, port]),
            sandbox("other", 81)
        );
        assert!(of(&[("host", "x"), id])
            .unwrap_err()
            .contains("Port is missing"));
        assert!(of(&[("host", "x"), port])
            .unwrap_err()
            .contains("Id is missing"));
        assert!(of(&[("host", "x"), id, id, port])
            .unwrap_err()
            .contains("twice"));
        assert!(of(&[("host", "x"), ("host", "y")])
            .unwrap_err()
            .contains("twice"));
        for bad in ["", "-1", "+80", "80 ", "0", "65536", "eighty", "00000080"] {
            assert!(
                of(&[("host", "x"), id, ("e2b-sandbox-port", bad)]).is_err(),
                "{bad}"
            );
        }
        for bad in ["", "ABC", "a-b", "a/b", "a b", "../x"] {
            assert!(
                of(&[("host", "x"), ("e2b-sandbox-id", bad), port]).is_err(),
                "{bad}"
            );
        }
    }

    #[test]
    fn hosts_must_agree() {
        assert!(of_request(&parts("/", &[])).is_err());
        assert_eq!(
            of_request(&parts("http://80-abc.x/p", &[("host", "80-ABC.x")])),
            sandbox("abc", 80)
        );
        assert!(of_request(&parts("http://80-abc.x/p", &[("host", "80-def.x")])).is_err());
        assert_eq!(
            of_request(&parts("http://80-abc.x/p", &[])),
            sandbox("abc", 80)
        );
    }

    proptest! {
        #[test]
        fn valid_labels_round_trip(port in 1u16.., id in "[a-z0-9]{1,64}", domain in "(\\.[a-z]{1,8}){0,3}", tail in "(:[0-9]{1,5})?") {
            let host = format!("{port}-{id}{domain}{tail}");
            prop_assert_eq!(of_host(&host), Ok(Some((id, port))));
        }

        #[test]
        fn any_host_yields_a_valid_target_or_none(host in "\\PC{0,80}") {
            if let Ok(Some((id, port))) = of_host(&host) {
                prop_assert!(is_id(&id) && port > 0);
            }
        }

        #[test]
        fn any_headers_yield_a_valid_target(id in "[ -~]{0,80}", port in "[ -~]{0,8}") {
            if let Ok(Target::Sandbox { id, port }) =
                of_request(&parts("/", &[("host", "x"), ("e2b-sandbox-id", &id), ("e2b-sandbox-port", &port)]))
            {
                prop_assert!(is_id(&id) && port > 0);
            }
        }
    }
}
