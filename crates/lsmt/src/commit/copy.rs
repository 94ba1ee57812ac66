//! Copying data, and leaving out what is not needed.

use std::io::Write;
use std::ops::Range;
use std::sync::Arc;

use super::plan::{Plan, GRANULE, PIECE};
use super::{Elide, Options};
use crate::entry::{Entry, FIRST_SECTOR};
use crate::error::{Error, Result};
use crate::header::SECTOR;
use crate::source::ReadAt;
use crate::tail;

/// Sectors read and written at once.
const BATCH: u64 = 2048;

/// Copies data in batches.
pub(super) struct Writer<'a, W> {
    sources: &'a [Arc<dyn ReadAt>],
    elide: Elide<'a>,
    plan: Plan,
    /// Entries to emit next; those with data are together not longer than a batch.
    batch: Vec<Entry>,
    batch_sectors: u64,
    /// Source entries not yet emitted; leaves room for them in the index.
    unplanned: usize,
    elided: u64,
    buf: Vec<u8>,
    below: Vec<u8>,
    out: &'a mut W,
}

impl<'a, W: Write> Writer<'a, W> {
    /// A writer that will be given `entries` entries.
    pub fn new(
        sources: &'a [Arc<dyn ReadAt>],
        options: &Options<'a>,
        entries: usize,
        out: &'a mut W,
    ) -> Writer<'a, W> {
        Writer {
            sources,
            elide: options.elide,
            plan: Plan::new(options.layout),
            batch: Vec::new(),
            batch_sectors: 0,
            unplanned: entries,
            elided: 0,
            buf: Vec::new(),
            below: Vec::new(),
            out,
        }
    }

    /// Writes what is left and returns the layout, and how many sectors were left out.
    pub fn finish(mut self) -> Result<(Plan, u64)> {
        self.flush()?;
        Ok((self.plan, self.elided))
    }

    pub fn add(&mut self, entry: Entry) -> Result<()> {
        if entry.is_zeroed() {
            self.batch.push(entry);
            return Ok(());
        }
        let mut rest = entry;
        loop {
            // Cut only at whole pieces counted from the start of the entry, so that batches leave no trace.
            let room = (BATCH - self.batch_sectors) / PIECE * PIECE;
            if rest.len() <= BATCH - self.batch_sectors {
                self.batch_sectors += rest.len();
                self.batch.push(rest);
                return Ok(());
            }
            if room > 0 {
                let cut = rest.offset() + room;
                self.batch.push(rest.clip(&(rest.offset()..cut)));
                rest = rest.clip(&(cut..rest.end()));
                self.unplanned += 1;
            }
            self.flush()?;
        }
    }

    /// Reads, filters and writes the batch.
    fn flush(&mut self) -> Result<()> {
        let batch = std::mem::take(&mut self.batch);
        self.batch_sectors = 0;
        self.read(&batch)?;
        let mut at = 0;
        let mut keep_from = 0;
        for entry in &batch {
            self.unplanned -= 1;
            tail::check_count(self.plan.gluer.len() as u64)?;
            if entry.is_zeroed() {
                if !matches!(self.elide, Elide::ZerosAtBottom) {
                    self.plan.emit(*entry);
                }
                continue;
            }
            let most =
                self.plan.gluer.len() + self.unplanned + (entry.len() / GRANULE + 2) as usize;
            let room = tail::check_count(most as u64).is_ok();
            if room && !matches!(self.elide, Elide::Nothing) {
                self.below(*entry)?;
                for (range, verdict) in self.judge(*entry, at) {
                    let part = entry.clip(&range);
                    let bytes = part.len() as usize * SECTOR as usize;
                    match verdict {
                        Verdict::Keep => self.plan.emit(part),
                        Verdict::Zero => self.plan.emit(Entry::zeroed(
                            part.offset(),
                            part.len(),
                            FIRST_SECTOR,
                            part.slot(),
                        )),
                        Verdict::Drop => {}
                    }
                    if verdict != Verdict::Keep {
                        self.write(keep_from..at)?;
                        keep_from = at + bytes;
                        self.elided += part.len();
                    }
                    at += bytes;
                }
            } else {
                self.plan.emit(*entry);
                at += entry.len() as usize * SECTOR as usize;
            }
        }
        self.write(keep_from..at)?;
        self.batch = batch;
        self.batch.clear();
        Ok(())
    }

    /// Fills the buffer with the data of the batch; neighbours in a source are read at once.
    fn read(&mut self, batch: &[Entry]) -> Result<()> {
        let data = || batch.iter().filter(|e| !e.is_zeroed());
        let sectors: u64 = data().map(|e| e.len()).sum();
        self.buf.resize((sectors * SECTOR) as usize, 0);
        let mut rest = self.buf.as_mut_slice();
        let mut batch = data().peekable();
        while let Some(first) = batch.next() {
            let (slot, source) = (first.slot(), first.source());
            let mut len = first.len();
            while let Some(next) = batch.next_if(|n| n.slot() == slot && n.source() == source + len)
            {
                len += next.len();
            }
            let (target, after) = rest.split_at_mut((len * SECTOR) as usize);
            rest = after;
            self.sources[usize::from(slot)]
                .read_exact_at(target, source * SECTOR)
                .map_err(Error::io("read the data of a layer"))?;
        }
        Ok(())
    }

    fn write(&mut self, range: Range<usize>) -> Result<()> {
        self.out
            .write_all(&self.buf[range])
            .map_err(Error::io("write a layer"))
    }

    /// Fetches what the disk below has in the place of `entry`.
    fn below(&mut self, entry: Entry) -> Result<()> {
        if let Elide::Unchanged(disk) = self.elide {
            self.below.resize((entry.len() * SECTOR) as usize, 0);
            let got = disk
                .read_at(&mut self.below, entry.offset() * SECTOR)
                .map_err(Error::io("read the disk below a layer"))?;
            self.below[got..].fill(0);
        }
        Ok(())
    }

    /// Decides for each granule of an entry, whose data is at `at` in the buffer. Equal verdicts are joined.
    fn judge(&self, entry: Entry, at: usize) -> Vec<(Range<u64>, Verdict)> {
        let mut verdicts: Vec<(Range<u64>, Verdict)> = Vec::new();
        let mut sector = entry.offset();
        while sector < entry.end() {
            let end = ((sector / GRANULE + 1) * GRANULE).min(entry.end());
            let bytes = ((sector - entry.offset()) * SECTOR) as usize
                ..((end - entry.offset()) * SECTOR) as usize;
            let data = &self.buf[at + bytes.start..at + bytes.end];
            let verdict = match self.elide {
                Elide::Unchanged(_) if data == &self.below[bytes] => Verdict::Drop,
                _ if !is_zero(data) => Verdict::Keep,
                Elide::ZerosAtBottom => Verdict::Drop,
                _ => Verdict::Zero,
            };
            match verdicts.last_mut() {
                Some((range, last)) if *last == verdict => range.end = end,
                _ => verdicts.push((sector..end, verdict)),
            }
            sector = end;
        }
        verdicts
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Keep,
    Zero,
    Drop,
}

/// Whether all bytes are zero. The compiler vectorises the inner loop.
fn is_zero(bytes: &[u8]) -> bool {
    bytes
        .chunks(256)
        .all(|chunk| chunk.iter().fold(0, |all, byte| all | byte) == 0)
}
