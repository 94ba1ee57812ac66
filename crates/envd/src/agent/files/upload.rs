//! `POST /files`: multipart forms and plain bodies, written in place as they arrive.

use bytes::{Bytes, BytesMut};
use flate2::write::MultiGzDecoder;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::{HeaderMap, CONTENT_ENCODING, CONTENT_TYPE};
use hyper::{Request, Response, StatusCode};
use rustix::fs::{ftruncate, Mode, OFlags};
use serde::Serialize;
use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::multipart::{boundary, Event, Parser};
use super::{blocking, Failure, Target};
use crate::agent::filesystem::walk::{Last, Walk};
use crate::agent::filesystem::{metadata, path};
use crate::agent::http::{self, Body};
use crate::agent::users::User;
use crate::agent::Agent;

/// Content is written in pieces of this size; smaller files are written at once, in bytes.
const WRITE_SIZE: usize = 256 << 10;
/// Compressed input decoded at once, in bytes; bounds what a bomb can inflate to.
const INFLATE_SIZE: usize = 4 << 10;
/// Files in one request.
const FILE_LIMIT: usize = 10_000;
/// How long a client may send nothing.
const IDLE_LIMIT: Duration = Duration::from_secs(600);
/// After a failure the client is still writing; so much of it is read before it gets its answer.
const DRAIN_LIMIT: usize = 256 << 20;
const DRAIN_TIME: Duration = Duration::from_secs(30);

#[derive(Serialize)]
struct Written {
    path: PathBuf,
    name: String,
    r#type: &'static str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
}

pub async fn serve(
    agent: Arc<Agent>,
    request: Request<Incoming>,
    target: Target,
) -> Result<Response<Body>, Failure> {
    let (parts, body) = request.into_parts();
    let mut source = Source {
        body,
        decoder: None,
        compressed: Bytes::new(),
    };
    match receive(&agent, &parts.headers, &target, &mut source).await {
        Ok(written) => Ok(http::json(StatusCode::OK, &written)),
        Err(failure) => {
            source.drain().await;
            Err(failure)
        }
    }
}

async fn receive(
    agent: &Arc<Agent>,
    headers: &HeaderMap,
    target: &Target,
    source: &mut Source,
) -> Result<Vec<Written>, Failure> {
    target.authorize(agent, headers, "write")?;
    let request = Arc::new(Upload {
        user: target.user(agent).await?,
        workdir: agent.identity().default_workdir.clone(),
        metadata: metadata::from_headers(headers).map_err(Failure::bad)?,
    });
    source.decoder = decoder(headers)?;
    let content_type = headers
        .get(CONTENT_TYPE)
        .and_then(|v| v.to_str().ok())
        .unwrap_or("");
    if let Some(boundary) = boundary(content_type) {
        return form(&request, target.path.as_deref(), source, &boundary).await;
    }
    let kind = content_type.split(';').next().unwrap_or("").trim();
    if !kind.eq_ignore_ascii_case("application/octet-stream") {
        let message = format!(
            "content type '{kind}' is not supported, send multipart/form-data with a boundary or application/octet-stream"
        );
        return Err(Failure::bad(message));
    }
    let Some(path) = target.path.as_deref() else {
        return Err(Failure::bad(
            "an application/octet-stream upload needs the query parameter path",
        ));
    };
    let mut sink = Sink::open(&request, request.resolve(path)?).await?;
    while let Some(data) = source.next().await? {
        sink.write(&data).await?;
    }
    Ok(vec![sink.finish(&request).await?])
}

fn decoder(headers: &HeaderMap) -> Result<Option<MultiGzDecoder<Vec<u8>>>, Failure> {
    match headers.get(CONTENT_ENCODING).map(|v| v.as_bytes()) {
        None | Some(b"" | b"identity") => Ok(None),
        Some(b"gzip") => Ok(Some(MultiGzDecoder::new(Vec::new()))),
        Some(other) => {
            let other = String::from_utf8_lossy(other);
            Err(Failure::bad(format!(
                "content encoding '{other}' is not supported, send identity or gzip"
            )))
        }
    }
}

/// What all files of one request have in common.
struct Upload {
    user: User,
    workdir: String,
    metadata: BTreeMap<String, String>,
}

impl Upload {
    fn resolve(&self, path: &str) -> Result<PathBuf, Failure> {
        path::resolve(path, &self.user, &self.workdir).map_err(|e| Failure::bad(e.message))
    }
}

async fn form(
    request: &Arc<Upload>,
    path: Option<&str>,
    source: &mut Source,
    boundary: &str,
) -> Result<Vec<Written>, Failure> {
    let mut parser = Parser::new(boundary);
    let mut seen = HashSet::new();
    let mut written = Vec::new();
    let mut sink: Option<Sink> = None;
    while !parser.ended() {
        let Some(data) = source.next().await? else {
            return Err(Failure::bad(
                "the multipart body ends before its closing boundary",
            ));
        };
        parser.feed(&data);
        while let Some(event) = parser.next().map_err(Failure::bad)? {
            match event {
                Event::Part(part) if part.name == "file" => {
                    let Some(path) = path.or(part.filename.as_deref()) else {
                        return Err(Failure::bad(
                            "a part named file needs a filename or the query parameter path",
                        ));
                    };
                    let path = request.resolve(path)?;
                    if !seen.insert(path.clone()) {
                        return Err(Failure::bad(format!(
                            "two parts write to '{}'",
                            path.display()
                        )));
                    }
                    if seen.len() > FILE_LIMIT {
                        return Err(Failure::bad(format!(
                            "one request writes at most {FILE_LIMIT} files"
                        )));
                    }
                    sink = Some(Sink::open(request, path).await?);
                }
                Event::Data(data) => {
                    if let Some(sink) = &mut sink {
                        sink.write(&data).await?;
                    }
                }
                Event::PartEnd => {
                    if let Some(sink) = sink.take() {
                        written.push(sink.finish(request).await?);
                    }
                }
                Event::Part(_) | Event::End => {}
            }
        }
    }
    // The rest is an epilogue; reading it keeps the connection usable.
    while source.next().await?.is_some() {}
    Ok(written)
}

