//! What each request means: one directory of regular files, one file per image.
//!
//! A file handle carries nothing and a node number is the number of the image. So everything a request needs is in the
//! table of images, and a daemon that rebuilt the table can answer requests on files opened through its predecessor.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use serde_json::json;

use super::abi::{self, Attr, Negotiated, Op, Out, Request, ROOT};
use super::MAX_IO;
use crate::attach::{Disk, Seek, Shape};
use crate::{failpoint, log};

/// Lines about failed requests after which only every thousandth is written.
const LOUD_FAILURES: u64 = 100;

/// One attached image.
pub struct Node {
    number: u64,
    name: String,
    shape: Shape,
    disk: Arc<dyn Disk>,
}

impl Node {
    fn attr(&self) -> Attr {
        Attr {
            node: self.number,
            size: self.disk.size(),
            mode: libc::S_IFREG | self.shape.mode & 0o777,
            uid: self.shape.uid,
            gid: self.shape.gid,
            time: self.shape.created,
        }
    }
}

#[derive(Default)]
struct Table {
    nodes: HashMap<u64, Arc<Node>>,
    names: BTreeMap<String, u64>,
}

/// The images of one mount, and counters.
#[derive(Default)]
pub struct Session {
    table: RwLock<Table>,
    failures: AtomicU64,
}

/// What to send back.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    /// Nothing: the request wants no answer.
    Silence,
    /// Success with so many bytes of payload.
    Payload(usize),
    /// Failure with an error number.
    Error(i32),
    /// The answer to `INIT`; the payload is of the given length.
    Initialised(Negotiated, usize),
}

