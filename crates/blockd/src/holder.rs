//! A process that keeps descriptors open while the daemon is being replaced.
//!
//! The mount lives as long as its queues are open, and every VMM depends on it. The holder does nothing but keep them,
//! together with a text that says what they are, so there is nothing in it that could fail or need an upgrade. It
//! listens on a Unix socket (sequenced packets, mode 0600) and answers its own user only:
//!
//! | message | answer |
//! |---|---|
//! | `keep` + text, with descriptors | `ok`; replaces what was kept |
//! | `give` | `ok` + text, with copies of the descriptors; the text is empty if nothing is kept |
//! | `quit` | `ok`, then the holder closes everything and ends |
//!
//! The daemon starts a holder when none listens, and again when the one it talks to ends.

use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use rustix::net::{
    self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// Longest message in bytes.
const MAX_MESSAGE: usize = 16 << 10;
/// Most descriptors the kernel passes at once.
pub const MAX_DESCRIPTORS: usize = 253;

const SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS));

/// A text and descriptors.
#[derive(Default)]
pub struct Kept {
    /// Meaning of the descriptors, for whoever gets them.
    pub text: String,
    /// The descriptors.
    pub descriptors: Vec<OwnedFd>,
}

/// A connection to the holder.
pub struct Holder {
    socket: OwnedFd,
}

impl Holder {
    /// Connects to the holder at `path`, and starts one if there is none.
    pub fn find(path: &Path) -> io::Result<Holder> {
        match Holder::connect(path) {
            Err(error) if is_absent(&error) => {
                start(path)?;
                Holder::connect(path)
            }
            other => other,
        }
    }

    /// Connects to a running holder.
    pub fn connect(path: &Path) -> io::Result<Holder> {
        let socket = socket()?;
        net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Holder { socket })
    }

    /// Hands over copies of `descriptors`.
    pub fn keep(&self, text: &str, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.call(&format!("keep{text}"), descriptors).map(drop)
    }

    /// What is kept.
    pub fn give(&self) -> io::Result<Kept> {
        self.call("give", &[])
    }

    /// Ends the holder.
    pub fn quit(&self) -> io::Result<()> {
        self.call("quit", &[]).map(drop)
    }

    /// Returns when the holder has ended.
    pub fn wait_for_end(&self) {
        // The holder sends nothing by itself.
        while receive(self.socket.as_fd()).is_ok_and(|message| message.is_some()) {}
    }

    fn call(&self, text: &str, descriptors: &[BorrowedFd<'_>]) -> io::Result<Kept> {
        send(self.socket.as_fd(), text, descriptors)?;
        let mut answer = receive(self.socket.as_fd())?
            .ok_or_else(|| io::Error::new(io::ErrorKind::BrokenPipe, "the holder ended"))?;
        match answer.text.strip_prefix("ok") {
            Some(text) => {
                answer.text = text.to_owned();
                Ok(answer)
            }
            None => Err(io::Error::other(format!(
                "the holder says: {}",
                answer.text
            ))),
        }
    }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
    )
}

/// Starts a holder and returns when it listens.
fn start(path: &Path) -> io::Result<()> {
    let mut child = Command::new("/proc/self/exe")
        .args(["holder", "--socket"])
        .arg(path)
        .env_remove("AENV_FAILPOINT")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut ready = String::new();
    if let Some(stdout) = child.stdout.take() {
        stdout.take(64).read_to_string(&mut ready)?;
    }
    if ready != "ready\n" {
        let status = child.wait()?;
        return Err(io::Error::other(format!(
            "the holder did not start: {status}"
        )));
    }
    // Collects the exit status, should it end before us.
    thread::Builder::new()
        .name("holder-exit".into())
        .spawn(move || child.wait())?;
    Ok(())
}

