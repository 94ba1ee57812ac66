//! Metadata of files: extended attributes `user.e2b.<key>`.

use hyper::header::HeaderMap;
use rustix::fs::{fgetxattr, flistxattr, fremovexattr, fsetxattr, XattrFlags};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;

const PREFIX: &str = "user.e2b.";
const HEADER_PREFIX: &str = "x-metadata-";
/// Longest key; with the prefix it fits the kernel's 255 bytes.
const KEY_LIMIT: usize = 246;
/// All keys and values of a file together, in bytes.
const TOTAL_LIMIT: usize = 4096;

pub type Metadata = BTreeMap<String, String>;

/// The metadata an upload sends in `X-Metadata-<key>` headers.
pub fn from_headers(headers: &HeaderMap) -> Result<Metadata, String> {
    let mut metadata = Metadata::new();
    let mut total = 0;
    for (name, value) in headers {
        let Some(key) = name.as_str().strip_prefix(HEADER_PREFIX) else {
            continue;
        };
        if key.is_empty() || key.len() > KEY_LIMIT {
            return Err(format!("a metadata key has 1 to {KEY_LIMIT} bytes"));
        }
        let Ok(value) = value.to_str() else {
            return Err(format!("metadata '{key}' must be printable ASCII"));
        };
        total += key.len() + value.len();
        if total > TOTAL_LIMIT {
            return Err(format!(
                "the metadata of a file has at most {TOTAL_LIMIT} bytes"
            ));
        }
        metadata.insert(key.to_owned(), value.to_owned());
    }
    Ok(metadata)
}

fn attributes(fd: BorrowedFd<'_>) -> io::Result<Vec<String>> {
    // 64 KiB is what the kernel allows for all names of a file.
    let mut names = vec![0; 64 << 10];
    let size = match flistxattr(fd, &mut names[..]) {
        Err(Errno::NOTSUP) => 0,
        other => other?,
    };
    let names = names[..size]
        .split(|b| *b == 0)
        .filter_map(|name| std::str::from_utf8(name).ok());
    Ok(names
        .filter(|name| name.len() > PREFIX.len() && name.starts_with(PREFIX))
        .map(str::to_owned)
        .collect())
}

/// The metadata of an open file. Values that are not text are left out.
pub fn read(fd: BorrowedFd<'_>) -> io::Result<Metadata> {
    let mut metadata = Metadata::new();
    let mut value = [0; TOTAL_LIMIT];
    for name in attributes(fd)? {
        // One that vanished or outgrew the limit is not ours.
        let Ok(size) = fgetxattr(fd, &*name, &mut value[..]) else {
            continue;
        };
        if let Ok(value) = std::str::from_utf8(&value[..size]) {
            metadata.insert(name[PREFIX.len()..].to_owned(), value.to_owned());
        }
    }
    Ok(metadata)
}

/// Makes `metadata` all there is, and returns what is stored. Attributes are only touched if something
/// changes, because watchers see that.
pub fn replace(fd: BorrowedFd<'_>, metadata: &Metadata) -> io::Result<Metadata> {
    let old = attributes(fd)?;
    if old.is_empty() && metadata.is_empty() {
        return Ok(Metadata::new());
    }
    for name in old
        .iter()
        .filter(|name| !metadata.contains_key(&name[PREFIX.len()..]))
    {
        fremovexattr(fd, &**name)?;
    }
    for (key, value) in metadata {
        fsetxattr(
            fd,
            format!("{PREFIX}{key}"),
            value.as_bytes(),
            XattrFlags::empty(),
        )?;
    }
    read(fd)
}
