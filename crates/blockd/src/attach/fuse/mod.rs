//! Attachments as files of one FUSE mount.
//!
//! # Design
//!
//! *One mount, one file per image.* Attaching is an insertion into a table. Long timeouts let the kernel answer lookups
//! itself; we invalidate what we change.
//!
//! *Queues.* The device is cloned once per core. Workers read a request from their queue, serve it and write the answer,
//! all on one thread; see [`crate::crew`] for what happens when serving takes long.
//!
//! *Restart.* Closing a queue fails the requests taken from it. So all queues are kept open by the
//! [holder](crate::holder), together with what was negotiated. A new daemon gets them from there, rebuilds the table,
//! and tells the kernel to send again whatever its predecessor had taken and not answered.
//!
//! *Caching.* Read-only images use the page cache and keep it across opens. Writable images bypass it, because the
//! guest has a cache of its own, and because data must not sit in the host's cache when a snapshot is cut.

mod abi;
mod buffer;
mod mount;
mod session;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use serde_json::json;

pub use buffer::Buffer;
pub use mount::{canonical, remove as remove_mount};

use self::abi::{notify, Negotiated, Request, IN_HEADER, OUT_HEADER, ROOT, WRITE_HEADER};
use self::session::{Answer, Session};
use super::{Attach, Disk, Shape};
use crate::crew::{Crew, Worker};
use crate::log;

/// Most bytes one request reads or writes.
pub const MAX_IO: usize = 1 << 20;
/// Most threads that serve requests, the blocked ones included. Each holds 2 MiB of locked memory.
const MAX_WORKERS: usize = 96;
/// Most queues. More than this gains nothing even on large machines, and a message passes at most 253 descriptors.
const MAX_QUEUES: usize = 32;

/// A connection to the kernel: the queues of one mount and what was agreed on it. Survives the daemon in the holder.
pub struct Connection {
    /// The device and its clones.
    pub queues: Vec<OwnedFd>,
    /// Agreement and place.
    pub terms: Terms,
}

/// What a daemon has to know about a mount it did not make.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terms {
    directory: PathBuf,
    negotiated: Negotiated,
}

impl Terms {
    /// The mount point.
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

impl Connection {
    /// Mounts on `directory`, which must be [`canonical`], and agrees with the kernel on the terms. `queues` is the
    /// number of queues wanted.
    pub fn establish(directory: &Path, queues: usize) -> io::Result<Connection> {
        let device = mount::make(directory)?;
        let established = negotiate(&device).and_then(|negotiated| {
            let mut all = vec![device];
            for _ in 1..queues.clamp(1, MAX_QUEUES) {
                all.push(mount::clone_device(all[0].as_fd())?);
            }
            Ok(Connection {
                queues: all,
                terms: Terms {
                    directory: directory.to_owned(),
                    negotiated,
                },
            })
        });
        if established.is_err() {
            let _ = mount::remove(directory);
        }
        established
    }

    /// Whether the mount still exists. A connection whose mount was removed by hand is of no use.
    pub fn is_alive(&self) -> io::Result<bool> {
        Ok(mount::find(&self.terms.directory)?.is_some())
    }
}

/// Answers `INIT`, which is the first request on a new mount.
fn negotiate(device: &OwnedFd) -> io::Result<Negotiated> {
    let mut input = Buffer::new(WRITE_HEADER, MAX_IO)?;
    let mut output = Buffer::new(OUT_HEADER, MAX_IO)?;
    let session = Session::default();
    let len = read_request(device.as_fd(), &mut input)?
        .ok_or_else(|| io::Error::other("the mount vanished while it was being made"))?;
    let request = Request::decode(&input.message()[..len])
        .map_err(|_| io::Error::other("the first request on a new mount makes no sense"))?;
    let answer = session.serve(&request, output.payload());
    send(device.as_fd(), request.unique, &answer, &mut output)?;
    match answer {
        Answer::Initialised(negotiated, _) => {
            if negotiated.flags & abi::init::HAS_RESEND == 0 {
                log::warn(
                    "the kernel cannot send requests again; a restart of the daemon may fail requests under way",
                    json!({ "needs": "Linux 6.9" }),
                );
            }
            Ok(negotiated)
        }
        _ => Err(io::Error::other(
            "the FUSE of this kernel is too old; Linux 5.4 or later is needed",
        )),
    }
}

/// The implementation of [`Attach`]. Images may be attached before and while requests are served.
pub struct FuseAttach {
    directory: PathBuf,
    session: Arc<Session>,
    /// Queues and workers. Empty until [`FuseAttach::serve`].
    device: OnceLock<Arc<Vec<OwnedFd>>>,
    crew: OnceLock<Arc<Crew>>,
}

impl FuseAttach {
    /// An empty table for the mount at `directory`.
    pub fn new(directory: &Path) -> FuseAttach {
        FuseAttach {
            directory: directory.to_owned(),
            session: Arc::default(),
            device: OnceLock::new(),
            crew: OnceLock::new(),
        }
    }

