//! Putting one index over another.

use crate::entry::Entry;
use crate::error::{Error, Result};
use crate::index::Index;

/// One index equal to `top` over `bottom`: where `top` has nothing, `bottom` shows through.
///
/// Slots of `top` are raised by `shift`. Costs one pass over `top`, and copies stretches of `bottom` between entries
/// of `top` as a whole, so a small index over a large one costs little more than a memory copy.
pub fn merge(top: &Index, shift: u8, bottom: &Index) -> Result<Index> {
    let highest = top.entries().iter().map(|e| e.slot()).max().unwrap_or(0);
    if u16::from(highest) + u16::from(shift) > u16::from(u8::MAX) {
        return Err(Error::Limit {
            what: "the number of sources in a stack of layers",
            value: u64::from(highest) + u64::from(shift) + 1,
            max: 256,
            remedy: "merge some of the layers into one first",
        });
    }
    let mut out = Vec::with_capacity(top.len() + bottom.len());
    let mut below = Below {
        rest: bottom.entries(),
        from: 0,
    };
    for entry in top.entries() {
        below.emit_until(entry.offset(), &mut out);
        out.push(entry.with_slot(entry.slot() + shift));
        below.skip_until(entry.end());
    }
    below.emit_until(u64::MAX, &mut out);
    Ok(Index::from_sorted(out))
}

/// Merges a list of indexes, top first, each with the shift of its slots. Neighbours are merged in pairs, so each
/// entry is copied log2(n) times.
pub fn merge_all(indexes: &[(&Index, u8)]) -> Result<Index> {
    match indexes {
        [] => Ok(Index::default()),
        [(only, shift)] => merge(only, *shift, &Index::default()),
        _ => {
            let (upper, lower) = indexes.split_at(indexes.len() / 2);
            // Only leaves are shifted: a merged half already has its final slots.
            match (upper, lower) {
                ([(a, shift)], [(b, 0)]) => merge(a, *shift, b),
                ([(a, shift)], _) => merge(a, *shift, &merge_all(lower)?),
                (_, [(b, 0)]) => merge(&merge_all(upper)?, 0, b),
                _ => merge(&merge_all(upper)?, 0, &merge_all(lower)?),
            }
        }
    }
}

/// Entries of the lower index not yet passed. Everything before sector `from` is hidden.
struct Below<'a> {
    rest: &'a [Entry],
    from: u64,
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
        if first.offset() < self.from {
            out.push(first.clip(&(self.from..limit)));
            if first.end() > limit {
                return;
            }
            self.rest = &self.rest[1..];
        }
        let count = gallop(self.rest, |e| e.end() <= limit);
        out.extend_from_slice(&self.rest[..count]);
        self.rest = &self.rest[count..];
        if let Some(cut) = self.rest.first().filter(|e| e.offset() < limit) {
            out.push(cut.clip(&(0..limit)));
        }
    }

    /// Hides everything before sector `end`.
    fn skip_until(&mut self, end: u64) {
        self.rest = &self.rest[gallop(self.rest, |e| e.end() <= end)..];
        self.from = end;
    }
}

/// How many leading entries satisfy `test`, which is true for a prefix. Fast when the answer is small.
fn gallop(entries: &[Entry], test: impl Fn(&Entry) -> bool) -> usize {
    let mut step = 1;
    while step <= entries.len() && test(&entries[step - 1]) {
        step *= 2;
    }
    let from = step / 2;
    let to = step.min(entries.len());
    from + entries[from..to].partition_point(test)
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
