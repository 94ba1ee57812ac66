//! What the client does.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use aenv_blockd::attach::fuse::Buffer;
use io_uring::{opcode, types, IoUring};

pub struct Load {
    pub name: &'static str,
    pub block: usize,
    depth: usize,
    random: bool,
    pub write: bool,
}

pub const ALL: &[Load] = &[
    Load {
        name: "4K read QD1",
        block: 4096,
        depth: 1,
        random: true,
        write: false,
    },
    Load {
        name: "4K read QD32",
        block: 4096,
        depth: 32,
        random: true,
        write: false,
    },
    Load {
        name: "1M seq read",
        block: 1 << 20,
        depth: 1,
        random: false,
        write: false,
    },
    Load {
        name: "1M seq read QD4",
        block: 1 << 20,
        depth: 4,
        random: false,
        write: false,
    },
    Load {
        name: "4K write QD1",
        block: 4096,
        depth: 1,
        random: true,
        write: true,
    },
    Load {
        name: "4K write QD32",
        block: 4096,
        depth: 32,
        random: true,
        write: true,
    },
    Load {
        name: "1M seq write",
        block: 1 << 20,
        depth: 1,
        random: false,
        write: true,
    },
];

/// Latencies in nanoseconds and the throughput of each round.
#[derive(Default)]
pub struct Samples {
    latencies: Vec<u32>,
    rates: Vec<f64>,
}

impl Samples {
    /// Upper quartile over the rounds, requests a second: what else runs on the machine only ever lowers a round.
    pub fn rate(&mut self) -> f64 {
        self.rates.sort_unstable_by(f64::total_cmp);
        self.rates[self.rates.len() * 3 / 4]
    }

    pub fn print(&mut self, load: &Load, subject: &str, floor: f64) {
        let rate = self.rate();
        self.latencies.sort_unstable();
        let count = self.latencies.len();
        let at = |p: f64| f64::from(self.latencies[((count - 1) as f64 * p) as usize]) / 1e3;
        println!(
            "{:18} {:10} {:>8} {:>8.1} {:>8.1} {:>8.1} {:>9.0} {:>8.0} {:>7.2}",
            load.name,
            subject,
            count,
            at(0.5),
            at(0.95),
            at(0.99),
            rate,
            rate * load.block as f64 / (1 << 20) as f64,
            rate / floor
        );
    }
}

impl Load {
    /// One round on `path`.
    pub fn run(&self, path: &Path, size: u64, time: Duration, samples: &mut Samples) {
        let file = OpenOptions::new()
            .read(true)
            .write(self.write)
            .custom_flags(libc::O_DIRECT)
            .open(path)
            .expect("open the image");
        let before = samples.latencies.len();
        let start = Instant::now();
        if self.depth == 1 {
            self.serial(&file, size, time, &mut samples.latencies);
        } else {
            self.deep(&file, size, time, &mut samples.latencies);
        }
        let count = samples.latencies.len() - before;
        samples
            .rates
            .push(count as f64 / start.elapsed().as_secs_f64());
    }

    fn serial(&self, file: &File, size: u64, time: Duration, latencies: &mut Vec<u32>) {
        use std::os::unix::fs::FileExt;
        let mut buffer = Buffer::new(0, self.block).expect("memory");
        let mut offsets = Offsets::new(self, size);
        let start = Instant::now();
        let mut last = start;
        while last - start < time {
            let offset = offsets.next();
            let block = &mut buffer.payload()[..self.block];
            if self.write {
                file.write_all_at(block, offset).expect("write");
            } else {
                file.read_exact_at(block, offset).expect("read");
            }
            let now = Instant::now();
            latencies.push((now - last).as_nanos() as u32);
            last = now;
        }
    }

    fn deep(&self, file: &File, size: u64, time: Duration, latencies: &mut Vec<u32>) {
        let mut ring = IoUring::new(64).expect("io_uring");
        let mut buffers: Vec<Buffer> = (0..self.depth)
            .map(|_| Buffer::new(0, self.block).expect("memory"))
            .collect();
        let mut offsets = Offsets::new(self, size);
        let mut started = vec![Instant::now(); self.depth];
        let fd = types::Fd(file.as_raw_fd());
        let start = Instant::now();
        let mut submit = |ring: &mut IoUring, slot: usize| {
            let address = buffers[slot].payload().as_mut_ptr();
            let (len, offset) = (self.block as u32, offsets.next());
            let entry = if self.write {
                opcode::Write::new(fd, address, len).offset(offset).build()
            } else {
                opcode::Read::new(fd, address, len).offset(offset).build()
            };
            // SAFETY: the buffer of a slot lives until the ring is drained below, and a slot has one request at a time.
            unsafe {
                ring.submission()
                    .push(&entry.user_data(slot as u64))
                    .expect("room")
            };
            Instant::now()
        };
        for (slot, started) in started.iter_mut().enumerate() {
            *started = submit(&mut ring, slot);
        }
        let mut flying = self.depth;
        while flying > 0 {
            ring.submit_and_wait(1).expect("submit");
            let done: Vec<_> = ring
                .completion()
                .map(|c| (c.user_data() as usize, c.result()))
                .collect();
            let now = Instant::now();
            for (slot, result) in done {
                assert_eq!(result, self.block as i32, "a request failed");
                latencies.push((now - started[slot]).as_nanos() as u32);
                if now - start < time {
                    started[slot] = submit(&mut ring, slot);
                } else {
                    flying -= 1;
                }
            }
        }
    }
}

struct Offsets {
    state: u64,
    blocks: u64,
    block: u64,
    random: bool,
}

impl Offsets {
    fn new(load: &Load, size: u64) -> Offsets {
        Offsets {
            state: if load.random {
                0x9E37_79B9_7F4A_7C15
            } else {
                0
            },
            blocks: size / load.block as u64,
            block: load.block as u64,
            random: load.random,
        }
    }

    fn next(&mut self) -> u64 {
        if self.random {
            self.state ^= self.state << 13;
            self.state ^= self.state >> 7;
            self.state ^= self.state << 17;
        } else {
            self.state += 1;
        }
        self.state % self.blocks * self.block
    }
}
