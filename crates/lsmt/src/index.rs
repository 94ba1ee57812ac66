//! Frozen indexes: sorted, non-overlapping entries that never change once built.

use std::ops::Range;

use crate::entry::{Entry, MAX_LEN};
use crate::error::{Error, Result};

/// Entries per fence key, measured: 32 entries are eight cache lines, and the keys of a million entries stay in the cache.
const FENCE: usize = 32;

/// A run of consecutive sectors of an image and where its bytes come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// First sector of the image.
    pub start: u64,
    /// Length in sectors, at least 1.
    pub len: u64,
    /// Origin of the bytes.
    pub origin: Origin,
}

impl Piece {
    /// Sector after the last.
    pub fn end(&self) -> u64 {
        self.start + self.len
    }
}

/// Where the bytes of a [`Piece`] come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// Nothing here; a lower layer decides, and at the bottom it reads as zeros.
    Hole,
    /// Zeros that hide lower layers.
    Zero,
    /// Data in source number `slot` from its sector `sector`.
    Data {
        /// Source number.
        slot: u8,
        /// First sector in that source.
        sector: u64,
    },
}

/// Immutable map from sectors to sources. Cheap to search and meant to be shared through `Arc`.
#[derive(Debug, Default)]
pub struct Index {
    entries: Box<[Entry]>,
    /// `entries[i * FENCE].offset()` for each i.
    fence: Box<[u64]>,
}

impl Index {
    /// Builds an index from entries that must be non-empty, sorted and free of overlap.
    pub fn new(entries: Vec<Entry>) -> Result<Index> {
        let mut end = 0;
        for entry in &entries {
            if entry.is_empty() {
                return Err(Error::Argument(format!(
                    "an entry without length at sector {}",
                    entry.offset()
                )));
            }
            if entry.offset() < end {
                return Err(Error::Argument(format!(
                    "the entry at sector {} starts before its predecessor ends at {end}",
                    entry.offset()
                )));
            }
            end = entry.end();
        }
        Ok(Index::from_sorted(entries))
    }

    /// Builds an index from entries already known to be in order.
    pub(crate) fn from_sorted(entries: Vec<Entry>) -> Index {
        debug_assert!(entries.windows(2).all(|w| w[0].end() <= w[1].offset()));
        let fence = entries.iter().step_by(FENCE).map(|e| e.offset()).collect();
        Index {
            entries: entries.into_boxed_slice(),
            fence,
        }
    }

    /// Entries in order of their offset.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is mapped.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Sector after the last mapped one.
    pub fn end(&self) -> u64 {
        self.entries.last().map_or(0, |e| e.end())
    }

    /// Heap bytes held.
    pub fn memory(&self) -> usize {
        self.entries.len() * Entry::SIZE + self.fence.len() * size_of::<u64>()
    }

    /// Sectors of data, and sectors that are explicitly zero.
    pub fn sectors(&self) -> (u64, u64) {
        self.entries.iter().fold((0, 0), |(data, zero), e| {
            if e.is_zeroed() {
                (data, zero + e.len())
            } else {
                (data + e.len(), zero)
            }
        })
    }

    /// Position of the first entry that ends after `sector`.
    fn position(&self, sector: u64) -> usize {
        let block = self.fence.partition_point(|start| *start <= sector);
        if block == 0 {
            return 0;
        }
        let from = (block - 1) * FENCE;
        let to = (from + FENCE).min(self.entries.len());
        // At least the first entry of the block starts at or before `sector`, so `after` is not 0.
        let after = from + self.entries[from..to].partition_point(|e| e.offset() <= sector);
        after - usize::from(self.entries[after - 1].end() > sector)
    }

    /// The entry that covers `sector`.
    pub fn get(&self, sector: u64) -> Option<Entry> {
        self.entries
            .get(self.position(sector))
            .copied()
            .filter(|e| e.offset() <= sector)
    }

    /// Cuts `range` (sectors) into data, zero and hole pieces, in order and without gaps.
    pub fn pieces(&self, range: Range<u64>) -> Pieces<'_> {
        let next = if range.is_empty() {
            0
        } else {
            self.position(range.start)
        };
        Pieces {
            rest: &self.entries[next..],
            range,
        }
    }
}

