//! Reads and writes.

use std::collections::VecDeque;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::PoisonError;

use super::journal::{self, Record};
use super::{locked, Durability, Freed, Segment, State, Upper, BLOCK_SIZE};
use crate::entry::MAX_REAL_ENTRIES;
use crate::error::{Error, Result};
use crate::extents::Extent;
use crate::source::{read_file, ReadAt};

/// Blocks written by one step of a long write.
const CHUNK_BLOCKS: u64 = 1024;

/// What a block was when its rest was read: in the data file (block, zeros), or not here.
type Was = Option<(u32, bool)>;

/// Someone who uses blocks found in the index; blocks are not used again while it lives.
struct Reader<'a>(&'a AtomicU64);

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

/// Reads from `source`, whose end is followed by zeros.
fn read_extended(source: &dyn ReadAt, buf: &mut [u8], offset: u64) -> io::Result<()> {
    let got = source.read_at(buf, offset)?;
    buf[got..].fill(0);
    Ok(())
}

impl Upper {
    /// Reads bytes; what this upper does not have comes from `below`, and from behind its end as zeros. Any alignment.
    /// Must end within the disk.
    pub fn read(&self, buf: &mut [u8], offset: u64, below: &dyn ReadAt) -> io::Result<()> {
        if buf.is_empty() {
            return Ok(());
        }
        let end = offset + buf.len() as u64;
        let blocks = (offset / BLOCK_SIZE) as u32..end.div_ceil(BLOCK_SIZE) as u32;
        let mut holes = Vec::new();
        {
            let (_reader, pieces) = {
                let state = self.read_state();
                (
                    self.enter(&state),
                    state.map.pieces(blocks).collect::<Vec<_>>(),
                )
            };
            let mut pieces = pieces.into_iter().peekable();
            let place = |start: u32, stop: u32| {
                let from = (u64::from(start) * BLOCK_SIZE).max(offset);
                let to = (u64::from(stop) * BLOCK_SIZE).min(end);
                (from, (from - offset) as usize..(to - offset) as usize)
            };
            while let Some(piece) = pieces.next() {
                match piece {
                    Err(hole) => holes.push(place(hole.start, hole.end)),
                    Ok(extent) if extent.zero => buf[place(extent.start, extent.end()).1].fill(0),
                    Ok(mut extent) => {
                        // Random writes that were later filled in sequence may still lie in one run.
                        while let Some(Ok(next)) = pieces.next_if(|p| {
                            matches!(p, Ok(n) if !n.zero && n.source == extent.source + extent.len)
                        }) {
                            extent.len += next.len;
                        }
                        let (from, range) = place(extent.start, extent.end());
                        let at = u64::from(extent.source) * BLOCK_SIZE
                            + (from - u64::from(extent.start) * BLOCK_SIZE);
                        self.read_data(&mut buf[range], at)?;
                    }
                }
            }
        }
        // Outside the epoch: what is below may be slow.
        for (from, range) in holes {
            read_extended(below, &mut buf[range], from)?;
        }
        Ok(())
    }

