//! Speed of images through FUSE beside a floor measured in the same run.
//!
//! ```text
//! cargo bench -p aenv-blockd --bench attach [-- SECONDS]
//! ```
//! Floor: a minimal server on the same mount code that answers reads with a constant buffer and passes writes to a plain
//! file. Rounds on floor and subject alternate, so that a disturbance hits both; the ratio is that of the medians over
//! the rounds. The client is this process, with O_DIRECT; the servers are processes of their own. Not measured: cold
//! storage, more than one client process.

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
    if args.get(1).is_some_and(|a| a == "--serve") {
        return servers::run(&args[2], Path::new(&args[3]), SIZE);
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
    let servers: Vec<_> = servers::KINDS
        .iter()
        .map(|kind| servers::Server::start(kind, directory.path()))
        .collect();
    println!(
        "{:18} {:8} {:>8} {:>8} {:>8} {:>8} {:>9} {:>8} {:>7}",
        "load", "subject", "N", "p50 µs", "p95 µs", "p99 µs", "IOPS", "MiB/s", "ratio"
    );
    for load in load::ALL {
        if !only.is_empty() && !only.iter().any(|o| load.name.contains(&o[5..])) {
            continue;
        }
        let mut all: Vec<Samples> = servers.iter().map(|_| Samples::default()).collect();
        for _ in 0..ROUNDS {
            for (server, samples) in servers.iter().zip(&mut all) {
                load.run(
                    &server.path,
                    SIZE,
                    Duration::from_secs_f64(seconds) / ROUNDS,
                    samples,
                );
            }
        }
        let floor = all[0].rate();
        for (kind, samples) in servers::KINDS.iter().zip(&mut all) {
            samples.print(load, kind, floor);
        }
    }
}
