//! Positioned reads: the only thing the readers of this crate need from a file, a buffer or a remote blob.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use crate::error::{Error, Result};

/// Bytes that can be read at any position, by any number of threads at once.
///
/// The content of a source never changes while it is in use. Offsets and lengths are bytes.
pub trait ReadAt: Send + Sync {
    /// Reads into `buf` from `offset`. Fewer bytes than asked for are returned only at the end of the source.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Length in bytes.
    fn size(&self) -> u64;

    /// Tells a caching source that the bytes it delivered for this range failed a checksum, so that the next
    /// read fetches them anew. Sources without a cache do nothing.
    fn forget(&self, _offset: u64, _len: u64) {}

    /// Reads exactly `buf.len()` bytes or fails with `UnexpectedEof`.
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let got = self.read_at(buf, offset)?;
        if got == buf.len() {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            format!("wanted {} bytes at {offset}, found {got}", buf.len()),
        ))
    }
}

impl<T: ReadAt + ?Sized> ReadAt for Arc<T> {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        (**self).read_at(buf, offset)
    }
    fn size(&self) -> u64 {
        (**self).size()
    }
    fn forget(&self, offset: u64, len: u64) {
        (**self).forget(offset, len);
    }
}

impl<T: ReadAt + ?Sized> ReadAt for &T {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        (**self).read_at(buf, offset)
    }
    fn size(&self) -> u64 {
        (**self).size()
    }
    fn forget(&self, offset: u64, len: u64) {
        (**self).forget(offset, len);
    }
}

impl ReadAt for [u8] {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let start = usize::try_from(offset)
            .unwrap_or(usize::MAX)
            .min(self.len());
        let len = buf.len().min(self.len() - start);
        buf[..len].copy_from_slice(&self[start..start + len]);
        Ok(len)
    }
    fn size(&self) -> u64 {
        self.len() as u64
    }
}

impl ReadAt for Vec<u8> {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.as_slice().read_at(buf, offset)
    }
    fn size(&self) -> u64 {
        self.len() as u64
    }
}

/// A local file or block device whose length was taken once, when it was opened.
#[derive(Debug)]
pub struct FileSource {
    file: Arc<File>,
    size: u64,
}

impl FileSource {
    /// Opens `path` read-only.
    pub fn open(path: impl AsRef<Path>) -> Result<FileSource> {
        let path = path.as_ref();
        let file = File::open(path).map_err(Error::io(format_args!("open {}", path.display())))?;
        // Seeking to the end also works for block devices, whose metadata length is 0.
        let size = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0)).map_err(|e| {
            Error::io(format_args!("find the size of {}", path.display()))(e.into())
        })?;
        Ok(FileSource {
            file: Arc::new(file),
            size,
        })
    }

    /// The first `size` bytes of an open file that may still grow behind them.
    pub fn with_size(file: Arc<File>, size: u64) -> FileSource {
        FileSource { file, size }
    }

    /// The file itself.
    pub fn file(&self) -> &Arc<File> {
        &self.file
    }
}

impl ReadAt for FileSource {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let len = (buf.len() as u64).min(self.size.saturating_sub(offset)) as usize;
        read_file(&self.file, &mut buf[..len], offset)
    }
    fn size(&self) -> u64 {
        self.size
    }
}

/// Reads until `buf` is full or the file ends.
pub(crate) fn read_file(file: &File, buf: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buf.len() {
        match file.read_at(&mut buf[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

/// A part of another source: the content of a tar member, for example.
#[derive(Debug, Clone)]
pub struct SubRange<S> {
    inner: S,
    base: u64,
    len: u64,
}

impl<S: ReadAt> SubRange<S> {
    /// `len` bytes of `inner` from `base` on, cut to what `inner` has.
    pub fn new(inner: S, base: u64, len: u64) -> SubRange<S> {
        let base = base.min(inner.size());
        let len = len.min(inner.size() - base);
        SubRange { inner, base, len }
    }
}

impl<S: ReadAt> ReadAt for SubRange<S> {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let len = (buf.len() as u64).min(self.len.saturating_sub(offset)) as usize;
        if len == 0 {
            return Ok(0);
        }
        self.inner.read_at(&mut buf[..len], self.base + offset)
    }
    fn size(&self) -> u64 {
        self.len
    }
    fn forget(&self, offset: u64, len: u64) {
        let offset = offset.min(self.len);
        self.inner
            .forget(self.base + offset, len.min(self.len - offset));
    }
}
