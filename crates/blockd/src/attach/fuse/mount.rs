//! Making, finding and removing the mount.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::ioctl::{ioctl, opcode, Setter};
use rustix::mount::{mount, unmount, MountFlags, UnmountFlags};

use super::MAX_IO;

const DEVICE: &str = "/dev/fuse";

/// Makes one path out of different spellings of it, without touching the last component: that may be our own mount.
pub fn canonical(directory: &Path) -> io::Result<PathBuf> {
    let absolute = std::path::absolute(directory)?;
    match (absolute.parent(), absolute.file_name()) {
        (Some(parent), Some(name)) => {
            fs::create_dir_all(parent)?;
            Ok(fs::canonicalize(parent)?.join(name))
        }
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{} cannot be a mount point", directory.display()),
        )),
    }
}

/// Opens the device and mounts it on `directory`, which is created if necessary. A dead mount of ours that is in the
/// way is removed first. `directory` has to be [`canonical`].
///
/// The first request on the returned descriptor is `INIT`.
pub fn make(directory: &Path) -> io::Result<OwnedFd> {
    remove(directory)?;
    match fs::create_dir(directory) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
        other => other?,
    }
    let device = rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| explain(e.into(), "open /dev/fuse"))?;
    let data = format!(
        "fd={},rootmode=40755,user_id=0,group_id=0,allow_other,default_permissions,max_read={MAX_IO}",
        device.as_raw_fd()
    );
    let data = std::ffi::CString::new(data).expect("no NUL inside");
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::NOATIME;
    mount("aenv", directory, "fuse.aenv", flags, &*data)
        .map_err(|e| explain(e.into(), "mount the images"))?;
    Ok(device)
}

/// Ends the connection behind a mount of ours and removes the mount. Nothing mounted is not an error.
///
/// Whoever waits for an answer gets an error at once, even if nobody serves the mount any more.
pub fn remove(directory: &Path) -> io::Result<()> {
    while find(directory)?.is_some() {
        // Neither flag looks at the root of the mount, so this cannot wait for a server.
        unmount(directory, UnmountFlags::FORCE | UnmountFlags::DETACH)
            .map_err(|e| explain(e.into(), "remove the old mount of the images"))?;
    }
    Ok(())
}

/// A mount found in the table.
#[derive(Debug, PartialEq, Eq)]
pub struct Found {
    /// `major:minor`, which also names the connection in sysfs.
    pub device: String,
}

/// The topmost mount on `directory`, if it is one of ours. Reads the table of mounts only.
pub fn find(directory: &Path) -> io::Result<Option<Found>> {
    Ok(find_in(&fs::read("/proc/self/mountinfo")?, directory))
}

fn find_in(table: &[u8], directory: &Path) -> Option<Found> {
    let mut found = None;
    for line in table.split(|b| *b == b'\n') {
        let fields: Vec<_> = line.split(|b| *b == b' ').collect();
        if fields.len() < 5 || unescape(fields[4]) != directory {
            continue;
        }
        // Optional fields end with a dash; the type follows.
        let kind = fields
            .iter()
            .position(|f| *f == b"-")
            .map(|at| fields.get(at + 1));
        found = (kind == Some(Some(&&b"fuse.aenv"[..]))).then(|| Found {
            device: String::from_utf8_lossy(fields[2]).into_owned(),
        });
    }
    found
}

/// Undoes the octal escapes of the table of mounts.
fn unescape(field: &[u8]) -> PathBuf {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, tail)) = rest.split_first() {
        let code = tail
            .get(..3)
            .filter(|_| *first == b'\\')
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(byte) => {
                out.push(byte);
                rest = &tail[3..];
            }
            None => {
                out.push(*first);
                rest = tail;
            }
        }
    }
    PathBuf::from(OsString::from_vec(out))
}

/// One more queue of the same connection. Each queue answers the requests it took, so that threads with a queue of
/// their own share no lock.
pub fn clone_device(device: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    const CLONE: rustix::ioctl::Opcode = opcode::read::<u32>(229, 0);
    let queue = rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    // SAFETY: FUSE_DEV_IOC_CLONE reads one u32, the descriptor to clone, and writes nothing.
    unsafe {
        ioctl(
            queue.as_fd(),
            Setter::<CLONE, u32>::new(device.as_raw_fd() as u32),
        )?;
    }
    Ok(queue)
}

fn explain(error: io::Error, action: &str) -> io::Error {
    let remedy = match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => "; load the module: modprobe fuse",
        Some(libc::EPERM | libc::EACCES) => "; it needs CAP_SYS_ADMIN and access to /dev/fuse",
        _ => "",
    };
    io::Error::new(error.kind(), format!("cannot {action}: {error}{remedy}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_mount_of_ours_on_top_counts() {
        let table = b"22 1 8:1 / / rw - ext4 /dev/vda rw\n\
            40 22 0:44 / /run/with\\040space rw,nosuid shared:1 - fuse.aenv aenv rw\n\
            41 22 0:45 / /run/covered rw - fuse.aenv aenv rw\n\
            42 22 0:46 / /run/covered rw - tmpfs tmpfs rw\n";
        let found = find_in(table, Path::new("/run/with space")).unwrap();
        assert_eq!(found.device, "0:44");
        assert_eq!(find_in(table, Path::new("/run/covered")), None);
        assert_eq!(find_in(table, Path::new("/")), None);
        assert_eq!(find_in(b"\n\n1 2 3", Path::new("/x")), None);
    }
}
