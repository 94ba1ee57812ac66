//! Speed of images through FUSE beside a floor measured in the same run.
//!
//! ```text
//! cargo bench -p aenv-blockd --bench attach [-- SECONDS] [load=NAME]
//! ```
//! Floor: a minimal server on the same mount code that answers reads with a constant buffer and passes writes to a plain
//! file. Subjects: the daemon with an image of one raw layer, all of it in the page cache; the same layer compressed with lz4;
//! and for writes a writable image. Rounds on floor and subjects alternate, so that a disturbance hits all; the ratio is
//! that of the upper quartiles over the rounds. The client is this process, with O_DIRECT; servers are processes of their
//! own. Not measured: cold storage, more than one client process.

mod load;
mod servers;

use std::path::Path;
use std::time::Duration;

use load::Samples;

/// Size of the images in bytes.
const SIZE: u64 = 1 << 30;
const ROUNDS: u32 = 12;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if args.get(1).is_some_and(|a| a == "--floor") {
        return servers::run_floor(Path::new(&args[2]), SIZE);
    }
    let seconds: f64 = args
        .iter()
        .skip(1)
        .find_map(|a| a.parse().ok())
        .unwrap_or(4.0);
    let only: Vec<&String> = args
        .iter()
        .skip(1)
        .filter(|a| a.starts_with("load="))
        .collect();
    let directory = tempfile::Builder::new()
        .prefix("aenv-bench-")
        .tempdir_in("/dev/shm")
        .expect("a directory for the mounts");
    let floor = servers::Floor::start(directory.path());
    let daemon = servers::Daemon::start(directory.path(), SIZE);
    let subjects = [floor.subject(), daemon.raw(), daemon.lz4()];
    println!(
        "{:18} {:10} {:>8} {:>8} {:>8} {:>8} {:>9} {:>8} {:>7}",
        "load", "subject", "N", "p50 µs", "p95 µs", "p99 µs", "IOPS", "MiB/s", "ratio"
    );
    for load in load::ALL {
        if !only.is_empty() && !only.iter().any(|o| load.name.contains(&o[5..])) {
            continue;
        }
        let usable: Vec<_> = subjects.iter().filter(|s| s.file(load).is_some()).collect();
        let mut all: Vec<Samples> = usable.iter().map(|_| Samples::default()).collect();
        for _ in 0..ROUNDS {
            for (subject, samples) in usable.iter().zip(&mut all) {
                let path = subject.file(load).expect("filtered above");
                load.run(
                    path,
                    SIZE,
                    Duration::from_secs_f64(seconds) / ROUNDS,
                    samples,
                );
            }
        }
        let floor = all[0].rate();
        for (subject, samples) in usable.iter().zip(&mut all) {
            samples.print(load, subject.name, floor);
        }
    }
}