/// The request body, decompressed.
struct Source {
    body: Incoming,
    decoder: Option<MultiGzDecoder<Vec<u8>>>,
    /// Input of the decoder that is not decoded yet.
    compressed: Bytes,
}

impl Source {
    /// The next piece, never empty.
    async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        loop {
            while let (Some(decoder), false) = (&mut self.decoder, self.compressed.is_empty()) {
                let piece = self
                    .compressed
                    .split_to(self.compressed.len().min(INFLATE_SIZE));
                decoder.write_all(&piece).map_err(broken_gzip)?;
                if !decoder.get_ref().is_empty() {
                    return Ok(Some(std::mem::take(decoder.get_mut()).into()));
                }
            }
            let frame = match tokio::time::timeout(IDLE_LIMIT, self.body.frame()).await {
                Ok(Some(Ok(frame))) => frame,
                Ok(Some(Err(e))) => {
                    return Err(Failure::bad(format!("the request body broke off: {e}")))
                }
                Ok(None) => return self.end(),
                Err(_) => {
                    let message = format!("no data came for {} s", IDLE_LIMIT.as_secs());
                    return Err(Failure::new(StatusCode::REQUEST_TIMEOUT, message));
                }
            };
            match frame.into_data() {
                Ok(data) if self.decoder.is_some() => self.compressed = data,
                Ok(data) if !data.is_empty() => return Ok(Some(data)),
                _ => {}
            }
        }
    }

    fn end(&mut self) -> Result<Option<Bytes>, Failure> {
        match self.decoder.take() {
            None => Ok(None),
            Some(decoder) => {
                let rest = decoder.finish().map_err(broken_gzip)?;
                Ok((!rest.is_empty()).then(|| rest.into()))
            }
        }
    }

    /// Reads on so that the client, which may still be writing, can read the answer.
    async fn drain(&mut self) {
        let mut left = DRAIN_LIMIT;
        let reading = async {
            while let Some(Ok(frame)) = self.body.frame().await {
                left = left.saturating_sub(frame.data_ref().map_or(0, Bytes::len));
                if left == 0 {
                    break;
                }
            }
        };
        // Running out of time is one of the ways to be done.
        let _ = tokio::time::timeout(DRAIN_TIME, reading).await;
    }
}

/// A file being written.
struct Sink {
    file: Arc<File>,
    path: PathBuf,
    buffer: BytesMut,
}

impl Sink {
    async fn open(request: &Arc<Upload>, path: PathBuf) -> Result<Sink, Failure> {
        let request = request.clone();
        blocking(move || {
            let file = create(&request.user, &path).map_err(|e| Failure::io(&path, &e))?;
            Ok(Sink {
                file: Arc::new(file),
                path,
                buffer: BytesMut::new(),
            })
        })
        .await
    }

    async fn write(&mut self, mut data: &[u8]) -> Result<(), Failure> {
        while !data.is_empty() {
            let size = data.len().min(WRITE_SIZE - self.buffer.len());
            self.buffer.extend_from_slice(&data[..size]);
            data = &data[size..];
            if self.buffer.len() == WRITE_SIZE {
                let piece = self.buffer.split().freeze();
                let (file, path) = (self.file.clone(), self.path.clone());
                blocking(move || {
                    (&*file)
                        .write_all(&piece)
                        .map_err(|e| Failure::io(&path, &e))
                })
                .await?;
            }
        }
        Ok(())
    }

    async fn finish(self, request: &Arc<Upload>) -> Result<Written, Failure> {
        let request = request.clone();
        blocking(move || {
            let Sink { file, path, buffer } = self;
            if !buffer.is_empty() {
                (&*file)
                    .write_all(&buffer)
                    .map_err(|e| Failure::io(&path, &e))?;
            }
            let metadata = metadata::replace(file.as_fd(), &request.metadata)
                .map_err(|e| Failure::io(&path, &e))?;
            let name = path::base_name(&path).to_string_lossy().into_owned();
            Ok(Written {
                path,
                name,
                r#type: "file",
                metadata,
            })
        })
        .await
    }
}

/// Opens `path` for writing: empty, a regular file, and the user's.
fn create(user: &User, path: &Path) -> io::Result<File> {
    let mut walk = Walk::new(user);
    let place = walk.make(path, Last::Follow)?;
    loop {
        let file = match place.open_regular(OFlags::WRONLY) {
            Ok((fd, stat)) => {
                if stat.st_size > 0 {
                    ftruncate(&fd, 0)?;
                }
                fd
            }
            // Not O_CREAT alone: the kernel may refuse that in directories like /tmp to those, even
            // root, who do not own the file that is there.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let mode = Mode::from_raw_mode(0o644);
                match place.open(OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL, mode) {
                    Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                    other => other?,
                }
            }
            Err(e) => return Err(e),
        };
        walk.give(file.as_fd())?;
        return Ok(File::from(file));
    }
}

fn broken_gzip(error: io::Error) -> Failure {
    Failure::bad(format!("the gzip body is broken: {error}"))
}