/// Runs a holder until it is told to end. Prints `ready` when it listens.
pub fn run(path: &Path) -> io::Result<()> {
    // Neither a closed terminal nor the end of the daemon's process group may end the holder.
    let _ = rustix::process::setsid();
    std::env::set_current_dir("/")?;
    // Losing the holder in a shortage of memory would cost far more than its few pages.
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
    let listener = listen(path)?;
    {
        use std::io::Write;
        let mut stdout = io::stdout();
        stdout.write_all(b"ready\n")?;
        stdout.flush()?;
    }
    // The starter waits for the end of our output.
    rustix::stdio::dup2_stdout(rustix::fs::open(
        "/dev/null",
        rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )?)?;
    let kept = Arc::new(Mutex::new(Kept::default()));
    loop {
        let client = match net::accept_with(&listener, SocketFlags::CLOEXEC) {
            Ok(client) => client,
            Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => continue,
            Err(error) => return Err(error.into()),
        };
        let own = rustix::process::geteuid();
        if !net::sockopt::socket_peercred(&client).is_ok_and(|peer| peer.uid == own) {
            continue;
        }
        let (kept, path) = (kept.clone(), path.to_owned());
        let _ = thread::Builder::new()
            .stack_size(256 << 10)
            .spawn(move || attend(&client, &kept, path));
    }
}

fn attend(client: &OwnedFd, kept: &Mutex<Kept>, path: PathBuf) {
    while let Ok(Some(message)) = receive(client.as_fd()) {
        let (call, text) = message.text.split_at(message.text.len().min(4));
        // The two fields are replaced together, so a panic cannot leave them apart.
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        let answered = match call {
            "keep" => {
                kept.text = text.to_owned();
                kept.descriptors = message.descriptors;
                send(client.as_fd(), "ok", &[])
            }
            "give" => {
                let all: Vec<_> = kept.descriptors.iter().map(AsFd::as_fd).collect();
                send(client.as_fd(), &format!("ok{}", kept.text), &all)
            }
            "quit" => {
                let _ = std::fs::remove_file(&path);
                let _ = send(client.as_fd(), "ok", &[]);
                std::process::exit(0);
            }
            _ => send(client.as_fd(), "there is no such call", &[]),
        };
        if answered.is_err() {
            return;
        }
    }
}

fn listen(path: &Path) -> io::Result<OwnedFd> {
    match Holder::connect(path) {
        Ok(_) => {
            return Err(io::Error::new(
                io::ErrorKind::AddrInUse,
                format!("another holder listens on {}", path.display()),
            ))
        }
        // A socket file nobody listens on is a leftover.
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path)?;
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let listener = socket()?;
    let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let bound = net::bind(&listener, &SocketAddrUnix::new(path)?);
    rustix::process::umask(before);
    bound?;
    net::listen(&listener, 16)?;
    Ok(listener)
}

fn socket() -> io::Result<OwnedFd> {
    Ok(net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

fn send(socket: BorrowedFd<'_>, text: &str, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    if text.len() > MAX_MESSAGE || descriptors.len() > MAX_DESCRIPTORS {
        return Err(io::Error::other("too much for one message to the holder"));
    }
    let mut space = vec![MaybeUninit::uninit(); SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other("too many descriptors for one message"));
    }
    loop {
        match net::sendmsg(
            socket,
            &[IoSlice::new(text.as_bytes())],
            &mut control,
            SendFlags::NOSIGNAL,
        ) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// The next message; `None` at the end.
fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<Kept>> {
    let mut bytes = vec![0; MAX_MESSAGE + 1];
    let mut space = vec![MaybeUninit::uninit(); SPACE];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = loop {
        match net::recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        ) {
            Ok(message) => break message,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    };
    let mut descriptors = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = part {
            descriptors.extend(passed);
        }
    }
    if message.bytes == 0 {
        return Ok(None);
    }
    if message
        .flags
        .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
    {
        return Err(io::Error::other("a message to or from the holder was cut"));
    }
    bytes.truncate(message.bytes);
    let text = String::from_utf8(bytes).map_err(io::Error::other)?;
    Ok(Some(Kept { text, descriptors }))
}
