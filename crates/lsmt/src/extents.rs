//! The index of a writable upper: an ordered map of extents that is edited in place.
//!
//! Offsets count abstract units so that both kinds of upper can use it: sectors in an append upper of the open format,
//! 4 KiB blocks in our own. 32 bits are enough for either and keep an extent at 12 bytes.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::entry::Entry;

/// Greatest length of one extent in units.
const MAX_UNITS: u32 = (1 << 31) - 1;

/// A run of units with its place in the upper's data file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// First unit of the image.
    pub start: u32,
    /// Length in units, 1..2^31.
    pub len: u32,
    /// First unit in the data file.
    pub source: u32,
    /// Reads as zeros; `source` means nothing then.
    pub zero: bool,
}

impl Extent {
    /// Unit after the last.
    pub fn end(&self) -> u32 {
        self.start + self.len
    }

    fn clip(self, range: &Range<u32>) -> Extent {
        let start = self.start.max(range.start);
        let len = self.end().min(range.end) - start;
        let source = if self.zero {
            self.source
        } else {
            self.source + (start - self.start)
        };
        Extent {
            start,
            len,
            source,
            zero: self.zero,
        }
    }
}

/// Length, its top bit set for zeros, and source.
type Value = (u32, u32);
const ZERO: u32 = 1 << 31;

fn pack(extent: &Extent) -> Value {
    (
        extent.len | if extent.zero { ZERO } else { 0 },
        extent.source,
    )
}

fn unpack(start: u32, (len, source): Value) -> Extent {
    Extent {
        start,
        len: len & !ZERO,
        source,
        zero: len & ZERO != 0,
    }
}

/// Non-overlapping extents, newest content only.
#[derive(Debug, Clone)]
pub struct ExtentMap {
    map: BTreeMap<u32, Value>,
    /// Join an extent to its predecessor when it continues it. The reference implementation does not.
    join: bool,
    /// Longest index entry in units, for counting.
    entry_units: u32,
    entries: u64,
    data_units: u64,
}

impl ExtentMap {
    /// An empty map whose exported entries have at most `entry_units` units.
    pub fn new(join: bool, entry_units: u32) -> ExtentMap {
        ExtentMap {
            map: BTreeMap::new(),
            join,
            entry_units,
            entries: 0,
            data_units: 0,
        }
    }

    /// Extents in the map.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether nothing was written.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// Index entries an export has.
    pub fn entries(&self) -> u64 {
        self.entries
    }

    /// Units of data the map refers to.
    pub fn data_units(&self) -> u64 {
        self.data_units
    }

    /// Maps an extent over whatever was there. `freed` is told each run of the data file that lost its meaning.
    pub fn insert(&mut self, extent: Extent, freed: &mut impl FnMut(u32, u32)) {
        debug_assert!((1..=MAX_UNITS).contains(&extent.len));
        self.remove(extent.start..extent.end(), freed);
        if self.join {
            if let Some((start, value)) = self.map.range(..extent.start).next_back() {
                let before = unpack(*start, *value);
                let continues = before.end() == extent.start
                    && before.zero == extent.zero
                    && (extent.zero || before.source + before.len == extent.source)
                    && extent.len <= MAX_UNITS - before.len;
                if continues {
                    self.take(before.start);
                    self.put(Extent {
                        len: before.len + extent.len,
                        ..before
                    });
                    return;
                }
            }
        }
        self.put(extent);
    }

    /// Forgets what is mapped in `range`.
    pub fn remove(&mut self, range: Range<u32>, freed: &mut impl FnMut(u32, u32)) {
        if range.is_empty() {
            return;
        }
        let before = self
            .map
            .range(..range.start)
            .next_back()
            .map(|(start, value)| unpack(*start, *value));
        if let Some(extent) = before.filter(|e| e.end() > range.start) {
            self.cut(extent, &range, freed);
        }
        while let Some((start, value)) = self.map.range(range.clone()).next() {
            let extent = unpack(*start, *value);
            self.cut(extent, &range, freed);
        }
    }

    /// Removes the part of an extent that is inside `range`.
    fn cut(&mut self, extent: Extent, range: &Range<u32>, freed: &mut impl FnMut(u32, u32)) {
        self.take(extent.start);
        if extent.start < range.start {
            self.put(extent.clip(&(extent.start..range.start)));
        }
        if extent.end() > range.end {
            self.put(extent.clip(&(range.end..extent.end())));
        }
        if !extent.zero {
            let gone = extent.clip(range);
            freed(gone.source, gone.len);
        }
    }

    fn put(&mut self, extent: Extent) {
        self.entries += u64::from(extent.len.div_ceil(self.entry_units));
        self.data_units += if extent.zero {
            0
        } else {
            u64::from(extent.len)
        };
        self.map.insert(extent.start, pack(&extent));
    }

    fn take(&mut self, start: u32) {
        let extent = unpack(
            start,
            self.map
                .remove(&start)
                .expect("an extent that was just seen"),
        );
        self.entries -= u64::from(extent.len.div_ceil(self.entry_units));
        self.data_units -= if extent.zero {
            0
        } else {
            u64::from(extent.len)
        };
    }

