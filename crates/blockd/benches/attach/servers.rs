//! The processes that are measured.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use aenv_blockd::attach::fuse::{canonical, remove_mount, Buffer, Connection, FuseAttach};
use aenv_blockd::attach::{Attach, Disk, Seek, Shape};

pub const KINDS: [&str; 2] = ["floor", "file"];

/// A running server; its mount goes with it.
pub struct Server {
    /// Directory with the files `image` (read-only) and `disk`.
    pub path: PathBuf,
    child: Child,
}

impl Server {
    pub fn start(kind: &str, directory: &Path) -> Server {
        let path = directory.join(kind);
        let mut child = Command::new("/proc/self/exe")
            .args(["--serve", kind])
            .arg(&path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("start a server");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped"))
            .read_line(&mut line)
            .expect("a line");
        assert_eq!(line, "ready\n", "server {kind} did not start");
        Server { path, child }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = remove_mount(&canonical(&self.path).expect("a path"));
    }
}

/// Body of a server process.
pub fn run(kind: &str, path: &Path, size: u64) {
    let directory = canonical(path).expect("a mount point");
    let queues = std::thread::available_parallelism().map_or(2, usize::from);
    let connection = Connection::establish(&directory, queues).expect("mount");
    let backing = |name: &str| {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(directory.with_extension(name))
            .expect("a backing file");
        let megabyte = vec![0xa5; 1 << 20];
        for offset in (0..size).step_by(megabyte.len()) {
            file.write_all_at(&megabyte, offset).expect("fill");
        }
        file
    };
    if kind == "floor" {
        let disk = backing("disk");
        floor(connection, disk, size, queues);
    } else {
        let attach = FuseAttach::new(&directory);
        for (number, name, read_only) in [(2, "image", true), (3, "disk", false)] {
            let shape = Shape {
                read_only,
                uid: 0,
                gid: 0,
                mode: 0o600,
                created: 0,
            };
            let disk = Arc::new(FileDisk {
                file: Arc::new(backing(name)),
                size,
            });
            attach.attach(number, name, shape, disk).expect("attach");
        }
        attach.serve(connection, queues).expect("serve");
    }
    println!("ready");
    io::stdout().flush().expect("stdout");
    // Ends with the bench.
    let _ = io::stdin().read(&mut [0]);
    let _ = remove_mount(&directory);
}

struct FileDisk {
    file: Arc<File>,
    size: u64,
}

impl Disk for FileDisk {
    fn size(&self) -> u64 {
        self.size
    }
    fn read(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buf, offset)
    }
    fn write(&self, data: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(data, offset)
    }
    fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
    fn seek(&self, offset: u64, target: Seek) -> io::Result<Option<u64>> {
        Ok(Some(if target == Seek::Data {
            offset
        } else {
            self.size
        }))
    }
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
