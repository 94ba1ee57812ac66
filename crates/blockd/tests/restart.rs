//! A daemon that dies under its users: they wait a moment and notice nothing.

mod common;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{mpsc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use aenv_blockd::attach::fuse::{canonical, remove_mount, Buffer};
use aenv_blockd::holder::Holder;
use common::{eventually, open_direct, open_rw, pattern, patterned, read_at, Node};
use serde_json::json;

const MIB: u64 = 1 << 20;
/// No request may take longer than this, whatever happens to the daemon.
const MAX_STALL: Duration = Duration::from_secs(2);

/// Longest time of one request so far, in microseconds.
#[derive(Default)]
struct Stall(AtomicU64);

impl Stall {
    fn time<T>(&self, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let done = work();
        self.0.fetch_max(start.elapsed().as_micros() as u64, SeqCst);
        done
    }

    fn longest(&self) -> Duration {
        Duration::from_micros(self.0.load(SeqCst))
    }
}

/// Writes and checks blocks of its own part of a disk until told to stop. Returns the number of requests.
fn disk_load(path: &Path, base: u64, seed: u64, stop: &AtomicBool, stall: &Stall) -> u64 {
    const BLOCKS: u64 = 512;
    let file = open_direct(path);
    let mut buffer = Buffer::new(0, 128 << 10).unwrap();
    let mut expected = vec![0u8; 128 << 10];
    let mut versions = vec![0u64; BLOCKS as usize];
    let mut random = seed | 1;
    let mut next = |below: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % below
    };
    let content = |block: u64, version: u64, out: &mut [u8]| match version {
        0 => out.fill(0),
        version => pattern(seed << 40 | block << 20 | version, out),
    };
    let mut requests = 0;
    while !stop.load(SeqCst) {
        let count = 1 + next(32);
        let first = next(BLOCKS - count + 1);
        let len = count as usize * 4096;
        let at = base + first * 4096;
        if next(2) == 0 {
            for block in first..first + count {
                versions[block as usize] += 1;
                let from = (block - first) as usize * 4096;
                content(
                    block,
                    versions[block as usize],
                    &mut buffer.payload()[from..from + 4096],
                );
            }
            stall
                .time(|| file.write_all_at(&buffer.payload()[..len], at))
                .expect("write");
        } else {
            stall
                .time(|| file.read_exact_at(&mut buffer.payload()[..len], at))
                .expect("read");
            for block in first..first + count {
                let from = (block - first) as usize * 4096;
                content(
                    block,
                    versions[block as usize],
                    &mut expected[from..from + 4096],
                );
            }
            assert!(
                buffer.payload()[..len] == expected[..len],
                "wrong data at {at}"
            );
        }
        requests += 1;
    }
    requests
}

/// Faults pages of a memory image that is not in the page cache, one by one.
fn memory_load(path: &Path, data: &[u8], stop: &AtomicBool, stall: &Stall) -> u64 {
    let file = open_rw(path);
    let mut faults = 0;
    while !stop.load(SeqCst) {
        // SAFETY: the kernel is only given a descriptor and numbers.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        let map = map_private(&file, data.len());
        for page in (0..data.len()).step_by(4096 * 37) {
            // SAFETY: inside the mapping.
            let byte = stall.time(|| unsafe { map.cast::<u8>().add(page).read_volatile() });
            assert_eq!(byte, data[page], "wrong byte in page {}", page / 4096);
            faults += 1;
            if stop.load(SeqCst) {
                break;
            }
        }
        // SAFETY: mapped above with this length; nobody refers to it any more.
        unsafe { libc::munmap(map, data.len()) };
    }
    faults
}

fn map_private(file: &File, len: usize) -> *mut libc::c_void {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let map = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            protection,
            libc::MAP_PRIVATE,
            file.as_raw_fd(),
            0,
        )
    };
    assert_ne!(map, libc::MAP_FAILED);
    // Without read-around every page is a request of its own.
    // SAFETY: the range was just mapped.
    unsafe { libc::madvise(map, len, libc::MADV_RANDOM) };
    map
}

/// Ends the load, also when the test fails.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

fn memory_image(node: &Node, data: &[u8]) -> std::path::PathBuf {
    open_rw(&node.disk("source", data.len() as u64))
        .write_all_at(data, 0)
        .unwrap();
    let layers = node.seal("source");
    node.fixed("memory", "memory", &layers)
}

