//! Append uppers of the open format: a data file and an index file in write order.
//!
//! They are read for import and written for compatibility; the engine's own upper is [`crate::upper`].
//!
//! Nothing orders the two files on disk, so a crash can leave an index that runs ahead of its data, ends in the middle
//! of an entry, or ends in zeros. A strict open refuses all of that. A repairing open keeps the longest prefix of
//! entries that make sense: entries are in time order, so that is the disk as it was at some earlier moment.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use crate::entry::{Entry, MAX_LEN};
use crate::error::{Error, Result};
use crate::extents::{Extent, ExtentMap};
use crate::header::{flags, Header, Identity, BLOCK, SECTOR};
use crate::index::Index;
use crate::layer::{Layer, Limits};
use crate::source::ReadAt;
use crate::tail::{self, Padding};

const OBJECT: &str = "the append upper";
/// Most entries an index file may have.
const MAX_LOG: u64 = 128_000_000;
/// Longest write that gets one entry, in bytes.
const MAX_WRITE: usize = 4 << 20;

/// What to do with an index that a crash left inconsistent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Repair {
    /// Refuse it.
    Refuse,
    /// Use the entries before the first inconsistency. The files are not changed.
    Cut,
}

/// An append upper that was read.
#[derive(Debug)]
pub struct Pair {
    /// Header of the data file.
    pub header: Header,
    /// Its content as a layer.
    pub layer: Layer,
    /// Entries that were used, padding not counted.
    pub entries: u64,
    /// Bytes at the end of the index file that were left out by a repair.
    pub cut: u64,
}

/// Reads a pair. The index is streamed; memory grows with the number of distinct extents.
pub fn read(data: Arc<dyn ReadAt>, index: &dyn ReadAt, repair: Repair) -> Result<Pair> {
    let header = read_header(&*data, "the data file of the append upper")?;
    let index_header = read_header(index, "the index file of the append upper")?;
    if !header.has(flags::HEADER | flags::DATA) || header.has(flags::SPARSE) {
        return Err(Error::format(
            OBJECT,
            format!("flags {:#x} are not those of its data file", header.flags),
        ));
    }
    if !index_header.has(flags::HEADER)
        || index_header.has(flags::DATA)
        || index_header.index_offset != BLOCK as u64
    {
        return Err(Error::format(
            OBJECT,
            format!(
                "flags {:#x} are not those of its index file",
                index_header.flags
            ),
        ));
    }
    if header.identity.uuid != index_header.identity.uuid {
        return Err(Error::format(
            OBJECT,
            format!(
                "data file {} and index file {} do not belong together",
                header.identity.uuid, index_header.identity.uuid
            ),
        ));
    }
    let bytes = index.size() - BLOCK as u64;
    if bytes / Entry::SIZE as u64 > MAX_LOG {
        return Err(Error::Limit {
            what: "the number of entries in the index file",
            value: bytes / Entry::SIZE as u64,
            max: MAX_LOG,
            remedy: "commit the upper with the tool that wrote it",
        });
    }
    let limits = Limits {
        end: header.virtual_size.div_ceil(SECTOR),
        first: BLOCK as u64 / SECTOR,
        last: (data.size() / SECTOR).min(u64::from(u32::MAX)),
    };
    let mut map = ExtentMap::new(false, MAX_LEN as u32);
    let (mut entries, mut done) = (0, 0);
    let mut fault = None;
    let mut buf = vec![0; 64 << 10];
    'log: while done + Entry::SIZE as u64 <= bytes {
        let chunk = &mut buf[..(bytes - done).min(64 << 10) as usize / Entry::SIZE * Entry::SIZE];
        index
            .read_exact_at(chunk, BLOCK as u64 + done)
            .map_err(Error::io("read the index of an append upper"))?;
        for entry in chunk.chunks_exact(Entry::SIZE).map(Entry::decode) {
            if !entry.is_padding() {
                if let Err(error) = limits.check(entry, None) {
                    fault = Some(error.to_string());
                    break 'log;
                }
                map.insert(extent(entry), &mut |_, _| {});
                entries += 1;
            }
            done += Entry::SIZE as u64;
        }
    }
    if fault.is_none() && done < bytes {
        fault = Some(format!(
            "its index file ends after {} bytes of an entry",
            bytes - done
        ));
    }
    if let Some(reason) = fault.filter(|_| repair == Repair::Refuse) {
        return Err(Error::Torn {
            object: OBJECT,
            reason,
            good: entries,
        });
    }
    let exported = map.export(1, limits.end, None);
    let layer = Layer::new(
        header.identity.clone(),
        header.virtual_size,
        Index::from_sorted(exported),
        vec![data],
    )?;
    Ok(Pair {
        header,
        layer,
        entries,
        cut: bytes - done,
    })
}

/// The extent of a checked entry.
fn extent(entry: Entry) -> Extent {
    Extent {
        start: entry.offset() as u32,
        len: entry.len() as u32,
        source: entry.source() as u32,
        zero: entry.is_zeroed(),
    }
}

fn read_header(source: &dyn ReadAt, object: &'static str) -> Result<Header> {
    let mut block = [0; BLOCK];
    source
        .read_exact_at(&mut block, 0)
        .map_err(Error::io(format_args!("read the header of {object}")))?;
    Header::decode(&block, object)
}

