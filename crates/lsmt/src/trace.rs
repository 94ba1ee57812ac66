//! Prefetch traces: which bytes of which layers a first start reads.
//!
//! ```text
//! 24 B header: magic u32, 0 u32, payload bytes u64, checksum u32, 0 u32
//! 24 B record: 'R', 3 × 0, layer u32 (0 = bottom), count u64, offset i64 (bytes of the plain layer file)
//! ```
//! The checksum covers the records. It is CRC-32C without final inversion; a widespread writer inverts, and both are
//! accepted.

use std::io::Write;
use std::ops::Range;

use crate::entry::Entry;
use crate::error::{Error, Result};
use crate::header::{u32_at, u64_at, SECTOR};
use crate::source::ReadAt;
use crate::stack::Stack;
use crate::zfile::raw_crc32c;

const MAGIC: u32 = 0xC2EF_1820;
const SIZE: usize = 24;
/// Bytes of records read at once.
const CHUNK: usize = SIZE * 4096;
const OBJECT: &str = "the prefetch trace";
/// Longest read one record can stand for, in bytes.
pub const MAX_COUNT: u64 = 1 << 20;
/// Most records read or written: 96 MiB of trace, which can name 4 TiB.
pub const MAX_RECORDS: u64 = 4 << 20;

/// One read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// Position of the layer, 0 is the bottom one.
    pub layer: u32,
    /// Byte in the plain layer file, at most `i64::MAX`.
    pub offset: u64,
    /// Bytes, at most [`MAX_COUNT`].
    pub count: u64,
}

/// Reads a trace. A trace of zero length, which asks for recording, has no records.
pub fn read(source: &dyn ReadAt) -> Result<Vec<Record>> {
    if source.size() == 0 {
        return Ok(Vec::new());
    }
    let wrong = |reason: String| Error::format(OBJECT, reason);
    let mut header = [0; SIZE];
    source
        .read_exact_at(&mut header, 0)
        .map_err(Error::io("read the header of a prefetch trace"))?;
    if u32_at(&header, 0) != MAGIC {
        return Err(wrong("the magic number is missing".into()));
    }
    let payload = u64_at(&header, 8);
    if payload % SIZE as u64 != 0 || payload.checked_add(SIZE as u64) != Some(source.size()) {
        return Err(wrong(format!(
            "{payload} bytes of records do not fit a file of {} bytes",
            source.size()
        )));
    }
    check_count(payload / SIZE as u64)?;
    let (mut raw, mut inverted) = (0, 0);
    let mut records = Vec::new();
    let mut buf = vec![0; CHUNK.min(payload as usize)];
    let mut at = 0;
    while at < payload {
        let bytes = &mut buf[..(payload - at).min(CHUNK as u64) as usize];
        source
            .read_exact_at(bytes, SIZE as u64 + at)
            .map_err(Error::io("read a prefetch trace"))?;
        raw = raw_crc32c(raw, bytes);
        inverted = crc32c::crc32c_append(inverted, bytes);
        for record in bytes.chunks_exact(SIZE) {
            records.push(decode(record)?);
        }
        at += bytes.len() as u64;
    }
    let stored = u32_at(&header, 16);
    if stored != raw && stored != inverted {
        return Err(wrong(format!(
            "its records have checksum {raw:#x} instead of {stored:#x}"
        )));
    }
    Ok(records)
}

/// Writes a trace.
pub fn write(records: &[Record], out: &mut impl Write) -> Result<()> {
    check_count(records.len() as u64)?;
    let mut bytes = Vec::with_capacity(records.len() * SIZE);
    for record in records {
        if record.count > MAX_COUNT || i64::try_from(record.offset).is_err() {
            return Err(Error::Argument(format!("a trace cannot hold {record:?}")));
        }
        bytes.extend_from_slice(&[b'R', 0, 0, 0]);
        bytes.extend_from_slice(&record.layer.to_le_bytes());
        bytes.extend_from_slice(&record.count.to_le_bytes());
        bytes.extend_from_slice(&record.offset.to_le_bytes());
    }
    let mut header = [0; SIZE];
    header[..4].copy_from_slice(&MAGIC.to_le_bytes());
    header[8..16].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
    header[16..20].copy_from_slice(&raw_crc32c(0, &bytes).to_le_bytes());
    out.write_all(&header)
        .and_then(|()| out.write_all(&bytes))
        .map_err(Error::io("write a prefetch trace"))
}

/// The ranges of sectors of the disk that the recorded reads were for, in the order of the reads: what
/// [`crate::commit::Options::order`] takes. Data that is hidden by higher layers, and bytes that are not data, such as the
/// index of a layer, are left out.
pub fn image_ranges(records: &[Record], stack: &Stack) -> Result<Vec<Range<u64>>> {
    // First slot of each layer; its own file is always the first of its sources.
    let mut first_slots = Vec::new();
    let mut slot = 0;
    for layer in stack.layers() {
        first_slots.push(slot);
        slot += layer.sources().len();
    }
    let index = stack.merged_index()?;
    let mut by_source: Vec<Vec<Entry>> = vec![Vec::new(); slot];
    for entry in index.entries().iter().filter(|e| !e.is_zeroed()) {
        by_source[usize::from(entry.slot())].push(*entry);
    }
    by_source
        .iter_mut()
        .for_each(|entries| entries.sort_unstable_by_key(|e| e.source()));
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for record in records {
        let Some(slot) = first_slots.get(record.layer as usize) else {
            return Err(Error::Argument(format!(
                "the trace names layer {} of {}",
                record.layer,
                first_slots.len()
            )));
        };
        let entries = &by_source[*slot];
        let (from, to) = (
            record.offset / SECTOR,
            (record.offset + record.count).div_ceil(SECTOR),
        );
        // Several entries can refer to the same data only in files of strangers; finding one of them is enough.
        let start = entries.partition_point(|e| e.source() + e.len() <= from);
        for entry in entries[start..].iter().take_while(|e| e.source() < to) {
            let skip = from.saturating_sub(entry.source()).min(entry.len());
            let end = entry.offset() + entry.len().min(to - entry.source());
            let range = entry.offset() + skip..end;
            match ranges.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ if range.is_empty() => {}
                _ => ranges.push(range),
            }
        }
    }
    Ok(ranges)
}

fn check_count(count: u64) -> Result<()> {
    if count <= MAX_RECORDS {
        return Ok(());
    }
    Err(Error::Limit {
        what: "the number of records in a prefetch trace",
        value: count,
        max: MAX_RECORDS,
        remedy: "record a shorter time",
    })
}

fn decode(bytes: &[u8]) -> Result<Record> {
    let record = Record {
        layer: u32_at(bytes, 4),
        count: u64_at(bytes, 8),
        offset: u64_at(bytes, 16),
    };
    if bytes[0] != b'R' || record.count > MAX_COUNT || i64::try_from(record.offset).is_err() {
        return Err(Error::format(
            OBJECT,
            format!("operation {:#x} with {record:?}", bytes[0]),
        ));
    }
    Ok(record)
}
