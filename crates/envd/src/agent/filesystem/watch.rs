//! Watching directories with inotify.
//!
//! A watch follows the tree below its directory if it is recursive. A directory that appears may have
//! content before its own watch is in place; it is scanned then, and what the scan found is told once,
//! however the kernel's events and the scan overlap.

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::fs::{fstatfs, openat, FileType, Mode, OFlags, CWD};
use rustix::io::Errno;
use rustix::process::fchdir;
use rustix::thread::{unshare_unsafe, UnshareFlags};
use serde_json::{json, Value};
use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::io::unix::AsyncFd;

use super::entry::describe;
use super::tree;
use super::walk::{kind, Last, Place, Walk};
use crate::agent::users::{Names, User};

/// Directories one watch may follow, and how deep.
const DIRECTORY_LIMIT: usize = 100_000;
const DEPTH_LIMIT: usize = 256;
/// Events kept for a client that does not take them.
const EVENT_LIMIT: usize = 16_384;
/// Bytes of kernel events read at once.
const BUFFER_SIZE: usize = 16 << 10;

const NETWORK: [i64; 5] = [0x6969, 0x517b, 0xff53_4d42, 0xfe53_4d42, 0x6573_5546];

/// What to watch, for whom, and how much to tell.
pub struct Scope {
    pub user: User,
    /// The directory, as the client named it.
    pub path: PathBuf,
    pub recursive: bool,
    pub include_entry: bool,
    pub allow_network: bool,
}

pub struct Watch {
    pub fd: AsyncFd<OwnedFd>,
    state: Mutex<State>,
}

struct State {
    scope: Scope,
    /// Directories by watch descriptor, relative to the root of the watch.
    directories: HashMap<i32, PathBuf>,
    /// What a scan has told already and the kernel may tell again.
    announced: HashSet<PathBuf>,
    events: Vec<Value>,
    lost: bool,
}

/// Why there is no watch.
pub enum Refusal {
    Io(io::Error),
    NotADirectory,
    Network,
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Refusal::Io(error)
    }
}

impl From<Errno> for Refusal {
    fn from(error: Errno) -> Self {
        Refusal::Io(error.into())
    }
}

