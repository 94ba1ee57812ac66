//! Starting a child as a user of the guest.

use rustix::fs::{openat, Mode, OFlags};
use rustix::io::retry_on_intr;
use rustix::process::{
    fchdir, ioctl_tiocsctty, pidfd_open, setrlimit, setsid, umask, Pid, PidfdFlags, Resource,
};
use rustix::pty::{ioctl_tiocgptpeer, unlockpt, OpenptFlags};
use rustix::termios::{tcsetwinsize, Winsize};
use rustix::thread::{set_thread_gid, set_thread_groups, set_thread_uid, Gid, Uid};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use super::messages::Output;
use crate::agent::kernel::{Guest, Kernel};
use crate::agent::users::User;
use crate::sys::signals;

/// What to start. Paths and names are those of the guest.
pub struct Plan {
    pub cmd: String,
    pub args: Vec<String>,
    pub env: BTreeMap<String, String>,
    /// Working directory, already opened with the rights of the user.
    pub cwd: OwnedFd,
    pub user: User,
    /// Size of the pseudo-terminal, if there is to be one.
    pub pty: Option<Winsize>,
    /// Whether standard input is a pipe; otherwise it is `/dev/null`. Ignored with a terminal.
    pub stdin: bool,
}

/// A started child. Nobody else waits for it.
pub struct Child {
    pub pid: Pid,
    /// Becomes readable when the child exits.
    pub pidfd: OwnedFd,
    /// Where input goes: a pipe, or the master side of the terminal.
    pub input: Option<OwnedFd>,
    /// Where output comes from.
    pub outputs: Vec<(Output, OwnedFd)>,
}

/// Starts `plan`. Blocks until the program is executed or has failed to be.
pub fn spawn(kernel: &Kernel, plan: Plan) -> io::Result<Child> {
    let mut command = Command::new(&plan.cmd);
    command.args(&plan.args).env_clear().envs(&plan.env);
    let (input, outputs) = match plan.pty {
        Some(size) => terminal(kernel, &mut command, size, &plan.user)?,
        None => pipes(kernel, &mut command, plan.stdin)?,
    };
    let groups: Vec<Gid> = plan.user.groups.iter().map(|g| Gid::from_raw(*g)).collect();
    let (uid, gid) = (Uid::from_raw(plan.user.uid), Gid::from_raw(plan.user.gid));
    let cwd = plan.cwd;
    let files = kernel.files;
    let on_terminal = plan.pty.is_some();
    let proc = kernel.proc.try_clone()?;
    let members = kernel.guest.as_ref().map(Guest::members).transpose()?;
    let prepare = move || {
        if let Some(members) = &members {
            retry_on_intr(|| rustix::io::write(members, b"0"))?;
            // Only the agent is precious; a failure leaves the child harder to kill, no worse.
            if let Ok(score) = openat(&proc, c"self/oom_score_adj", OFlags::WRONLY, Mode::empty()) {
                let _ = rustix::io::write(score, b"0");
            }
        }
        setsid()?;
        signals::reset();
        if on_terminal {
            // SAFETY: descriptor 0 was just set to the terminal by the standard library.
            ioctl_tiocsctty(unsafe { BorrowedFd::borrow_raw(0) })?;
        }
        setrlimit(Resource::Nofile, files)?;
        umask(Mode::from_raw_mode(0o022));
        if !rustix::process::geteuid().is_root() {
            // Tests without privileges: the child stays who we are.
            return Ok(fchdir(&cwd)?);
        }
        set_thread_groups(&groups)?;
        set_thread_gid(gid)?;
        set_thread_uid(uid)?;
        Ok(fchdir(&cwd)?)
    };
    // SAFETY: the closure runs between fork and exec. It makes raw system calls on values prepared
    // before the fork; it neither allocates nor takes locks.
    unsafe { command.pre_exec(prepare) };
    let child = command.spawn()?;
    let pid = Pid::from_child(&child);
    match pidfd_open(pid, PidfdFlags::NONBLOCK) {
        Ok(pidfd) => Ok(Child {
            pid,
            pidfd,
            input,
            outputs,
        }),
        Err(error) => {
            // Out of descriptors: take back what could not be supervised.
            let mut child = child;
            let _ = child.kill();
            let _ = child.wait();
            Err(error.into())
        }
    }
}

type Ends = (Option<OwnedFd>, Vec<(Output, OwnedFd)>);

/// Gives the command a terminal; both of our ends are the master side.
fn terminal(
    kernel: &Kernel,
    command: &mut Command,
    size: Winsize,
    user: &User,
) -> io::Result<Ends> {
    let master = kernel.ptmx()?;
    unlockpt(&master)?;
    tcsetwinsize(&master, size)?;
    let slave = ioctl_tiocgptpeer(
        &master,
        OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC,
    )?;
    // Programs reopen /dev/tty and check who owns it.
    let _ = rustix::fs::fchown(&slave, Some(Uid::from_raw(user.uid)), None);
    command
        .stdin(slave.try_clone()?)
        .stdout(slave.try_clone()?)
        .stderr(slave);
    Ok((Some(master.try_clone()?), vec![(Output::Pty, master)]))
}

fn pipes(kernel: &Kernel, command: &mut Command, stdin: bool) -> io::Result<Ends> {
    let input = if stdin {
        let (theirs, ours) = pipe()?;
        command.stdin(theirs);
        nonblocking(&ours)?;
        Some(ours)
    } else {
        command.stdin(Stdio::from(kernel.null()?));
        None
    };
    let (out, theirs_out) = pipe()?;
    let (err, theirs_err) = pipe()?;
    nonblocking(&out)?;
    nonblocking(&err)?;
    command.stdout(theirs_out).stderr(theirs_err);
    Ok((input, vec![(Output::Stdout, out), (Output::Stderr, err)]))
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?)
}

/// Only our end: the other one must block, programs expect that.
fn nonblocking(fd: &OwnedFd) -> io::Result<()> {
    Ok(rustix::fs::fcntl_setfl(
        fd,
        rustix::fs::fcntl_getfl(fd)? | OFlags::NONBLOCK,
    )?)
}
