//! Figures of the life of images: what a seal costs the guest, what a capture costs the VMM, what a fault costs a sibling.
//!
//! ```text
//! cargo bench -p aenv-blockd --bench life [-- seal | capture | fault]
//! ```
//! State is on tmpfs, so that the disk of the machine does not count. Each figure stands beside its floor, measured in the
//! same run. Not measured: cold storage, other load on the node.

#[path = "../../tests/common/mod.rs"]
mod common;

use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

use aenv_blockd::memory::process::Process;
use common::frozen::Frozen;
use common::{open_direct, open_rw, patterned, Node};
use serde_json::{json, Value};

const MIB: usize = 1 << 20;
const PAGE: usize = 4096;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let all = !args
        .iter()
        .any(|a| matches!(a.as_str(), "seal" | "capture" | "fault"));
    let wanted = |name: &str| all || args.iter().any(|a| a == name);
    std::env::set_var("TMPDIR", "/dev/shm");
    if wanted("seal") {
        seal();
    }
    if wanted("capture") {
        capture();
    }
    if wanted("fault") {
        fault();
    }
}

fn print(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |p: f64| times[((times.len() - 1) as f64 * p) as usize];
    println!(
        "{what:52} N {:>7}  p50 {:>10.1?}  p95 {:>10.1?}  p99 {:>10.1?}  max {:>10.1?}",
        times.len(),
        at(0.5),
        at(0.95),
        at(0.99),
        at(1.0)
    );
}

/// Latency of single 4 KiB writes while the image is sealed again and again.
fn seal() {
    const BLOCKS: u64 = 850_000;
    const SEALS: usize = 5;
    let node = Node::start();
    let size = 4 * BLOCKS * PAGE as u64;
    let path = node.disk("disk", size);
    let file = open_rw(&path);
    let (mut quiet, mut sealing, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..SEALS {
        // Every fourth block, so that no two are one entry of the index.
        for block in 0..BLOCKS {
            file.write_all_at(&[round as u8; PAGE], block * 4 * PAGE as u64)
                .expect("dirty");
        }
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let prober = scope.spawn(|| {
                let (file, block) = (open_direct(&path), Aligned([7; PAGE]));
                let mut times = Vec::new();
                while !done.load(SeqCst) {
                    let start = Instant::now();
                    let at = (times.len() as u64 * 7919 % BLOCKS * 4 + 1) * PAGE as u64;
                    file.write_all_at(&block.0, at).expect("probe");
                    times.push((start, start.elapsed()));
                }
                times
            });
            std::thread::sleep(Duration::from_millis(300));
            let start = Instant::now();
            let answer = node.ok("POST", "/v1/images/disk/seal", json!({ "wait_ms": 0 }));
            let answered = Instant::now();
            calls.push(answered - start);
            let id = answer["layer"]["id"].as_str().expect("an id");
            node.ok(
                "GET",
                &format!("/v1/layers/{id}?wait_ms=60000"),
                Value::Null,
            );
            let sealed = Instant::now();
            done.store(true, SeqCst);
            for (at, time) in prober.join().expect("the prober") {
                if at + time < start {
                    quiet.push(time);
                } else if at < sealed {
                    sealing.push(time);
                }
            }
        });
    }
    println!("seal of {BLOCKS} dirty blocks of 4 KiB, {SEALS} times");
    print("  floor: a 4 KiB write before the seal", quiet);
    print("  a 4 KiB write during the seal", sealing.clone());
    print("  seal: call to answer (layer readable)", calls);
}

#[repr(align(4096))]
struct Aligned([u8; PAGE]);

