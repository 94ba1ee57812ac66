//! The journal of an upper: what its index would be if the process, or the machine, died now.
//!
//! A file of its own, never written by a guest, so nothing a guest stores can pass for a record.
//!
//! ```text
//! header 64 B: magic, uuid of the upper, random key, boot id of the machine, virtual size, CRC-32C
//! record 16 B + 16 B × count: CRC-32C over key and record, kind, count, sequence number, items
//! ```
//! Records are numbered without gaps; the first that does not fit its checksum and number ends the journal. The key
//! keeps records of another journal, or of an earlier life of this one, from fitting.
//!
//! Records are written (not flushed) before the write they describe is acknowledged, so they survive the process. A
//! *barrier* says that the data of all records up to a number has been flushed. After a crash of the machine, told by the
//! boot id, only what a barrier covers can be trusted; after a mere crash of the process everything can.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use uuid::Uuid;

use crate::error::{Error, Result};
use crate::extents::Extent;
use crate::header::{u32_at, u64_at};

const MAGIC: &[u8; 8] = b"AENVJRN1";
const OBJECT: &str = "the journal of the upper";
const HEADER: usize = 64;
const HEAD: usize = 16;
const ITEM: usize = 16;
/// Most items in one record.
pub(super) const MAX_ITEMS: usize = 4096;
const ZERO: u32 = 1 << 31;

/// One change of an upper.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Record {
    /// Blocks were mapped.
    Extents(Vec<Extent>),
    /// The data of all records up to this number is durable.
    Barrier(u64),
    /// The disk has a new size in bytes.
    Resize(u64),
}

/// Identity of a journal file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    pub upper: Uuid,
    pub key: u64,
    pub boot: Uuid,
    pub virtual_size: u64,
}

impl Head {
    /// A head with a fresh key, for this run of the machine.
    pub fn fresh(upper: Uuid, virtual_size: u64) -> Head {
        Head {
            upper,
            key: Uuid::new_v4().as_u64_pair().1,
            boot: boot_id(),
            virtual_size,
        }
    }

    pub fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..24].copy_from_slice(self.upper.as_bytes());
        bytes[24..32].copy_from_slice(&self.key.to_le_bytes());
        bytes[32..48].copy_from_slice(self.boot.as_bytes());
        bytes[48..56].copy_from_slice(&self.virtual_size.to_le_bytes());
        let crc = crc32c::crc32c(&bytes[..60]);
        bytes[60..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; HEADER]) -> Result<Head> {
        if bytes[..8] != *MAGIC || u32_at(bytes, 60) != crc32c::crc32c(&bytes[..60]) {
            return Err(Error::format(
                OBJECT,
                "its header has a wrong magic number or checksum",
            ));
        }
        let uuid = |at: usize| Uuid::from_slice(&bytes[at..at + 16]).expect("16 bytes");
        Ok(Head {
            upper: uuid(8),
            key: u64_at(bytes, 24),
            boot: uuid(32),
            virtual_size: u64_at(bytes, 48),
        })
    }
}

/// Id of this run of the machine. An unknown one equals none, which distrusts everything not covered by a barrier.
pub(super) fn boot_id() -> Uuid {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or_else(Uuid::new_v4)
}

/// Appends the encoding of a record to `out`.
pub(super) fn encode(key: u64, sequence: u64, record: &Record, out: &mut Vec<u8>) {
    let start = out.len();
    let (kind, count) = match record {
        Record::Extents(extents) => (1u8, extents.len()),
        Record::Barrier(_) => (2, 1),
        Record::Resize(_) => (3, 1),
    };
    debug_assert!(count <= MAX_ITEMS);
    out.extend_from_slice(&[0, 0, 0, 0, kind, 0]);
    out.extend_from_slice(&(count as u16).to_le_bytes());
    out.extend_from_slice(&sequence.to_le_bytes());
    match record {
        Record::Extents(extents) => {
            for e in extents {
                let len = e.len | if e.zero { ZERO } else { 0 };
                for word in [e.start, len, e.source, 0] {
                    out.extend_from_slice(&word.to_le_bytes());
                }
            }
        }
        Record::Barrier(number) | Record::Resize(number) => {
            out.extend_from_slice(&number.to_le_bytes());
            out.extend_from_slice(&[0; 8]);
        }
    }
    let crc = crc(key, &out[start + 4..]);
    out[start..start + 4].copy_from_slice(&crc.to_le_bytes());
}

fn crc(key: u64, body: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&key.to_le_bytes()), body)
}

/// A journal file that was read.
#[derive(Debug)]
pub(super) struct Scan {
    pub head: Head,
    /// Records with their numbers, in order, up to the first that does not fit.
    pub records: Vec<(u64, Record)>,
    /// Bytes behind the last record that fits.
    pub cut: u64,
}

