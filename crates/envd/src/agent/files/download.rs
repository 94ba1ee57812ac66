//! `GET /files`: one file, whole or a range of it.

use bytes::Bytes;
use hyper::body::{Body as _, Incoming};
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use rustix::fs::OFlags;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::body::FileBody;
use super::{blocking, Failure, Target};
use crate::agent::filesystem::path;
use crate::agent::filesystem::walk::{Last, Walk};
use crate::agent::http::{self, Body};
use crate::agent::users::User;
use crate::agent::Agent;

/// Files that claim to be empty, as those of procfs do, are read up to here to learn their size.
const UNSIZED_LIMIT: u64 = 1 << 20;

pub async fn serve(
    agent: Arc<Agent>,
    request: Request<Incoming>,
    target: Target,
) -> Result<Response<Body>, Failure> {
    target.authorize(&agent, request.headers(), "read")?;
    let user = target.user(&agent).await?;
    let workdir = agent.identity().default_workdir.clone();
    let path = path::resolve(target.path.as_deref().unwrap_or(""), &user, &workdir)
        .map_err(|e| Failure::bad(e.message))?;
    let opened = path.clone();
    let content =
        blocking(move || open(&user, &opened).map_err(|e| Failure::io(&opened, &e))).await?;
    let gzip = compress(request.headers())? && !request.headers().contains_key(header::RANGE);
    let mut response = respond(request.headers(), content, gzip);
    if request.method() == Method::HEAD {
        if let Some(size) = response.body().size_hint().exact() {
            response
                .headers_mut()
                .insert(header::CONTENT_LENGTH, size.into());
        }
        *response.body_mut() = http::full(Bytes::new());
    }
    let headers = response.headers_mut();
    insert(headers, header::CONTENT_DISPOSITION, &disposition(&path));
    insert(headers, header::CONTENT_TYPE, media_type(&path));
    insert(headers, header::VARY, "accept-encoding");
    Ok(response)
}

/// A file opened for reading.
enum Content {
    File {
        file: File,
        size: u64,
        modified: SystemTime,
    },
    Bytes(Bytes),
}

fn open(user: &User, path: &Path) -> io::Result<Content> {
    let mut walk = Walk::new(user);
    let place = walk.find(path, Last::Follow)?;
    let (fd, stat) = place.open_regular(OFlags::RDONLY)?;
    let file = File::from(fd);
    if stat.st_size == 0 {
        let mut bytes = Vec::new();
        (&file).take(UNSIZED_LIMIT).read_to_end(&mut bytes)?;
        return Ok(Content::Bytes(bytes.into()));
    }
    let modified = UNIX_EPOCH + Duration::from_secs(u64::try_from(stat.st_mtime).unwrap_or(0));
    Ok(Content::File {
        file,
        size: stat.st_size as u64,
        modified,
    })
}

fn respond(request: &HeaderMap, content: Content, gzip: bool) -> Response<Body> {
    let (file, size, modified) = match content {
        Content::Bytes(bytes) => return Response::new(http::full(bytes)),
        Content::File {
            file,
            size,
            modified,
        } => (file, size, modified),
    };
    let date = httpdate::fmt_http_date(modified);
    let mut response = if unmodified(request, modified) {
        http::empty(StatusCode::NOT_MODIFIED)
    } else {
        match range(request, size, &date) {
            Range::Whole if gzip => {
                let mut response = Response::new(http::boxed(FileBody::gzip(file, size)));
                insert(response.headers_mut(), header::CONTENT_ENCODING, "gzip");
                response
            }
            Range::Whole => Response::new(http::boxed(FileBody::plain(file, 0, size))),
            Range::Part(start, length) => {
                let mut response = Response::new(http::boxed(FileBody::plain(file, start, length)));
                *response.status_mut() = StatusCode::PARTIAL_CONTENT;
                let range = format!("bytes {start}-{}/{size}", start + length - 1);
                insert(response.headers_mut(), header::CONTENT_RANGE, &range);
                response
            }
            Range::Outside => {
                let message = format!("the file has {size} bytes");
                let mut response = http::error(StatusCode::RANGE_NOT_SATISFIABLE, &message);
                insert(
                    response.headers_mut(),
                    header::CONTENT_RANGE,
                    &format!("bytes */{size}"),
                );
                response
            }
        }
    };
    insert(response.headers_mut(), header::LAST_MODIFIED, &date);
    insert(response.headers_mut(), header::ACCEPT_RANGES, "bytes");
    response
}

fn unmodified(request: &HeaderMap, modified: SystemTime) -> bool {
    let since = request
        .get(header::IF_MODIFIED_SINCE)
        .and_then(|v| v.to_str().ok());
    since
        .and_then(|v| httpdate::parse_http_date(v).ok())
        .is_some_and(|since| modified <= since)
}

#[derive(Debug, PartialEq, Eq)]
enum Range {
    Whole,
    /// First byte and length.
    Part(u64, u64),
    Outside,
}

