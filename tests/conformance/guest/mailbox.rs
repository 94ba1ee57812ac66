//! A guest that does as it is told, and whose memory and disk can be compared with what they should be.
//!
//! Orders come through the second disk: `<number> <order> <arguments>` in its first sector, read past all caches. Each
//! number is answered once, on the console: `guest: answer <number> <text> end`.

use crate::say;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::thread::sleep;
use std::time::Duration;

const O_DIRECT: i32 = 0x4000;
const MIB: usize = 1 << 20;
const SECTOR: usize = 512;

/// Keep a buffer of so many MiB, and carry out orders for ever.
pub fn serve(size: u64) {
    let mut buffer = vec![0u64; size as usize * MIB / 8];
    generate(1, &mut buffer);
    let mut sector = Aligned::new(SECTOR);
    let mut seen = 0;
    let mut orders = 0u64;
    loop {
        if let Some(line) = order(&mut sector)
            && let Some((number, order)) = line.split_once(' ')
            && let Ok(number) = number.parse::<u64>()
            && number != seen
        {
            seen = number;
            orders += 1;
            let answer = obey(order, &mut buffer, orders).unwrap_or_else(|error| format!("error {error}"));
            say(&format!("guest: answer {number} {answer} end"));
        }
        sleep(Duration::from_millis(5));
    }
}

fn obey(order: &str, buffer: &mut [u64], orders: u64) -> Result<String, String> {
    let words: Vec<&str> = order.split_whitespace().collect();
    let argument = |index: usize| -> Result<usize, String> {
        words.get(index).and_then(|word| word.parse().ok()).ok_or_else(|| format!("no argument {index}"))
    };
    match words.first() {
        // All that must survive: the buffer, the disk, and how often it was asked anything.
        Some(&"sum") => {
            let disk = read_disk().map_err(|error| format!("disk: {error}"))?;
            Ok(format!("memory={:016x} disk={disk:016x} orders={orders}", sum(buffer.iter().copied())))
        }
        // Fill MiBs of the buffer: seed, first, count.
        Some(&"fill") => {
            let (first, count) = (argument(2)? * MIB / 8, argument(3)? * MIB / 8);
            generate(argument(1)? as u64, buffer.get_mut(first..first + count).ok_or("beyond the buffer")?);
            Ok("filled".into())
        }
        // Write MiBs of the disk: seed, first, count.
        Some(&"write") => {
            let mut data = vec![0u64; argument(3)? * MIB / 8];
            generate(argument(1)? as u64, &mut data);
            write_disk(argument(2)?, &data).map_err(|error| format!("disk: {error}"))?;
            Ok("written".into())
        }
        // Use so many MiB of further memory, and give them back.
        Some(&"take") => {
            let mut taken = vec![0u64; argument(1)? * MIB / 8];
            generate(7, &mut taken);
            Ok(format!("took {:016x}", sum(taken.iter().copied())))
        }
        Some(&"size") => {
            let size = File::open("/dev/vda").and_then(|mut disk| disk.seek(SeekFrom::End(0)));
            Ok(format!("size {}", size.map_err(|error| error.to_string())?))
        }
        Some(&"cpus") => {
            let cpus = std::thread::available_parallelism().map_err(|error| error.to_string())?;
            Ok(format!("cpus {cpus}"))
        }
        _ => Err("unknown order".into()),
    }
}

/// xorshift64*
fn generate(seed: u64, words: &mut [u64]) {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for word in words {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        *word = state.wrapping_mul(0x2545_f491_4f6c_dd1d);
    }
}

/// FNV-1a, by words.
fn sum(words: impl Iterator<Item = u64>) -> u64 {
    words.fold(0xcbf2_9ce4_8422_2325, |sum, word| (sum ^ word).wrapping_mul(0x0000_0100_0000_01b3))
}

/// The sum of the first disk, as it is on the disk and not in the guest's cache.
fn read_disk() -> std::io::Result<u64> {
    let disk = OpenOptions::new().read(true).custom_flags(O_DIRECT).open("/dev/vda")?;
    let mut buffer = Aligned::new(MIB);
    let piece = buffer.bytes();
    let (mut total, mut position) = (0u64, 0);
    loop {
        let got = disk.read_at(piece, position)?;
        if got == 0 {
            return Ok(total);
        }
        let words = piece[..got].chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
        total = total.rotate_left(1) ^ sum(words);
        position += got as u64;
    }
}

fn write_disk(first: usize, words: &[u64]) -> std::io::Result<()> {
    let mut disk = OpenOptions::new().write(true).open("/dev/vda")?;
    disk.seek(SeekFrom::Start((first * MIB) as u64))?;
    for piece in words.chunks(MIB / 8) {
        let bytes: Vec<u8> = piece.iter().flat_map(|word| word.to_le_bytes()).collect();
        disk.write_all(&bytes)?;
    }
    disk.sync_all()
}

/// Memory as direct I/O wants it.
struct Aligned(Vec<Block>);

#[repr(align(4096))]
#[derive(Clone)]
struct Block(#[expect(dead_code, reason = "only its size counts")] [u8; 4096]);

impl Aligned {
    fn new(size: usize) -> Self {
        Self(vec![Block([0; 4096]); size.div_ceil(4096)])
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: a Block is as large as its alignment, so the blocks are nothing but bytes without gaps.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * 4096) }
    }
}

/// The order, as soon as the disk is there.
fn order(sector: &mut Aligned) -> Option<String> {
    let mut disk = OpenOptions::new().read(true).custom_flags(O_DIRECT).open("/dev/vdb").ok()?;
    let bytes = &mut sector.bytes()[..SECTOR];
    disk.read_exact(bytes).ok()?;
    Some(std::str::from_utf8(bytes).ok()?.split('\n').next()?.to_string())
}
