//! `GET /metrics`: use of processor, memory and disk.

use rustix::fs::statvfs;
use serde::Serialize;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::sys::read;

const FILE_LIMIT: u64 = 1 << 20;

#[derive(Debug, PartialEq, Serialize)]
pub struct Metrics {
    /// Seconds since 1970.
    ts: u64,
    cpu_count: usize,
    /// Share of all processors in use since the last call, 0 to 100.
    cpu_used_pct: f64,
    /// Bytes, as all that follow.
    mem_total: u64,
    mem_used: u64,
    mem_cache: u64,
    disk_used: u64,
    disk_total: u64,
}

/// Processor time at the last call.
#[derive(Debug, Default)]
pub struct Cpu(Mutex<Ticks>);

#[derive(Clone, Copy, Debug, Default)]
struct Ticks {
    busy: u64,
    total: u64,
}

impl Cpu {
    /// Collects all metrics; `proc` is a procfs.
    pub fn collect(&self, proc: BorrowedFd<'_>) -> Result<Metrics, String> {
        let file = |name: &str| {
            let bytes = read::bounded_at(proc, Path::new(name), FILE_LIMIT);
            let bytes = bytes.map_err(|e| format!("cannot read {name} of procfs: {e}"))?;
            Ok::<_, String>(String::from_utf8_lossy(&bytes).into_owned())
        };
        let (ticks, cpu_count) = cpu(&file("stat")?);
        let memory = file("meminfo")?;
        let kib = |key: &str| field(&memory, key) * 1024;
        let disk = statvfs("/").map_err(|e| format!("cannot read the state of the disk: {e}"))?;
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let busy = ticks.busy.saturating_sub(last.busy) as f64;
        let total = ticks.total.saturating_sub(last.total).max(1) as f64;
        *last = ticks;
        Ok(Metrics {
            ts: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |d| d.as_secs()),
            cpu_count,
            cpu_used_pct: (busy / total * 10_000.0).round().min(10_000.0) / 100.0,
            mem_total: kib("MemTotal"),
            mem_used: kib("MemTotal").saturating_sub(kib("MemAvailable")),
            mem_cache: kib("Cached"),
            disk_used: disk.f_blocks.saturating_sub(disk.f_bfree) * disk.f_frsize,
            disk_total: disk.f_blocks * disk.f_frsize,
        })
    }
}

/// Reads `/proc/stat`: processor time and number of processors.
fn cpu(stat: &str) -> (Ticks, usize) {
    let mut ticks = Ticks::default();
    let mut count = 0;
    for line in stat.lines() {
        let mut words = line.split_ascii_whitespace();
        let name = words.next().unwrap_or("");
        if name == "cpu" {
            // user nice system idle iowait irq softirq steal; what follows is contained in these.
            let times: Vec<u64> = words.take(8).map(|w| w.parse().unwrap_or(0)).collect();
            ticks.total = times.iter().sum();
            ticks.busy = ticks.total - times.iter().skip(3).take(2).sum::<u64>();
        } else if name.starts_with("cpu") {
            count += 1;
        }
    }
    (ticks, count.max(1))
}

fn field(meminfo: &str, key: &str) -> u64 {
    meminfo
        .lines()
        .find_map(|line| {
            line.strip_prefix(key)?
                .strip_prefix(':')?
                .split_ascii_whitespace()
                .next()?
                .parse()
                .ok()
        })
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processor_time_leaves_out_waiting() {
        let (ticks, count) =
            cpu("cpu  10 1 9 70 10 0 0 0 5 5\ncpu0 1 1 1 1\ncpu1 1 1 1 1\nintr 5\n");
        assert_eq!((ticks.busy, ticks.total, count), (20, 100, 2));
    }

    #[test]
    fn fields_are_matched_whole() {
        let meminfo = "MemTotal:  100 kB\nSwapCached: 7 kB\nCached:   30 kB\n";
        assert_eq!(
            (field(meminfo, "Cached"), field(meminfo, "Missing")),
            (30, 0)
        );
    }
}
