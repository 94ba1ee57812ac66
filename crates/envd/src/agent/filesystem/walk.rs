//! Walking to a path with root's rights, without being led astray by the users of the guest.
//!
//! Clients may ask for any path on behalf of any user, so the agent acts as root and then gives what
//! it created to that user. Processes of the guest can plant symbolic links while it does so. The rule
//! that keeps them from borrowing root's rights: **the words of the client carry root's authority, a
//! link carries only that of who could have made it.** The walk opens one component after the other
//! and never lets the kernel follow a link. As soon as it follows one that root does not own, the
//! thread drops to the file system rights of the user the call is made for, until the operation ends.

use rustix::fs::{
    fstat, fstatfs, mkdirat, openat, readlinkat, AtFlags, FileType, Mode, OFlags, Stat, CWD,
};
use rustix::io::Errno;
use rustix::thread::{set_thread_groups, Gid, Uid};
use std::cell::Cell;
use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::agent::users::User;

/// Links followed on one path, as in the kernel.
const LINK_LIMIT: usize = 40;
/// Components on one path with all its links, which the kernel bounds by their length.
const COMPONENT_LIMIT: usize = 4096;
const PROC_SUPER_MAGIC: i64 = 0x9fa0;

const PLACE: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// What to do with a symbolic link at the end of the path.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Last {
    Keep,
    Follow,
}

/// An object by its open parent directory and its name there; the object itself may not exist.
pub struct Place {
    dir: OwnedFd,
    name: OsString,
    /// Where the walk ended, all links resolved.
    pub path: PathBuf,
}

impl Place {
    pub fn new(dir: OwnedFd, name: OsString, path: PathBuf) -> Place {
        Place { dir, name, path }
    }

    pub fn dir(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }

    /// The name in [`Self::dir`]; `.` for the root and for what a link to `..` leads to.
    pub fn name(&self) -> &OsStr {
        &self.name
    }

    /// Status of the object itself, never of what a link points to.
    pub fn stat(&self) -> io::Result<Stat> {
        Ok(rustix::fs::statat(
            &self.dir,
            &self.name,
            AtFlags::SYMLINK_NOFOLLOW,
        )?)
    }

    /// Opens the object if it is a regular file. Others are not even opened, because that alone can
    /// have effects: `EISDIR` for a directory, `EINVAL` for the rest.
    pub fn open_regular(&self, flags: OFlags) -> io::Result<(OwnedFd, Stat)> {
        let check = |stat: &Stat| match kind(stat) {
            FileType::RegularFile => Ok(()),
            FileType::Directory => Err(Errno::ISDIR),
            _ => Err(Errno::INVAL),
        };
        check(&self.stat()?)?;
        let fd = self.open(flags, Mode::empty())?;
        let stat = fstat(&fd)?;
        check(&stat)?;
        Ok((fd, stat))
    }

    /// Opens the object. `O_NOFOLLOW` makes a link that has appeared there in the meantime an error.
    pub fn open(&self, flags: OFlags, mode: Mode) -> io::Result<OwnedFd> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        Ok(openat(&self.dir, &self.name, flags, mode)?)
    }
}

thread_local! {
    /// Whether a walk on this thread has lowered its rights.
    static LOWERED: Cell<bool> = const { Cell::new(false) };
}

/// One operation for one user. Belongs to the thread it was made on, whose rights it may lower;
/// dropping it restores them. A walk within a walk, always for the same user, starts with the rights
/// of the outer one and leaves them as they were.
pub struct Walk<'a> {
    user: &'a User,
    /// Whether it was this walk that lowered the rights.
    lowered: bool,
    links: usize,
    thread: PhantomData<*const ()>,
}

impl<'a> Walk<'a> {
    pub fn new(user: &'a User) -> Self {
        Walk {
            user,
            lowered: false,
            links: 0,
            thread: PhantomData,
        }
    }

    /// Finds `path`, which must be absolute. All directories on the way must exist.
    pub fn find(&mut self, path: &Path, last: Last) -> io::Result<Place> {
        self.walk(path, last, false)
    }

    /// Finds `path` and creates the missing directories above it, owned by the user.
    pub fn make(&mut self, path: &Path, last: Last) -> io::Result<Place> {
        self.walk(path, last, true)
    }

    fn walk(&mut self, path: &Path, last: Last, create: bool) -> io::Result<Place> {
        let mut todo = VecDeque::new();
        push(&mut todo, path.as_os_str())?;
        let mut dir = root()?;
        let mut at = PathBuf::from("/");
        while let Some(name) = todo.pop_front() {
            if name == ".." {
                dir = openat(&dir, "..", PLACE | OFlags::DIRECTORY, Mode::empty())?;
                at.pop();
                continue;
            }
            let is_last = todo.is_empty();
            let found = match openat(&dir, &name, PLACE, Mode::empty()) {
                Err(Errno::NOENT) if is_last => None,
                Err(Errno::NOENT) if create => Some(self.make_directory(dir.as_fd(), &name)?),
                other => Some(other?),
            };
            let stat = found.as_ref().map(fstat).transpose()?;
            match (found, stat) {
                (Some(link), Some(stat)) if kind(&stat) == FileType::Symlink => {
                    if is_last && last == Last::Keep {
                        return Ok(Place {
                            path: at.join(&name),
                            dir,
                            name,
                        });
                    }
                    self.follow(&mut dir, &mut at, &mut todo, &name, &link, &stat)?;
                }
                (Some(found), Some(stat)) if !is_last => {
                    if kind(&stat) != FileType::Directory {
                        return Err(Errno::NOTDIR.into());
                    }
                    dir = found;
                    at.push(name);
                }
                _ => {
                    return Ok(Place {
                        path: at.join(&name),
                        dir,
                        name,
                    })
                }
            }
        }
        Ok(Place {
            dir,
            name: ".".into(),
            path: at,
        })
    }

