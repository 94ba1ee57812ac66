//! Traces: what a first start reads, in the order in which it reads it.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use lsmt::header::SECTOR;
use lsmt::index::Origin;
use lsmt::stack::Stack;
use lsmt::trace::{Record, MAX_COUNT};

use crate::layers::regular_file;

/// Unit in which first use is told apart.
const BLOCK: u64 = 4096;
/// Most records kept; what comes later is not recorded.
const MAX_RECORDS: usize = 1 << 20;
/// Threads that prefetch for one image.
const PREFETCHERS: usize = 4;

/// Notes the first use of every block while it is switched on. Costs one load while it is not.
#[derive(Default)]
pub struct Recorder {
    on: AtomicBool,
    notes: Mutex<Notes>,
}

#[derive(Default)]
struct Notes {
    /// One bit for each block of the image.
    seen: Vec<u64>,
    records: Vec<Record>,
}

impl Notes {
    /// Marks a block, and says whether it was not marked before.
    fn mark(&mut self, block: u64) -> bool {
        let (word, bit) = ((block / 64) as usize, 1 << (block % 64));
        if self.seen.len() <= word {
            self.seen.resize(word + 1, 0);
        }
        let fresh = self.seen[word] & bit == 0;
        self.seen[word] |= bit;
        fresh
    }

    fn add(&mut self, record: Record) {
        let joins = |last: &&mut Record| {
            last.layer == record.layer
                && last.offset + last.count == record.offset
                && last.count + record.count <= MAX_COUNT
        };
        if let Some(last) = self.records.last_mut().filter(joins) {
            last.count += record.count;
        } else if self.records.len() < MAX_RECORDS {
            self.records.push(record);
        }
    }
}

impl Recorder {
    /// Forgets everything and begins.
    pub fn start(&self) {
        *self.notes() = Notes::default();
        self.on.store(true, Relaxed);
    }

    /// Ends, and returns what was noted.
    pub fn stop(&self) -> Vec<Record> {
        self.on.store(false, Relaxed);
        std::mem::take(&mut *self.notes()).records
    }

    /// Whether reads are noted.
    pub fn is_on(&self) -> bool {
        self.on.load(Relaxed)
    }

    /// A range of bytes was read; what comes from `stack` is noted.
    pub fn note(&self, stack: &Stack, offset: u64, len: usize) {
        if !self.is_on() || len == 0 {
            return;
        }
        let mut notes = self.notes();
        let last = (offset + len as u64 - 1) / BLOCK;
        for block in offset / BLOCK..=last {
            if !notes.mark(block) {
                continue;
            }
            let sectors = block * BLOCK / SECTOR..(block + 1) * BLOCK / SECTOR;
            let _ = stack.pieces(sectors, &mut |piece| {
                if let Origin::Data { slot, sector } = piece.origin {
                    if let Some(layer) = layer_of(stack, usize::from(slot)) {
                        notes.add(Record {
                            layer,
                            offset: sector * SECTOR,
                            count: piece.len * SECTOR,
                        });
                    }
                }
                Ok::<(), ()>(())
            });
        }
    }

    fn notes(&self) -> std::sync::MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The layer whose own file a source is.
fn layer_of(stack: &Stack, slot: usize) -> Option<u32> {
    let mut first = 0;
    for (number, layer) in stack.layers().iter().enumerate() {
        if slot == first {
            return Some(number as u32);
        }
        first += layer.sources().len();
    }
    None
}

/// Reads a trace file.
pub fn load(path: &Path) -> lsmt::Result<Vec<Record>> {
    regular_file(path).map_err(|source| lsmt::Error::Io {
        action: format!("open {}", path.display()),
        source,
    })?;
    lsmt::trace::read(&lsmt::source::FileSource::open(path)?)
}

/// Brings what a trace names closer, in its order, in threads of their own. Errors end it early and mean nothing.
pub fn prefetch(stack: Arc<Stack>, records: Vec<Record>) {
    let work = Arc::new((stack, records, AtomicUsize::new(0)));
    for number in 0..PREFETCHERS {
        let work = work.clone();
        let started = thread::Builder::new()
            .name(format!("prefetch-{number}"))
            .spawn(move || {
                let (stack, records, next) = &*work;
                let mut buf = vec![0; MAX_COUNT as usize];
                while let Some(record) = records.get(next.fetch_add(1, Relaxed)) {
                    let layer = stack.layers().get(record.layer as usize);
                    let Some(source) = layer.and_then(|layer| layer.sources().first()) else {
                        return;
                    };
                    let part = &mut buf[..record.count as usize];
                    if source.read_at(part, record.offset).is_err() {
                        return;
                    }
                }
            });
        if started.is_err() {
            return;
        }
    }
}
