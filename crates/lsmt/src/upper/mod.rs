//! The engine's own writable upper.
//!
//! The data file is a standard layer file without an index: a header, then blocks of 4 KiB. Sealing appends index and
//! trailer, in place, and the file is an ordinary layer from then on. Until then the index lives in memory and in a
//! journal beside the file (see the module `journal` for its format), and is private to this crate.
//!
//! **Writes** never touch a block that is in use: new content goes to a free block, then the index is switched. A block
//! that lost its meaning is used again as soon as nobody can need it: no reader is still looking at it, and the record
//! that replaced it is as durable as the upper promises. So a disk that is rewritten over and over stays about as large
//! as its live data. Sealing freezes the index first; nothing is written after that, so a sealed or frozen range never
//! changes.
//!
//! **Part of a block** is written by reading the rest of it, from here or from the layers below. The index is only
//! switched if that rest is still current, otherwise the block is put together again.
//!
//! | durability | survives the process | survives the machine |
//! |---|---|---|
//! | `None` | nothing | nothing |
//! | `Process` | every acknowledged write | nothing |
//! | `Flush` | every acknowledged write | every flushed write |
//!
//! All methods may be called from any thread.

mod io;
mod journal;
mod persist;
mod recover;
mod space;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rustix::fs::FlockOperation;

use crate::entry::Entry;
use crate::error::{Error, Result};
use crate::extents::ExtentMap;
use crate::header::{flags, Header, Identity, BLOCK, MAX_VIRTUAL_SIZE, SECTOR};
use crate::index::Index;
use crate::layer::{Layer, LayerKey};
use crate::source::FileSource;
use crate::tail::{self, Padding};
pub(crate) use journal::sync_parent;
use journal::{Head, Journal};
pub use recover::Recovery;
use space::{Segment, Space};

/// Bytes in a block, the unit of an upper.
pub const BLOCK_SIZE: u64 = BLOCK as u64;
/// Sectors in a block.
const SECTORS: u32 = (BLOCK_SIZE / SECTOR) as u32;
/// Longest exported index entry in blocks.
const ENTRY_BLOCKS: u32 = (crate::entry::MAX_LEN / SECTORS as u64) as u32;
/// First block that can hold data; the header is before it.
const FIRST_BLOCK: u32 = 1;

/// Number before that of the first record. A rewritten journal has up to 245 records more than the numbers it replaces.
const FIRST_RECORD: u64 = 1 << 20;

/// What a crash may take away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Durability {
    /// Everything since the last seal, even when only the process dies. No journal is written.
    None,
    /// Everything since the last seal when the machine dies; nothing when the process dies. Flushes do nothing.
    Process,
    /// Only what was not flushed when the machine dies; nothing when the process dies.
    Flush,
}

/// How an upper is created.
#[derive(Debug, Clone)]
pub struct Options {
    /// Ids of the layer this will become.
    pub identity: Identity,
    /// Size of the disk in bytes, a multiple of 512.
    pub virtual_size: u64,
    /// What a crash may take away.
    pub durability: Durability,
}

/// A sealed upper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sealed {
    /// Length of the layer file in bytes.
    pub file: u64,
    /// Index entries without padding.
    pub entries: u64,
}

/// A writable upper; see the module.
#[derive(Debug)]
pub struct Upper {
    file: File,
    path: PathBuf,
    identity: Identity,
    key: LayerKey,
    durability: Durability,
    state: RwLock<State>,
    space: Mutex<Space>,
    /// Held shared by everyone who may write to the data file; sealing waits for them.
    writers: RwLock<()>,
    /// Readers by parity of the epoch in which they looked at the index.
    readers: [AtomicU64; 2],
    /// Held while records are written; `None` without a journal.
    journal: Mutex<Option<JournalState>>,
    /// Number of the last record known to be durable. Held while flushing, so that one flush serves all who wait.
    durable: Mutex<Durable>,
    /// The result of a seal, and whether it is durable.
    sealed: Mutex<Option<(Sealed, bool)>>,
}

#[derive(Debug)]
struct JournalState {
    journal: Journal,
    /// Number of the last record written.
    written: u64,
}

#[derive(Debug)]
struct Durable {
    sequence: u64,
    /// The system lost data once; no promise can be made any more.
    failed: bool,
}

