//! How an image becomes a path that a VMM can open.
//!
//! # Life of an attachment
//!
//! 1. [`Attach::attach`] makes a disk visible under `directory/name` and gives it a *number*. From then on any process
//!    that the owner and mode of the [`Shape`] admit can open the path. Numbers are never used twice, not even after a
//!    restart: the kernel caches content by number.
//! 2. The content of a read-only attachment never changes. The kernel keeps its pages, and all processes that map it
//!    share them.
//! 3. A writable attachment grows when its disk does; [`Attach::resized`] tells the kernel. It never shrinks.
//! 4. [`Attach::detach`] removes the path. Who still has it open gets `ESTALE` from the next request on. Detaching what
//!    is not attached is not an error.
//! 5. When the daemon dies, attachments stay: requests wait in the kernel. Its successor attaches the same disks under
//!    the same numbers and names, and then takes the waiting requests over. A request that was being served when
//!    the daemon died is served again, so serving it twice must have the effect of serving it once.
//!
//! No process that serves attachments may open one, or stat it, or look at the directory they are in: the request would
//! wait for the process that makes it.
//!
//! Every implementation passes the suite in `tests/attach.rs`.

pub mod fuse;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// What is behind an attachment: a disk of [`Disk::size`] bytes. Offsets and lengths are bytes.
///
/// All methods are called from several threads at once, and ranges always lie inside the disk. A write is visible to
/// every read that starts after the write returned; overlapping operations at the same time have no order.
pub trait Disk: Send + Sync {
    /// Current size in bytes.
    fn size(&self) -> u64;

    /// Fills `buf`.
    fn read(&self, buf: &mut [u8], offset: u64) -> io::Result<()>;

    /// Stores `data`.
    fn write(&self, data: &[u8], offset: u64) -> io::Result<()>;

    /// Makes a range read as zeros and gives its space back.
    fn discard(&self, offset: u64, len: u64) -> io::Result<()>;

    /// Makes everything written before as durable as the image promises.
    fn flush(&self) -> io::Result<()>;

    /// First byte at or after `offset` that is data or that is a hole. The end of the disk counts as a hole; `None` if
    /// there is no data up to the end.
    fn seek(&self, offset: u64, target: Seek) -> io::Result<Option<u64>>;
}

/// What [`Disk::seek`] looks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seek {
    /// The next byte that may be other than zero.
    Data,
    /// The next byte that is known to be zero, or the end.
    Hole,
}

/// How an attachment looks from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Whether writes are refused. Read-only content is cached by the kernel, writable content is not.
    pub read_only: bool,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Permission bits. Read-only images may carry write permission: some VMMs insist on opening memory files for
    /// writing; the write itself is what fails.
    pub mode: u32,
    /// Modification time shown, in seconds since 1970.
    pub created: u64,
}

/// A way to show disks as paths; see the module for what it has to guarantee.
pub trait Attach: Send + Sync {
    /// Shows `disk` as `name` under the number `number`. Fails with `AlreadyExists` if one of the two is taken.
    fn attach(
        &self,
        number: u64,
        name: &str,
        shape: Shape,
        disk: Arc<dyn Disk>,
    ) -> io::Result<PathBuf>;

    /// Tells whoever looks that the disk has grown.
    fn resized(&self, number: u64);

    /// Removes the path.
    fn detach(&self, number: u64);
}