    /// Goes through the link `name` in `dir`.
    fn follow(
        &mut self,
        dir: &mut OwnedFd,
        at: &mut PathBuf,
        todo: &mut VecDeque<OsString>,
        name: &OsStr,
        link: &OwnedFd,
        stat: &Stat,
    ) -> io::Result<()> {
        self.links += 1;
        if self.links > LINK_LIMIT {
            return Err(Errno::LOOP.into());
        }
        let magic = fstatfs(&*dir)?.f_type as i64 == PROC_SUPER_MAGIC;
        if stat.st_uid != 0 || magic {
            self.lower()?;
        }
        let target = readlinkat(link, "", Vec::new())?;
        let target = OsStr::from_bytes(target.as_bytes());
        if magic {
            // A link of procfs may lead where its text does not; only the kernel can follow it.
            let reached = openat(&*dir, name, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
            *at = if target.as_bytes().starts_with(b"/") {
                target.into()
            } else {
                at.join(target)
            };
            if kind(&fstat(&reached)?) == FileType::Directory {
                *dir = reached;
                return Ok(());
            }
            // Files behind such links (/proc/self/fd/1) have no directory to speak of.
            return Err(if todo.is_empty() {
                Errno::LOOP
            } else {
                Errno::NOTDIR
            }
            .into());
        }
        if target.as_bytes().starts_with(b"/") {
            *dir = root()?;
            *at = PathBuf::from("/");
        }
        push(todo, target)
    }

    fn make_directory(&self, dir: BorrowedFd<'_>, name: &OsStr) -> io::Result<OwnedFd> {
        let made = match mkdirat(dir, name, Mode::from_raw_mode(0o755)) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(e) => return Err(e.into()),
        };
        let fd = openat(dir, name, PLACE, Mode::empty())?;
        let stat = fstat(&fd)?;
        // Whoever owns the parent may have put something else there meanwhile.
        if made && stat.st_uid == 0 && kind(&stat) == FileType::Directory {
            self.give(fd.as_fd())?;
        }
        Ok(fd)
    }

    /// Creates the directory `place` and gives it to the user.
    pub fn create_directory(&self, place: &Place) -> io::Result<()> {
        mkdirat(place.dir(), place.name(), Mode::from_raw_mode(0o755))?;
        let fd = openat(
            place.dir(),
            place.name(),
            PLACE | OFlags::DIRECTORY,
            Mode::empty(),
        )?;
        if fstat(&fd)?.st_uid == 0 {
            self.give(fd.as_fd())?;
        }
        Ok(())
    }

    /// Makes the user the owner of what `fd` is. With lowered rights that is so already, or forbidden.
    pub fn give(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        if LOWERED.get() || !rustix::process::geteuid().is_root() {
            return Ok(());
        }
        let owner = Some(Uid::from_raw(self.user.uid));
        let group = Some(Gid::from_raw(self.user.gid));
        Ok(rustix::fs::chownat(
            fd,
            "",
            owner,
            group,
            AtFlags::EMPTY_PATH,
        )?)
    }

    /// Drops this thread to the user's file system rights.
    pub fn lower(&mut self) -> io::Result<()> {
        if LOWERED.get() || self.user.is_root() || !rustix::process::geteuid().is_root() {
            return Ok(());
        }
        self.lowered = true;
        LOWERED.set(true);
        let groups: Vec<Gid> = self.user.groups.iter().map(|g| Gid::from_raw(*g)).collect();
        set_thread_groups(&groups)?;
        set_fs_ids(self.user.uid, self.user.gid)
    }
}

impl Drop for Walk<'_> {
    fn drop(&mut self) {
        if self.lowered {
            // Should one of these fail, the thread keeps fewer rights than it should have, not more.
            let _ = set_fs_ids(0, 0);
            let _ = set_thread_groups(&[]);
            LOWERED.set(false);
        }
    }
}

/// Sets the ids used for file access of this thread; leaving uid 0 also drops root's file capabilities.
fn set_fs_ids(uid: u32, gid: u32) -> io::Result<()> {
    // SAFETY: both calls take plain integers and affect this thread only. They report no errors;
    // asking with an invalid id returns what is in force.
    let now = unsafe {
        libc::setfsgid(gid);
        libc::setfsuid(uid);
        (
            libc::setfsuid(u32::MAX) as u32,
            libc::setfsgid(u32::MAX) as u32,
        )
    };
    if now == (uid, gid) {
        Ok(())
    } else {
        Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "cannot change file system rights",
        ))
    }
}

/// Opens a directory as `user` would, with nobody else's rights.
pub fn open_directory_as(user: &User, path: &Path) -> io::Result<OwnedFd> {
    let mut walk = Walk::new(user);
    walk.lower()?;
    Ok(openat(
        CWD,
        path,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

pub fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

fn root() -> io::Result<OwnedFd> {
    Ok(openat(CWD, "/", PLACE | OFlags::DIRECTORY, Mode::empty())?)
}

/// Puts the components of `path` before those that are still to be walked.
fn push(todo: &mut VecDeque<OsString>, path: &OsStr) -> io::Result<()> {
    let names = path
        .as_bytes()
        .split(|b| *b == b'/')
        .filter(|name| !name.is_empty() && *name != b".");
    let names: Vec<_> = names
        .map(|name| OsStr::from_bytes(name).to_owned())
        .collect();
    if todo.len() + names.len() > COMPONENT_LIMIT {
        return Err(Errno::NAMETOOLONG.into());
    }
    for name in names.into_iter().rev() {
        todo.push_front(name);
    }
    Ok(())
}
