//! Where everything goes in the output.

use std::ops::Range;

use super::Layout;
use crate::entry::{Entry, FIRST_SECTOR, MAX_LEN};
use crate::extents::{Extent, ExtentMap};
use crate::index::{Gluer, Index, Origin};

/// Sectors in the pieces the reference implementation copies; joined again afterwards.
pub(super) const PIECE: u64 = 64;

/// Sectors in the unit that is compared when data is left out.
pub(super) const GRANULE: u64 = 8;

/// Lays out the output: where each piece goes and which entries describe it.
pub(super) struct Plan {
    layout: Layout,
    pub gluer: Gluer,
    /// Next free sector of the output.
    pub output: u64,
}

impl Plan {
    pub fn new(layout: Layout) -> Plan {
        // The reference implementation joins only what stays below the limit.
        let max = if layout == Layout::Reference {
            MAX_LEN - 1
        } else {
            MAX_LEN / GRANULE * GRANULE
        };
        Plan {
            layout,
            gluer: Gluer::new(max),
            output: FIRST_SECTOR,
        }
    }

    /// Adds the entry or entries for a run of the source whose data goes to the end of the output.
    pub fn emit(&mut self, entry: Entry) {
        // Joining across sources is legal, as the output is one file; the reference implementation does not do it.
        let slot = if self.layout == Layout::Reference {
            entry.slot()
        } else {
            0
        };
        if entry.is_zeroed() {
            self.gluer.push(Entry::zeroed(
                entry.offset(),
                entry.len(),
                self.output,
                slot,
            ));
            return;
        }
        let mut at = entry.offset();
        while at < entry.end() {
            let len = PIECE.min(entry.end() - at);
            self.gluer.push(Entry::data(at, len, self.output, slot));
            self.output += len;
            at += len;
        }
    }
}

/// How many leading entries fit one layer when nothing is left out.
pub(super) fn fitting(entries: &[Entry], layout: Layout, limit: usize) -> usize {
    if entries.len() <= limit {
        return entries.len();
    }
    let mut plan = Plan::new(layout);
    for (i, entry) in entries.iter().enumerate() {
        plan.emit(*entry);
        if plan.gluer.len() > limit {
            return i;
        }
    }
    entries.len()
}

/// Entries that end at sector `end`.
pub(super) fn clip(entries: &[Entry], end: u64) -> Vec<Entry> {
    let count = entries.partition_point(|e| e.offset() < end);
    let mut kept = entries[..count].to_vec();
    if let Some(last) = kept.last_mut() {
        *last = last.clip(&(0..end));
    }
    kept
}

/// The same content, cut and arranged so that `order` comes first.
pub(super) fn in_order(entries: &[Entry], order: &[Range<u64>]) -> Vec<Entry> {
    let index = Index::from_sorted(entries.to_vec());
    let end = index.end();
    let mut taken = ExtentMap::new(true, u32::MAX);
    let mut out = Vec::with_capacity(entries.len() + 2 * order.len());
    for range in order.iter().cloned().chain(std::iter::once(0..end)) {
        // Virtual sizes are limited so that sectors have 32 bits.
        let range = range.start.min(end) as u32..range.end.min(end) as u32;
        let free: Vec<_> = taken
            .pieces(range.start..range.end.max(range.start))
            .filter_map(Result::err)
            .collect();
        for hole in free {
            for piece in index.pieces(hole.start.into()..hole.end.into()) {
                match piece.origin {
                    Origin::Hole => {}
                    Origin::Zero => {
                        out.push(Entry::zeroed(piece.start, piece.len, FIRST_SECTOR, 0))
                    }
                    Origin::Data { slot, sector } => {
                        out.push(Entry::data(piece.start, piece.len, sector, slot))
                    }
                }
            }
            mark(&mut taken, hole.start, hole.end);
        }
    }
    out
}

/// Marks a range as taken, in extents of legal length: half of the address space is too long for one.
fn mark(taken: &mut ExtentMap, mut start: u32, end: u32) {
    while start < end {
        let len = (end - start).min(1 << 30);
        taken.insert(
            Extent {
                start,
                len,
                source: 0,
                zero: true,
            },
            &mut |_, _| {},
        );
        start += len;
    }
}