impl Watch {
    /// Starts to watch. Blocks while it walks the tree; must be called within the runtime.
    pub fn new(scope: Scope) -> Result<Watch, Refusal> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        let mut state = State {
            scope,
            directories: HashMap::new(),
            announced: HashSet::new(),
            events: Vec::new(),
            lost: false,
        };
        state.begin(inotify.as_fd())?;
        // SAFETY: the AsyncFd owns the descriptor, and nothing takes it out or replaces it.
        let fd = unsafe { AsyncFd::register(inotify) }.map_err(io::Error::from)?;
        Ok(Watch {
            fd,
            state: Mutex::new(state),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads what the kernel has to tell. Blocks for file access.
    pub fn drain(&self) {
        self.state().drain(self.fd.get_ref().as_fd());
    }

    /// Takes the events so far. An error if some were lost since the last time.
    pub fn take(&self) -> Result<Vec<Value>, ()> {
        let mut state = self.state();
        let events = std::mem::take(&mut state.events);
        match std::mem::take(&mut state.lost) {
            true => Err(()),
            false => Ok(events),
        }
    }
}

impl State {
    fn begin(&mut self, inotify: BorrowedFd<'_>) -> Result<(), Refusal> {
        let user = self.scope.user.clone();
        let mut walk = Walk::new(&user);
        let place = walk.find(&self.scope.path, Last::Follow)?;
        if kind(&place.stat()?) != FileType::Directory {
            return Err(Refusal::NotADirectory);
        }
        let directory = place.open(OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?;
        let magic = fstatfs(&directory)?.f_type as i64;
        if !self.scope.allow_network && NETWORK.contains(&magic) {
            return Err(Refusal::Network);
        }
        self.add(inotify, directory.as_fd(), PathBuf::new())?;
        if self.scope.recursive {
            self.scan(inotify, &place, Path::new(""), false)?;
        }
        Ok(())
    }

    fn add(
        &mut self,
        inotify: BorrowedFd<'_>,
        directory: BorrowedFd<'_>,
        path: PathBuf,
    ) -> io::Result<()> {
        let flags = WatchFlags::CREATE
            | WatchFlags::MODIFY
            | WatchFlags::ATTRIB
            | WatchFlags::DELETE
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE
            | WatchFlags::ONLYDIR;
        if self.directories.len() >= DIRECTORY_LIMIT {
            return Err(Errno::NOSPC.into());
        }
        let watch = in_directory(directory, || Ok(inotify::add_watch(inotify, ".", flags)?))?;
        self.directories.insert(watch, path);
        Ok(())
    }

    /// Follows the directories below `place`, which is `path` of the watch; tells of everything there
    /// if it is `new`.
    fn scan(
        &mut self,
        inotify: BorrowedFd<'_>,
        place: &Place,
        path: &Path,
        new: bool,
    ) -> io::Result<()> {
        tree::visit(place, DEPTH_LIMIT, DIRECTORY_LIMIT, |child, below| {
            let below = path.join(below);
            // The watch comes before its directory is read, so nothing falls in between.
            if kind(&child.stat()?) == FileType::Directory {
                let directory = child.open(OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?;
                self.add(inotify, directory.as_fd(), below.clone())?;
            }
            if new {
                self.tell("EVENT_TYPE_CREATE", &below);
                self.announced.insert(below);
            }
            Ok(())
        })
    }

    /// A directory has appeared at `path` of the watch.
    fn follow(&mut self, inotify: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
        let user = self.scope.user.clone();
        let mut walk = Walk::new(&user);
        let place = walk.find(&self.scope.path.join(path), Last::Keep)?;
        let directory = place.open(OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?;
        self.add(inotify, directory.as_fd(), path.to_owned())?;
        self.scan(inotify, &place, path, true)
    }

    /// A directory has left: what is below `path` is somebody else's now.
    fn forget(&mut self, inotify: BorrowedFd<'_>, path: &Path) {
        self.directories.retain(|watch, directory| {
            let stays = !directory.starts_with(path);
            if !stays {
                // The kernel has removed the watch itself if the directory was deleted.
                let _ = inotify::remove_watch(inotify, *watch);
            }
            stays
        });
    }

    fn drain(&mut self, inotify: BorrowedFd<'_>) {
        let mut buffer = [MaybeUninit::uninit(); BUFFER_SIZE];
        let mut reader = inotify::Reader::new(inotify, &mut buffer);
        loop {
            let event = match reader.next() {
                Ok(event) => event,
                Err(Errno::INTR) => continue,
                // Nothing more: all that was told twice has come by now.
                Err(_) => break self.announced.clear(),
            };
            let name = event
                .file_name()
                .map(|name| OsStr::from_bytes(name.to_bytes()).to_owned());
            let (watch, flags) = (event.wd(), event.events());
            self.handle(inotify, watch, flags, name);
        }
    }

    fn handle(
        &mut self,
        inotify: BorrowedFd<'_>,
        watch: i32,
        flags: ReadFlags,
        name: Option<OsString>,
    ) {
        if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            self.lost = true;
            return;
        }
        if flags.contains(ReadFlags::IGNORED) {
            self.directories.remove(&watch);
            return;
        }
        let Some(directory) = self.directories.get(&watch) else {
            return;
        };
        let path = match &name {
            Some(name) => directory.join(name),
            // A watched directory itself: its parent tells about it, except for the root of the watch.
            None if directory.as_os_str().is_empty() => PathBuf::new(),
            None => return,
        };
        let is_directory = flags.contains(ReadFlags::ISDIR) && name.is_some();
        let came = flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO);
        if came && !self.announced.remove(&path) {
            self.tell("EVENT_TYPE_CREATE", &path);
            if is_directory && self.scope.recursive {
                // It may be gone again, or not ours to read.
                let _ = self.follow(inotify, &path);
            }
        }
        if flags.contains(ReadFlags::MODIFY) {
            self.tell("EVENT_TYPE_WRITE", &path);
        }
        if flags.contains(ReadFlags::ATTRIB) {
            self.tell("EVENT_TYPE_CHMOD", &path);
        }
        if flags.intersects(ReadFlags::DELETE | ReadFlags::DELETE_SELF) {
            self.tell("EVENT_TYPE_REMOVE", &path);
        }
        if flags.contains(ReadFlags::MOVED_FROM) {
            self.tell("EVENT_TYPE_RENAME", &path);
            if is_directory {
                self.forget(inotify, &path);
            }
        }
    }

    fn tell(&mut self, kind: &str, path: &Path) {
        if self.events.len() >= EVENT_LIMIT {
            self.lost = true;
            return;
        }
        let name = if path.as_os_str().is_empty() {
            ".".into()
        } else {
            path.to_string_lossy()
        };
        let mut event = json!({ "name": name, "type": kind });
        let described = matches!(
            kind,
            "EVENT_TYPE_CREATE" | "EVENT_TYPE_WRITE" | "EVENT_TYPE_CHMOD"
        );
        if self.scope.include_entry && described {
            let full = self.scope.path.join(path);
            let entry = Walk::new(&self.scope.user)
                .find(&full, Last::Keep)
                .and_then(|place| describe(&self.scope.user, &Names::load(), &place, &full));
            // It may be gone again.
            if let Ok(entry) = entry {
                event["entry"] = json!(entry);
            }
        }
        self.events.push(event);
    }
}

thread_local! {
    /// Whether this thread has a working directory of its own.
    static UNSHARED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work` with `directory` as the working directory of this thread alone. inotify takes paths
/// only, and a path may lead elsewhere by the time it is used.
fn in_directory<T>(
    directory: BorrowedFd<'_>,
    work: impl FnOnce() -> io::Result<T>,
) -> io::Result<T> {
    if !UNSHARED.get() {
        // SAFETY: this gives the thread its own root, working directory and umask, with equal values.
        // The root never changes after the start, and nothing else here uses the working directory.
        unsafe { unshare_unsafe(UnshareFlags::FS)? };
        UNSHARED.set(true);
    }
    fchdir(directory)?;
    let result = work();
    // Not to keep the directory busy.
    fchdir(openat(
        CWD,
        "/",
        OFlags::PATH | OFlags::CLOEXEC,
        Mode::empty(),
    )?)?;
    result
}
