//! What makes writes survive: records, flushes, and the rewriting of a journal that became long.

use std::path::Path;

use super::journal::{self, Head, Journal, Record};
use super::{locked, sync_parent, Durability, Upper};
use crate::error::{Error, Result};
use crate::extents::ExtentMap;

/// Unusable blocks, waiting for a flush nobody asks for, at which the upper flushes by itself: 64 MiB, or a quarter of what
/// is live.
const PENDING: u64 = 16384;

/// Least length of a journal, in bytes, at which it is written anew.
const JOURNAL: u64 = 4 << 20;

/// Items of a record cost this many bytes.
const RECORD_BYTES: u64 = 32;

impl Upper {
    /// Makes every acknowledged write durable, as far as the durability promises that. Waiting flushes share the work.
    pub fn flush(&self) -> Result<()> {
        if self.durability != Durability::Flush {
            return Ok(());
        }
        let wanted = self.read_state().changed;
        let mut durable = locked(&self.durable);
        if durable.failed {
            return Err(lost(&self.path));
        }
        if durable.sequence >= wanted {
            return Ok(());
        }
        let covered = self.read_state().changed;
        // A failed flush may have dropped the dirty pages: trying again would succeed and mean nothing.
        self.file
            .sync_data()
            .map_err(Error::io(format_args!("flush {}", self.path.display())))
            .inspect_err(|_| durable.failed = true)?;
        let barrier = self.write_state().record(&Record::Barrier(covered));
        self.commit(barrier)?;
        if let Some(current) = &*locked(&self.journal) {
            current
                .journal
                .sync()
                .inspect_err(|_| durable.failed = true)?;
        }
        durable.sequence = covered;
        let mut state = self.write_state();
        state.safe = state.safe.max(covered);
        Ok(())
    }

    /// Writes all records up to a number. Whoever comes first writes for all who wait.
    pub(super) fn commit(&self, sequence: u64) -> Result<()> {
        if self.durability == Durability::None {
            return Ok(());
        }
        let mut journal = locked(&self.journal);
        let Some(current) = &mut *journal else {
            return Ok(());
        };
        if current.written >= sequence {
            return Ok(());
        }
        let (log, last) = {
            let mut state = self.write_state();
            (std::mem::take(&mut state.log), state.sequence)
        };
        current.journal.append(&log)?;
        current.written = last;
        if self.durability == Durability::Process {
            let mut state = self.write_state();
            state.safe = state.safe.max(last);
        }
        Ok(())
    }

    /// What has to be done now and then, in the thread of a writer.
    pub(super) fn housekeep(&self) -> Result<()> {
        let (pending, live, entries) = {
            let state = self.read_state();
            (
                state.freed_blocks,
                state.map.data_units(),
                state.map.len() as u64,
            )
        };
        if self.durability == Durability::Flush && pending > PENDING.max(live / 4) {
            self.flush()?;
        }
        let long = |journal: &Journal| journal.len() > JOURNAL.max(4 * RECORD_BYTES * entries);
        if locked(&self.journal)
            .as_ref()
            .is_some_and(|state| long(&state.journal))
        {
            self.checkpoint()?;
        }
        Ok(())
    }

    /// Replaces the journal by one that holds just the current index. Writers wait meanwhile.
    pub(super) fn checkpoint(&self) -> Result<()> {
        let mut durable = locked(&self.durable);
        let mut journal = locked(&self.journal);
        let Some(current) = &mut *journal else {
            return Ok(());
        };
        let flush = self.durability == Durability::Flush;
        let (head, records, log, last) = {
            let mut state = self.write_state();
            // The same key, and numbers that end where the old ones do: what is logged from now on fits either file.
            let head = Head {
                virtual_size: state.virtual_size,
                ..self.head(state.key)
            };
            let records = snapshot(&state.map, &head, state.sequence, flush);
            (
                head,
                records,
                std::mem::take(&mut state.log),
                state.sequence,
            )
        };
        let run = || -> Result<Journal> {
            if flush {
                // All data the snapshot refers to was written before it was taken.
                self.file
                    .sync_data()
                    .map_err(Error::io(format_args!("flush {}", self.path.display())))?;
            }
            Journal::replace(current.journal.path(), &head, &records, flush)
        };
        match run() {
            Ok(fresh) => current.journal = fresh,
            Err(error) => {
                current.journal.postpone(&log);
                durable.failed |= flush;
                return Err(error);
            }
        }
        current.written = last;
        if flush {
            sync_parent(&self.path)
                .map_err(Error::io(format_args!(
                    "flush the directory of {}",
                    self.path.display()
                )))
                .inspect_err(|_| durable.failed = true)?;
            durable.sequence = durable.sequence.max(last);
        }
        let mut state = self.write_state();
        state.safe = state.safe.max(last);
        Ok(())
    }

    fn head(&self, key: u64) -> Head {
        Head {
            key,
            ..Head::fresh(self.identity.uuid, 0)
        }
    }
}

/// Encodes the whole index as records under `head`, the last of which has number `last`; with a barrier if asked for.
pub(super) fn snapshot(map: &ExtentMap, head: &Head, last: u64, barrier: bool) -> Vec<u8> {
    let mut records: Vec<Record> = Vec::new();
    let mut extents = map.iter().peekable();
    while extents.peek().is_some() {
        records.push(Record::Extents(
            extents.by_ref().take(journal::MAX_ITEMS).collect(),
        ));
    }
    if barrier {
        records.push(Record::Barrier(last));
    }
    let mut bytes = Vec::new();
    for (i, record) in records.iter().enumerate() {
        // Numbers start high enough for this never to go below zero.
        journal::encode(
            head.key,
            last - (records.len() - 1 - i) as u64,
            record,
            &mut bytes,
        );
    }
    bytes
}

fn lost(path: &Path) -> Error {
    let cause =
        std::io::Error::other("an earlier flush failed, and what it was to write may be lost");
    Error::io(format_args!("flush {}", path.display()))(cause)
}
