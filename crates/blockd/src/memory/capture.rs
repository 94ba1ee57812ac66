//! From a frozen process to a layer.

use std::fs::OpenOptions;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;

use lsmt::commit::{commit, Elide, Options, Report};
use lsmt::entry::{Entry, MAX_LEN, MAX_REAL_ENTRIES};
use lsmt::header::{Identity, SECTOR};
use lsmt::index::{Index, Origin};
use lsmt::layer::Layer;
use lsmt::source::ReadAt;
use lsmt::stack::Stack;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::live::{Live, Place};
use super::pagemap::Pagemap;
use super::process::{mappings, Mapping, Process};
use super::staging::Staging;
use super::PAGE;
use crate::failpoint;
use crate::failure::{Failure, Result};

/// Most ranges of memory in one capture.
const MAX_RANGES: usize = 4096;
/// Longest entry in whole pages.
const ENTRY: u64 = MAX_LEN / (PAGE / SECTOR) * PAGE;

/// A piece of guest memory in the process. All numbers are bytes in whole pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    /// Address in the process.
    pub address: u64,
    pub size: u64,
    /// Position in the memory image.
    pub offset: u64,
}

/// What to capture.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The frozen process.
    pub pid: u32,
    /// When it started, in clock ticks since boot (field 22 of its `stat`).
    #[serde(default)]
    pub start_time: Option<u64>,
    /// Its guest memory.
    pub ranges: Vec<Range>,
    /// Bytes of the memory image.
    pub virtual_size: u64,
    /// Copy everything before the call returns, so that the process may go on.
    #[serde(default)]
    pub copy: bool,
}

impl Plan {
    /// Sorts the ranges and refuses what makes no sense.
    pub fn check(&mut self) -> Result<()> {
        let whole = |number: u64| number % PAGE == 0;
        if self.virtual_size == 0
            || !whole(self.virtual_size)
            || self.virtual_size > lsmt::header::MAX_VIRTUAL_SIZE
        {
            return Err(Failure::bad_request(format!(
                "memory has whole pages of {PAGE} bytes, not {} bytes",
                self.virtual_size
            )));
        }
        if self.ranges.is_empty() || self.ranges.len() > MAX_RANGES {
            return Err(Failure::bad_request(format!(
                "a capture has 1 to {MAX_RANGES} ranges"
            )));
        }
        self.ranges.sort_unstable_by_key(|range| range.offset);
        let mut end = 0;
        for range in &self.ranges {
            let last = range.offset.checked_add(range.size);
            let fits = last.is_some_and(|last| last <= self.virtual_size)
                && range
                    .address
                    .checked_add(range.size)
                    .is_some_and(|last| last < 1 << 63);
            if !(whole(range.address) && whole(range.size) && whole(range.offset))
                || range.size == 0
                || !fits
            {
                return Err(Failure::bad_request(format!(
                    "{range:?} is not whole pages inside the memory of {} bytes",
                    self.virtual_size
                )));
            }
            if range.offset < end {
                return Err(Failure::bad_request(format!(
                    "{range:?} overlaps another range"
                )));
            }
            end = range.offset + range.size;
        }
        Ok(())
    }
}

/// A capture under way.
pub struct Capture {
    plan: Plan,
    /// When the process started.
    pub start_time: u64,
    /// The layer, readable from the beginning.
    pub layer: Arc<Layer>,
    live: Arc<Live>,
    /// What the memory was a private mapping of.
    below: Arc<Stack>,
    identity: Identity,
}

impl Capture {
    /// Finds the private pages of the process. Costs about a millisecond for each 256 MiB of memory, and with `copy` the time
    /// to copy what was found. `plan` was checked.
    pub fn start(uuid: Uuid, plan: Plan, below: Arc<Stack>) -> Result<Capture> {
        let action = || format!("capture the memory of process {}", plan.pid);
        let process = Process::open(plan.pid, plan.start_time).map_err(Failure::io(action()))?;
        let (index, runs) = scan(&plan, &below).map_err(Failure::io(action()))?;
        let start_time = process.start_time();
        let place = if plan.copy {
            Place::Staging(
                Staging::copy(&process, &plan.ranges, &runs).map_err(Failure::io(action()))?,
            )
        } else {
            Place::Process(process, plan.ranges.clone())
        };
        let live = Arc::new(Live::new(plan.virtual_size, place));
        let parent = below
            .layers()
            .last()
            .map_or(Uuid::nil(), |layer| layer.identity().uuid);
        let identity = Identity {
            uuid,
            parent,
            tag: Vec::new(),
        };
        let source: Arc<dyn ReadAt> = live.clone();
        let layer = Layer::new(identity.clone(), plan.virtual_size, index, vec![source])
            .map_err(Failure::lsmt("describe the captured memory"))?;
        Ok(Capture {
            plan,
            start_time,
            layer: Arc::new(layer),
            live,
            below,
            identity,
        })
    }