/// Iterator of [`Index::pieces`].
#[derive(Debug)]
pub struct Pieces<'a> {
    rest: &'a [Entry],
    range: Range<u64>,
}

impl Iterator for Pieces<'_> {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        if self.range.is_empty() {
            return None;
        }
        let start = self.range.start;
        let piece = match self.rest.first() {
            Some(entry) if entry.offset() <= start => {
                let entry = entry.clip(&self.range);
                self.rest = &self.rest[1..];
                let origin = if entry.is_zeroed() {
                    Origin::Zero
                } else {
                    Origin::Data {
                        slot: entry.slot(),
                        sector: entry.source(),
                    }
                };
                Piece {
                    start,
                    len: entry.len(),
                    origin,
                }
            }
            Some(entry) => Piece {
                start,
                len: entry.offset().min(self.range.end) - start,
                origin: Origin::Hole,
            },
            None => Piece {
                start,
                len: self.range.end - start,
                origin: Origin::Hole,
            },
        };
        self.range.start = piece.end();
        Some(piece)
    }
}

/// Collects entries in order and joins neighbours that continue each other.
#[derive(Debug, Default)]
pub(crate) struct Gluer {
    entries: Vec<Entry>,
    /// Longest entry that joining may produce.
    max: u64,
}

impl Gluer {
    pub(crate) fn new(max: u64) -> Gluer {
        debug_assert!(max <= MAX_LEN);
        Gluer {
            entries: Vec::new(),
            max,
        }
    }

    pub(crate) fn push(&mut self, entry: Entry) {
        if let Some(last) = self.entries.last_mut() {
            if last.continues_with(entry) && last.len() + entry.len() <= self.max {
                *last = last.grown(entry.len());
                return;
            }
        }
        self.entries.push(entry);
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn finish(self) -> Vec<Entry> {
        self.entries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index() -> Index {
        Index::new(vec![
            Entry::data(4, 4, 8, 0),
            Entry::zeroed(8, 2, 12, 0),
            Entry::data(20, 10, 12, 1),
        ])
        .unwrap()
    }

    #[test]
    fn pieces_cover_the_range_exactly() {
        let pieces: Vec<_> = index()
            .pieces(2..25)
            .map(|p| (p.start, p.len, p.origin))
            .collect();
        assert_eq!(
            pieces,
            [
                (2, 2, Origin::Hole),
                (4, 4, Origin::Data { slot: 0, sector: 8 }),
                (8, 2, Origin::Zero),
                (10, 10, Origin::Hole),
                (
                    20,
                    5,
                    Origin::Data {
                        slot: 1,
                        sector: 12
                    }
                ),
            ]
        );
        let inside: Vec<_> = index().pieces(22..23).collect();
        assert_eq!(
            inside,
            [Piece {
                start: 22,
                len: 1,
                origin: Origin::Data {
                    slot: 1,
                    sector: 14
                }
            }]
        );
        assert_eq!(index().pieces(30..31).next().unwrap().origin, Origin::Hole);
        assert_eq!(index().pieces(5..5).count(), 0);
    }

    #[test]
    fn lookup_agrees_with_a_scan_at_every_sector() {
        let entries: Vec<_> = (0..1000)
            .map(|i| Entry::data(i * 7 + i % 3, 1 + i % 4, 8 + i, 0))
            .collect();
        let index = Index::new(entries.clone()).unwrap();
        for sector in 0..index.end() + 3 {
            let scanned = entries
                .iter()
                .copied()
                .find(|e| (e.offset()..e.end()).contains(&sector));
            assert_eq!(index.get(sector), scanned, "sector {sector}");
        }
    }

    #[test]
    fn disorder_is_refused() {
        assert!(Index::new(vec![Entry::data(4, 4, 8, 0), Entry::data(7, 1, 8, 0)]).is_err());
        assert!(Index::new(vec![Entry::PADDING]).is_err());
    }
}
