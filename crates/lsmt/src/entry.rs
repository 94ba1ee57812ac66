//! One index entry: where a run of sectors lives.

use std::fmt;
use std::ops::Range;

use crate::header::{u64_at, BLOCK, SECTOR};

/// Sectors one entry can cover: 8 MiB less one sector.
pub const MAX_LEN: u64 = (1 << 14) - 1;
/// First sector of a layer file that can hold data.
pub const FIRST_SECTOR: u64 = BLOCK as u64 / SECTOR;
/// Most entries, padding included, the trailer of a layer may announce.
pub const MAX_ENTRIES: u64 = 1_000_000;
/// Entries in one 4096-byte page; written indexes are padded to a multiple of it.
pub const PER_PAGE: u64 = BLOCK as u64 / Entry::SIZE as u64;
/// Most entries that still fit [`MAX_ENTRIES`] after padding.
pub const MAX_REAL_ENTRIES: u64 = MAX_ENTRIES / PER_PAGE * PER_PAGE;

const OFFSET_BITS: u32 = 50;
const OFFSET_MASK: u64 = (1 << OFFSET_BITS) - 1;
const SOURCE_MASK: u64 = (1 << 55) - 1;
const ZEROED: u64 = 1 << 55;

/// A run of sectors of the image and its place in a source. Packed as on disk, 16 bytes.
///
/// ```text
/// word 0: bits  0..49 first sector of the image, bits 50..63 length in sectors
/// word 1: bits  0..54 first sector in the source, bit 55 reads as zeros, bits 56..63 source number
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Entry {
    word0: u64,
    word1: u64,
}

impl Entry {
    /// Bytes on disk.
    pub const SIZE: usize = 16;
    /// Fills an index up to a multiple of its page; skipped by readers.
    pub const PADDING: Entry = Entry {
        word0: OFFSET_MASK,
        word1: 0,
    };

    /// A run with data. `len` is 1..=[`MAX_LEN`].
    pub fn data(offset: u64, len: u64, source: u64, slot: u8) -> Entry {
        debug_assert!(
            offset <= OFFSET_MASK && (1..=MAX_LEN).contains(&len) && source <= SOURCE_MASK
        );
        Entry {
            word0: offset | len << OFFSET_BITS,
            word1: source | u64::from(slot) << 56,
        }
    }

    /// A run that reads as zeros and hides what is below. `source` is only there to satisfy range checks.
    pub fn zeroed(offset: u64, len: u64, source: u64, slot: u8) -> Entry {
        let mut entry = Entry::data(offset, len, source, slot);
        entry.word1 |= ZEROED;
        entry
    }

    /// First sector of the image.
    pub fn offset(self) -> u64 {
        self.word0 & OFFSET_MASK
    }

    /// Length in sectors.
    pub fn len(self) -> u64 {
        self.word0 >> OFFSET_BITS
    }

    /// Whether the entry covers nothing: padding, or bytes a crash left behind.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Sector after the last of the image.
    pub fn end(self) -> u64 {
        self.offset() + self.len()
    }

    /// First sector in the source.
    pub fn source(self) -> u64 {
        self.word1 & SOURCE_MASK
    }

    /// Whether the run reads as zeros.
    pub fn is_zeroed(self) -> bool {
        self.word1 & ZEROED != 0
    }

    /// Number of the source the data is in; meaning depends on the owner of the index.
    pub fn slot(self) -> u8 {
        (self.word1 >> 56) as u8
    }

    /// The same run in another source.
    pub fn with_slot(self, slot: u8) -> Entry {
        Entry {
            word1: self.word1 & !(0xff << 56) | u64::from(slot) << 56,
            ..self
        }
    }

    /// Whether this is a padding entry.
    pub fn is_padding(self) -> bool {
        self.is_empty() && self.offset() == OFFSET_MASK
    }

    /// The part inside `range`, which must overlap the entry. Data moves along, a zeroed entry keeps its source.
    pub fn clip(self, range: &Range<u64>) -> Entry {
        let start = self.offset().max(range.start);
        let end = self.end().min(range.end);
        debug_assert!(start < end);
        let skip = if self.is_zeroed() {
            0
        } else {
            start - self.offset()
        };
        Entry {
            word0: start | (end - start) << OFFSET_BITS,
            word1: self.word1 + skip,
        }
    }

    /// Whether `next` continues this run in the image and in the source.
    pub fn continues_with(self, next: Entry) -> bool {
        let advance = if self.is_zeroed() { 0 } else { self.len() };
        self.end() == next.offset() && self.word1 + advance == next.word1
    }

    /// This run made longer by `len` sectors.
    pub fn grown(self, len: u64) -> Entry {
        debug_assert!(self.len() + len <= MAX_LEN);
        Entry {
            word0: self.word0 + (len << OFFSET_BITS),
            ..self
        }
    }

    /// Decodes 16 bytes. Every bit pattern is an entry; whether it makes sense is for the caller to check.
    pub fn decode(bytes: &[u8]) -> Entry {
        Entry {
            word0: u64_at(bytes, 0),
            word1: u64_at(bytes, 8),
        }
    }

    /// Encodes to 16 bytes.
    pub fn encode(self) -> [u8; Entry::SIZE] {
        let mut bytes = [0; Entry::SIZE];
        bytes[..8].copy_from_slice(&self.word0.to_le_bytes());
        bytes[8..].copy_from_slice(&self.word1.to_le_bytes());
        bytes
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_padding() {
            return f.write_str("padding");
        }
        let kind = if self.is_zeroed() { "zero" } else { "data" };
        write!(
            f,
            "{kind} {}..{} @ {}:{}",
            self.offset(),
            self.end(),
            self.slot(),
            self.source()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_have_the_documented_bytes() {
        assert_eq!(
            Entry::data(0, 8, 8, 0).encode(),
            [0, 0, 0, 0, 0, 0, 0x20, 0, 8, 0, 0, 0, 0, 0, 0, 0]
        );
        assert_eq!(
            Entry::PADDING.encode(),
            [255, 255, 255, 255, 255, 255, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        );
        let entry = Entry::zeroed(77, MAX_LEN, 9, 200);
        assert_eq!(Entry::decode(&entry.encode()), entry);
        assert_eq!(
            (entry.offset(), entry.len(), entry.source(), entry.slot()),
            (77, MAX_LEN, 9, 200)
        );
        assert!(entry.is_zeroed());
    }

    #[test]
    fn clipping_moves_the_source_of_data_only() {
        assert_eq!(
            Entry::data(10, 10, 100, 3).clip(&(12..15)),
            Entry::data(12, 3, 102, 3)
        );
        assert_eq!(
            Entry::zeroed(10, 10, 100, 3).clip(&(12..15)),
            Entry::zeroed(12, 3, 100, 3)
        );
    }
}
