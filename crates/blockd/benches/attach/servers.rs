//! The processes that are measured.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use aenv_blockd::attach::fuse::{canonical, remove_mount, Buffer, Connection};
use aenv_blockd::holder::Holder;
use lsmt::zfile::{Options, ZWriter};
use serde_json::{json, Value};

use crate::load::Load;

/// Files that are measured.
pub struct Subject {
    pub name: &'static str,
    image: PathBuf,
    disk: Option<PathBuf>,
}

impl Subject {
    /// The file for a load, if the subject can do it.
    pub fn file(&self, load: &Load) -> Option<&Path> {
        if load.write {
            self.disk.as_deref()
        } else {
            Some(&self.image)
        }
    }
}

fn spawn(command: &mut Command) -> Child {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("start a server");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("piped"))
        .read_line(&mut line)
        .expect("a line");
    assert_eq!(line, "ready\n", "a server did not start");
    child
}

/// The floor; its mount goes with it.
pub struct Floor {
    mount: PathBuf,
    child: Child,
}

impl Floor {
    pub fn start(directory: &Path) -> Floor {
        let mount = directory.join("floor");
        let child = spawn(Command::new("/proc/self/exe").arg("--floor").arg(&mount));
        Floor { mount, child }
    }

    pub fn subject(&self) -> Subject {
        Subject {
            name: "floor",
            image: self.mount.join("image"),
            disk: Some(self.mount.join("disk")),
        }
    }
}

impl Drop for Floor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = remove_mount(&canonical(&self.mount).expect("a path"));
    }
}

/// The daemon with its images.
pub struct Daemon {
    directory: PathBuf,
    child: Child,
}

impl Daemon {
    pub fn start(directory: &Path, size: u64) -> Daemon {
        let child = spawn(
            Command::new(env!("CARGO_BIN_EXE_aenv-blockd"))
                .arg("serve")
                .arg("--state")
                .arg(directory.join("state"))
                .arg("--mount")
                .arg(directory.join("mount"))
                .arg("--control")
                .arg(directory.join("control"))
                .stderr(Stdio::null()),
        );
        let daemon = Daemon {
            directory: directory.to_owned(),
            child,
        };
        daemon.fill(size);
        daemon
    }

    fn fill(&self, size: u64) {
        let spec = |layers: Value, size: u64, read_only: bool| json!({ "layers": layers, "virtual_size": size, "mode": "disk", "read_only": read_only });
        self.call("PUT", "/v1/images/source", spec(json!([]), size, false));
        let source = OpenOptions::new()
            .write(true)
            .open(self.directory.join("mount/source"))
            .expect("open the source");
        // Compresses to about a half.
        let mut state = 1u64;
        let mut megabyte = vec![0u8; 1 << 20];
        for offset in (0..size).step_by(megabyte.len()) {
            for (at, word) in megabyte.chunks_exact_mut(8).enumerate() {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let value = if at % 2 == 0 { state } else { at as u64 / 64 };
                word.copy_from_slice(&value.to_le_bytes());
            }
            source.write_all_at(&megabyte, offset).expect("fill");
        }
        let sealed = self.call(
            "POST",
            "/v1/images/source/seal",
            json!({ "wait_ms": 60_000 }),
        );
        let layer = sealed["layer"]["path"].as_str().expect("a path").to_owned();
        let packed = self.directory.join("layer.lz4");
        let out = File::create(&packed).expect("create a compressed layer");
        let mut writer = ZWriter::new(out, Options::default()).expect("start compressing");
        io::copy(
            &mut File::open(&layer).expect("open the layer"),
            &mut writer,
        )
        .expect("compress");
        writer.finish_seekable().expect("finish compressing");
        self.call(
            "PUT",
            "/v1/images/raw",
            spec(json!([{ "path": layer }]), 0, true),
        );
        self.call(
            "PUT",
            "/v1/images/lz4",
            spec(json!([{ "path": packed }]), 0, true),
        );
        self.call("PUT", "/v1/images/disk", spec(json!([]), size, false));
    }

    pub fn call(&self, method: &str, path: &str, body: Value) -> Value {
        let mut socket = UnixStream::connect(self.directory.join("control")).expect("connect");
        let body = body.to_string();
        let length = body.len();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n");
        socket.write_all((head + &body).as_bytes()).expect("send");
        let mut answer = String::new();
        socket.read_to_string(&mut answer).expect("an answer");
        assert!(
            answer.starts_with("HTTP/1.1 20"),
            "{method} {path}: {answer}"
        );
        let (_, body) = answer.split_once("\r\n\r\n").expect("a body");
        serde_json::from_str(body).unwrap_or_default()
    }

