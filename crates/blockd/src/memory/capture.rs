//! From a frozen process to a layer.

use std::fs::OpenOptions;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use lsmt::commit::{commit, Elide, Options, Report};
use lsmt::header::Identity;
use lsmt::layer::Layer;
use lsmt::source::ReadAt;
use lsmt::stack::Stack;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::guest::{identity as identity_index, Guest, Scan};
use super::live::{Live, State};
use super::process::Process;
use super::staging::Staging;
use super::PAGE;
use crate::failpoint;
use crate::failure::{Failure, Result};

/// Most ranges of memory in one capture.
const MAX_RANGES: usize = 4096;

/// A piece of guest memory in the process. All numbers are bytes in whole pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
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
    pub ranges: Vec<Place>,
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
    identity: Identity,
    /// Private memory in bytes, once it was scanned.
    found: OnceLock<u64>,
}

impl Capture {
    /// Makes the memory of the process readable as a layer over `below`. Without `copy` this takes about a millisecond,
    /// however much there is. `plan` was checked.
    pub fn start(uuid: Uuid, plan: Plan, below: Arc<Stack>) -> Result<Capture> {
        let action = || format!("capture the memory of process {}", plan.pid);
        let open = || {
            let process = Process::open(plan.pid, plan.start_time)?;
            Guest::open(process, &plan.ranges)
        };
        let guest = Arc::new(open().map_err(Failure::io(action()))?);
        let start_time = guest.process().start_time();
        let parent = below
            .layers()
            .last()
            .map_or(Uuid::nil(), |layer| layer.identity().uuid);
        let identity = Identity {
            uuid,
            parent,
            tag: Vec::new(),
        };
        let index = identity_index(&plan.ranges).map_err(Failure::io(action()))?;
        let live = Arc::new(Live::new(
            plan.virtual_size,
            below,
            State::Unscanned(guest.clone()),
        ));
        let source: Arc<dyn ReadAt> = live.clone();
        let layer = Layer::new(identity.clone(), plan.virtual_size, index, vec![source])
            .map_err(Failure::lsmt("describe the captured memory"))?;
        let capture = Capture {
            plan,
            start_time,
            layer: Arc::new(layer),
            live,
            identity,
            found: OnceLock::new(),
        };
        if capture.plan.copy {
            let copy = || {
                let scan = capture.scan(&guest)?;
                let staging = Staging::copy(&guest, &scan.runs)?;
                capture
                    .live
                    .set(State::Copied(staging, Arc::new(scan.index)));
                Ok(())
            };
            let action = format!("capture the memory of process {}", capture.plan.pid);
            copy().map_err(Failure::io(action))?;
        }
        Ok(capture)
    }

    fn scan(&self, guest: &Guest) -> io::Result<Scan> {
        let scan = guest.scan(self.live.below())?;
        let _ = self.found.set(scan.runs.iter().map(|(_, len)| len).sum());
        Ok(scan)
    }

    /// Copies all pages to a new file at `path`, and then reads from there. The process is not needed any more when this
    /// returns; the file is not yet on stable storage.
    pub fn drain(
        &self,
        path: &Path,
        open: impl FnOnce() -> lsmt::Result<Arc<Layer>>,
    ) -> Result<Report> {
        let action = || format!("write captured memory to {}", path.display());
        let report = self
            .write(path)
            .inspect_err(|failure| self.note_loss(failure))?;
        failpoint::hit("capture-drained");
        let file = open().map_err(Failure::lsmt(action()))?;
        let stack = self
            .live
            .below()
            .push(file)
            .and_then(|stack| stack.levelled())
            .map_err(Failure::lsmt(action()))?;
        self.live.set(State::File(Arc::new(stack)));
        Ok(report)
    }

    fn write(&self, path: &Path) -> Result<Report> {
        let action = || format!("write captured memory to {}", path.display());
        let index = match &*self.live.state() {
            State::Unscanned(guest) => {
                let scan = self.scan(guest).map_err(Failure::io(action()))?;
                let index = Arc::new(scan.index);
                self.live.set(State::Scanned(guest.clone(), index.clone()));
                index
            }
            State::Scanned(_, index) | State::Copied(_, index) => index.clone(),
            State::File(_) | State::Lost(_) => {
                return Err(Failure::conflict("this capture was finished already"))
            }
        };
        failpoint::hold("scanned");
        // A file may be left from an attempt that failed.
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .open(path)
            .map_err(Failure::io(action()))?;
        let below = self.live.below();
        let options = Options {
            identity: self.identity.clone(),
            virtual_size: self.plan.virtual_size,
            elide: if below.layers().is_empty() {
                Elide::ZerosAtBottom
            } else {
                Elide::Unchanged(&**below)
            },
            ..Options::default()
        };
        let mut out = BufWriter::with_capacity(1 << 20, file);
        let report = commit(&index, self.layer.sources(), &options, &mut out)
            .map_err(Failure::lsmt(action()))?;
        out.flush().map_err(Failure::io(action()))?;
        Ok(report)
    }

    /// If the process has ended, no page of it will ever be read again.
    fn note_loss(&self, failure: &Failure) {
        let gone = match &*self.live.state() {
            State::Unscanned(guest) | State::Scanned(guest, _) => !guest.process().is_alive(),
            _ => false,
        };
        if gone {
            self.live.set(State::Lost(failure.message.clone()));
        }
    }

    /// Bytes of private memory, once they are known.
    pub fn bytes(&self) -> Option<u64> {
        self.found.get().copied()
    }

    /// Whether another attempt to write the file could succeed.
    pub fn can_retry(&self) -> bool {
        match &*self.live.state() {
            State::Unscanned(guest) | State::Scanned(guest, _) => guest.process().is_alive(),
            State::Copied(..) => true,
            State::File(_) | State::Lost(_) => false,
        }
    }
}