impl Session {
    /// Adds an image.
    pub fn insert(
        &self,
        number: u64,
        name: &str,
        shape: Shape,
        disk: Arc<dyn Disk>,
    ) -> io::Result<()> {
        let mut table = self.write();
        if number <= ROOT || table.nodes.contains_key(&number) || table.names.contains_key(name) {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                format!("an image called {name} or numbered {number} is attached already"),
            ));
        }
        let node = Arc::new(Node {
            number,
            name: name.to_owned(),
            shape,
            disk,
        });
        table.nodes.insert(number, node);
        table.names.insert(name.to_owned(), number);
        Ok(())
    }

    /// Removes an image and returns its name.
    pub fn remove(&self, number: u64) -> Option<String> {
        let mut table = self.write();
        let name = table.nodes.remove(&number)?.name.clone();
        table.names.remove(&name);
        Some(name)
    }

    /// Serves one request. `payload` is where the payload of the answer goes, [`MAX_IO`] bytes.
    pub fn serve(&self, request: &Request<'_>, payload: &mut [u8]) -> Answer {
        match self.answer(request, payload) {
            Ok(answer) => answer,
            Err(Fault::Errno(errno)) => Answer::Error(errno),
            Err(Fault::Io(error)) => {
                let errno = errno_of(&error);
                self.report(request, &error, errno);
                Answer::Error(errno)
            }
        }
    }

    fn answer(&self, request: &Request<'_>, payload: &mut [u8]) -> Result<Answer, Fault> {
        let done = Ok(Answer::Payload(0));
        match request.op {
            Op::Read { offset, size } => {
                let node = self.node(request.node)?;
                let left = node.disk.size().saturating_sub(offset);
                let len = u64::from(size).min(left).min(MAX_IO as u64) as usize;
                failpoint::hit("fuse-read");
                if len > 0 {
                    node.disk.read(&mut payload[..len], offset)?;
                }
                Ok(Answer::Payload(len))
            }
            Op::Write { offset, data } => {
                let node = self.writable(request.node, libc::EROFS)?;
                inside(&node, offset, data.len() as u64)?;
                failpoint::hit("fuse-write");
                if !data.is_empty() {
                    node.disk.write(data, offset)?;
                }
                failpoint::hit("fuse-written");
                Ok(reply(payload, |out| {
                    out.u32(data.len() as u32).u32(0);
                }))
            }
            Op::Fallocate { offset, len, mode } => {
                let mode = mode as i32;
                // QEMU punches holes into memory files it could not have opened for writing; it takes EOPNOTSUPP well.
                let node = self.writable(request.node, libc::EOPNOTSUPP)?;
                inside(&node, offset, len)?;
                let base = mode & !libc::FALLOC_FL_KEEP_SIZE;
                if base == libc::FALLOC_FL_PUNCH_HOLE || base == libc::FALLOC_FL_ZERO_RANGE {
                    if len > 0 {
                        node.disk.discard(offset, len)?;
                    }
                    done
                } else if base == 0 {
                    // Space is taken when data arrives; there is nothing to reserve.
                    done
                } else {
                    Err(Fault::Errno(libc::EOPNOTSUPP))
                }
            }
            Op::Sync => {
                if request.node != ROOT {
                    self.node(request.node)?.disk.flush()?;
                }
                done
            }
            Op::Lookup { name } => {
                if request.node != ROOT {
                    return Err(Fault::Errno(libc::ENOTDIR));
                }
                let node = self.named(name)?;
                Ok(reply(payload, |out| {
                    out.entry_out(&node.attr());
                }))
            }
            Op::GetAttr => self.attributes(request.node, payload),
            Op::SetAttr { valid, size } => {
                if valid & (abi::set::MODE | abi::set::UID | abi::set::GID) != 0 {
                    return Err(Fault::Errno(libc::EPERM));
                }
                if valid & abi::set::SIZE != 0 && self.node(request.node)?.disk.size() != size {
                    return Err(Fault::Errno(libc::EPERM));
                }
                self.attributes(request.node, payload)
            }
            Op::Open => {
                let node = self.node(request.node)?;
                let flags = if node.shape.read_only {
                    abi::open::KEEP_CACHE
                } else {
                    abi::open::DIRECT_IO | abi::open::PARALLEL_DIRECT_WRITES
                };
                Ok(reply(payload, |out| {
                    out.open_out(flags | abi::open::NO_FLUSH);
                }))
            }
            Op::OpenDir => Ok(reply(payload, |out| {
                out.open_out(0);
            })),
            Op::ReadDir { offset, size } => Ok(self.list(offset, size, payload)),
            Op::Seek { offset, whence } => self.seek(request.node, offset, whence, payload),
            Op::StatFs => Ok(self.statfs(payload)),
            Op::Close | Op::Destroy => done,
            Op::Silent => Ok(Answer::Silence),
            Op::Change => Err(Fault::Errno(libc::EPERM)),
            Op::Unknown => Err(Fault::Errno(libc::ENOSYS)),
            Op::Init {
                major,
                minor,
                max_readahead,
                flags,
            } => {
                if major != abi::MAJOR || minor < abi::MIN_MINOR {
                    return Err(Fault::Errno(libc::EPROTO));
                }
                let agreed = Negotiated::choose(minor, max_readahead, flags);
                let Answer::Payload(len) = reply(payload, |out| {
                    out.init_out(&agreed);
                }) else {
                    unreachable!("reply always returns a payload")
                };
                Ok(Answer::Initialised(agreed, len))
            }
        }
    }

    fn attributes(&self, number: u64, payload: &mut [u8]) -> Result<Answer, Fault> {
        let attr = if number == ROOT {
            root_attr()
        } else {
            self.node(number)?.attr()
        };
        Ok(reply(payload, |out| {
            out.attr_out(&attr);
        }))
    }

    fn seek(
        &self,
        number: u64,
        offset: u64,
        whence: u32,
        payload: &mut [u8],
    ) -> Result<Answer, Fault> {
        let node = self.node(number)?;
        let target = match whence as i32 {
            libc::SEEK_DATA => Seek::Data,
            libc::SEEK_HOLE => Seek::Hole,
            _ => return Err(Fault::Errno(libc::EINVAL)),
        };
        let nothing = Fault::Errno(libc::ENXIO);
        if offset >= node.disk.size() {
            return Err(nothing);
        }
        let found = node.disk.seek(offset, target)?.ok_or(nothing)?;
        Ok(reply(payload, |out| {
            out.u64(found);
        }))
    }

    /// Directory entries from position `offset` on. The position of an image is its number, so that a listing in
    /// pieces misses nothing that was there all the time.
    fn list(&self, offset: u64, size: u32, payload: &mut [u8]) -> Answer {
        let mut entries = vec![(ROOT, ROOT, ".".to_owned()), (ROOT, 2, "..".to_owned())];
        {
            let table = self.read();
            entries.extend(
                table
                    .names
                    .iter()
                    .map(|(name, number)| (*number, number + 2, name.clone())),
            );
        }
        entries.sort_unstable_by_key(|(_, position, _)| *position);
        let room = (size as usize).min(payload.len());
        let mut out = Out::new(&mut payload[..room]);
        for (number, position, name) in entries.iter().filter(|(_, p, _)| *p > offset) {
            let len = (24 + name.len()).next_multiple_of(8);
            if out.len() + len > room {
                break;
            }
            let kind = if *number == ROOT {
                libc::DT_DIR
            } else {
                libc::DT_REG
            };
            out.u64(*number).u64(*position);
            out.u32(name.len() as u32).u32(u32::from(kind));
            out.bytes(name.as_bytes()).zeros(len - 24 - name.len());
        }
        Answer::Payload(out.len())
    }

    fn statfs(&self, payload: &mut [u8]) -> Answer {
        let files = self.read().nodes.len() as u64;
        reply(payload, |out| {
            out.u64(0).u64(0).u64(0).u64(files).u64(0);
            out.u32(4096).u32(255).u32(4096).zeros(7 * 4);
        })
    }

    fn named(&self, name: &[u8]) -> Result<Arc<Node>, Fault> {
        let table = self.read();
        std::str::from_utf8(name)
            .ok()
            .and_then(|name| table.names.get(name))
            .and_then(|number| table.nodes.get(number))
            .cloned()
            .ok_or(Fault::Errno(libc::ENOENT))
    }

    fn node(&self, number: u64) -> Result<Arc<Node>, Fault> {
        if number == ROOT {
            return Err(Fault::Errno(libc::EISDIR));
        }
        let table = self.read();
        table
            .nodes
            .get(&number)
            .cloned()
            .ok_or(Fault::Errno(libc::ESTALE))
    }

    fn writable(&self, number: u64, otherwise: i32) -> Result<Arc<Node>, Fault> {
        let node = self.node(number)?;
        if node.shape.read_only {
            return Err(Fault::Errno(otherwise));
        }
        Ok(node)
    }

    /// A guest can make requests fail as often as it likes; the log must survive that.
    fn report(&self, request: &Request<'_>, error: &io::Error, errno: i32) {
        let count = self.failures.fetch_add(1, Relaxed) + 1;
        if count > LOUD_FAILURES && count % 1000 != 0 {
            return;
        }
        let (operation, offset, len) = match request.op {
            Op::Read { offset, size } => ("read", offset, u64::from(size)),
            Op::Write { offset, data } => ("write", offset, data.len() as u64),
            Op::Fallocate { offset, len, .. } => ("discard", offset, len),
            Op::Seek { offset, .. } => ("seek", offset, 0),
            _ => ("flush", 0, 0),
        };
        let name = self
            .node(request.node)
            .map(|n| n.name.clone())
            .unwrap_or_default();
        log::error(
            "an image could not serve a request",
            json!({ "image": name, "operation": operation, "offset": offset, "len": len, "errno": errno,
                    "cause": error.to_string(), "failures": count }),
        );
    }

    /// Requests that failed because of the image, not because of the caller.
    pub fn failures(&self) -> u64 {
        self.failures.load(Relaxed)
    }

    // Each change of the table is complete before the lock is released, so a panic elsewhere leaves it usable.
    fn read(&self) -> RwLockReadGuard<'_, Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Table> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why a request fails.