/// Reads a journal. The length of the file bounds the memory.
pub(super) fn scan(path: &Path) -> Result<Scan> {
    let file = File::open(path).map_err(Error::io(format_args!("open {}", path.display())))?;
    let size = file
        .metadata()
        .map_err(Error::io(format_args!(
            "find the size of {}",
            path.display()
        )))?
        .len();
    let mut reader = Reader {
        file: BufReader::with_capacity(1 << 20, file),
        at: 0,
        size,
    };
    let head = reader
        .take::<HEADER>()?
        .ok_or_else(|| Error::format(OBJECT, format!("it has {size} bytes")))?;
    let head = Head::decode(&head)?;
    let mut records = Vec::new();
    let mut good = reader.at;
    while let Some((sequence, record)) = next_record(&mut reader, head.key)? {
        if records.last().is_some_and(|(last, _)| sequence != last + 1) {
            break;
        }
        records.push((sequence, record));
        good = reader.at;
    }
    Ok(Scan {
        head,
        records,
        cut: size - good,
    })
}

fn next_record(reader: &mut Reader, key: u64) -> Result<Option<(u64, Record)>> {
    let Some(start) = reader.take::<HEAD>()? else {
        return Ok(None);
    };
    let count = usize::from(u16::from_le_bytes([start[6], start[7]]));
    if count == 0 || count > MAX_ITEMS {
        return Ok(None);
    }
    let mut body = start[4..].to_vec();
    let Some(items) = reader.take_vec(count * ITEM)? else {
        return Ok(None);
    };
    body.extend_from_slice(&items);
    if crc(key, &body) != u32_at(&start, 0) {
        return Ok(None);
    }
    let number = u64_at(&items, 0);
    let record = match start[4] {
        1 => Record::Extents(
            items
                .chunks_exact(ITEM)
                .map(|item| Extent {
                    start: u32_at(item, 0),
                    len: u32_at(item, 4) & !ZERO,
                    source: u32_at(item, 8),
                    zero: u32_at(item, 4) & ZERO != 0,
                })
                .collect(),
        ),
        2 => Record::Barrier(number),
        3 => Record::Resize(number),
        kind => {
            return Err(Error::unsupported(
                OBJECT,
                format!("record kind {kind} is from a newer version"),
            ))
        }
    };
    Ok(Some((u64_at(&start, 8), record)))
}

struct Reader {
    file: BufReader<File>,
    at: u64,
    size: u64,
}

impl Reader {
    fn take<const N: usize>(&mut self) -> Result<Option<[u8; N]>> {
        Ok(self
            .take_vec(N)?
            .map(|bytes| bytes.try_into().expect("the length asked for")))
    }

    fn take_vec(&mut self, count: usize) -> Result<Option<Vec<u8>>> {
        if self.size - self.at < count as u64 {
            return Ok(None);
        }
        let mut bytes = vec![0; count];
        self.file
            .read_exact(&mut bytes)
            .map_err(Error::io(format_args!("read {OBJECT}")))?;
        self.at += count as u64;
        Ok(Some(bytes))
    }
}

/// The writing end of a journal file.
#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    file: File,
    /// Byte after the last record written.
    end: u64,
    /// Encoded records that could not be written yet.
    backlog: Vec<u8>,
}

impl Journal {
    /// Replaces the journal at `path` by one with the given content, or fails and leaves the old one in place. With
    /// `sync` the content is durable afterwards; its name is once the caller has synced the directory.
    pub fn replace(path: &Path, head: &Head, records: &[u8], sync: bool) -> Result<Journal> {
        let fresh = path.with_extension("jrn.new");
        let run = || -> io::Result<File> {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(true)
                .open(&fresh)?;
            file.write_all_at(&head.encode(), 0)?;
            file.write_all_at(records, HEADER as u64)?;
            if sync {
                file.sync_data()?;
            }
            std::fs::rename(&fresh, path)?;
            Ok(file)
        };
        let file = run().map_err(Error::io(format_args!("write {}", path.display())))?;
        Ok(Journal {
            path: path.to_owned(),
            file,
            end: (HEADER + records.len()) as u64,
            backlog: Vec::new(),
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes written.
    pub fn len(&self) -> u64 {
        self.end
    }

    /// Writes records at the end. What fails to be written is kept and tried again with the next records.
    pub fn append(&mut self, records: &[u8]) -> Result<()> {
        self.backlog.extend_from_slice(records);
        self.file
            .write_all_at(&self.backlog, self.end)
            .map_err(Error::io(format_args!("write {}", self.path.display())))?;
        self.end += self.backlog.len() as u64;
        self.backlog.clear();
        Ok(())
    }

    /// Keeps records for the next append.
    pub fn postpone(&mut self, records: &[u8]) {
        self.backlog.extend_from_slice(records);
    }

    pub fn sync(&self) -> Result<()> {
        self.file
            .sync_data()
            .map_err(Error::io(format_args!("flush {}", self.path.display())))
    }
}

/// Makes the creation, renaming or removal of `path` durable.
pub(crate) fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = path
        .parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    File::open(parent)?.sync_all()
}
