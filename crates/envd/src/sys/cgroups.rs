//! The control groups of a guest: one for the first process and the agent, one for what the user
//! starts, and whatever else the user makes, containers for example.

use rustix::fs::{mkdirat, openat, Dir, Mode, OFlags};
use rustix::io::Errno;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

/// Where cgroup2 is mounted in the initramfs.
pub const MOUNT: &str = "/sys/fs/cgroup";
/// Groups below the root.
pub const AGENT: &str = "agent";
pub const USER: &str = "user";

const WRITE: OFlags = OFlags::WRONLY.union(OFlags::CLOEXEC);
const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::CLOEXEC);

/// `cgroup.procs` of the user's group, which is made anew if the user removed it.
pub fn user_members(root: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    match mkdirat(root, USER, Mode::from_raw_mode(0o755)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(e) => return Err(e.into()),
    }
    Ok(openat(root, "user/cgroup.procs", WRITE, Mode::empty())?)
}

/// Stops everything but the agent where it is, or lets it go on. All groups are tried; the error is
/// that of the user's.
pub fn freeze(root: BorrowedFd<'_>, frozen: bool) -> io::Result<()> {
    let set = |group: &std::ffi::CStr| {
        let group = openat(root, group, DIRECTORY, Mode::empty())?;
        let file = openat(&group, "cgroup.freeze", WRITE, Mode::empty())?;
        rustix::io::write(file, if frozen { b"1" } else { b"0" }).map(drop)
    };
    for entry in Dir::read_from(root)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        // What is no directory fails to be opened as one.
        if name != b"." && name != b".." && name != AGENT.as_bytes() && name != USER.as_bytes() {
            let _ = set(entry.file_name());
        }
    }
    match set(c"user") {
        // Nobody is in a group that is not there.
        Err(Errno::NOENT) => Ok(()),
        other => Ok(other?),
    }
}
