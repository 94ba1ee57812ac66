//! Access tokens and the signatures of file URLs.

use base64::engine::general_purpose::STANDARD_NO_PAD;
use base64::Engine;
use hyper::header::HeaderValue;
use sha2::{Digest, Sha256};
use std::time::{SystemTime, UNIX_EPOCH};

pub const ACCESS_HEADER: &str = "x-access-token";

/// Compares secrets; the time taken depends on their lengths only.
pub fn equal(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len()
        && a.iter()
            .zip(b)
            .fold(0, |difference, (x, y)| difference | (x ^ y))
            == 0
}

/// What a signed URL says.
pub struct Signed<'a> {
    pub path: &'a str,
    /// `read` or `write`.
    pub operation: &'a str,
    pub user: &'a str,
    pub signature: Option<&'a str>,
    /// Seconds since 1970, as written in the URL.
    pub expiration: Option<&'a str>,
}

impl Signed<'_> {
    fn expected(&self, secret: &str) -> String {
        let mut text = format!("{}:{}:{}:{secret}", self.path, self.operation, self.user);
        if let Some(expiration) = self.expiration {
            text.push(':');
            text.push_str(expiration);
        }
        format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text)))
    }
}

/// Whether a request for a file may be served. The texts of the errors are part of the interface.
pub fn authorize_file(
    secret: &str,
    header: Option<&HeaderValue>,
    signed: &Signed<'_>,
) -> Result<(), &'static str> {
    if secret.is_empty() {
        return Ok(());
    }
    if let Some(token) = header {
        return match equal(token.as_bytes(), secret.as_bytes()) {
            true => Ok(()),
            false => Err("access token present in header but does not match"),
        };
    }
    let signature = signed
        .signature
        .ok_or("missing signature query parameter")?;
    if !equal(signature.as_bytes(), signed.expected(secret).as_bytes()) {
        return Err("invalid signature");
    }
    match signed.expiration.map(str::parse::<i64>) {
        None => Ok(()),
        Some(Ok(expiration)) if expiration >= now() => Ok(()),
        Some(_) => Err("signature is already expired"),
    }
}

/// Seconds since 1970 by the guest's clock.
fn now() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_secs() as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signed<'a>(signature: Option<&'a str>, expiration: Option<&'a str>) -> Signed<'a> {
        Signed {
            path: "/a b",
            operation: "read",
            user: "user",
            signature,
            expiration,
        }
    }

    #[test]
    fn the_header_decides_when_it_is_there() {
        let header = HeaderValue::from_static("secret");
        assert_eq!(
            authorize_file("secret", Some(&header), &signed(None, None)),
            Ok(())
        );
        assert!(authorize_file("other", Some(&header), &signed(None, None)).is_err());
        assert_eq!(authorize_file("", None, &signed(None, None)), Ok(()));
    }

    #[test]
    fn signatures_bind_every_part_and_expire() {
        // sha256("/a b:read:user:secret"), computed with coreutils.
        let signature = signed(None, None).expected("secret");
        assert_eq!(signature, "v1_PEA/icv+z+JO9bsZ7QQJfW5MQV9ADdOES2Wk1FxeiFU");
        assert_eq!(
            authorize_file("secret", None, &signed(Some(&signature), None)),
            Ok(())
        );
        assert_eq!(
            authorize_file("other", None, &signed(Some(&signature), None)),
            Err("invalid signature")
        );
        assert_eq!(
            authorize_file(
                "secret",
                None,
                &signed(Some(&signature), Some("99999999999"))
            ),
            Err("invalid signature")
        );
        for (expiration, expected) in [
            ("99999999999", Ok(())),
            ("1", Err("signature is already expired")),
        ] {
            let signature = signed(None, Some(expiration)).expected("secret");
            assert_eq!(
                authorize_file("secret", None, &signed(Some(&signature), Some(expiration))),
                expected
            );
        }
        assert_eq!(
            authorize_file("secret", None, &signed(None, None)),
            Err("missing signature query parameter")
        );
    }
}
