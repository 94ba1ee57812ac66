//! What is mounted: for the first process itself, and in the user's root.

use rustix::fs::{chmod, mknodat, open, symlinkat, FileType, Mode, OFlags, CWD};
use rustix::io::Errno;
use rustix::mount::{mount, MountFlags};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use super::devices::wait_for;
use super::paths::{MODULES, NEW_ROOT, STATE};
use super::root::{Mount, Root};
use crate::sys::cgroups;

const PLAIN: MountFlags = MountFlags::NOSUID
    .union(MountFlags::NODEV)
    .union(MountFlags::NOEXEC);
/// Memory the kernel leaves to the agent when the guest runs short, in bytes.
const AGENT_MEMORY: &str = "33554432";

/// Mounts what the first process needs to see the machine.
pub fn early() -> Result<(), String> {
    for (source, path, flags) in [
        ("proc", "/proc", PLAIN),
        ("sysfs", "/sys", PLAIN),
        ("devtmpfs", "/dev", MountFlags::NOSUID),
        ("cgroup2", "/sys/fs/cgroup", PLAIN),
    ] {
        if source != "cgroup2" {
            make(path)?;
        }
        // Every command moves into the users' group; without this option each move waits for a grace period of
        // RCU, tens of milliseconds on one emulated processor.
        let data = (source == "cgroup2").then_some(c"favordynmods");
        match mount(source, path, source, flags, data) {
            // devtmpfs may have been mounted by the kernel.
            Ok(()) | Err(Errno::BUSY) => {}
            Err(e) => return Err(format!("cannot mount {source} on {path}: {e}")),
        }
    }
    make(STATE)?;
    make(NEW_ROOT)?;
    chmod(STATE, Mode::RWXU).map_err(|e| format!("cannot protect {STATE}: {e}"))
}

fn make(path: &str) -> Result<(), String> {
    fs::create_dir_all(path).map_err(|e| format!("cannot create {path}: {e}"))
}

/// Puts the first process and the agent in one control group, and prepares the one of the user.
pub fn control_groups() -> Result<(), String> {
    let group = |name: &str| Path::new(cgroups::MOUNT).join(name);
    let write = |path: PathBuf, text: &str| {
        fs::write(&path, text)
            .map_err(|e| format!("cannot write {text} to {}: {e}", path.display()))
    };
    for name in [cgroups::AGENT, cgroups::USER] {
        fs::create_dir_all(group(name))
            .map_err(|e| format!("cannot create the control group {name}: {e}"))?;
    }
    write(group(cgroups::AGENT).join("cgroup.procs"), "1")?;
    let controllers = fs::read_to_string(group("cgroup.controllers"))
        .map_err(|e| format!("cannot read the cgroup controllers: {e}"))?;
    for controller in controllers.split_ascii_whitespace() {
        // One that cannot be enabled must not cost the others.
        if let Err(message) = write(group("cgroup.subtree_control"), &format!("+{controller}")) {
            super::warn(&message);
        }
    }
    // Without these controllers there is nothing to limit. A fork bomb must leave room for us.
    let _ = write(group(cgroups::AGENT).join("memory.min"), AGENT_MEMORY);
    let threads = fs::read_to_string("/proc/sys/kernel/threads-max").unwrap_or_default();
    if let Ok(threads) = threads.trim().parse::<u64>() {
        let _ = write(
            group(cgroups::USER).join("pids.max"),
            &(threads * 9 / 10).to_string(),
        );
    }
    Ok(())
}

/// Mounts the file system of the user; without a device it is an empty one in memory.
pub fn user_root(device: Option<&str>) -> Result<Root, String> {
    match device {
        Some(device) => {
            wait_for(Path::new(device))?;
            mount(device, NEW_ROOT, "ext4", MountFlags::NOATIME, c"discard")
        }
        None => mount(
            "tmpfs",
            NEW_ROOT,
            "tmpfs",
            MountFlags::NOATIME,
            c"mode=0755",
        ),
    }
    .map_err(|e| {
        format!(
            "cannot mount {} as the root of the user: {e}",
            device.unwrap_or("tmpfs")
        )
    })?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd: OwnedFd =
        open(NEW_ROOT, flags, Mode::empty()).map_err(|e| format!("cannot open {NEW_ROOT}: {e}"))?;
    Ok(Root::new(fd))
}

/// Mounts the kernel's interfaces in the user's root, creating the directories an image may lack.
pub fn inside(root: &Root) -> Result<(), String> {
    let device = MountFlags::NOSUID | MountFlags::NOEXEC;
    let scratch = MountFlags::NOSUID | MountFlags::NODEV;
    for (kind, path, flags, data) in [
        ("proc", "proc", PLAIN, c""),
        ("sysfs", "sys", PLAIN, c""),
        ("devtmpfs", "dev", MountFlags::NOSUID, c"mode=0755"),
        ("devpts", "dev/pts", device, c"gid=5,mode=620,ptmxmode=0666"),
        ("tmpfs", "dev/shm", scratch, c"mode=1777"),
        ("mqueue", "dev/mqueue", PLAIN, c""),
        ("tmpfs", "run", scratch, c"mode=0755"),
        ("cgroup2", "sys/fs/cgroup", PLAIN, c"favordynmods"),
    ] {
        root.mount(&Mount {
            source: kind,
            path,
            kind,
            flags,
            data,
        })?;
    }
    root.directory("tmp", 0o1777)?;
    root.directory("etc", 0o755)?;
    let dev = root.directory("dev", 0o755)?;
    for (name, target) in [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ] {
        match symlinkat(target, &dev, name) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(format!("cannot create /dev/{name}: {e}")),
        }
    }
    nodes();
    Ok(())
}

/// Makes device nodes usable whose drivers are loaded when first opened. A guest without them works.
fn nodes() {
    let make = |path: &str, minor: u32| -> io::Result<()> {
        if let Some(parent) = Path::new(path).parent() {
            fs::create_dir_all(parent)?;
        }
        match mknodat(
            CWD,
            path,
            FileType::CharacterDevice,
            Mode::from_raw_mode(0o666),
            rustix::fs::makedev(10, minor),
        ) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(e) => return Err(e.into()),
        }
        // Everyone may use these two on common distributions.
        Ok(chmod(path, Mode::from_raw_mode(0o666))?)
    };
    for (path, minor) in [("/dev/fuse", 229), ("/dev/net/tun", 200)] {
        if let Err(e) = make(path, minor) {
            super::warn(&format!("cannot create {path}: {e}"));
        }
    }
}

/// Mounts the kernel modules, for the first process and for the user.
pub fn modules(root: &Root, device: &str) -> Result<(), String> {
    wait_for(Path::new(device))?;
    make(MODULES)?;
    let flags = MountFlags::RDONLY | MountFlags::NOATIME | MountFlags::NOSUID | MountFlags::NODEV;
    mount(device, MODULES, "ext4", flags, c"noload")
        .map_err(|e| format!("cannot mount {device} on {MODULES}: {e}"))?;
    root.bind(MODULES, "lib/modules")
}
