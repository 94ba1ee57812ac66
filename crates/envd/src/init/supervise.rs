//! Keeping the agent alive, reaping orphans, and the orderly end.

use rustix::fs::{openat, Mode, OFlags, CWD};
use rustix::io::{fcntl_setfd, FdFlags};
use rustix::mount::{mount_remount, MountFlags, UnmountFlags};
use rustix::process::{kill_process, wait, Pid, Signal, WaitOptions};
use std::convert::Infallible;
use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

use super::root::{through, Root};
use super::{power_off, warn};
use crate::sys::{cgroups, signals};

/// The port of the agent. Its socket is ours, so that nobody takes it while the agent is restarted, and
/// no client is refused.
const PORT: u16 = 49983;
/// Shortest time between two starts of the agent.
const BACK_OFF: Duration = Duration::from_secs(1);
/// What processes get between SIGTERM and SIGKILL.
const GRACE: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(10);
/// The score of a process the kernel kills last when memory runs out; -1000 would be never.
const AGENT_OOM_SCORE: &[u8] = b"-900";

/// Runs the guest until somebody asks for its end.
pub fn run(root: &Root, address: Option<Ipv4Addr>) -> Result<Infallible, String> {
    let signals = Signals::block([libc::SIGCHLD, libc::SIGTERM, libc::SIGINT]);
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT))
        .map_err(|e| format!("cannot listen on port {PORT}: {e}"))?;
    let mut agent = None;
    let mut due = Instant::now();
    loop {
        if agent.is_none() && Instant::now() >= due {
            due = Instant::now() + BACK_OFF;
            match start(root, &listener, address) {
                Ok(pid) => agent = Some(pid),
                Err(message) => warn(&message),
            }
        }
        let patience = match agent {
            Some(_) => None,
            None => Some(due.saturating_duration_since(Instant::now())),
        };
        match signals.wait(patience) {
            Some(libc::SIGTERM | libc::SIGINT) => shut_down(root, agent),
            _ => {
                while let Some(pid) = reap() {
                    if Some(pid) == agent {
                        warn("the agent ended and is started again");
                        agent = None;
                    }
                }
            }
        }
    }
}

/// Starts the agent from the initramfs. It gets the user's root and its socket as open descriptors.
fn start(root: &Root, listener: &TcpListener, address: Option<Ipv4Addr>) -> Result<Pid, String> {
    let program = std::env::current_exe()
        .map_err(|e| format!("cannot find the program of the agent: {e}"))?;
    let passed = [root.fd().as_raw_fd(), listener.as_raw_fd()];
    let mut command = Command::new(program);
    command
        .arg0("aenv-envd")
        .args([
            "agent",
            "--root-fd",
            &passed[0].to_string(),
            "--listen-fd",
            &passed[1].to_string(),
        ])
        .env_clear();
    if let Some(address) = address {
        command.args(["--address", &address.to_string()]);
    }
    // SAFETY: the closure runs between fork and exec of a single-threaded process and only makes
    // system calls; both descriptors stay open for as long as we run.
    unsafe {
        command.pre_exec(move || {
            for fd in passed {
                fcntl_setfd(BorrowedFd::borrow_raw(fd), FdFlags::empty())?;
            }
            rustix::process::setsid()?;
            signals::reset();
            let score = openat(
                CWD,
                c"/proc/self/oom_score_adj",
                OFlags::WRONLY,
                Mode::empty(),
            )?;
            rustix::io::write(score, AGENT_OOM_SCORE)?;
            Ok(())
        });
    }
    let child = command
        .spawn()
        .map_err(|e| format!("cannot start the agent: {e}"))?;
    Ok(Pid::from_child(&child))
}

/// Collects one dead child, ours or an orphan.
fn reap() -> Option<Pid> {
    wait(WaitOptions::NOHANG).ok().flatten().map(|(pid, _)| pid)
}

