//! The procedures of `filesystem.Filesystem`.

use hyper::body::Incoming;
use hyper::header::HeaderMap;
use hyper::{Request, Response};
use rustix::fs::FileType;
use rustix::io::Errno;
use serde::Deserialize;
use serde_json::{json, Value};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::entry::{describe, Entry};
use super::walk::{kind, Last, Walk};
use super::{path, tree, watchers};
use crate::agent::call;
use crate::agent::connect::{self, check, Code, Error, Kind};
use crate::agent::http::Body;
use crate::agent::users::{Names, User};
use crate::agent::{blocking, wire, Agent};

/// Deepest listing, in levels.
const DEPTH_LIMIT: u32 = 256;
/// Entries of one listing.
const ENTRY_LIMIT: usize = 50_000;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PathRequest {
    #[serde(deserialize_with = "wire::nullable")]
    path: String,
    #[serde(deserialize_with = "wire::unsigned")]
    depth: Option<u32>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct MoveRequest {
    #[serde(deserialize_with = "wire::nullable")]
    source: String,
    #[serde(deserialize_with = "wire::nullable")]
    destination: String,
}

/// Serves one call, or `None` if the service has no such procedure.
pub async fn serve(
    agent: Arc<Agent>,
    method: &str,
    request: Request<Incoming>,
) -> Option<Response<Body>> {
    if !matches!(method, "Stat" | "MakeDir" | "Move" | "ListDir" | "Remove") {
        return watchers::serve(agent, method, request).await;
    }
    if let Err(response) = check(request.headers(), Kind::Unary) {
        return Some(*response);
    }
    let caller = Caller::of(&agent, request.headers()).await;
    Some(connect::unary(match method {
        "Move" => match connect::read_unary(request).await {
            Ok(message) => rename(caller, message).await,
            Err(error) => Err(error),
        },
        _ => match connect::read_unary(request).await {
            Ok(message) => one_path(caller, method, message).await,
            Err(error) => Err(error),
        },
    }))
}

/// Whom a call is made for, and where their empty path leads.
pub struct Caller {
    pub user: User,
    workdir: String,
}

impl Caller {
    pub async fn of(agent: &Arc<Agent>, headers: &HeaderMap) -> Result<Caller, Error> {
        Ok(Caller {
            user: call::user(agent, headers).await?,
            workdir: agent.identity().default_workdir.clone(),
        })
    }

    pub fn resolve(&self, path: &str) -> Result<PathBuf, Error> {
        path::resolve(path, &self.user, &self.workdir)
    }
}

async fn one_path(
    caller: Result<Caller, Error>,
    method: &str,
    message: PathRequest,
) -> Result<Value, Error> {
    let caller = caller?;
    let path = caller.resolve(&message.path)?;
    let user = caller.user;
    match method {
        "Stat" => blocking(move || entry(&user, &path).map(|e| json!({ "entry": e }))).await,
        "MakeDir" => {
            blocking(move || make_directory(&user, &path).map(|e| json!({ "entry": e }))).await
        }
        "Remove" => blocking(move || remove(&user, &path).map(|()| json!({}))).await,
        _ => {
            let depth = message.depth.unwrap_or(0).clamp(1, DEPTH_LIMIT) as usize;
            blocking(move || list(&user, &path, depth).map(|e| json!({ "entries": e }))).await
        }
    }
}

/// An error of the file system as one of the protocol.
pub fn io_error(path: &Path, error: &io::Error) -> Error {
    let shown = path.display();
    let code = match Errno::from_io_error(error) {
        Some(Errno::NOENT | Errno::NOTDIR) => {
            return Error::not_found(format!("path '{shown}' does not exist"));
        }
        Some(Errno::EXIST) => Code::AlreadyExists,
        Some(Errno::ACCESS | Errno::PERM | Errno::ROFS) => Code::PermissionDenied,
        Some(Errno::INVAL | Errno::NAMETOOLONG | Errno::ISDIR) => Code::InvalidArgument,
        Some(Errno::LOOP | Errno::NOTEMPTY | Errno::BUSY | Errno::XDEV) => Code::FailedPrecondition,
        Some(Errno::NOSPC | Errno::DQUOT | Errno::MFILE | Errno::NFILE | Errno::NOMEM) => {
            Code::ResourceExhausted
        }
        _ => Code::Internal,
    };
    Error::new(code, format!("'{shown}': {error}"))
}

/// Describes what is at `path`.
pub fn entry(user: &User, path: &Path) -> Result<Entry, Error> {
    let fail = |e: io::Error| io_error(path, &e);
    let mut walk = Walk::new(user);
    let place = walk.find(path, Last::Keep).map_err(fail)?;
    describe(user, &Names::load(), &place, path).map_err(fail)
}

fn make_directory(user: &User, path: &Path) -> Result<Entry, Error> {
    let fail = |e: io::Error| io_error(path, &e);
    {
        let mut walk = Walk::new(user);
        let place = match walk.make(path, Last::Follow) {
            Err(e) if Errno::from_io_error(&e) == Some(Errno::NOTDIR) => {
                return Err(Error::invalid(format!(
                    "a part of path '{}' is not a directory",
                    path.display()
                )));
            }
            other => other.map_err(fail)?,
        };
        match walk.create_directory(&place) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                let shown = path.display();
                return match place.stat().map_err(fail)? {
                    stat if kind(&stat) == FileType::Directory => Err(Error::new(
                        Code::AlreadyExists,
                        format!("directory already exists: {shown}"),
                    )),
                    _ => Err(Error::invalid(format!(
                        "path '{shown}' exists and is not a directory"
                    ))),
                };
            }
            other => other.map_err(fail)?,
        }
    }
    entry(user, path)
}

