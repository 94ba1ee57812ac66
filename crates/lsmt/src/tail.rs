//! What ends a sealed file: index, padding, trailer.

use std::io::{self, Write};

use crate::entry::{Entry, MAX_REAL_ENTRIES, PER_PAGE};
use crate::error::{Error, Result};
use crate::header::{flags, Header, SECTOR};

/// Entries encoded at once.
const CHUNK: usize = 16 << 10;

/// How an index is padded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Padding {
    /// Padding entries up to a full page, counted in the trailer. The form of committed files, and of all we write.
    Page,
    /// Zero bytes up to a full sector, not counted: what the reference implementation does when it seals in place.
    Sector,
}

/// Writes the tail of a file whose index starts at byte `index_offset` and returns its length.
///
/// `header` gives ids and virtual size; its flags tell whether the file was sparse.
pub(crate) fn write(
    entries: &[Entry],
    index_offset: u64,
    header: &Header,
    padding: Padding,
    out: &mut impl Write,
) -> Result<u64> {
    check_count(entries.len() as u64)?;
    let pads = match padding {
        Padding::Page => (entries.len() as u64).next_multiple_of(PER_PAGE) - entries.len() as u64,
        Padding::Sector => 0,
    };
    let trailer = Header {
        flags: flags::DATA | flags::SEALED | (header.flags & flags::SPARSE),
        index_offset,
        index_size: entries.len() as u64 + pads,
        ..header.clone()
    };
    let index_bytes = trailer.index_size * Entry::SIZE as u64;
    let fill = index_bytes.next_multiple_of(SECTOR) - index_bytes;
    let block = trailer.encode()?;
    let mut write = || -> io::Result<()> {
        let mut bytes = vec![0; CHUNK * Entry::SIZE];
        for chunk in entries.chunks(CHUNK) {
            let bytes = &mut bytes[..chunk.len() * Entry::SIZE];
            for (place, entry) in bytes.chunks_exact_mut(Entry::SIZE).zip(chunk) {
                place.copy_from_slice(&entry.encode());
            }
            out.write_all(bytes)?;
        }
        out.write_all(&Entry::PADDING.encode().repeat(pads as usize))?;
        out.write_all(&[0; SECTOR as usize][..fill as usize])?;
        out.write_all(&block)
    };
    write().map_err(Error::io("write the index of a layer"))?;
    Ok(index_bytes + fill + block.len() as u64)
}

/// Checks that an index of `count` entries fits a layer.
pub(crate) fn check_count(count: u64) -> Result<()> {
    if count <= MAX_REAL_ENTRIES {
        return Ok(());
    }
    Err(Error::Limit {
        what: "the number of index entries of the layer",
        value: count,
        max: MAX_REAL_ENTRIES,
        remedy: "write it as several layers",
    })
}