    /// Starts to serve. Every image that may have been opened through the connection has to be attached before.
    ///
    /// Returns at once; the threads end when the mount is removed.
    pub fn serve(&self, connection: Connection, workers: usize) -> io::Result<()> {
        if connection.terms.negotiated.max_write as usize > MAX_IO {
            return Err(io::Error::other(
                "the mount was made by a version with larger requests; stop its sandboxes and mount again",
            ));
        }
        let queues = Arc::new(connection.queues);
        // Before any worker waits for requests: the kernel wakes only one of those that wait.
        if connection.terms.negotiated.flags & abi::init::HAS_RESEND != 0 {
            tell(queues[0].as_fd(), notify::RESEND, &[])?;
        }
        self.device
            .set(queues.clone())
            .map_err(|_| io::Error::other("this table is served already"))?;
        let session = self.session.clone();
        let crew = Crew::start("fuse", workers.max(1), MAX_WORKERS, move |worker| {
            let queue = queues[worker.number % queues.len()].as_fd();
            if let Err(error) = work(queue, &session, worker) {
                log::error(
                    "a worker of the mount ended",
                    json!({ "worker": worker.number, "cause": error.to_string() }),
                );
            }
        })?;
        let _ = self.crew.set(crew);
        Ok(())
    }

    /// The mount point.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The queues that are served, for the holder.
    pub fn queues(&self) -> Vec<BorrowedFd<'_>> {
        let queues = self
            .device
            .get()
            .into_iter()
            .flat_map(|queues| queues.iter());
        queues.map(AsFd::as_fd).collect()
    }

    /// Threads that serve.
    pub fn workers(&self) -> usize {
        self.crew.get().map_or(0, |crew| crew.total())
    }

    /// Requests that failed because of their image.
    pub fn failures(&self) -> u64 {
        self.session.failures()
    }

    fn notify(&self, code: i32, message: &[u8]) {
        let Some(queues) = self.device.get() else {
            return;
        };
        match tell(queues[0].as_fd(), code, message) {
            Ok(()) => {}
            // The kernel has never heard of it, or has forgotten it.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
            Err(error) => log::warn(
                "the kernel did not take a message",
                json!({ "code": code, "cause": error.to_string() }),
            ),
        }
    }
}

impl Attach for FuseAttach {
    fn attach(
        &self,
        number: u64,
        name: &str,
        shape: Shape,
        disk: Arc<dyn Disk>,
    ) -> io::Result<PathBuf> {
        self.session.insert(number, name, shape, disk)?;
        Ok(self.directory.join(name))
    }

    fn resized(&self, number: u64) {
        let mut message = [0; 24];
        message[..8].copy_from_slice(&number.to_ne_bytes());
        // A negative offset means attributes only.
        message[8..16].copy_from_slice(&(-1i64).to_ne_bytes());
        self.notify(notify::INVAL_INODE, &message);
    }

    /// Must not be called by a worker: the kernel may wait for an answer of ours while it forgets the name.
    fn detach(&self, number: u64) {
        let Some(name) = self.session.remove(number) else {
            return;
        };
        let mut message = Vec::with_capacity(17 + name.len());
        message.extend(ROOT.to_ne_bytes());
        message.extend((name.len() as u32).to_ne_bytes());
        message.extend(0u32.to_ne_bytes());
        message.extend(name.as_bytes());
        message.push(0);
        self.notify(notify::INVAL_ENTRY, &message);
    }
}

/// Body of a worker.
fn work(queue: BorrowedFd<'_>, session: &Session, worker: &Worker) -> io::Result<()> {
    let mut input = Buffer::new(WRITE_HEADER, MAX_IO)?;
    let mut output = Buffer::new(OUT_HEADER, MAX_IO)?;
    loop {
        let Some(len) = read_request(queue, &mut input)? else {
            return Ok(());
        };
        worker.busy();
        let (unique, answer) = match Request::decode(&input.message()[..len]) {
            Ok(request) => (request.unique, session.serve(&request, output.payload())),
            Err(malformed) => (malformed.unique, Answer::Error(libc::EIO)),
        };
        send(queue, unique, &answer, &mut output)?;
        if worker.idle() {
            return Ok(());
        }
    }
}

/// Waits for a request; `None` when the mount is gone.
fn read_request(queue: BorrowedFd<'_>, input: &mut Buffer) -> io::Result<Option<usize>> {
    loop {
        match rustix::io::read(queue, input.message()) {
            Ok(len) if len >= IN_HEADER => return Ok(Some(len)),
            Ok(len) => {
                return Err(io::Error::other(format!(
                    "a request of {len} bytes has no header"
                )))
            }
            // The caller of the request was killed before we took it.
            Err(Errno::INTR | Errno::AGAIN | Errno::NOENT) => {}
            Err(Errno::NODEV) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
    }
}

fn send(
    queue: BorrowedFd<'_>,
    unique: u64,
    answer: &Answer,
    output: &mut Buffer,
) -> io::Result<()> {
    let (error, payload) = match answer {
        Answer::Silence => return Ok(()),
        Answer::Payload(len) | Answer::Initialised(_, len) => (0, *len),
        Answer::Error(errno) => (-errno, 0),
    };
    let len = OUT_HEADER + payload;
    let message = output.message();
    fill_header(message, len, error, unique);
    match rustix::io::write(queue, &message[..len]) {
        // The caller was killed meanwhile, or the mount is gone.
        Ok(_) | Err(Errno::NOENT | Errno::NODEV) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Sends a message nobody asked for.
fn tell(queue: BorrowedFd<'_>, code: i32, message: &[u8]) -> io::Result<()> {
    let mut all = vec![0; OUT_HEADER];
    all.extend(message);
    let len = all.len();
    fill_header(&mut all, len, code, 0);
    rustix::io::write(queue, &all)?;
    Ok(())
}

fn fill_header(message: &mut [u8], len: usize, error: i32, unique: u64) {
    message[..4].copy_from_slice(&(len as u32).to_ne_bytes());
    message[4..8].copy_from_slice(&error.to_ne_bytes());
    message[8..16].copy_from_slice(&unique.to_ne_bytes());
}
