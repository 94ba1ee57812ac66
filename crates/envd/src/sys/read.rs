//! Reading files that a user of the guest controls.

use rustix::fs::{fstat, openat, FileType, Mode, OFlags, CWD};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::path::Path;

/// Reads a regular file of at most `limit` bytes. Neither a FIFO nor a device can block or flood
/// the caller: anything but a regular file is an error.
pub fn bounded(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    bounded_at(CWD, path, limit)
}

/// [`bounded`] for a path relative to an open directory.
pub fn bounded_at(dir: impl AsFd, path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let fd = openat(dir, path, flags, Mode::empty())?;
    if FileType::from_raw_mode(fstat(&fd)?.st_mode) != FileType::RegularFile {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a regular file",
        ));
    }
    let mut bytes = Vec::new();
    if File::from(fd).take(limit + 1).read_to_end(&mut bytes)? as u64 > limit {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "file is too large",
        ));
    }
    Ok(bytes)
}