    /// Copies all pages to a new file at `path`, and then reads from there. The process is not needed any more when this
    /// returns; the file is not yet on stable storage.
    pub fn drain(
        &self,
        path: &Path,
        open: impl FnOnce() -> lsmt::Result<Arc<Layer>>,
    ) -> Result<Report> {
        let action = || format!("write captured memory to {}", path.display());
        // A file may be left from an attempt that failed.
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .open(path)
            .map_err(Failure::io(action()))?;
        let options = Options {
            identity: self.identity.clone(),
            virtual_size: self.plan.virtual_size,
            elide: if self.below.layers().is_empty() {
                Elide::ZerosAtBottom
            } else {
                Elide::Unchanged(&*self.below)
            },
            ..Options::default()
        };
        let mut out = BufWriter::with_capacity(1 << 20, file);
        let written = commit(self.layer.index(), self.layer.sources(), &options, &mut out)
            .map_err(Failure::lsmt(action()))
            .and_then(|report| out.flush().map(|()| report).map_err(Failure::io(action())));
        let report = match written {
            Ok(report) => report,
            Err(failure) => {
                self.note_loss(&failure);
                return Err(failure);
            }
        };
        failpoint::hit("capture-drained");
        let file = open().map_err(Failure::lsmt(action()))?;
        let stack = self
            .below
            .push(file)
            .and_then(|stack| stack.levelled())
            .map_err(Failure::lsmt(action()))?;
        self.live.set(Place::File(Arc::new(stack)));
        Ok(report)
    }

    /// If the process has ended, no page of it will ever be read again.
    fn note_loss(&self, failure: &Failure) {
        let lost = matches!(&*self.live.place(), Place::Process(process, _) if !process.is_alive());
        if lost {
            self.live.set(Place::Lost(failure.message.clone()));
        }
    }

    /// Bytes of private memory that were found.
    pub fn bytes(&self) -> u64 {
        self.layer.index().sectors().0 * SECTOR
    }

    /// Whether another attempt to write the file could succeed.
    pub fn can_retry(&self) -> bool {
        match &*self.live.place() {
            Place::Process(process, _) => process.is_alive(),
            Place::Staging(_) => true,
            Place::File(_) | Place::Lost(_) => false,
        }
    }
}

/// The index of the live layer, and its data as runs of position and length.
fn scan(plan: &Plan, below: &Stack) -> io::Result<(Index, Vec<(u64, u64)>)> {
    let mappings = mappings(plan.pid)?;
    let pagemap = Pagemap::open(plan.pid)?;
    let mut builder = Builder::default();
    for range in &plan.ranges {
        let mut at = range.address;
        let end = range.address + range.size;
        let mut next = mappings.partition_point(|mapping| mapping.end <= at);
        while at < end {
            let mapping = mappings.get(next).filter(|mapping| mapping.start <= at);
            let mapping = usable(mapping, at)?;
            let stop = end.min(mapping.end);
            let position = |address: u64| range.offset + (address - range.address);
            let mut seen = at;
            pagemap.private(at..stop, &mut |found| {
                builder.absent(position(seen)..position(found.start), mapping, below);
                builder.data(position(found.start)..position(found.end));
                seen = found.end;
            })?;
            builder.absent(position(seen)..position(stop), mapping, below);
            at = stop;
            next += 1;
        }
    }
    builder.finish()
}

fn usable(mapping: Option<&Mapping>, at: u64) -> io::Result<&Mapping> {
    let refuse = |reason: &str| {
        let message = format!("the memory at {at:#x} {reason}");
        Err(io::Error::new(io::ErrorKind::InvalidInput, message))
    };
    match mapping {
        None => refuse("is not mapped"),
        Some(mapping) if !mapping.private => {
            refuse("is a shared mapping; only what is private to the process can be captured")
        }
        Some(mapping) => Ok(mapping),
    }
}

/// Collects entries in order of their position.
#[derive(Default)]
struct Builder {
    entries: Vec<Entry>,
    runs: Vec<(u64, u64)>,
}

impl Builder {
    fn data(&mut self, range: std::ops::Range<u64>) {
        match self.runs.last_mut() {
            Some((start, len)) if *start + *len == range.start => *len += range.end - range.start,
            _ => self.runs.push((range.start, range.end - range.start)),
        }
        self.push(range, false);
    }

    /// Pages without content of their own show the file behind the mapping, which is the image below. Where there is no
    /// file they are zeros, which have to hide what the image has there.
    fn absent(&mut self, range: std::ops::Range<u64>, mapping: &Mapping, below: &Stack) {
        if mapping.has_file || range.is_empty() {
            return;
        }
        let sectors = range.start / SECTOR..range.end / SECTOR;
        let _ = below.pieces(sectors, &mut |piece| {
            if matches!(piece.origin, Origin::Data { .. }) {
                // Whole pages, inside the range.
                let from = (piece.start * SECTOR / PAGE * PAGE).max(range.start);
                let to = (piece.end() * SECTOR).next_multiple_of(PAGE).min(range.end);
                let from = self
                    .entries
                    .last()
                    .map_or(from, |last| from.max(last.end() * SECTOR));
                self.push(from..to, true);
            }
            Ok::<(), ()>(())
        });
    }

    fn push(&mut self, range: std::ops::Range<u64>, zeroed: bool) {
        let mut at = range.start;
        while at < range.end {
            let len = (range.end - at).min(ENTRY);
            let (sector, sectors) = (at / SECTOR, len / SECTOR);
            self.entries.push(if zeroed {
                Entry::zeroed(sector, sectors, lsmt::entry::FIRST_SECTOR, 0)
            } else {
                Entry::data(sector, sectors, sector, 0)
            });
            at += len;
        }
    }

    fn finish(self) -> io::Result<(Index, Vec<(u64, u64)>)> {
        if self.entries.len() as u64 > MAX_REAL_ENTRIES {
            let message = format!(
                "the changed memory is in {} pieces, a layer has at most {MAX_REAL_ENTRIES}",
                self.entries.len()
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let index = Index::new(self.entries).map_err(io::Error::from)?;
        Ok((index, self.runs))
    }
}