fn remove(user: &User, path: &Path) -> Result<(), Error> {
    let fail = |e: io::Error| io_error(path, &e);
    let mut walk = Walk::new(user);
    let place = match walk.find(path, Last::Keep) {
        // Whatever is missing is removed.
        Err(e) if matches!(Errno::from_io_error(&e), Some(Errno::NOENT | Errno::NOTDIR)) => {
            return Ok(())
        }
        other => other.map_err(fail)?,
    };
    if !tree::is_plain(place.name()) {
        return Err(Error::invalid("the root directory cannot be removed"));
    }
    tree::remove(&place).map_err(fail)
}

fn list(user: &User, path: &Path, depth: usize) -> Result<Vec<Entry>, Error> {
    let fail = |e: io::Error| io_error(path, &e);
    let mut walk = Walk::new(user);
    let place = walk.find(path, Last::Follow).map_err(fail)?;
    if kind(&place.stat().map_err(fail)?) != FileType::Directory {
        return Err(Error::invalid(format!(
            "path '{}' is not a directory",
            path.display()
        )));
    }
    let names = Names::load();
    let mut entries = Vec::new();
    tree::visit(&place, depth, ENTRY_LIMIT, |child, below| {
        entries.push(describe(user, &names, &child, &path.join(below))?);
        Ok(())
    })
    .map_err(|e| match Errno::from_io_error(&e) {
        Some(Errno::OVERFLOW) => {
            let message = format!(
                "'{}' has more than {ENTRY_LIMIT} entries; list less depth",
                path.display()
            );
            Error::new(Code::ResourceExhausted, message)
        }
        _ => fail(e),
    })?;
    Ok(entries)
}

async fn rename(caller: Result<Caller, Error>, message: MoveRequest) -> Result<Value, Error> {
    let caller = caller?;
    let source = caller.resolve(&message.source)?;
    let destination = caller.resolve(&message.destination)?;
    let user = caller.user;
    blocking(move || {
        {
            let mut walk = Walk::new(&user);
            let from = walk
                .find(&source, Last::Keep)
                .map_err(|e| io_error(&source, &e))?;
            // Before parents of the destination are created for nothing.
            from.stat().map_err(|e| io_error(&source, &e))?;
            let to = walk
                .make(&destination, Last::Keep)
                .map_err(|e| io_error(&destination, &e))?;
            if !tree::is_plain(from.name()) || !tree::is_plain(to.name()) {
                return Err(Error::invalid("the root directory cannot be moved"));
            }
            rustix::fs::renameat(from.dir(), from.name(), to.dir(), to.name()).map_err(|e| {
                let error = io_error(&destination, &e.into());
                Error::new(
                    error.code,
                    format!("cannot move '{}': {}", source.display(), error.message),
                )
            })?;
        }
        entry(&user, &destination).map(|entry| json!({ "entry": entry }))
    })
    .await
}