#[test]
fn kill_under_load_costs_nothing_but_a_moment() {
    let mut node = Node::start();
    let memory = patterned(1, 16 << 20);
    let memory_path = memory_image(&node, &memory);
    let disks: Vec<_> = (0..2)
        .map(|i| node.disk(&format!("disk{i}"), 16 * MIB))
        .collect();
    let (stop, stall) = (AtomicBool::new(false), Stall::default());
    let requests = AtomicU64::new(0);
    thread::scope(|scope| {
        for worker in 0..4u64 {
            let (path, stop, stall, requests) =
                (&disks[worker as usize / 2], &stop, &stall, &requests);
            scope.spawn(move || {
                let done = disk_load(path, worker % 2 * 4 * MIB, worker + 1, stop, stall);
                requests.fetch_add(done, SeqCst);
            });
        }
        let (stop, stall, requests, memory) = (&stop, &stall, &requests, &memory);
        let _end = SetOnDrop(stop);
        scope.spawn(move || {
            requests.fetch_add(memory_load(&memory_path, memory, stop, stall), SeqCst);
        });
        let mut down = Duration::ZERO;
        for round in 0..8 {
            thread::sleep(Duration::from_millis(150));
            if round % 2 == 1 {
                node.ok("POST", "/v1/images/disk0/seal", json!({}));
            }
            let start = Instant::now();
            node.kill();
            node.launch(&[]);
            down = down.max(start.elapsed());
        }
        thread::sleep(Duration::from_millis(100));
        println!("longest time from kill to ready: {down:?}");
    });
    println!(
        "requests: {}, longest request: {:?}",
        requests.load(SeqCst),
        stall.longest()
    );
    assert!(
        requests.load(SeqCst) > 500,
        "too little load to mean anything"
    );
    assert!(
        stall.longest() < MAX_STALL,
        "a request took {:?}",
        stall.longest()
    );
}

#[test]
fn requests_the_dead_daemon_had_taken_are_served_by_the_next() {
    let mut node = Node::start();
    let memory = patterned(2, 1 << 20);
    let memory_path = memory_image(&node, &memory);
    let disk = node.disk("disk", MIB);
    node.kill();

    // Dies with a read in hand, with a write not yet done, with a write done but not answered, and in a page fault.
    for (point, what) in [
        ("fuse-read", "read"),
        ("fuse-write", "write"),
        ("fuse-written", "write"),
        ("fuse-read", "fault"),
    ] {
        node.launch(&[("AENV_FAILPOINT", point)]);
        let data = patterned(point.len() as u64, 4096);
        let (disk, memory_path, data) = (disk.clone(), memory_path.clone(), &data);
        let expected = memory[8192];
        thread::scope(|scope| {
            let user = scope.spawn(move || match what {
                "read" => assert!(read_at(&open_rw(&disk), 65536, 4096) == [0; 4096]),
                "write" => open_rw(&disk).write_all_at(data, 0).unwrap(),
                _ => {
                    let file = open_rw(&memory_path);
                    let map = map_private(&file, 1 << 20);
                    // SAFETY: inside the mapping.
                    let byte = unsafe { map.cast::<u8>().add(8192).read_volatile() };
                    assert_eq!(byte, expected);
                    // SAFETY: mapped above with this length.
                    unsafe { libc::munmap(map, 1 << 20) };
                }
            });
            node.wait_for_death();
            assert!(!user.is_finished(), "{what} was answered by a dead daemon");
            node.launch(&[]);
            user.join().unwrap();
        });
        if what == "write" {
            assert!(read_at(&open_rw(&node.mount().join("disk")), 0, 4096) == *data);
        }
        node.kill();
    }
}

#[test]
fn the_holder_is_replaced_when_it_dies() {
    let mut node = Node::start();
    let file = open_rw(&node.disk("disk", MIB));
    file.write_all_at(&[1; 4096], 0).unwrap();
    for _ in 0..2 {
        let socket = node.state().join("holder");
        Holder::connect(&socket).unwrap().quit().unwrap();
        eventually("another holder has the mount", || {
            Holder::connect(&socket)
                .and_then(|h| h.give())
                .is_ok_and(|kept| !kept.descriptors.is_empty())
        });
        node.kill();
        node.launch(&[]);
        assert!(read_at(&file, 0, 4096) == [1; 4096]);
    }
}