    /// The extent that covers `unit`.
    pub fn get(&self, unit: u32) -> Option<Extent> {
        let (start, value) = self.map.range(..=unit).next_back()?;
        Some(unpack(*start, *value)).filter(|e| e.end() > unit)
    }

    /// All extents in order.
    pub fn iter(&self) -> impl Iterator<Item = Extent> + '_ {
        self.map.iter().map(|(start, value)| unpack(*start, *value))
    }

    /// Cuts `range` into the parts that are mapped (`Ok`) and those that are not (`Err`), in order and without gaps.
    pub fn pieces(
        &self,
        range: Range<u32>,
    ) -> impl Iterator<Item = Result<Extent, Range<u32>>> + '_ {
        let first = self.get(range.start).map_or(range.start, |e| e.start);
        let mut inside = self.map.range(first..range.end.max(first)).peekable();
        let mut at = range.start;
        std::iter::from_fn(move || {
            if at >= range.end {
                return None;
            }
            let piece = match inside.peek().map(|(start, value)| unpack(**start, **value)) {
                Some(extent) if extent.start <= at => {
                    inside.next();
                    Ok(extent.clip(&(at..range.end)))
                }
                Some(extent) => Err(at..extent.start),
                None => Err(at..range.end),
            };
            at = match &piece {
                Ok(extent) => extent.end(),
                Err(hole) => hole.end,
            };
            Some(piece)
        })
    }

    /// Index entries in sectors, `unit` sectors to a unit, cut at sector `end`. A zeroed entry points at `zero_source`,
    /// or where its extent says.
    pub fn export(&self, unit: u32, end: u64, zero_source: Option<u64>) -> Vec<Entry> {
        let unit = u64::from(unit);
        let mut out = Vec::with_capacity(usize::try_from(self.entries).unwrap_or(0));
        for extent in self.iter() {
            for part in (0..extent.len).step_by(self.entry_units as usize) {
                let start = u64::from(extent.start + part) * unit;
                let len = (u64::from(self.entry_units.min(extent.len - part)) * unit)
                    .min(end.saturating_sub(start));
                if len == 0 {
                    return out;
                }
                out.push(if extent.zero {
                    Entry::zeroed(
                        start,
                        len,
                        zero_source.unwrap_or(u64::from(extent.source) * unit),
                        0,
                    )
                } else {
                    Entry::data(start, len, u64::from(extent.source + part) * unit, 0)
                });
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Step {
        Write(u32, u32),
        Zero(u32, u32),
        Remove(u32, u32),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let run = (0u32..200, 1u32..40);
        prop::collection::vec(
            prop_oneof![
                run.clone().prop_map(|(s, l)| Step::Write(s, l)),
                run.clone().prop_map(|(s, l)| Step::Zero(s, l)),
                run.prop_map(|(s, l)| Step::Remove(s, l)),
            ],
            1..60,
        )
    }

    proptest! {
        /// Against one cell per unit: `None` unmapped, `Some(None)` zero, `Some(Some(n))` unit n of the data file.
        #[test]
        fn the_map_is_an_array(steps in steps(), join: bool) {
            let mut map = ExtentMap::new(join, 7);
            let mut oracle = vec![None; 256];
            let mut tail = 0;
            let mut freed = 0;
            for step in steps {
                match step {
                    Step::Write(start, len) => {
                        map.insert(Extent { start, len, source: tail, zero: false }, &mut |_, len| freed += len);
                        (0..len).for_each(|i| oracle[(start + i) as usize] = Some(Some(tail + i)));
                        tail += len;
                    }
                    Step::Zero(start, len) => {
                        map.insert(Extent { start, len, source: 0, zero: true }, &mut |_, len| freed += len);
                        (0..len).for_each(|i| oracle[(start + i) as usize] = Some(None));
                    }
                    Step::Remove(start, len) => {
                        map.remove(start..start + len, &mut |_, len| freed += len);
                        (0..len).for_each(|i| oracle[(start + i) as usize] = None);
                    }
                }
            }
            let mut found = Vec::new();
            for piece in map.pieces(0..256) {
                match piece {
                    Ok(e) => found.extend((0..e.len).map(|i| Some((!e.zero).then_some(e.source + i)))),
                    Err(hole) => found.extend(hole.map(|_| None)),
                }
            }
            prop_assert_eq!(&found, &oracle);
            let live = oracle.iter().filter(|c| matches!(c, Some(Some(_)))).count() as u64;
            prop_assert_eq!(map.data_units(), live);
            prop_assert_eq!(u64::from(tail - freed), live, "what is not live was reported as freed");
            prop_assert_eq!(map.export(1, 256, None).len() as u64, map.entries());
            for unit in 0..256 {
                let covered = map.get(unit).is_some();
                prop_assert_eq!(covered, oracle[unit as usize].is_some());
            }
        }
    }

    #[test]
    fn an_export_ends_with_the_image() {
        let mut map = ExtentMap::new(true, 2047);
        map.insert(
            Extent {
                start: 1,
                len: 3000,
                source: 5,
                zero: false,
            },
            &mut |_, _| {},
        );
        let end = 3000 * 8 + 3;
        let entries = map.export(8, end, None);
        assert_eq!(
            entries,
            [
                Entry::data(8, 16376, 40, 0),
                Entry::data(16384, end - 16384, 40 + 16376, 0)
            ]
        );
    }
}
