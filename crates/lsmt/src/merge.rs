//! Putting one index over another.

use std::borrow::Cow;

use crate::entry::Entry;
use crate::error::{Error, Result};
use crate::index::Index;

/// One index equal to `top` over `bottom`: where `top` has nothing, `bottom` shows through.
///
/// Slots of `top` are raised by `shift`. Costs one pass over `top`, and copies stretches of `bottom` between entries
/// of `top` as a whole, so a small index over a large one costs little more than a memory copy.
pub fn merge(top: &Index, shift: u8, bottom: &Index) -> Result<Index> {
    merge_all(&[(top, shift), (bottom, 0)])
}

/// Merges a list of indexes, top first, each with the shift of its slots. Neighbours are merged in pairs, so each
/// entry is copied log2(n) times.
pub fn merge_all(indexes: &[(&Index, u8)]) -> Result<Index> {
    for (index, shift) in indexes {
        let highest = index.entries().iter().map(|e| e.slot()).max().unwrap_or(0);
        if u16::from(highest) + u16::from(*shift) > u16::from(u8::MAX) {
            return Err(Error::Limit {
                what: "the number of sources in a stack of layers",
                value: u64::from(highest) + u64::from(*shift) + 1,
                max: 256,
                remedy: "merge some of the layers into one first",
            });
        }
    }
    let entries = match indexes {
        [] => Vec::new(),
        [(only, shift)] => only
            .entries()
            .iter()
            .map(|e| e.with_slot(e.slot() + shift))
            .collect(),
        _ => merge_halves(indexes, &mut Vec::new()),
    };
    Ok(Index::from_sorted(entries))
}

/// Merges at least two indexes. `spare` holds vectors that are not needed any more: fresh memory costs more than merging.
fn merge_halves(indexes: &[(&Index, u8)], spare: &mut Vec<Vec<Entry>>) -> Vec<Entry> {
    let (upper, lower) = indexes.split_at(indexes.len() / 2);
    let [upper, lower] = [upper, lower].map(|half| match half {
        [(only, shift)] => Half {
            entries: Cow::Borrowed(only.entries()),
            shift: *shift,
        },
        half => Half {
            entries: Cow::Owned(merge_halves(half, spare)),
            shift: 0,
        },
    });
    let count = upper.entries.len() + lower.entries.len();
    let fitting = spare.iter().position(|v| v.capacity() >= count);
    let mut out = fitting.map_or_else(|| Vec::with_capacity(count), |i| spare.swap_remove(i));
    overlay(
        &upper.entries,
        upper.shift,
        &lower.entries,
        lower.shift,
        &mut out,
    );
    for half in [upper, lower] {
        if let Cow::Owned(mut entries) = half.entries {
            entries.clear();
            spare.push(entries);
        }
    }
    out
}

struct Half<'a> {
    entries: Cow<'a, [Entry]>,
    shift: u8,
}

/// Appends `top` over `bottom` to the empty `out`.
fn overlay(top: &[Entry], top_shift: u8, bottom: &[Entry], bottom_shift: u8, out: &mut Vec<Entry>) {
    let mut below = Below {
        rest: bottom,
        from: 0,
        shift: bottom_shift,
    };
    for entry in top {
        below.emit_until(entry.offset(), out);
        out.push(entry.with_slot(entry.slot() + top_shift));
        below.skip_until(entry.end());
    }
    below.emit_until(u64::MAX, out);
}

/// Entries of the lower index not yet passed. Everything before sector `from` is hidden.
struct Below<'a> {
    rest: &'a [Entry],
    from: u64,
    shift: u8,
}

impl Below<'_> {
    /// Copies what is visible before sector `limit`.
    fn emit_until(&mut self, limit: u64, out: &mut Vec<Entry>) {
        let Some(first) = self
            .rest
            .first()
            .filter(|e| e.offset() < limit && self.from < limit)
        else {
            return;
        };
        let shifted = |e: &Entry| e.with_slot(e.slot() + self.shift);
        if first.offset() < self.from {
            out.push(shifted(&first.clip(&(self.from..limit))));
            if first.end() > limit {
                return;
            }
            self.rest = &self.rest[1..];
        }
        let (whole, rest) = self.rest.split_at(gallop(self.rest, |e| e.end() <= limit));
        // A call for a copy of a few entries costs more than the copy.
        if self.shift == 0 && whole.len() > 8 {
            out.extend_from_slice(whole);
        } else {
            whole.iter().for_each(|e| out.push(shifted(e)));
        }
        if let Some(cut) = rest.first().filter(|e| e.offset() < limit) {
            out.push(shifted(&cut.clip(&(0..limit))));
        }
        self.rest = rest;
    }

    /// Hides everything before sector `end`.
    fn skip_until(&mut self, end: u64) {
        self.rest = &self.rest[gallop(self.rest, |e| e.end() <= end)..];
        self.from = end;
    }
}

/// How many leading entries satisfy `test`, which is true for a prefix. Fast when the answer is small.
fn gallop(entries: &[Entry], test: impl Fn(&Entry) -> bool) -> usize {
    const NEAR: usize = 4;
    for (i, entry) in entries.iter().take(NEAR).enumerate() {
        if !test(entry) {
            return i;
        }
    }
    let mut known = NEAR.min(entries.len());
    let mut step = 2 * NEAR;
    while step <= entries.len() && test(&entries[step - 1]) {
        known = step;
        step *= 2;
    }
    known + entries[known..step.min(entries.len()).max(known)].partition_point(test)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(runs: &[(u64, u64, u64)]) -> Index {
        Index::new(
            runs.iter()
                .map(|(o, l, s)| Entry::data(*o, *l, *s, 0))
                .collect(),
        )
        .unwrap()
    }

    #[test]
    fn the_top_hides_and_gaps_show_through() {
        let top = index(&[(5, 3, 100), (8, 2, 103), (30, 5, 105)]);
        let bottom = index(&[(0, 20, 8), (22, 2, 28), (31, 2, 30), (34, 4, 32)]);
        let merged = merge(&top, 1, &bottom).unwrap();
        assert_eq!(
            merged.entries(),
            [
                Entry::data(0, 5, 8, 0),
                Entry::data(5, 3, 100, 1),
                Entry::data(8, 2, 103, 1),
                Entry::data(10, 10, 18, 0),
                Entry::data(22, 2, 28, 0),
                Entry::data(30, 5, 105, 1),
                Entry::data(35, 3, 33, 0),
            ]
        );
    }

    #[test]
    fn one_long_entry_can_be_cut_many_times() {
        let top = index(&[(10, 1, 50), (20, 1, 51), (30, 1, 52)]);
        let bottom = index(&[(0, 100, 8)]);
        let merged = merge(&top, 0, &bottom).unwrap();
        assert_eq!(merged.len(), 7);
        assert_eq!(merged.get(25), Some(Entry::data(21, 9, 29, 0)));
        assert_eq!(merged.entries()[6], Entry::data(31, 69, 39, 0));
    }

    #[test]
    fn too_many_sources_are_refused() {
        let top = Index::new(vec![Entry::data(0, 1, 8, 1)]).unwrap();
        assert!(merge(&top, 254, &Index::default()).is_ok());
        assert!(matches!(
            merge(&top, 255, &Index::default()),
            Err(Error::Limit { .. })
        ));
    }
}