    pub fn raw(&self) -> Subject {
        Subject {
            name: "blockd",
            image: self.directory.join("mount/raw"),
            disk: Some(self.directory.join("mount/disk")),
        }
    }

    pub fn lz4(&self) -> Subject {
        Subject {
            name: "blockd lz4",
            image: self.directory.join("mount/lz4"),
            disk: None,
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = remove_mount(&canonical(&self.directory.join("mount")).expect("a path"));
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Ok(holder) = Holder::connect(&self.directory.join("state/holder")) {
            let _ = holder.quit();
        }
    }
}

/// Body of the floor's process.
pub fn run_floor(path: &Path, size: u64) {
    let directory = canonical(path).expect("a mount point");
    let queues = std::thread::available_parallelism().map_or(2, usize::from);
    let connection = Connection::establish(&directory, queues).expect("mount");
    let disk = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(directory.with_extension("disk"))
        .expect("a backing file");
    let megabyte = vec![0xa5; 1 << 20];
    for offset in (0..size).step_by(megabyte.len()) {
        disk.write_all_at(&megabyte, offset).expect("fill");
    }
    floor(connection, disk, size, queues);
    println!("ready");
    io::stdout().flush().expect("stdout");
    // Ends with the bench.
    let _ = io::stdin().read(&mut [0]);
    let _ = remove_mount(&directory);
}

/// The least a server can do: fixed answers, no table, no checks.
fn floor(connection: Connection, disk: File, size: u64, threads: usize) {
    let queues = Arc::new(connection.queues);
    let disk = Arc::new(disk);
    for number in 0..threads {
        let (queues, disk) = (queues.clone(), disk.clone());
        std::thread::spawn(move || {
            let queue = &queues[number];
            let mut input = Buffer::new(80, 1 << 20).expect("memory");
            let mut output = Buffer::new(16, 1 << 20).expect("memory");
            output.payload().fill(0xa5);
            let mut small = [0u8; 144];
            while let Ok(len) = rustix::io::read(queue, input.message()) {
                let message = &input.message()[..len];
                let u32_at =
                    |at: usize| u32::from_ne_bytes(message[at..at + 4].try_into().unwrap());
                let u64_at =
                    |at: usize| u64::from_ne_bytes(message[at..at + 8].try_into().unwrap());
                let (opcode, unique, node) = (u32_at(4), u64_at(8), u64_at(16));
                let attr = |out: &mut [u8], node: u64| {
                    let mode: u32 = if node == 1 { 0o40755 } else { 0o100600 };
                    out[..8].copy_from_slice(&node.to_ne_bytes());
                    out[8..16].copy_from_slice(&size.to_ne_bytes());
                    out[60..64].copy_from_slice(&mode.to_ne_bytes());
                    out[64..68].copy_from_slice(&1u32.to_ne_bytes());
                };
                small.fill(0);
                let (error, payload) = match opcode {
                    15 => (0, u32_at(56) as usize),
                    16 => {
                        disk.write_all_at(&message[80..], u64_at(48))
                            .expect("write");
                        small[16..20].copy_from_slice(&u32_at(56).to_ne_bytes());
                        (0, 8)
                    }
                    1 => {
                        let node: u64 = if message[40] == b'd' { 3 } else { 2 };
                        small[16..24].copy_from_slice(&node.to_ne_bytes());
                        small[32..40].copy_from_slice(&1000u64.to_ne_bytes());
                        small[40..48].copy_from_slice(&1000u64.to_ne_bytes());
                        attr(&mut small[56..], node);
                        (0, 128)
                    }
                    3 => {
                        small[16..24].copy_from_slice(&1000u64.to_ne_bytes());
                        attr(&mut small[32..], node);
                        (0, 104)
                    }
                    14 => {
                        let flags: u32 = if node == 3 { 1 | 1 << 6 } else { 2 };
                        small[24..28].copy_from_slice(&flags.to_ne_bytes());
                        (0, 16)
                    }
                    18 | 25 | 27..=29 => (0, if opcode == 27 { 16 } else { 0 }),
                    2 | 36 | 42 => continue,
                    _ => (-libc::ENOSYS, 0),
                };
                let total = 16 + payload;
                let reply = if opcode == 15 {
                    output.message()
                } else {
                    &mut small[..]
                };
                reply[..4].copy_from_slice(&(total as u32).to_ne_bytes());
                reply[4..8].copy_from_slice(&error.to_ne_bytes());
                reply[8..16].copy_from_slice(&unique.to_ne_bytes());
                let _ = rustix::io::write(queue, &reply[..total]);
            }
        });
    }
}
