//! What the headers of any call say about it.

use base64::engine::general_purpose::STANDARD;
use base64::Engine;
use hyper::header::{HeaderMap, AUTHORIZATION};
use std::sync::Arc;
use std::time::Duration;

use super::connect::{Code, Error};
use super::users::User;
use super::Agent;

const DEFAULT_KEEPALIVE: Duration = Duration::from_secs(90);

/// The user a call is made for: the one of `Authorization: Basic`, or the default user.
pub async fn user(agent: &Arc<Agent>, headers: &HeaderMap) -> Result<User, Error> {
    let name = match headers.get(AUTHORIZATION) {
        None => String::new(),
        Some(value) => value.to_str().ok().and_then(basic).ok_or_else(|| {
            Error::new(
                Code::Unauthenticated,
                "authorization must be Basic with base64 of '<user>:'",
            )
        })?,
    };
    agent
        .user(&name)
        .await
        .map_err(|message| Error::new(Code::Unauthenticated, message))
}

/// The user name of a `Basic` authorization; the password is none of our business.
fn basic(value: &str) -> Option<String> {
    let (scheme, credentials) = value.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let credentials = String::from_utf8(STANDARD.decode(credentials.trim()).ok()?).ok()?;
    Some(
        credentials
            .split_once(':')
            .map_or(&*credentials, |(name, _)| name)
            .to_owned(),
    )
}

/// Interval of silence after which the client wants a sign of life.
pub fn keepalive(headers: &HeaderMap) -> Duration {
    let value = headers
        .get("keepalive-ping-interval")
        .and_then(|v| v.to_str().ok());
    match value.and_then(|v| v.parse().ok()) {
        Some(seconds @ 1..=86_400) => Duration::from_secs(seconds),
        _ => DEFAULT_KEEPALIVE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_names_are_read_from_basic_credentials() {
        assert_eq!(basic("Basic dXNlcjo="), Some("user".into()));
        assert_eq!(basic("basic dXNlcjpwOnE="), Some("user".into()));
        assert_eq!(basic("Basic dXNlcg=="), Some("user".into()));
        for bad in [
            "Bearer dXNlcjo=",
            "Basic",
            "Basic !",
            "Basic /w==",
            "dXNlcjo=",
        ] {
            assert_eq!(basic(bad), None, "{bad}");
        }
    }

    #[test]
    fn keepalive_intervals_have_a_default() {
        let of = |value: &'static str| {
            keepalive(
                &[(
                    "keepalive-ping-interval".parse().unwrap(),
                    value.parse().unwrap(),
                )]
                .into_iter()
                .collect(),
            )
        };
        assert_eq!(of("50"), Duration::from_secs(50));
        for odd in ["0", "-1", "x", "99999999"] {
            assert_eq!(of(odd), DEFAULT_KEEPALIVE, "{odd}");
        }
    }
}
