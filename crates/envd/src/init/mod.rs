//! The first process of a guest: from the kernel's hand-over to power-off.
//!
//! It stays in the initramfs and makes the user's root the root of the mount namespace, on top of its
//! own. The agent changes its root to that mount, which the kernel then does not count as a chroot, so
//! user namespaces and containers work. Neither process depends on a file of the user.
//!
//! Single-threaded: everything happens in order, and a fork needs no care.

mod cmdline;
mod devices;
mod modules;
mod mounts;
mod network;
pub mod paths;
mod root;
mod supervise;

use rustix::fs::{open, Mode, OFlags, CWD};
use rustix::mount::mount_move;
use rustix::process::{chdir, setrlimit, umask, Resource, Rlimit};
use rustix::system::{reboot, RebootCommand};
use std::fs;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd};
use std::process::ExitCode;

use crate::sys::{ext4, names};
pub use modules::modprobe;
use root::Root;

/// Open files: the soft limit of user processes, and what they may raise it to.
const OPEN_FILES: Rlimit = Rlimit {
    current: Some(65_536),
    maximum: Some(1 << 20),
};

/// Kernel settings that differ from the defaults.
const SETTINGS: &[(&str, &str)] = &[
    // Links in shared directories must not lead root astray.
    ("fs/protected_hardlinks", "1"),
    ("fs/protected_symlinks", "1"),
    // Development servers watch large trees.
    ("fs/inotify/max_user_instances", "1024"),
    ("fs/inotify/max_user_watches", "524288"),
    // Everybody may ping.
    ("net/ipv4/ping_group_range", "0 2147483647"),
];

pub fn main() -> ExitCode {
    if std::process::id() != 1 {
        eprintln!("aenv-envd: init must be the first process of a machine");
        return ExitCode::from(2);
    }
    // A panic must not end the first process, which would panic the kernel.
    let result = std::panic::catch_unwind(|| {
        let (root, address) = boot()?;
        supervise::run(&root, address)
    });
    let cause = match result {
        Ok(Ok(never)) => match never {},
        Ok(Err(cause)) => cause,
        Err(_) => "a defect in the first process, see the message above".into(),
    };
    fatal(&cause)
}

/// Says why this guest cannot run, and powers off.
fn fatal(cause: &str) -> ! {
    eprintln!("aenv-envd: fatal: {cause}");
    power_off()
}

fn warn(message: &str) {
    eprintln!("aenv-envd: {message}");
}

/// Ends the machine. Data must be safe already.
fn power_off() -> ! {
    rustix::fs::sync();
    // Without the ACPI state S5 a kernel that shall power off halts, and the VMM would not notice; a
    // restart ends such machines, because their VMM does not start them again.
    let switchable = fs::read("/sys/firmware/acpi/tables/DSDT")
        .is_ok_and(|table| memchr::memmem::find(&table, b"_S5_").is_some());
    let command = if switchable {
        RebootCommand::PowerOff
    } else {
        RebootCommand::Restart
    };
    loop {
        if let Err(e) = reboot(command) {
            eprintln!("aenv-envd: cannot power off: {e}");
        }
        std::thread::sleep(std::time::Duration::from_secs(1));
    }
}

fn boot() -> Result<(Root, Option<Ipv4Addr>), String> {
    // Modes are meant as they are written here; the agent sets a mask for itself and its children.
    umask(Mode::empty());
    mounts::early()?;
    console();
    // Ctrl-Alt-Del, the power button of some VMMs, shall come to us as SIGINT.
    let _ = reboot(RebootCommand::CadOff);
    let line = fs::read_to_string("/proc/cmdline")
        .map_err(|e| format!("cannot read /proc/cmdline: {e}"))?;
    let parameters = cmdline::parse(&line)?;
    modules::load_list()?;
    mounts::control_groups()?;
    let root = mounts::user_root(parameters.root.as_deref())?;
    mounts::inside(&root)?;
    if let Some(device) = &parameters.modules {
        mounts::modules(&root, device)?;
        if let Err(e) = modules::offer() {
            warn(&format!("cannot offer modules to the kernel: {e}"));
        }
    }
    settings();
    if parameters.root.is_some() {
        grow(&root);
    }
    network::configure(&parameters)?;
    let etc = root.directory("etc", 0o755)?;
    if !parameters.dns.is_empty() {
        let lines: String = parameters
            .dns
            .iter()
            .map(|server| format!("nameserver {server}\n"))
            .collect();
        if let Err(e) = names::replace(etc.as_fd(), "resolv.conf", lines.as_bytes()) {
            warn(&format!("cannot write /etc/resolv.conf: {e}"));
        }
    }
    if let Some(name) = &parameters.hostname {
        names::set(name)?;
        // Files of the user, which may be protected against us.
        if let Err(message) = names::write(etc.as_fd(), name) {
            warn(&message);
        }
    }
    setrlimit(Resource::Nofile, OPEN_FILES)
        .map_err(|e| format!("cannot set the limit of open files: {e}"))?;
    // From here on "/" is the user's root for everyone who looks it up anew; we keep ours.
    chdir(paths::NEW_ROOT)
        .and_then(|()| mount_move(".", "/"))
        .and_then(|()| chdir("/"))
        .map_err(|e| format!("cannot move the root of the user to /: {e}"))?;
    Ok((root, parameters.address.map(|address| address.ip)))
}

/// Opens the console if the kernel could not, as before devtmpfs was mounted.
fn console() {
    let Ok(console) = open("/dev/console", OFlags::RDWR | OFlags::NOCTTY, Mode::empty()) else {
        return;
    };
    for fd in 0..=2 {
        // SAFETY: both numbers are open descriptors; replacing 0 to 2 closes what the kernel or the
        // runtime opened there, which nothing else refers to.
        unsafe { libc::dup2(console.as_raw_fd(), fd) };
    }
    if console.as_raw_fd() <= 2 {
        std::mem::forget(console);
    }
}

fn settings() {
    for (name, value) in SETTINGS {
        if let Err(e) = fs::write(format!("/proc/sys/{name}"), value) {
            warn(&format!("cannot set {name} to {value}: {e}"));
        }
    }
}

/// A root that could not be grown is still a root.
fn grow(root: &Root) {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let result = rustix::fs::openat(CWD, "/sys", flags, Mode::empty())
        .map_err(|e| format!("cannot open /sys: {e}"))
        .and_then(|sys| ext4::device_size(root.fd(), sys.as_fd()))
        .and_then(|size| ext4::grow(root.fd(), size));
    if let Err(message) = result {
        warn(&message);
    }
}
