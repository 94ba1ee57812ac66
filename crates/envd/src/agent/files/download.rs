//! `GET /files`: one file, whole or a range of it.

use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use rustix::fs::{FileType, Mode, OFlags};
use std::fs::File;
use std::future::Future;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{ready, Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::task::JoinHandle;

use super::{blocking, Failure, Target};
use crate::agent::filesystem::path;
use crate::agent::filesystem::walk::{kind, Last, Walk};
use crate::agent::http::{self, Body};
use crate::agent::users::User;
use crate::agent::Agent;

/// Bytes read at once.
const READ_SIZE: u64 = 256 << 10;
/// Files that claim to be empty, as those of procfs do, are read up to here to learn their size.
const UNSIZED_LIMIT: u64 = 1 << 20;

pub async fn serve(
    agent: Arc<Agent>,
    request: Request<Incoming>,
    target: Target,
) -> Result<Response<Body>, Failure> {
    target.authorize(&agent, request.headers(), "read")?;
    let user = target.user(&agent)?;
    let workdir = agent.identity().default_workdir.clone();
    let path = path::resolve(target.path.as_deref().unwrap_or(""), &user, &workdir)
        .map_err(|e| Failure::bad(e.message))?;
    let opened = path.clone();
    let content =
        blocking(move || open(&user, &opened).map_err(|e| Failure::io(&opened, &e))).await?;
    let mut response = respond(request.headers(), content);
    if request.method() == Method::HEAD {
        *response.body_mut() = http::full(Bytes::new());
    }
    let headers = response.headers_mut();
    insert(headers, header::CONTENT_DISPOSITION, &disposition(&path));
    insert(headers, header::CONTENT_TYPE, media_type(&path));
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
    let fd = place.open(OFlags::RDONLY, Mode::empty())?;
    let stat = rustix::fs::fstat(&fd)?;
    match kind(&stat) {
        FileType::RegularFile => {}
        FileType::Directory => return Err(rustix::io::Errno::ISDIR.into()),
        _ => return Err(rustix::io::Errno::INVAL.into()),
    }
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

fn respond(request: &HeaderMap, content: Content) -> Response<Body> {
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
            Range::Whole => Response::new(http::boxed(FileBody::new(file, 0, size))),
            Range::Part(start, length) => {
                let mut response = Response::new(http::boxed(FileBody::new(file, start, length)));
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

/// Part of a file as a body. No thread is held while the client reads slowly.
struct FileBody {
    file: Arc<File>,
    offset: u64,
    left: u64,
    reading: Option<JoinHandle<io::Result<Vec<u8>>>>,
}

impl FileBody {
    fn new(file: File, offset: u64, left: u64) -> FileBody {
        FileBody {
            file: Arc::new(file),
            offset,
            left,
            reading: None,
        }
    }
}

impl HttpBody for FileBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let this = self.get_mut();
        if this.left == 0 {
            return Poll::Ready(None);
        }
        let reading = this.reading.get_or_insert_with(|| {
            let (file, offset, size) = (this.file.clone(), this.offset, this.left.min(READ_SIZE));
            tokio::task::spawn_blocking(move || {
                let mut buffer = vec![0; size as usize];
                let size = file.read_at(&mut buffer, offset)?;
                buffer.truncate(size);
                Ok(buffer)
            })
        });
        let data = ready!(Pin::new(reading).poll(cx)).map_err(io::Error::other)??;
        this.reading = None;
        if data.is_empty() {
            // The length is already promised, so the connection has to break.
            return Poll::Ready(Some(Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the file was cut short",
            ))));
        }
        this.offset += data.len() as u64;
        this.left -= data.len() as u64;
        Poll::Ready(Some(Ok(Frame::data(data.into()))))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
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
