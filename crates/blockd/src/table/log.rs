//! An append-only file of checksummed records.
//!
//! ```text
//! header 16 B: magic
//! record: magic u32, payload bytes u32, number u64, CRC-32C u32 over all that and the payload, 0 u32, payload, zeros to a
//!         multiple of 8 bytes
//! ```
//! Integers are little-endian; records are numbered from 0 without gaps. A crash can only leave a torn record at the end,
//! which is cut. A damaged record with intact ones behind it cannot come from a crash; then the file is refused, because
//! going on would forget what those records say.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

const FILE_MAGIC: &[u8; 16] = b"AENV-BLOCKD-TBL1";
const MAGIC: u32 = 0x6472_6372;
const HEAD: usize = 24;
/// Most bytes in a record.
pub const MAX_RECORD: usize = 1 << 20;
/// Most bytes of a log that are read.
const MAX_FILE: u64 = 1 << 30;

/// The writing end. For one thread at a time.
#[derive(Debug)]
pub struct Log {
    file: File,
    end: u64,
    next: u64,
    /// A write failed and what is on disk behind `end` is unknown.
    broken: bool,
}

impl Log {
    /// Creates an empty log; nothing must be there.
    pub fn create(path: &Path) -> io::Result<Log> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)?;
        file.write_all_at(FILE_MAGIC, 0)?;
        Ok(Log {
            file,
            end: FILE_MAGIC.len() as u64,
            next: 0,
            broken: false,
        })
    }

    /// Opens a log and returns the payloads in it, oldest first. `Ok(None)` means that not even the header was written.
    pub fn open(path: &Path) -> io::Result<Option<(Log, Vec<Vec<u8>>)>> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let mut bytes = Vec::new();
        (&file).take(MAX_FILE + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > MAX_FILE {
            return Err(damaged(path, "it is longer than any table can be"));
        }
        if bytes.len() < FILE_MAGIC.len() {
            return Ok(None);
        }
        if !bytes.starts_with(FILE_MAGIC) {
            return Err(damaged(path, "its magic number is wrong"));
        }
        let mut payloads = Vec::new();
        let mut at = FILE_MAGIC.len();
        while let Some((number, payload, len)) = decode(&bytes[at..]) {
            if number != payloads.len() as u64 {
                break;
            }
            payloads.push(payload.to_vec());
            at += len;
        }
        let next = payloads.len() as u64;
        // Writes start at multiples of 8 only.
        let survivor = (at..bytes.len())
            .step_by(8)
            .find(|from| decode(&bytes[*from..]).is_some_and(|(number, _, _)| number >= next));
        if let Some(from) = survivor {
            let reason = format!("record {next} at byte {at} is not intact, but one at {from} is");
            return Err(damaged(path, &reason));
        }
        file.set_len(at as u64)?;
        let log = Log {
            file,
            end: at as u64,
            next,
            broken: false,
        };
        Ok(Some((log, payloads)))
    }

    /// Appends a record. It survives the process when this returns, the machine after [`Log::sync`].
    pub fn append(&mut self, payload: &[u8]) -> io::Result<()> {
        if payload.len() > MAX_RECORD {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("a record of {} bytes is too long", payload.len()),
            ));
        }
        if self.broken {
            self.file.set_len(self.end)?;
            self.broken = false;
        }
        let bytes = encode(self.next, payload);
        // In one write: what a crash leaves is a prefix.
        if let Err(error) = self.file.write_all_at(&bytes, self.end) {
            self.broken = self.file.set_len(self.end).is_err();
            return Err(error);
        }
        self.end += bytes.len() as u64;
        self.next += 1;
        Ok(())
    }

    /// Makes everything appended durable.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Records in the file.
    pub fn len(&self) -> u64 {
        self.next
    }
}

fn encode(number: u64, payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEAD + payload.len() + 8);
    out.extend(MAGIC.to_le_bytes());
    out.extend((payload.len() as u32).to_le_bytes());
    out.extend(number.to_le_bytes());
    let crc = crc32c::crc32c_append(crc32c::crc32c(&out), payload);
    out.extend(crc.to_le_bytes());
    out.extend(0u32.to_le_bytes());
    out.extend(payload);
    out.resize(out.len().next_multiple_of(8), 0);
    out
}

/// Number, payload and total length of the record at the start of `bytes`, if there is an intact one.
fn decode(bytes: &[u8]) -> Option<(u64, &[u8], usize)> {
    let head = bytes.get(..HEAD)?;
    let u32_at = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().expect("four bytes"));
    if u32_at(0) != MAGIC {
        return None;
    }
    let len = u32_at(4) as usize;
    if len > MAX_RECORD {
        return None;
    }
    let payload = bytes.get(HEAD..HEAD + len)?;
    let crc = crc32c::crc32c_append(crc32c::crc32c(&head[..16]), payload);
    if crc != u32_at(16) {
        return None;
    }
    let number = u64::from_le_bytes(head[8..16].try_into().expect("eight bytes"));
    let total = (HEAD + len).next_multiple_of(8);
    (bytes.len() >= total).then_some((number, payload, total))
}

fn damaged(path: &Path, reason: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!(
            "{} is damaged: {reason}; restore it from a backup, or move the state directory away to start empty",
            path.display()
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(count: usize) -> (tempfile::TempDir, std::path::PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut log = Log::create(&path).unwrap();
        for i in 0..count {
            log.append(format!("record {i}").repeat(i).as_bytes())
                .unwrap();
        }
        (dir, path)
    }

    #[test]
    fn every_prefix_is_an_earlier_log() {
        let (_dir, path) = written(6);
        let whole = std::fs::read(&path).unwrap();
        let mut last = 0;
        for len in 0..=whole.len() {
            std::fs::write(&path, &whole[..len]).unwrap();
            let Some((mut log, payloads)) = Log::open(&path).unwrap() else {
                assert!(len < 16);
                continue;
            };
            assert!(payloads.len() >= last, "records vanished at {len}");
            last = payloads.len();
            // What is written after a crash must be found again.
            log.append(b"next").unwrap();
            let (_, again) = Log::open(&path).unwrap().unwrap();
            assert_eq!(again.len(), payloads.len() + 1);
            assert_eq!(again.last().unwrap(), b"next");
        }
        assert_eq!(last, 6);
    }

    #[test]
    fn damage_in_the_middle_is_refused() {
        let (_dir, path) = written(6);
        let whole = std::fs::read(&path).unwrap();
        let last = encode(5, "record 5".repeat(5).as_bytes()).len();
        for at in 16..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            std::fs::write(&path, &bytes).unwrap();
            let opened = Log::open(&path);
            if at < whole.len() - last {
                // Bytes that fill up a record carry nothing.
                let harmless = matches!(&opened, Ok(Some((_, p))) if p.len() == 6);
                assert!(harmless || opened.is_err(), "flip at {at}");
            } else {
                assert!(opened.is_ok(), "a torn end is not damage: flip at {at}");
            }
        }
    }
}