/// The range asked for. Several ranges, and what is no range, mean the whole file, as HTTP allows.
fn range(request: &HeaderMap, size: u64, date: &str) -> Range {
    let text = |name: HeaderName| request.get(name).and_then(|v| v.to_str().ok());
    if text(header::IF_RANGE).is_some_and(|validator| validator != date) {
        return Range::Whole;
    }
    let spec = text(header::RANGE)
        .and_then(|v| v.trim().strip_prefix("bytes="))
        .unwrap_or("");
    let Some((first, last)) = spec.trim().split_once('-') else {
        return Range::Whole;
    };
    let (start, end) = match (first.parse::<u64>(), last.parse::<u64>()) {
        (Ok(first), Ok(last)) if first <= last => (first, last.min(size - 1)),
        (Ok(first), Err(_)) if last.is_empty() => (first, size - 1),
        (Err(_), Ok(0)) if first.is_empty() => return Range::Outside,
        (Err(_), Ok(suffix)) if first.is_empty() => (size.saturating_sub(suffix), size - 1),
        _ => return Range::Whole,
    };
    if start >= size {
        return Range::Outside;
    }
    Range::Part(start, end - start + 1)
}

/// Whether to compress for a client: only if it takes nothing else, because the guest's processor is
/// dearer than its network. An error if it takes nothing we have.
fn compress(request: &HeaderMap) -> Result<bool, Failure> {
    let accepted = request
        .get(header::ACCEPT_ENCODING)
        .and_then(|v| v.to_str().ok())
        .unwrap_or("");
    let coding = |item: &str| {
        let (name, parameters) = item.split_once(';').unwrap_or((item, ""));
        let weight = parameters
            .trim()
            .strip_prefix("q=")
            .and_then(|q| q.parse::<f32>().ok());
        (
            name.trim().to_ascii_lowercase(),
            weight.unwrap_or(1.0) > 0.0,
        )
    };
    let codings: Vec<_> = accepted
        .split(',')
        .filter(|i| !i.trim().is_empty())
        .map(coding)
        .collect();
    let find = |wanted: &str| {
        codings
            .iter()
            .find(|(name, _)| name == wanted)
            .map(|(_, taken)| *taken)
    };
    let gzip = find("gzip").or(find("*")).unwrap_or(false);
    let identity = find("identity").or(find("*")).unwrap_or(true);
    let only_gzip = gzip && codings.iter().all(|(name, _)| name == "gzip");
    match identity || gzip {
        true => Ok(only_gzip || !identity),
        false => Err(Failure::new(
            StatusCode::NOT_ACCEPTABLE,
            format!("accept-encoding '{accepted}' leaves neither identity nor gzip"),
        )),
    }
}

/// Sets a header unless the value cannot be one.
fn insert(headers: &mut HeaderMap, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.entry(name).or_insert(value);
    }
}

fn disposition(path: &Path) -> String {
    let name = path::base_name(path).as_encoded_bytes();
    let plain = |b: &u8| b.is_ascii_alphanumeric() || b"!#$&+-.^_`|~".contains(b);
    if name.iter().all(plain) {
        return format!("inline; filename={}", String::from_utf8_lossy(name));
    }
    if name.iter().all(|b| (b' '..=b'~').contains(b)) {
        let quoted = String::from_utf8_lossy(name)
            .replace('\\', "\\\\")
            .replace('"', "\\\"");
        return format!("inline; filename=\"{quoted}\"");
    }
    let mut encoded = String::from("inline; filename*=utf-8''");
    for byte in name {
        if plain(byte) {
            encoded.push(char::from(*byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

fn media_type(path: &Path) -> &'static str {
    let extension = path
        .extension()
        .map(|e| e.to_ascii_lowercase())
        .unwrap_or_default();
    match extension.to_str().unwrap_or("") {
        "txt" | "log" | "md" | "py" | "sh" | "c" | "h" | "rs" | "go" | "ts" | "toml" | "yaml"
        | "yml" | "ini" => "text/plain; charset=utf-8",
        "html" | "htm" => "text/html; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "js" | "mjs" => "text/javascript; charset=utf-8",
        "csv" => "text/csv; charset=utf-8",
        "xml" => "text/xml; charset=utf-8",
        "json" | "ipynb" => "application/json",
        "pdf" => "application/pdf",
        "zip" => "application/zip",
        "gz" | "tgz" => "application/gzip",
        "tar" => "application/x-tar",
        "wasm" => "application/wasm",
        "png" => "image/png",
        "jpg" | "jpeg" => "image/jpeg",
        "gif" => "image/gif",
        "webp" => "image/webp",
        "svg" => "image/svg+xml",
        "ico" => "image/x-icon",
        "mp3" => "audio/mpeg",
        "wav" => "audio/wav",
        "mp4" => "video/mp4",
        "webm" => "video/webm",
        _ => "application/octet-stream",
    }
}