enum Fault {
    /// The caller asked for something we do not do.
    Errno(i32),
    /// The disk could not.
    Io(io::Error),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Fault {
        Fault::Io(error)
    }
}

fn reply(payload: &mut [u8], fill: impl FnOnce(&mut Out<'_>)) -> Answer {
    let mut out = Out::new(payload);
    fill(&mut out);
    Answer::Payload(out.len())
}

/// A disk does not grow by writing behind its end.
fn inside(node: &Node, offset: u64, len: u64) -> Result<(), Fault> {
    match offset.checked_add(len) {
        Some(end) if end <= node.disk.size() => Ok(()),
        _ => Err(Fault::Errno(libc::ENOSPC)),
    }
}

fn root_attr() -> Attr {
    Attr {
        node: ROOT,
        size: 0,
        mode: libc::S_IFDIR | 0o755,
        uid: 0,
        gid: 0,
        time: 0,
    }
}

/// The error number that tells a guest most about `error`.
fn errno_of(error: &io::Error) -> i32 {
    if let Some(errno) = error.raw_os_error() {
        return errno;
    }
    match error.kind() {
        io::ErrorKind::StorageFull => libc::ENOSPC,
        io::ErrorKind::QuotaExceeded => libc::EDQUOT,
        io::ErrorKind::ReadOnlyFilesystem => libc::EROFS,
        io::ErrorKind::InvalidInput => libc::EINVAL,
        _ => libc::EIO,
    }
}
