//! Which chunks of a blob are in its cache file.
//!
//! ```text
//! header 64 B: magic, boot id of the machine, size of the blob u64, CRC-32C of all that u32, zeros
//! record 16 B: chunk u32, 1 if it came and 0 if it went u32, CRC-32C of its content u32, CRC-32C of all that u32
//! ```
//! Records follow the effect when a chunk comes and precede it when it goes, and nothing is ever flushed. After a death of the
//! daemon the journal is right. After that of the machine, told by the boot id, a chunk it names may not have
//! reached the disk, and is checked against its checksum before it is used.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

const MAGIC: &[u8; 8] = b"AENVCCH1";
const HEADER: usize = 64;
const RECORD: usize = 16;

/// The writing end.
pub struct Journal {
    file: File,
    /// Where the next record goes; `None` after the journal had to be given up.
    end: Option<u64>,
}

/// What a journal said when it was opened.
pub struct Found {
    /// For each chunk the checksum of its content, if it is there.
    pub chunks: Vec<Option<u32>>,
    /// Whether the machine has not been started since.
    pub trusted: bool,
}

impl Journal {
    /// Starts a journal that names `chunks`, replacing what is at `path`.
    pub fn create(path: &Path, size: u64, chunks: &[Option<u32>]) -> io::Result<Journal> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(path)?;
        let mut bytes = header(size).to_vec();
        for (chunk, crc) in chunks.iter().enumerate() {
            if let Some(crc) = crc {
                bytes.extend(record(chunk as u32, Some(*crc)));
            }
        }
        file.write_all_at(&bytes, 0)?;
        Ok(Journal {
            file,
            end: Some(bytes.len() as u64),
        })
    }

    /// Reads the journal of a blob of `size` bytes in `count` chunks; `None` if it is not one, or that of another size.
    pub fn open(path: &Path, size: u64, count: usize) -> io::Result<Option<(Journal, Found)>> {
        let file = match OpenOptions::new().read(true).write(true).open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        let mut bytes = Vec::new();
        // A journal is replaced long before it is so long.
        let limit = HEADER + 16 * RECORD * count.max(64);
        (&file).take(limit as u64).read_to_end(&mut bytes)?;
        let own = header(size);
        let Some(head) = bytes.get(..HEADER) else {
            return Ok(None);
        };
        let intact = crc32c::crc32c(&head[..32]).to_le_bytes() == head[32..36];
        if !intact || head[..8] != own[..8] || head[24..32] != own[24..32] {
            return Ok(None);
        }
        let trusted = head[8..24] == own[8..24];
        let mut chunks = vec![None; count];
        let mut end = HEADER;
        for bytes in bytes[HEADER..].chunks_exact(RECORD) {
            let word =
                |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
            let Some(chunk) = chunks
                .get_mut(word(0) as usize)
                .filter(|_| crc32c::crc32c(&bytes[..12]) == word(12))
            else {
                break;
            };
            *chunk = (word(4) == 1).then_some(word(8));
            end += RECORD;
        }
        let journal = Journal {
            file,
            end: Some(end as u64),
        };
        Ok(Some((journal, Found { chunks, trusted })))
    }

    /// Writes that a chunk came, with the checksum of its content, or went. If there is no room for that, the journal is
    /// emptied, which always works: after a restart nothing is known then, and nothing wrong.
    pub fn append(&mut self, chunk: u32, crc: Option<u32>) -> io::Result<()> {
        let Some(end) = self.end else {
            return Ok(());
        };
        if self.file.write_all_at(&record(chunk, crc), end).is_ok() {
            self.end = Some(end + RECORD as u64);
            return Ok(());
        }
        self.file.set_len(0)?;
        self.end = None;
        Ok(())
    }

    /// Whether it should be replaced, because it has grown too long or was given up.
    pub fn is_worn(&self, count: usize) -> bool {
        let limit = (HEADER + 8 * RECORD * count.max(64)) as u64;
        self.end.is_none_or(|end| end > limit)
    }
}

fn header(size: u64) -> [u8; HEADER] {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let boot = uuid::Uuid::try_parse(boot.trim()).unwrap_or_else(|_| uuid::Uuid::new_v4());
    let mut bytes = [0; HEADER];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..24].copy_from_slice(boot.as_bytes());
    bytes[24..32].copy_from_slice(&size.to_le_bytes());
    let crc = crc32c::crc32c(&bytes[..32]);
    bytes[32..36].copy_from_slice(&crc.to_le_bytes());
    bytes
}

fn record(chunk: u32, crc: Option<u32>) -> [u8; RECORD] {
    let mut bytes = [0; RECORD];
    bytes[..4].copy_from_slice(&chunk.to_le_bytes());
    bytes[4..8].copy_from_slice(&u32::from(crc.is_some()).to_le_bytes());
    bytes[8..12].copy_from_slice(&crc.unwrap_or(0).to_le_bytes());
    let check = crc32c::crc32c(&bytes[..12]);
    bytes[12..].copy_from_slice(&check.to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_found_up_to_a_torn_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("j");
        let mut journal = Journal::create(&path, 1000, &[None, Some(7), None]).unwrap();
        journal.append(0, Some(1)).unwrap();
        journal.append(2, Some(3)).unwrap();
        journal.append(0, None).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let states = [
            [None, Some(7), None],
            [Some(1), Some(7), None],
            [Some(1), Some(7), Some(3)],
            [None, Some(7), Some(3)],
        ];
        for len in 80..=bytes.len() {
            std::fs::write(&path, &bytes[..len]).unwrap();
            let (_, found) = Journal::open(&path, 1000, 3).unwrap().unwrap();
            assert!(found.trusted);
            assert_eq!(found.chunks, states[(len - 80) / 16]);
        }
        assert!(Journal::open(&path, 1001, 3).unwrap().is_none());
        let mut bytes = bytes;
        bytes[9] ^= 1;
        let crc = crc32c::crc32c(&bytes[..32]);
        bytes[32..36].copy_from_slice(&crc.to_le_bytes());
        std::fs::write(&path, &bytes).unwrap();
        assert!(!Journal::open(&path, 1000, 3).unwrap().unwrap().1.trusted);
        bytes[3] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        assert!(Journal::open(&path, 1000, 3).unwrap().is_none());
    }
}
