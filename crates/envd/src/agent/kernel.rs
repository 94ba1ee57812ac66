//! Handles to kernel interfaces, opened before any user code runs.
//!
//! The user of a guest may unmount `/proc`, delete `/dev/null` or the whole root. What the agent
//! needs to go on serving is therefore opened once, at start.

use rustix::fs::{fstat, open, openat, Mode, OFlags, CWD};
use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use crate::sys::{cgroups, ext4, read};

const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
const STATE_LIMIT: u64 = 16 << 20;

#[derive(Debug)]
pub struct Kernel {
    /// A procfs that nobody can unmount.
    pub proc: OwnedFd,
    null: OwnedFd,
    /// The devpts instance; its `ptmx` cannot be deleted, unlike `/dev/ptmx`.
    pts: Option<OwnedFd>,
    /// Limit of open files that user processes get.
    pub files: Rlimit,
    pub guest: Option<Guest>,
}

/// What exists only inside a VM, where the agent may change the machine.
#[derive(Debug)]
pub struct Guest {
    /// `/dev/random`, for adding entropy.
    pub random: File,
    /// The root of all control groups.
    cgroups: OwnedFd,
    /// A sysfs.
    sys: OwnedFd,
    /// Size of the root's device when the file system was last grown.
    grown: Mutex<Option<u64>>,
    /// Private directory of the first process: state that survives a crash of the agent.
    state: OwnedFd,
}

impl Kernel {
    /// Opens everything; `guest` tells whether this is the agent of a VM, still in the initramfs.
    pub fn open(guest: bool) -> io::Result<Kernel> {
        let files = getrlimit(Resource::Nofile);
        setrlimit(
            Resource::Nofile,
            Rlimit {
                current: files.maximum,
                maximum: files.maximum,
            },
        )?;
        Ok(Kernel {
            proc: open("/proc", DIRECTORY, Mode::empty())?,
            null: open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?,
            pts: None,
            files,
            guest: if guest { Some(Guest::open()?) } else { None },
        })
    }

    /// Opens what lives in the user's root; call after the change of root.
    pub fn enter(&mut self) {
        self.pts = open("/dev/pts", DIRECTORY, Mode::empty()).ok();
        // Takes note of the size. A root in memory has no device and cannot grow.
        let _ = self.guest.as_ref().map(Guest::grow);
    }

    pub fn null(&self) -> io::Result<OwnedFd> {
        self.null.try_clone()
    }

    /// A new pseudo-terminal: its master side.
    pub fn ptmx(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        if let Some(pts) = &self.pts {
            if let Ok(fd) = openat(pts, "ptmx", flags, Mode::empty()) {
                return Ok(fd);
            }
        }
        Ok(openat(CWD, "/dev/ptmx", flags, Mode::empty())?)
    }

    pub fn proc(&self) -> BorrowedFd<'_> {
        self.proc.as_fd()
    }
}

impl Guest {
    fn open() -> io::Result<Guest> {
        use crate::init::paths::STATE;
        Ok(Guest {
            random: File::options().read(true).write(true).open("/dev/random")?,
            cgroups: open(
                cgroups::MOUNT,
                OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
                Mode::empty(),
            )?,
            sys: open("/sys", DIRECTORY, Mode::empty())?,
            grown: Mutex::default(),
            state: open(STATE, DIRECTORY, Mode::empty())?,
        })
    }

    /// Where a process writes "0" to become one of the user's.
    pub fn members(&self) -> io::Result<OwnedFd> {
        cgroups::user_members(self.cgroups.as_fd())
    }

    /// Stops all user processes where they are, or lets them go on.
    pub fn freeze(&self, frozen: bool) -> io::Result<()> {
        cgroups::freeze(self.cgroups.as_fd(), frozen)
    }

    /// Grows the root file system if its device has grown since the last call or the start.
    pub fn grow(&self) -> Result<(), String> {
        let root = open(
            "/",
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(|e| format!("cannot open the root: {e}"))?;
        // Majors of file systems without a device are 0.
        if rustix::fs::major(
            fstat(&root)
                .map_err(|e| format!("cannot read the root: {e}"))?
                .st_dev,
        ) == 0
        {
            return Ok(());
        }
        let mut grown = self.grown.lock().unwrap_or_else(PoisonError::into_inner);
        let size = ext4::device_size(root.as_fd(), self.sys.as_fd())?;
        // The first process grew it at boot.
        if grown.is_some_and(|grown| grown != size) {
            ext4::grow(root.as_fd(), size)?;
        }
        *grown = Some(size);
        Ok(())
    }

    /// Keeps `state` for the next agent. Atomic: a crash leaves the old or the new one.
    pub fn save(&self, state: &[u8]) -> io::Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC;
        let fd = openat(&self.state, "identity.new", flags, Mode::RUSR | Mode::WUSR)?;
        File::from(fd).write_all(state)?;
        Ok(rustix::fs::renameat(
            &self.state,
            "identity.new",
            &self.state,
            "identity",
        )?)
    }

    /// What the previous agent saved; `None` if there was none.
    pub fn load(&self) -> io::Result<Option<Vec<u8>>> {
        match read::bounded_at(&self.state, Path::new("identity"), STATE_LIMIT) {
            Ok(state) => Ok(Some(state)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }
}
