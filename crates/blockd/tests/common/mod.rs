//! One running daemon in a directory of its own, for tests. Whatever happens, its mount and processes go with it.
#![allow(dead_code)] // Each test program uses a part.

pub mod frozen;

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::Arc;
use std::time::{Duration, Instant};

use aenv_blockd::attach::fuse::{canonical, remove_mount};
use aenv_blockd::holder::Holder;
use rustix::mount::MountFlags;
use serde_json::{json, Value};
use tempfile::TempDir;

/// After this time the mount is removed, so that a test that would hang fails instead.
const LIMIT: Duration = Duration::from_secs(240);

pub struct Node {
    pub dir: TempDir,
    /// More arguments for the daemon.
    pub arguments: Vec<String>,
    daemon: Option<Child>,
    over: Arc<AtomicBool>,
}

impl Node {
    /// Starts a daemon in a new directory.
    pub fn start() -> Node {
        let mut node = Node::new();
        node.launch(&[]);
        node
    }

    /// A directory without a daemon.
    pub fn new() -> Node {
        let dir = tempfile::Builder::new()
            .prefix("blockd-")
            .tempdir()
            .unwrap();
        let over = Arc::new(AtomicBool::new(false));
        let (mount, watched) = (dir.path().join("mnt"), over.clone());
        std::thread::spawn(move || {
            let start = Instant::now();
            while !watched.load(SeqCst) {
                if start.elapsed() > LIMIT {
                    eprintln!("the test takes too long; its mount is removed");
                    let _ = remove_mount(&canonical(&mount).unwrap());
                    return;
                }
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        Node {
            dir,
            arguments: Vec::new(),
            daemon: None,
            over,
        }
    }

    /// Starts a daemon whose state directory is a file system of its own of so many MiB.
    pub fn on_small_disk(mebibytes: u64) -> Node {
        let mut node = Node::new();
        std::fs::create_dir(node.state()).unwrap();
        let size = std::ffi::CString::new(format!("size={mebibytes}m")).unwrap();
        rustix::mount::mount(
            "blockd-test",
            node.state(),
            "tmpfs",
            MountFlags::empty(),
            &*size,
        )
        .unwrap();
        node.launch(&[]);
        node
    }

    /// Gives the small disk more room.
    pub fn enlarge_disk(&self, mebibytes: u64) {
        let size = std::ffi::CString::new(format!("size={mebibytes}m")).unwrap();
        rustix::mount::mount_remount(self.state(), MountFlags::empty(), &*size).unwrap();
    }

    /// Starts the daemon and waits until it is ready.
    pub fn launch(&mut self, environment: &[(&str, &str)]) {
        assert!(self.try_launch(environment), "the daemon did not start");
    }

    /// Starts the daemon; false if it ended before it was ready.
    pub fn try_launch(&mut self, environment: &[(&str, &str)]) -> bool {
        assert!(self.daemon.is_none());
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.dir.path().join("log"))
            .unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_aenv-blockd"));
        command
            .arg("serve")
            .arg("--state")
            .arg(self.state())
            .arg("--mount")
            .arg(self.mount())
            .arg("--control")
            .arg(self.control())
            .args(&self.arguments)
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log);
        // A test program that is killed must not leave its daemon behind.
        // SAFETY: prctl with numbers is all that happens between fork and exec.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        let stdout = child.stdout.take().unwrap();
        let _ = BufReader::new(stdout).read_line(&mut line);
        self.daemon = Some(child);
        line == "ready\n"
    }

    pub fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    pub fn mount(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    pub fn control(&self) -> PathBuf {
        self.dir.path().join("control")
    }

    pub fn pid(&self) -> u32 {
        self.daemon.as_ref().unwrap().id()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        let mut child = self.daemon.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Waits until the daemon has ended by itself.
    pub fn wait_for_death(&mut self) {
        let mut child = self.daemon.take().unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        while child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "the daemon lives on");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// A call on the control socket; `None` if the daemon died before it answered.
    pub fn try_call(&self, method: &str, path: &str, body: &str) -> Option<(u16, Value)> {
        let mut socket = UnixStream::connect(self.control()).ok()?;
        socket
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: blockd\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        socket.write_all(request.as_bytes()).ok()?;
        let mut answer = Vec::new();
        socket.read_to_end(&mut answer).ok()?;
        let answer = String::from_utf8(answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n")?;
        let status = head.split(' ').nth(1)?.parse().ok()?;
        Some((status, serde_json::from_str(body).unwrap_or(Value::Null)))
    }

    pub fn call(&self, method: &str, path: &str, body: Value) -> (u16, Value) {
        let body = if body.is_null() {
            String::new()
        } else {
            body.to_string()
        };
        self.try_call(method, path, &body).expect("an answer")
    }

    /// A call that must succeed.
    pub fn ok(&self, method: &str, path: &str, body: Value) -> Value {
        let (status, answer) = self.call(method, path, body);
        assert!(
            (200..300).contains(&status),
            "{method} {path}: {status} {answer}"
        );
        answer
    }

    /// Opens an empty writable disk.
    pub fn disk(&self, id: &str, size: u64) -> PathBuf {
        self.disk_over(id, size, &json!([]))
    }

    pub fn disk_over(&self, id: &str, size: u64, layers: &Value) -> PathBuf {
        let spec =
            json!({ "layers": layers, "virtual_size": size, "mode": "disk", "read_only": false });
        path_in(&self.ok("PUT", &format!("/v1/images/{id}"), spec))
    }

    /// Opens a read-only image.
    pub fn fixed(&self, id: &str, mode: &str, layers: &Value) -> PathBuf {
        let spec = json!({ "layers": layers, "mode": mode, "read_only": true });
        path_in(&self.ok("PUT", &format!("/v1/images/{id}"), spec))
    }

    /// Seals an image, waits for it, and returns its layers.
    pub fn seal(&self, id: &str) -> Value {
        let answer = self.ok(
            "POST",
            &format!("/v1/images/{id}/seal"),
            json!({ "wait_ms": 60_000 }),
        );
        assert_eq!(answer["layer"]["state"], "sealed", "{answer}");
        answer["layers"].clone()
    }
}

pub fn path_in(view: &Value) -> PathBuf {
    PathBuf::from(view["path"].as_str().unwrap())
}

impl Drop for Node {
    fn drop(&mut self) {
        self.over.store(true, SeqCst);
        // The mount goes first: it wakes whoever waits, the daemon included.
        let _ = remove_mount(&canonical(&self.mount()).unwrap());
        if let Some(mut child) = self.daemon.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if let Ok(holder) = Holder::connect(&self.state().join("holder")) {
            let _ = holder.quit();
        }
        let _ = rustix::mount::unmount(self.state(), rustix::mount::UnmountFlags::DETACH);
        if std::thread::panicking() {
            eprintln!("--- log of the daemon\n{}", self.log());
        }
    }
}

pub fn open_rw(path: &Path) -> File {
    OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap()
}

pub fn open_direct(path: &Path) -> File {
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(path)
        .unwrap()
}

/// Fills `buf` with bytes that follow from `seed` alone.
pub fn pattern(seed: u64, buf: &mut [u8]) {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    for chunk in buf.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
    }
}

pub fn patterned(seed: u64, len: usize) -> Vec<u8> {
    let mut buf = vec![0; len];
    pattern(seed, &mut buf);
    buf
}

pub fn read_at(file: &File, offset: u64, len: usize) -> Vec<u8> {
    let mut buf = vec![0; len];
    file.read_exact_at(&mut buf, offset).unwrap();
    buf
}

/// Waits for a condition.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !condition() {
        assert!(Instant::now() < deadline, "did not happen: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The operating system's number of an error.
pub fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result
        .expect_err("an error")
        .raw_os_error()
        .expect("a number")
}