#[derive(Debug)]
struct State {
    map: ExtentMap,
    virtual_size: u64,
    frozen: bool,
    /// Number of the last record.
    sequence: u64,
    /// Number of the last record that is not a barrier.
    changed: u64,
    /// Key of the journal; 0 without one.
    key: u64,
    /// Encoded records not yet written.
    log: Vec<u8>,
    epoch: u64,
    /// Blocks that lost their meaning and may still be needed, oldest first.
    freed: VecDeque<Freed>,
    freed_blocks: u64,
    /// Records up to this number are as durable as promised; blocks they replaced may be used again.
    safe: u64,
}

#[derive(Debug, Clone, Copy)]
struct Freed {
    sequence: u64,
    epoch: u64,
    segment: Segment,
}

impl State {
    fn new(map: ExtentMap, virtual_size: u64) -> State {
        State {
            map,
            virtual_size,
            frozen: false,
            sequence: FIRST_RECORD,
            changed: FIRST_RECORD,
            key: 0,
            log: Vec::new(),
            epoch: 0,
            freed: VecDeque::new(),
            freed_blocks: 0,
            safe: FIRST_RECORD,
        }
    }

    /// Blocks of the disk, the last one possibly cut short.
    fn blocks(&self) -> u64 {
        self.virtual_size.div_ceil(BLOCK_SIZE)
    }

    fn record(&mut self, record: &journal::Record) -> u64 {
        self.sequence += 1;
        if !matches!(record, journal::Record::Barrier(_)) {
            self.changed = self.sequence;
        }
        if self.key != 0 {
            journal::encode(self.key, self.sequence, record, &mut self.log);
        }
        self.sequence
    }
}

fn new_map() -> ExtentMap {
    ExtentMap::new(true, ENTRY_BLOCKS)
}

fn check_size(virtual_size: u64) -> Result<()> {
    if virtual_size == 0 || virtual_size % SECTOR != 0 || virtual_size > MAX_VIRTUAL_SIZE {
        return Err(Error::Argument(format!(
            "a disk has 512 to {MAX_VIRTUAL_SIZE} bytes in whole sectors, not {virtual_size}"
        )));
    }
    Ok(())
}

/// A lock held for writing must not be taken by a second process.
fn lock_file(file: &File, path: &Path) -> Result<()> {
    rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive).map_err(|e| {
        Error::io(format_args!(
            "lock {}, which may be in use by another process",
            path.display()
        ))(e.into())
    })
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes to a file from an offset on.
struct At<'a> {
    file: &'a File,
    offset: u64,
}