/// How a pair is written.
#[derive(Debug, Clone, Copy, Default)]
pub struct PairOptions {
    /// Bytes of entries collected before they are written, a multiple of 512; 0 writes each entry at once.
    pub group_commit: usize,
    /// Source number stored in the entries: the reference implementation stores the number of layers below.
    pub slot: u8,
}

/// Writes an append upper exactly like the reference implementation. For one thread.
#[derive(Debug)]
pub struct PairWriter {
    data: File,
    index: File,
    header: Header,
    options: PairOptions,
    map: ExtentMap,
    /// End of the data file in sectors.
    data_end: u64,
    /// End of the index file in bytes.
    index_end: u64,
    group: Vec<u8>,
}

impl PairWriter {
    /// Starts a pair in two empty files.
    pub fn create(
        data: File,
        index: File,
        identity: Identity,
        virtual_size: u64,
        options: PairOptions,
    ) -> Result<PairWriter> {
        if options.group_commit % SECTOR as usize != 0 {
            return Err(Error::Argument(format!(
                "a group of {} bytes is not a whole number of sectors",
                options.group_commit
            )));
        }
        let header = Header::new(flags::HEADER | flags::DATA, virtual_size, identity);
        let index_header = Header {
            flags: flags::HEADER,
            index_offset: BLOCK as u64,
            ..header.clone()
        };
        data.write_all_at(&header.encode()?, 0)
            .map_err(Error::io("write the data file of an append upper"))?;
        index
            .write_all_at(&index_header.encode()?, 0)
            .map_err(Error::io("write the index file of an append upper"))?;
        let map = ExtentMap::new(false, MAX_LEN as u32);
        let (data_end, index_end) = (BLOCK as u64 / SECTOR, BLOCK as u64);
        Ok(PairWriter {
            data,
            index,
            header,
            options,
            map,
            data_end,
            index_end,
            group: Vec::new(),
        })
    }

    /// Writes whole sectors.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.check(offset, bytes.len() as u64)?;
        for (i, chunk) in bytes.chunks(MAX_WRITE).enumerate() {
            self.data
                .write_all_at(chunk, self.data_end * SECTOR)
                .map_err(Error::io("write the data file of an append upper"))?;
            let (start, len) = (
                offset / SECTOR + (i * MAX_WRITE) as u64 / SECTOR,
                chunk.len() as u64 / SECTOR,
            );
            let source = self.data_end;
            self.data_end += len;
            self.log(Entry::data(start, len, source, self.options.slot))?;
        }
        Ok(())
    }

    /// Makes whole sectors read as zeros.
    pub fn discard(&mut self, offset: u64, length: u64) -> Result<()> {
        self.check(offset, length)?;
        let end = (offset + length) / SECTOR;
        for start in (offset / SECTOR..end).step_by(MAX_LEN as usize) {
            self.log(Entry::zeroed(
                start,
                MAX_LEN.min(end - start),
                self.data_end,
                self.options.slot,
            ))?;
        }
        Ok(())
    }

    /// Makes everything written so far durable: index group, data file, index file.
    pub fn flush(&mut self) -> Result<()> {
        if !self.group.is_empty() {
            let full = self.options.group_commit;
            while self.group.len() < full {
                self.group.extend_from_slice(&Entry::PADDING.encode());
            }
            self.write_group()?;
        }
        self.data
            .sync_data()
            .map_err(Error::io("flush the data file of an append upper"))?;
        self.index
            .sync_data()
            .map_err(Error::io("flush the index file of an append upper"))
    }

    /// Seals the data file in place and returns it. The index file has no meaning any more once this is durable.
    pub fn seal(mut self) -> Result<File> {
        self.write_group()?;
        let entries = self
            .map
            .export(1, self.header.virtual_size.div_ceil(SECTOR), None);
        // The reference implementation leaves the user tag out of this trailer.
        self.header.identity.tag.clear();
        let mut end = Vec::new();
        tail::write(
            &entries,
            self.data_end * SECTOR,
            &self.header,
            Padding::Sector,
            &mut end,
        )?;
        self.data
            .write_all_at(&end, self.data_end * SECTOR)
            .map_err(Error::io("seal an append upper"))?;
        Ok(self.data)
    }

    fn check(&self, offset: u64, length: u64) -> Result<()> {
        let end = offset
            .checked_add(length)
            .filter(|end| *end <= self.header.virtual_size);
        if offset % SECTOR != 0 || length % SECTOR != 0 || end.is_none() {
            return Err(Error::Argument(format!(
                "{length} bytes at {offset} are not whole sectors of a disk of {} bytes",
                self.header.virtual_size
            )));
        }
        if self.data_end + length / SECTOR > u64::from(u32::MAX) {
            return Err(Error::Limit {
                what: "the size of the data file in sectors",
                value: self.data_end + length / SECTOR,
                max: u64::from(u32::MAX),
                remedy: "commit the upper and start a new one",
            });
        }
        Ok(())
    }

    fn log(&mut self, entry: Entry) -> Result<()> {
        self.map.insert(extent(entry), &mut |_, _| {});
        self.group
            .write_all(&entry.encode())
            .expect("a vector takes all bytes");
        if self.group.len() >= self.options.group_commit {
            self.write_group()?;
        }
        Ok(())
    }

    fn write_group(&mut self) -> Result<()> {
        self.index
            .write_all_at(&self.group, self.index_end)
            .map_err(Error::io("write the index file of an append upper"))?;
        self.index_end += self.group.len() as u64;
        self.group.clear();
        Ok(())
    }
}
