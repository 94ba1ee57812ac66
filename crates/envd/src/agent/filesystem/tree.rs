//! Whole trees: listing them in order, and removing them.
//!
//! A guest may nest directories as deep as its disk allows, so neither function recurses, and the
//! number of open directories is bounded.

use rustix::fs::{openat, renameat, unlinkat, AtFlags, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;
use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use super::walk::Place;

/// Directories held open at once while removing.
const OPEN_LIMIT: usize = 128;

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// Names in a directory, sorted by bytes, with whether each is a directory itself. More than `limit`
/// are an error.
fn children(fd: &OwnedFd, limit: usize) -> io::Result<Vec<(OsString, bool)>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(fd)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        if names.len() == limit {
            return Err(Errno::OVERFLOW.into());
        }
        let is_directory = match entry.file_type() {
            FileType::Unknown => is_directory(fd.as_fd(), entry.file_name())?,
            kind => kind == FileType::Directory,
        };
        names.push((OsString::from_vec(name.to_vec()), is_directory));
    }
    names.sort();
    Ok(names)
}

fn is_directory(dir: BorrowedFd<'_>, name: &std::ffi::CStr) -> io::Result<bool> {
    let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
}

/// Visits everything below the directory at `place`, at most `depth` levels: a directory before its
/// children, siblings by name. Links are not followed. What vanishes meanwhile is skipped. More than
/// `limit` objects are the error `EOVERFLOW`.
pub fn visit(
    place: &Place,
    depth: usize,
    mut limit: usize,
    mut visitor: impl FnMut(Place, &Path) -> io::Result<()>,
) -> io::Result<()> {
    let top = place.open(OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?;
    let mut levels = vec![Level::new(top, PathBuf::new(), limit)?];
    while let Some(level) = levels.last_mut() {
        let Some((name, is_directory)) = level.names.next() else {
            levels.pop();
            continue;
        };
        limit = limit.checked_sub(1).ok_or(Errno::OVERFLOW)?;
        let path = level.path.join(&name);
        let child = match is_directory && levels.len() < depth {
            true => openat(
                &levels[levels.len() - 1].fd,
                &name,
                DIRECTORY,
                Mode::empty(),
            )
            .ok(),
            false => None,
        };
        let parent = levels[levels.len() - 1].fd.try_clone()?;
        match visitor(Place::new(parent, name, place.path.join(&path)), &path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            other => other?,
        }
        if let Some(child) = child {
            levels.push(Level::new(child, path, limit)?);
        }
    }
    Ok(())
}

struct Level {
    fd: OwnedFd,
    path: PathBuf,
    names: std::vec::IntoIter<(OsString, bool)>,
}

impl Level {
    fn new(fd: OwnedFd, path: PathBuf, limit: usize) -> io::Result<Level> {
        let names = children(&fd, limit)?.into_iter();
        Ok(Level { fd, path, names })
    }
}

/// Removes the object at `place` and everything below it. Links are removed, not followed, and what
/// somebody else removes at the same time is no error.
pub fn remove(place: &Place) -> io::Result<()> {
    match unlink(place.dir(), place.name(), false) {
        // POSIX lets unlink of a directory fail with EPERM, Linux says EISDIR.
        Err(Errno::ISDIR) => {}
        other => return Ok(other?),
    }
    let top = openat(place.dir(), place.name(), DIRECTORY, Mode::empty())?;
    let mut levels: Vec<(OwnedFd, Dir, CString)> = vec![open_level(top, CString::default())?];
    let mut moved = 0u64;
    while let Some((fd, entries, _)) = levels.last_mut() {
        let Some(entry) = entries.read() else {
            let Some((_, _, name)) = levels.pop() else {
                break;
            };
            if let Some((parent, _, _)) = levels.last() {
                unlink(parent.as_fd(), &name, true)?;
            }
            continue;
        };
        let name = entry?.file_name().to_owned();
        if name.as_bytes() == b"." || name.as_bytes() == b".." {
            continue;
        }
        match unlink(fd.as_fd(), &name, false) {
            Err(Errno::ISDIR) => {}
            other => {
                other?;
                continue;
            }
        }
        if levels.len() < OPEN_LIMIT {
            let (fd, _, _) = &levels[levels.len() - 1];
            let child = match openat(fd, &name, DIRECTORY, Mode::empty()) {
                Err(Errno::NOENT) => continue,
                other => other?,
            };
            levels.push(open_level(child, name)?);
            continue;
        }
        // Too deep: bring it up to the top, where it is met again.
        moved += 1;
        let up = format!(".aenv-removing-{}-{moved}", std::process::id());
        renameat(&levels[levels.len() - 1].0, &name, &levels[0].0, up)?;
        levels[0].1.rewind();
    }
    Ok(unlink(place.dir(), place.name(), true)?)
}

fn open_level(fd: OwnedFd, name: CString) -> io::Result<(OwnedFd, Dir, CString)> {
    let entries = Dir::read_from(&fd)?;
    Ok((fd, entries, name))
}

/// Unlinks one name; one that is gone already is fine.
fn unlink<N: rustix::path::Arg>(
    dir: BorrowedFd<'_>,
    name: N,
    is_directory: bool,
) -> Result<(), Errno> {
    let flags = if is_directory {
        AtFlags::REMOVEDIR
    } else {
        AtFlags::empty()
    };
    match unlinkat(dir, name, flags) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(e) => Err(e),
    }
}

/// Whether `name` is one that can be removed or renamed.
pub fn is_plain(name: &OsStr) -> bool {
    name != "." && name != ".."
}