impl std::io::Write for At<'_> {
    fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
        let count = self.file.write_at(data, self.offset)?;
        self.offset += count as u64;
        Ok(count)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Upper {
    /// Creates an empty upper at `path`, which must not exist. Its journal has the same name with the extension `jrn`.
    pub fn create(path: &Path, options: &Options) -> Result<Upper> {
        check_size(options.virtual_size)?;
        let header = Header::new(
            flags::HEADER | flags::DATA,
            options.virtual_size,
            options.identity.clone(),
        )
        .encode()?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)
            .map_err(Error::io(format_args!("create {}", path.display())))?;
        lock_file(&file, path)?;
        file.write_all_at(&header, 0)
            .map_err(Error::io(format_args!("write {}", path.display())))?;
        let mut state = State::new(new_map(), options.virtual_size);
        let journal = if options.durability == Durability::None {
            None
        } else {
            if options.durability == Durability::Flush {
                file.sync_data()
                    .map_err(Error::io(format_args!("flush {}", path.display())))?;
            }
            let head = Head::fresh(options.identity.uuid, options.virtual_size);
            state.key = head.key;
            let durable = options.durability == Durability::Flush;
            let journal = Journal::replace(&path.with_extension("jrn"), &head, &[], durable)?;
            if durable {
                sync_parent(path).map_err(Error::io(format_args!(
                    "flush the directory of {}",
                    path.display()
                )))?;
            }
            Some(JournalState {
                journal,
                written: state.sequence,
            })
        };
        let space = Space::new(FIRST_BLOCK);
        Ok(Upper::assemble(
            file,
            path,
            options.identity.clone(),
            options.durability,
            state,
            space,
            journal,
        ))
    }

    fn assemble(
        file: File,
        path: &Path,
        identity: Identity,
        durability: Durability,
        state: State,
        space: Space,
        journal: Option<JournalState>,
    ) -> Upper {
        Upper {
            file,
            path: path.to_owned(),
            identity,
            key: LayerKey::unique(),
            durability,
            state: RwLock::new(state),
            space: Mutex::new(space),
            writers: RwLock::new(()),
            readers: Default::default(),
            journal: Mutex::new(journal),
            durable: Mutex::new(Durable {
                sequence: FIRST_RECORD,
                failed: false,
            }),
            sealed: Mutex::new(None),
        }
    }

    /// Ids of the layer this will become.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Path of the data file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size of the disk in bytes.
    pub fn virtual_size(&self) -> u64 {
        self.read_state().virtual_size
    }

    /// Index entries a seal would write now.
    pub fn entries(&self) -> u64 {
        self.read_state().map.entries()
    }

    /// Bytes of current data, and bytes of the data file that are in use or reserved.
    pub fn usage(&self) -> (u64, u64) {
        let live = self.read_state().map.data_units();
        (
            live * BLOCK_SIZE,
            u64::from(locked(&self.space).end()) * BLOCK_SIZE,
        )
    }

    /// Whether writes are refused.
    pub fn is_frozen(&self) -> bool {
        self.read_state().frozen
    }

    /// Ends writing, at once and for good. Writes that are under way either are part of the frozen content or fail
    /// with [`Error::Frozen`] and have no effect.
    pub fn freeze(&self) {
        self.write_state().frozen = true;
    }

    /// The frozen content as a layer, readable at once from the index in memory.
    pub fn layer(&self) -> Result<Layer> {
        let (entries, virtual_size) = self.frozen_index()?;
        let size = u64::from(locked(&self.space).end()) * BLOCK_SIZE;
        // Opened anew: the lock of the upper's own file must end with the upper, however long the layer lives.
        let file = File::open(&self.path)
            .map_err(Error::io(format_args!("open {}", self.path.display())))?;
        let source = Arc::new(FileSource::with_size(Arc::new(file), size));
        let index = Arc::new(Index::from_sorted(entries));
        Ok(Layer::from_parts(
            self.key,
            self.identity.clone(),
            virtual_size,
            index,
            vec![source],
        ))
    }

    /// Turns the data file into an ordinary layer by appending index and trailer; the upper has to be frozen. With
    /// `durable` the file is on stable storage afterwards. Can be repeated, also after a crash in the middle.
    pub fn seal(&self, durable: bool) -> Result<Sealed> {
        let mut sealed = locked(&self.sealed);
        if let Some((result, _)) = sealed.filter(|(_, was_durable)| *was_durable || !durable) {
            return Ok(result);
        }
        // Late writers whose content is not part of the layer must not change the file any more.
        let _quiet = self.writers.write().unwrap_or_else(PoisonError::into_inner);
        let (entries, virtual_size) = self.frozen_index()?;
        let end = u64::from(locked(&self.space).end()) * BLOCK_SIZE;
        let header = Header::new(
            flags::HEADER | flags::DATA,
            virtual_size,
            self.identity.clone(),
        );
        let block = header.encode()?;
        let mut out = At {
            file: &self.file,
            offset: end,
        };
        let file = end + tail::write(&entries, end, &header, Padding::Page, &mut out)?;
        let run = || {
            self.file.write_all_at(&block, 0)?;
            self.file.set_len(file)?;
            if durable {
                self.file.sync_data()?;
                sync_parent(&self.path)?;
            }
            Ok(())
        };
        run().map_err(Error::io(format_args!("seal {}", self.path.display())))?;
        let result = Sealed {
            file,
            entries: entries.len() as u64,
        };
        *sealed = Some((result, durable));
        Ok(result)
    }

    /// Removes the journal of a sealed upper, once whatever records its role knows that it is sealed.
    pub fn remove_journal(&self) -> Result<()> {
        if locked(&self.sealed).is_none() {
            return Err(Error::Argument(format!(
                "{} is not sealed, its journal is still needed",
                self.path.display()
            )));
        }
        match locked(&self.journal).take() {
            Some(state) => {
                let path = state.journal.path();
                std::fs::remove_file(path)
                    .map_err(Error::io(format_args!("remove {}", path.display())))
            }
            None => Ok(()),
        }
    }

    fn frozen_index(&self) -> Result<(Vec<Entry>, u64)> {
        let state = self.read_state();
        if !state.frozen {
            return Err(Error::Argument(format!(
                "{} has to be frozen before it is sealed",
                self.path.display()
            )));
        }
        let end = u64::from(locked(&self.space).end()) * u64::from(SECTORS);
        let entries = state
            .map
            .export(SECTORS, state.virtual_size / SECTOR, Some(end));
        Ok((entries, state.virtual_size))
    }

    fn read_state(&self) -> RwLockReadGuard<'_, State> {
        // Every change to the state is complete before anything that can panic.
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_state(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }
}
