//! Which blocks of an upper's data file are free.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{Error, Result};

/// Free blocks that are tolerated before a write is cut into fragments to use them up: 16 MiB, or a quarter of what is live.
const SLACK: u64 = 4096;

/// Consecutive blocks of the data file: first block, count.
pub(super) type Segment = (u32, u32);

/// Allocator of blocks. Everything below `end` is either given out or free.
#[derive(Debug)]
pub(super) struct Space {
    end: u32,
    free: BTreeMap<u32, u32>,
    by_len: BTreeSet<(u32, u32)>,
    total: u64,
    /// Blocks with current data, as last reported.
    live: u64,
}

impl Space {
    /// A file whose blocks from `end` on are unused.
    pub fn new(end: u32) -> Space {
        Space {
            end,
            free: BTreeMap::new(),
            by_len: BTreeSet::new(),
            total: 0,
            live: 0,
        }
    }

    /// The space around what is in use; `used` is sorted by first block.
    pub fn around(first: u32, used: &[Segment]) -> Space {
        let mut space = Space::new(first);
        for (start, len) in used {
            if *start > space.end {
                space.insert(space.end, start - space.end);
            }
            space.end = space.end.max(start + len);
        }
        space
    }

    /// First block that was never given out, or was given back.
    pub fn end(&self) -> u32 {
        self.end
    }

    /// Free blocks below the end.
    #[cfg(test)]
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Tells how many blocks hold current data.
    pub fn set_live(&mut self, live: u64) {
        self.live = live;
    }

    /// Whether one free segment has `count` blocks.
    pub fn fits(&self, count: u32) -> bool {
        self.by_len.last().is_some_and(|(len, _)| *len >= count)
    }

    /// Takes `count` blocks, in one segment if possible.
    pub fn allocate(&mut self, count: u32) -> Result<Vec<Segment>> {
        if let Some(&(len, start)) = self.by_len.range((count, 0)..).next() {
            self.take(start, len, count);
            return Ok(vec![(start, count)]);
        }
        let mut segments = Vec::new();
        let mut rest = count;
        // Bounds the file: it never exceeds live data by much more than the slack, however fragmented.
        while rest > 0 && self.total > SLACK.max(self.live / 4) {
            let Some(&(len, start)) = self.by_len.last() else {
                break;
            };
            let part = len.min(rest);
            self.take(start, len, part);
            segments.push((start, part));
            rest -= part;
        }
        if rest > 0 {
            let Some(end) = self.end.checked_add(rest) else {
                segments.into_iter().for_each(|s| self.release(s));
                return Err(Error::Limit {
                    what: "the size of an upper in blocks of 4 KiB",
                    value: u64::from(self.end) + u64::from(rest),
                    max: u64::from(u32::MAX),
                    remedy: "seal it",
                });
            };
            segments.push((self.end, rest));
            self.end = end;
        }
        Ok(segments)
    }

    /// Gives blocks back.
    pub fn release(&mut self, (mut start, mut len): Segment) {
        if let Some((&before, &before_len)) = self.free.range(..start).next_back() {
            debug_assert!(before + before_len <= start, "a block was released twice");
            if before + before_len == start {
                self.remove(before, before_len);
                (start, len) = (before, before_len + len);
            }
        }
        if let Some(&after_len) = self.free.get(&(start + len)) {
            self.remove(start + len, after_len);
            len += after_len;
        }
        if start + len == self.end {
            self.end = start;
        } else {
            self.insert(start, len);
        }
    }

    fn take(&mut self, start: u32, len: u32, count: u32) {
        self.remove(start, len);
        if len > count {
            self.insert(start + count, len - count);
        }
    }

    fn insert(&mut self, start: u32, len: u32) {
        self.free.insert(start, len);
        self.by_len.insert((len, start));
        self.total += u64::from(len);
    }

    fn remove(&mut self, start: u32, len: u32) {
        self.free.remove(&start);
        self.by_len.remove(&(len, start));
        self.total -= u64::from(len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn nothing_is_given_out_twice(steps in prop::collection::vec((any::<bool>(), 1u32..50, any::<prop::sample::Index>()), 1..200)) {
            let mut space = Space::new(1);
            let mut held: Vec<Segment> = Vec::new();
            for (allocate, count, which) in steps {
                if allocate || held.is_empty() {
                    let segments = space.allocate(count).unwrap();
                    prop_assert_eq!(segments.iter().map(|s| s.1).sum::<u32>(), count);
                    held.extend(segments);
                } else {
                    space.release(held.swap_remove(which.index(held.len())));
                }
                let mut sorted = held.clone();
                sorted.sort_unstable();
                prop_assert!(sorted.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0));
                let used: u64 = held.iter().map(|s| u64::from(s.1)).sum();
                prop_assert_eq!(used + space.total(), u64::from(space.end() - 1));
                let again = Space::around(1, &sorted);
                prop_assert_eq!((again.end(), again.total()), (space.end(), space.total()));
            }
        }
    }

    #[test]
    fn fragments_are_used_before_the_file_grows_without_bound() {
        let mut space = Space::new(1);
        let held = space.allocate(20_000).unwrap();
        assert_eq!(held, [(1, 20_000)]);
        for block in (1..20_000).step_by(2) {
            space.release((block, 1));
        }
        assert_eq!(space.total(), 10_000);
        let end = space.end();
        let segments = space.allocate(1000).unwrap();
        assert_eq!((segments.len(), space.end()), (1000, end));
    }
}