#[test]
fn an_orderly_end_leaves_the_images_to_the_next_daemon() {
    let mut node = Node::start();
    let file = open_rw(&node.disk("disk", MIB));
    file.write_all_at(&[1; 4096], 0).unwrap();
    node.ok("POST", "/v1/shutdown", json!({}));
    node.wait_for_death();
    let (sender, receiver) = mpsc::channel();
    let blocked = Mutex::new(sender);
    thread::scope(|scope| {
        scope.spawn(|| {
            file.write_all_at(&[2; 4096], 4096).unwrap();
            blocked.lock().unwrap().send(()).unwrap();
        });
        assert!(
            receiver.recv_timeout(Duration::from_millis(200)).is_err(),
            "nobody was there to answer"
        );
        node.launch(&[]);
        receiver.recv_timeout(Duration::from_secs(10)).unwrap();
    });
    assert!(read_at(&file, 4096, 4096) == [2; 4096]);
    node.ok("POST", "/v1/shutdown", json!({ "unmount": true }));
    node.wait_for_death();
    assert!(file.read_at(&mut [0; 512], 0).is_err());
    assert!(
        Holder::connect(&node.state().join("holder")).is_err(),
        "the holder was left behind"
    );
    // And a daemon on a clean mount still has the image.
    node.launch(&[]);
    assert!(read_at(&open_rw(&node.mount().join("disk")), 4096, 4096) == [2; 4096]);
}

#[test]
fn a_hundred_images_are_back_at_once() {
    let mut node = Node::start();
    let mut files = Vec::new();
    for i in 0..100u8 {
        let file = open_rw(&node.disk(&format!("disk{i}"), 64 * MIB));
        for block in 0..20 {
            file.write_all_at(&[i; 4096], block * MIB).unwrap();
        }
        files.push(file);
    }
    let mut times: Vec<Duration> = (0..5)
        .map(|_| {
            node.kill();
            let start = Instant::now();
            node.launch(&[]);
            // The first request proves that the daemon serves.
            assert!(read_at(&files[99], 0, 4096) == [99; 4096]);
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    println!("restart with 100 images: {times:?}");
    for (i, file) in files.iter().enumerate() {
        assert!(read_at(file, 19 * MIB, 4096) == [i as u8; 4096]);
    }
    assert!(times[2] < Duration::from_secs(1), "{times:?}");
}

#[test]
fn a_daemon_whose_mount_was_removed_ends_and_the_next_makes_another() {
    let mut node = Node::start();
    let data = patterned(8, 4096);
    open_rw(&node.disk("disk", MIB))
        .write_all_at(&data, 0)
        .unwrap();
    remove_mount(&canonical(&node.mount()).unwrap()).unwrap();
    node.wait_for_death();
    assert!(node.log().contains("was removed by somebody else"));
    node.launch(&[]);
    assert!(read_at(&open_rw(&node.mount().join("disk")), 0, 4096) == data);
}

#[test]
fn what_guests_wrote_is_for_the_owner_only() {
    use std::os::unix::fs::PermissionsExt;
    let node = Node::start();
    node.disk("disk", MIB);
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&node.state().join("images")), 0o700);
    assert_eq!(mode(&node.state().join("layers")), 0o700);
    assert_eq!(mode(&node.state().join("table-1")), 0o600);
}

#[test]
fn a_mount_in_use_is_neither_taken_nor_left_behind() {
    let mut node = Node::start();
    node.disk("disk", MIB);
    // Another daemon on the same mount point.
    let other = tempfile::tempdir().unwrap();
    let run = |state: &Path, mount: &Path| {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_aenv-blockd"))
            .args(["serve", "--state"])
            .arg(state)
            .arg("--mount")
            .arg(mount)
            .arg("--control")
            .arg(other.path().join("control"))
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).unwrap()
    };
    let message = run(&other.path().join("state"), &node.mount());
    assert!(message.contains("another aenv-blockd"), "{message}");
    // The same daemon on another mount point, while VMMs may use the old one.
    node.kill();
    let message = run(&node.state(), &other.path().join("mnt"));
    assert!(message.contains("the holder keeps the mount"), "{message}");
    node.launch(&[]);
    assert!(read_at(&open_rw(&node.mount().join("disk")), 0, 512) == [0; 512]);
}