    fn read_data(&self, buf: &mut [u8], at: u64) -> io::Result<()> {
        if read_file(&self.file, buf, at)? < buf.len() {
            let what = format!("{} is shorter than its index says", self.path.display());
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, what));
        }
        Ok(())
    }

    /// Writes bytes of any alignment; must end within the disk. `below` supplies the rest of blocks that are written in
    /// part. The write is visible and, as far as the durability goes, recorded when this returns.
    pub fn write(&self, offset: u64, data: &[u8], below: &dyn ReadAt) -> Result<()> {
        self.check_range(offset, data.len() as u64)?;
        let _writing = self.writers.read().unwrap_or_else(PoisonError::into_inner);
        let mut done = 0;
        while done < data.len() {
            let at = offset + done as u64;
            let stop = (at / BLOCK_SIZE + CHUNK_BLOCKS) * BLOCK_SIZE;
            let len = (data.len() - done).min((stop - at) as usize);
            self.write_chunk(at, &data[done..done + len], below)?;
            done += len;
        }
        self.housekeep()
    }

    /// Makes a range of any alignment read as zeros, whatever is below; must end within the disk. Discards and
    /// write-zeroes are both this.
    pub fn zero(&self, offset: u64, length: u64, below: &dyn ReadAt) -> Result<()> {
        self.check_range(offset, length)?;
        let _writing = self.writers.read().unwrap_or_else(PoisonError::into_inner);
        let end = offset + length;
        let (first, last) = (
            offset.next_multiple_of(BLOCK_SIZE),
            end / BLOCK_SIZE * BLOCK_SIZE,
        );
        // The last block of the disk may be cut short: all of it is zeroed then.
        let last = if end == self.virtual_size() {
            end.next_multiple_of(BLOCK_SIZE)
        } else {
            last
        };
        if first >= last {
            return self.write_chunks_of_zeros(offset, end, below);
        }
        self.write_chunks_of_zeros(offset, first, below)?;
        let (start, len) = (
            (first / BLOCK_SIZE) as u32,
            ((last - first) / BLOCK_SIZE) as u32,
        );
        if let Some(sequence) = self.publish(
            &[Extent {
                start,
                len,
                source: 0,
                zero: true,
            }],
            &[],
        )? {
            self.commit(sequence)?;
        }
        self.write_chunks_of_zeros(last.min(end), end, below)?;
        self.housekeep()
    }

    /// Zeros part of a block, or of two neighbours.
    fn write_chunks_of_zeros(&self, offset: u64, end: u64, below: &dyn ReadAt) -> Result<()> {
        if offset < end {
            self.write_chunk(
                offset,
                &[0; 2 * BLOCK_SIZE as usize][..(end - offset) as usize],
                below,
            )?;
        }
        Ok(())
    }

    /// Changes the size of the disk, in bytes. What is cut off is forgotten here; when the disk grows again, whoever owns
    /// the layers below has to hide what they have there.
    pub fn resize(&self, virtual_size: u64) -> Result<()> {
        super::check_size(virtual_size)?;
        let sequence = {
            let mut state = self.write_state();
            if state.frozen {
                return Err(Error::Frozen);
            }
            if virtual_size == state.virtual_size {
                return Ok(());
            }
            let end = virtual_size.div_ceil(BLOCK_SIZE) as u32;
            let sequence = state.record(&Record::Resize(virtual_size));
            let State {
                map,
                freed,
                freed_blocks,
                epoch,
                ..
            } = &mut *state;
            map.remove(end..u32::MAX, &mut |start, len| {
                retire(freed, freed_blocks, sequence, *epoch, (start, len))
            });
            state.virtual_size = virtual_size;
            sequence
        };
        self.commit(sequence)
    }

    fn check_range(&self, offset: u64, length: u64) -> Result<()> {
        let size = self.virtual_size();
        match offset.checked_add(length) {
            Some(end) if end <= size => Ok(()),
            _ => Err(Error::Argument(format!(
                "{length} bytes at {offset} are outside a disk of {size} bytes"
            ))),
        }
    }

    /// Registers a user of the index; `state` proves that it is locked.
    fn enter(&self, state: &State) -> Reader<'_> {
        let readers = &self.readers[(state.epoch & 1) as usize];
        readers.fetch_add(1, Ordering::Acquire);
        Reader(readers)
    }

    fn write_chunk(&self, offset: u64, data: &[u8], below: &dyn ReadAt) -> Result<()> {
        let first = offset / BLOCK_SIZE;
        let count = (offset + data.len() as u64).div_ceil(BLOCK_SIZE) - first;
        if self.is_frozen() {
            // Not even a block that nobody refers to may change after a seal, which waits only for those already here.
            return Err(Error::Frozen);
        }
        let segments = self.allocate(count as u32)?;
        let sequence = self
            .write_into(&segments, first as u32, count as u32, offset, data, below)
            .inspect_err(|_| {
                let mut space = locked(&self.space);
                segments.iter().for_each(|s| space.release(*s));
            })?;
        self.commit(sequence)
    }

    /// Stores data in new blocks and switches the index to them; returns the number of the record.
    fn write_into(
        &self,
        segments: &[Segment],
        first: u32,
        count: u32,
        offset: u64,
        data: &[u8],
        below: &dyn ReadAt,
    ) -> Result<u64> {
        let mut extents = Vec::with_capacity(segments.len());
        let mut start = first;
        for (source, len) in segments {
            extents.push(Extent {
                start,
                len: *len,
                source: *source,
                zero: false,
            });
            start += len;
        }
        if data.len() as u64 == u64::from(count) * BLOCK_SIZE {
            self.store(segments, data)?;
            return Ok(self.publish(&extents, &[])?.expect("nothing was compared"));
        }
        let mut edges = vec![first];
        if count > 1 {
            edges.push(first + count - 1);
        }
        let skip = (offset - u64::from(first) * BLOCK_SIZE) as usize;
        let mut whole = vec![0; count as usize * BLOCK_SIZE as usize];
        loop {
            // Held until the index is switched: a block that is replaced and reused meanwhile would look unchanged.
            let (_reader, was) = {
                let state = self.read_state();
                let was: Vec<(u32, Was)> = edges.iter().map(|b| (*b, lookup(&state, *b))).collect();
                (self.enter(&state), was)
            };
            for (block, was) in &was {
                let at = (block - first) as usize * BLOCK_SIZE as usize;
                let target = &mut whole[at..at + BLOCK_SIZE as usize];
                match was {
                    Some((_, true)) => target.fill(0),
                    Some((source, false)) => self
                        .read_data(target, u64::from(*source) * BLOCK_SIZE)
                        .map_err(Error::io(
                            "read the rest of a block that is written in part",
                        ))?,
                    None => read_extended(below, target, u64::from(*block) * BLOCK_SIZE).map_err(
                        Error::io("read the rest of a block that is written in part"),
                    )?,
                }
            }
            whole[skip..skip + data.len()].copy_from_slice(data);
            self.store(segments, &whole)?;
            if let Some(sequence) = self.publish(&extents, &was)? {
                return Ok(sequence);
            }
        }
    }

    /// Writes data to blocks that are not in use.
    fn store(&self, segments: &[Segment], mut data: &[u8]) -> Result<()> {
        for (start, len) in segments {
            let (part, rest) = data.split_at(*len as usize * BLOCK_SIZE as usize);
            self.file
                .write_all_at(part, u64::from(*start) * BLOCK_SIZE)
                .map_err(Error::io(format_args!("write {}", self.path.display())))?;
            data = rest;
        }
        Ok(())
    }

    /// Switches the index to new extents and logs that under the number it returns. Does nothing and returns `None` when
    /// a block of `was` is no longer what it was.
    fn publish(&self, extents: &[Extent], was: &[(u32, Was)]) -> Result<Option<u64>> {
        let mut state = self.write_state();
        if state.frozen {
            return Err(Error::Frozen);
        }
        if was
            .iter()
            .any(|(block, was)| lookup(&state, *block) != *was)
        {
            return Ok(None);
        }
        if extents.iter().any(|e| u64::from(e.end()) > state.blocks()) {
            return Err(Error::Argument(
                "the disk became smaller during the write".into(),
            ));
        }
        // Each extent adds its own entries and may cut one in two.
        let more: u64 = extents
            .iter()
            .map(|e| u64::from(e.len.div_ceil(super::ENTRY_BLOCKS)) + 1)
            .sum();
        if state.map.entries() + more > MAX_REAL_ENTRIES {
            return Err(Error::Limit {
                what: "the number of index entries of the upper",
                value: state.map.entries() + more,
                max: MAX_REAL_ENTRIES,
                remedy: "seal it and continue in a new one",
            });
        }
        let mut sequence = state.sequence;
        for group in extents.chunks(journal::MAX_ITEMS) {
            sequence = state.record(&Record::Extents(group.to_vec()));
            let State {
                map,
                freed,
                freed_blocks,
                epoch,
                ..
            } = &mut *state;
            for extent in group {
                map.insert(*extent, &mut |start, len| {
                    retire(freed, freed_blocks, sequence, *epoch, (start, len))
                });
            }
        }
        Ok(Some(sequence))
    }

    fn allocate(&self, count: u32) -> Result<Vec<Segment>> {
        if !locked(&self.space).fits(count) {
            self.reclaim();
        }
        locked(&self.space).allocate(count)
    }

    /// Makes blocks that nobody can need any more available.
    fn reclaim(&self) {
        let mut state = self.write_state();
        // The epoch advances when nobody is left in the one before the current, which shares the counter of the next.
        // Two steps let go of everything freed so far.
        for _ in 0..2 {
            if self.readers[((state.epoch + 1) & 1) as usize].load(Ordering::Acquire) == 0 {
                state.epoch += 1;
            }
        }
        let promises_nothing = self.durability == Durability::None;
        let mut space = locked(&self.space);
        space.set_live(state.map.data_units());
        while let Some(freed) = state.freed.front().copied() {
            if freed.epoch + 2 > state.epoch || (freed.sequence > state.safe && !promises_nothing) {
                break;
            }
            state.freed.pop_front();
            state.freed_blocks -= u64::from(freed.segment.1);
            space.release(freed.segment);
        }
    }
}

fn retire(
    freed: &mut VecDeque<Freed>,
    blocks: &mut u64,
    sequence: u64,
    epoch: u64,
    segment: Segment,
) {
    freed.push_back(Freed {
        sequence,
        epoch,
        segment,
    });
    *blocks += u64::from(segment.1);
}

fn lookup(state: &State, block: u32) -> Was {
    state.map.get(block).map(|e| {
        if e.zero {
            (0, true)
        } else {
            (e.source + (block - e.start), false)
        }
    })
}