/// Stops everything, makes the disk safe and powers off.
fn shut_down(root: &Root, agent: Option<Pid>) -> ! {
    // Frozen processes would not see a signal.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    if let Ok(groups) = openat(CWD, cgroups::MOUNT, flags, Mode::empty()) {
        let _ = cgroups::freeze(groups.as_fd(), false);
    }
    let agent = agent.map_or(0, |pid| pid.as_raw_nonzero().get());
    for pid in others(agent) {
        // Whoever is gone by now needs no signal.
        let _ = kill_process(pid, Signal::TERM);
    }
    let deadline = Instant::now() + GRACE;
    while Instant::now() < deadline && !others(agent).is_empty() {
        while reap().is_some() {}
        std::thread::sleep(POLL);
    }
    // SAFETY: a plain system call; -1 means everyone but us.
    unsafe { libc::kill(-1, libc::SIGKILL) };
    let deadline = Instant::now() + GRACE;
    while Instant::now() < deadline && !others(0).is_empty() {
        while reap().is_some() {}
        std::thread::sleep(POLL);
    }
    for pid in others(0) {
        warn(&format!(
            "process {pid} did not end: {}",
            stat(pid).unwrap_or_default().trim_end()
        ));
    }
    unmount(root);
    rustix::fs::sync();
    if let Err(e) = mount_remount(through(root.fd()), MountFlags::RDONLY, c"") {
        warn(&format!(
            "cannot make the root read-only, its journal will be replayed: {e}"
        ));
    }
    power_off()
}

/// All processes but kernel threads, ourselves and `agent`. Zombies count: they go when reaped.
fn others(agent: i32) -> Vec<Pid> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| *pid != 1 && *pid != agent && !is_kernel_thread(*pid))
        .filter_map(Pid::from_raw)
        .collect()
}

fn stat(pid: impl std::fmt::Display) -> Option<String> {
    fs::read_to_string(format!("/proc/{pid}/stat")).ok()
}

/// Takes away what the user mounted, as an overlay keeps its lower file system from being read-only.
fn unmount(root: &Root) {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = mounts
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .filter(|point| *point != "/");
    let root = through(root.fd());
    for point in points.collect::<Vec<_>>().into_iter().rev() {
        // Names with a space are escaped here and not found; those and busy ones stay.
        let _ = rustix::mount::unmount(
            format!("{root}{point}"),
            UnmountFlags::DETACH | UnmountFlags::NOFOLLOW,
        );
    }
}

fn is_kernel_thread(pid: i32) -> bool {
    /// `PF_KTHREAD` of <linux/sched.h>, in the field "flags" of /proc/PID/stat.
    const PF_KTHREAD: u64 = 0x0020_0000;
    let Some(stat) = stat(pid) else { return true };
    // The name may contain anything, so the fields are counted from its last parenthesis.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let flags = fields
        .split_ascii_whitespace()
        .nth(6)
        .and_then(|flags| flags.parse::<u64>().ok());
    flags.is_none_or(|flags| flags & PF_KTHREAD != 0)
}

/// Signals that are waited for instead of handled.
struct Signals(libc::sigset_t);

impl Signals {
    fn block<const N: usize>(signals: [i32; N]) -> Signals {
        // SAFETY: the set is initialised by sigemptyset before anything reads it, and the signal
        // numbers are valid; with valid arguments none of the calls can fail.
        unsafe {
            let mut set = std::mem::zeroed();
            libc::sigemptyset(&mut set);
            for signal in signals {
                libc::sigaddset(&mut set, signal);
            }
            libc::sigprocmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
            Signals(set)
        }
    }

    /// Waits for a signal, at most `limit`.
    fn wait(&self, limit: Option<Duration>) -> Option<i32> {
        let limit = limit.map(|limit| libc::timespec {
            tv_sec: limit.as_secs() as i64,
            tv_nsec: i64::from(limit.subsec_nanos()),
        });
        let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: the set is initialised, no information is asked for, and the time limit is null or
        // points to a value that lives until the call returns.
        let signal = unsafe { libc::sigtimedwait(&self.0, std::ptr::null_mut(), limit) };
        (signal > 0).then_some(signal)
    }
}
