//! A thousand forks of one deep image.

mod common;

use std::fs;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use common::{open_rw, read_at, Node};
use serde_json::{json, Value};

const MIB: u64 = 1 << 20;
const FORKS: usize = 1000;
const LAYERS: u64 = 32;
/// Blocks that differ in each layer; together they are the segments of the chain.
const BLOCKS: u64 = 4096;
const SIZE: u64 = LAYERS * BLOCKS * 8192 + MIB;

/// Bytes of anonymous memory of a process.
fn memory(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|l| l.starts_with("RssAnon:")).unwrap();
    line.split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<u64>()
        .unwrap()
        * 1024
}

fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

#[test]
fn a_thousand_forks_share_what_they_have_in_common() {
    let mut node = Node::start();
    let file = open_rw(&node.disk("base", SIZE));
    let mut layers = Value::Null;
    for layer in 0..LAYERS {
        // Every second block, so that no two segments join.
        for block in 0..BLOCKS {
            let number = layer * BLOCKS + block;
            file.write_all_at(&[layer as u8 + 1; 4096], number * 8192)
                .unwrap();
        }
        layers = node.seal("base");
    }
    assert_eq!(layers.as_array().unwrap().len(), LAYERS as usize);

    let (memory_before, files_before) = (memory(node.pid()), descriptors(node.pid()));
    let mut times = Vec::new();
    for i in 0..FORKS {
        let start = Instant::now();
        node.disk_over(&format!("fork{i}"), 0, &layers);
        times.push(start.elapsed());
    }
    let each = (memory(node.pid()).saturating_sub(memory_before)) / FORKS as u64;
    times.sort_unstable();
    println!(
        "fork of {LAYERS} layers with {} segments, N = {FORKS}: p50 {:?}, p95 {:?}, p99 {:?}; {each} bytes of memory each",
        LAYERS * BLOCKS,
        times[FORKS / 2],
        times[FORKS * 95 / 100],
        times[FORKS * 99 / 100]
    );
    assert!(each <= 64 << 10, "{each} bytes for each fork");
    assert!(
        times[FORKS / 2] < Duration::from_millis(50),
        "{:?}",
        times[FORKS / 2]
    );
    assert!(descriptors(node.pid()) - files_before <= 3 * FORKS + 10);

    // They are separate, and all are still there after a crash.
    let numbers = [0, 1, 499, 999];
    let files: Vec<_> = numbers
        .iter()
        .map(|i| open_rw(&node.mount().join(format!("fork{i}"))))
        .collect();
    for (file, number) in files.iter().zip(numbers) {
        assert!(read_at(file, 5 * BLOCKS * 8192, 4096) == [6; 4096]);
        file.write_all_at(&[number as u8; 4096], 5 * BLOCKS * 8192)
            .unwrap();
    }
    node.kill();
    let start = Instant::now();
    node.launch(&[]);
    println!("restart with {} images: {:?}", FORKS + 1, start.elapsed());
    for (file, number) in files.iter().zip(numbers) {
        assert!(read_at(file, 5 * BLOCKS * 8192, 4096) == [number as u8; 4096]);
        assert!(read_at(file, 7 * BLOCKS * 8192, 4096) == [8; 4096]);
    }
    assert!(read_at(&file, 5 * BLOCKS * 8192, 4096) == [6; 4096]);
    for i in 0..FORKS {
        node.ok("DELETE", &format!("/v1/images/fork{i}"), json!(null));
    }
    assert_eq!(
        node.ok("GET", "/v1/images", json!(null))["images"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
}