/// 256 MiB of dirty memory: every other page of 512 MiB, which is the worst pattern, and one solid piece.
fn capture() {
    for (name, step) in [("in one piece", 1), ("every other page", 2)] {
        let dirty = 256 * MIB;
        let size = dirty * step;
        let node = Node::start();
        let frozen = Frozen::new(None, size, |memory| {
            for (number, page) in memory
                .chunks_mut(PAGE)
                .enumerate()
                .filter(|(n, _)| n % step == 0)
            {
                page[..8].copy_from_slice(&(number as u64 + 1).to_le_bytes());
            }
        });
        println!("capture of 256 MiB of dirty memory, {name}");
        // The floor: the same pages into buffers that are there already.
        let process = Process::open(frozen.pid as u32, None).expect("the process");
        let mut buffer = vec![1u8; 32 * MIB];
        let mut floors = Vec::new();
        for _ in 0..10 {
            let start = Instant::now();
            let run = if step == 1 { 32 * MIB } else { PAGE };
            let all: Vec<(u64, usize)> = (0..dirty / run)
                .map(|i| (frozen.address + (i * step * run) as u64, run))
                .collect();
            for group in all.chunks(32 * MIB / run) {
                let len = group.iter().map(|(_, len)| len).sum();
                process.read(&mut buffer[..len], group).expect("read");
            }
            floors.push(start.elapsed());
        }
        print("  floor: process_vm_readv into warm buffers", floors);
        for copy in [false, true] {
            let (mut calls, mut sealed) = (Vec::new(), Vec::new());
            for round in 0..6u32 {
                let id = format!(
                    "00000000-0000-4000-8000-{:012}",
                    round + 100 * u32::from(copy)
                );
                let mut plan = frozen.plan();
                plan["copy"] = json!(copy);
                let start = Instant::now();
                node.ok(
                    "PUT",
                    &format!("/v1/layers/{id}"),
                    json!({ "layers": [], "capture": plan }),
                );
                let called = start.elapsed();
                let layer = node.ok(
                    "GET",
                    &format!("/v1/layers/{id}?wait_ms=60000&until=copied"),
                    Value::Null,
                );
                assert_ne!(layer["state"], "failed", "{layer}");
                // The first one gets its memory from the kernel.
                if round > 0 {
                    calls.push(called);
                    sealed.push(start.elapsed());
                }
                node.ok(
                    "GET",
                    &format!("/v1/layers/{id}?wait_ms=60000"),
                    Value::Null,
                );
                node.ok("DELETE", &format!("/v1/layers/{id}"), Value::Null);
            }
            let mode = if copy { "copy" } else { "live" };
            print(
                &format!("  {mode}: call to answer (stop of the guest)"),
                calls,
            );
            print(&format!("  {mode}: until the file is written"), sealed);
        }
    }
}

/// Faults of a second process on pages of a memory image that a first one has read.
fn fault() {
    let node = Node::start();
    let data = patterned(1, 256 * MIB);
    open_rw(&node.disk("source", data.len() as u64))
        .write_all_at(&data, 0)
        .expect("fill");
    let layers = node.seal("source");
    let path = node.fixed("memory", "memory", &layers);
    let floor_path = node.dir.path().join("plain");
    std::fs::write(&floor_path, &data).expect("a plain file");
    println!("page fault on a cached memory image of 256 MiB, one page at a time");
    for (name, path) in [
        ("  floor: a plain file on tmpfs", &floor_path),
        ("  the image", &path),
    ] {
        drop(std::fs::read(path).expect("the first sibling"));
        let file = open_rw(path);
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                data.len(),
                protection,
                flags,
                file.as_raw_fd(),
                0,
            )
        };
        assert_ne!(base, libc::MAP_FAILED);
        // Sparse, so that the kernel's mapping of neighbours does not hide the faults.
        let times = (0..data.len() / PAGE)
            .step_by(17)
            .map(|page| {
                let start = Instant::now();
                // SAFETY: inside the mapping.
                let byte = unsafe { base.cast::<u8>().add(page * PAGE).read_volatile() };
                let time = start.elapsed();
                assert_eq!(byte, data[page * PAGE]);
                time
            })
            .collect();
        print(name, times);
        // SAFETY: mapped above with this length.
        unsafe { libc::munmap(base, data.len()) };
    }
}
