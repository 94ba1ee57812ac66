//! An origin behind a Unix socket that speaks HTTP/1.1.
//!
//! | request | answer |
//! |---|---|
//! | `GET /v1/blobs/{digest}` with `Range: bytes=a-b` | 206 and exactly those bytes |
//! | `GET /v1/blobs/{digest}/chunks` | 200 and 32 bytes for each chunk of 256 KiB |
//!
//! Answers carry `Content-Length`. Connections are kept and used again. 404 and other 4xx answers are final, but for 408
//! and 429.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::{Origin, CHUNK};

/// Longest silence of the origin.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Longest head of an answer in bytes.
const MAX_HEAD: usize = 16 << 10;
/// Idle connections kept.
const KEPT: usize = 16;

/// A client of one origin.
pub struct HttpOrigin {
    path: PathBuf,
    idle: Mutex<Vec<UnixStream>>,
}

impl HttpOrigin {
    /// For the origin that listens, or will listen, at `path`.
    pub fn new(path: &Path) -> HttpOrigin {
        HttpOrigin {
            path: path.to_owned(),
            idle: Mutex::default(),
        }
    }

    /// Makes a request and fills `buf` with the body of the answer, which has to be as long.
    fn get(&self, target: &str, range: Option<(u64, u64)>, buf: &mut [u8]) -> io::Result<()> {
        let range = range.map_or(String::new(), |(first, last)| {
            format!("Range: bytes={first}-{last}\r\n")
        });
        let request = format!("GET {target} HTTP/1.1\r\nHost: origin\r\n{range}\r\n");
        let wanted = if range.is_empty() { 200 } else { 206 };
        // A connection that was kept may have been closed meanwhile, a new one not.
        let kept = self
            .idle
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop();
        if let Some(mut connection) = kept {
            if connection.write_all(request.as_bytes()).is_ok() {
                if let Ok(head) = read_head(&mut connection) {
                    return self.finish(connection, head, wanted, buf);
                }
            }
        }
        let mut connection = UnixStream::connect(&self.path)?;
        connection.set_read_timeout(Some(TIMEOUT))?;
        connection.set_write_timeout(Some(TIMEOUT))?;
        connection.write_all(request.as_bytes())?;
        let head = read_head(&mut connection)?;
        self.finish(connection, head, wanted, buf)
    }

    fn finish(
        &self,
        mut connection: UnixStream,
        head: Head,
        wanted: u16,
        buf: &mut [u8],
    ) -> io::Result<()> {
        if head.status != wanted {
            return Err(refusal(head.status));
        }
        if head.length != Some(buf.len() as u64) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "the origin announces {:?} bytes instead of {}",
                    head.length,
                    buf.len()
                ),
            ));
        }
        let (early, rest) = buf.split_at_mut(head.body.len().min(buf.len()));
        early.copy_from_slice(&head.body[..early.len()]);
        connection.read_exact(rest)?;
        if head.keep && head.body.len() == early.len() {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
            if idle.len() < KEPT {
                idle.push(connection);
            }
        }
        Ok(())
    }
}

impl Origin for HttpOrigin {
    fn read(&self, digest: &str, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let last = offset + buf.len() as u64 - 1;
        self.get(&format!("/v1/blobs/{digest}"), Some((offset, last)), buf)
    }

    fn chunk_digests(&self, digest: &str, size: u64) -> io::Result<Vec<u8>> {
        let mut digests = vec![0; size.div_ceil(CHUNK) as usize * 32];
        self.get(&format!("/v1/blobs/{digest}/chunks"), None, &mut digests)?;
        Ok(digests)
    }
}

fn refusal(status: u16) -> io::Error {
    let (kind, meaning) = match status {
        404 | 410 => (io::ErrorKind::NotFound, "it does not have the layer"),
        401 | 403 => (
            io::ErrorKind::PermissionDenied,
            "it may not hand out the layer",
        ),
        408 | 429 | 500..=599 => (io::ErrorKind::Other, "it cannot answer now"),
        _ => (
            io::ErrorKind::InvalidInput,
            "it does not understand the request",
        ),
    };
    io::Error::new(kind, format!("the origin answers {status}: {meaning}"))
}

/// Head of an answer.
struct Head {
    status: u16,
    length: Option<u64>,
    /// The connection can be used again.
    keep: bool,
    /// What was read of the body together with the head.
    body: Vec<u8>,
}

fn read_head(connection: &mut UnixStream) -> io::Result<Head> {
    let wrong = |reason: &str| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("the answer of the origin {reason}"),
        )
    };
    let mut bytes = Vec::new();
    let mut buf = [0; 4096];
    let end = loop {
        if let Some(at) = bytes.windows(4).position(|w| w == b"\r\n\r\n") {
            break at;
        }
        if bytes.len() > MAX_HEAD {
            return Err(wrong("has an endless head"));
        }
        match connection.read(&mut buf)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => bytes.extend_from_slice(&buf[..count]),
        }
    };
    let head = std::str::from_utf8(&bytes[..end]).map_err(|_| wrong("is not text"))?;
    let mut lines = head.split("\r\n");
    let status = lines
        .next()
        .filter(|line| line.starts_with("HTTP/1.1 "))
        .and_then(|line| line.get(9..12)?.parse().ok())
        .ok_or_else(|| wrong("is not HTTP/1.1"))?;
    let (mut length, mut keep) = (None, true);
    for line in lines {
        let Some((name, value)) = line.split_once(':') else {
            return Err(wrong("has a malformed header"));
        };
        if name.eq_ignore_ascii_case("content-length") {
            length = Some(
                value
                    .trim()
                    .parse()
                    .map_err(|_| wrong("has a malformed length"))?,
            );
        } else if name.eq_ignore_ascii_case("connection") {
            keep = !value.trim().eq_ignore_ascii_case("close");
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            return Err(wrong("has a transfer encoding"));
        }
    }
    Ok(Head {
        status,
        length,
        keep,
        body: bytes[end + 4..].to_vec(),
    })
}
