//! A writable disk: a stack of layers, and an upper on top.
//!
//! ```text
//! directory/manifest      which file plays which role
//! directory/<uuid>.lsmt   uppers: the live one, frozen ones, and those that were sealed into layers
//! directory/<uuid>.jrn    journals of those not yet sealed
//! ```
//! A snapshot swaps in a new upper first ([`Image::freeze`], microseconds under a lock) and turns the old one into a layer
//! afterwards ([`Image::settle`]), while the disk is in use. Layers below, and their merged index, are shared with every
//! other image of the process through [`ChainCache`].
//!
//! All methods may be called from any thread. Nothing is done in threads of its own.

mod cut;
mod files;

use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use crate::cache::ChainCache;
use crate::error::{Error, Result};
use crate::header::SECTOR;
use crate::index::Origin;
use crate::manifest::{Manifest, Roles};
use crate::source::ReadAt;
use crate::stack::Stack;
use crate::upper::{Durability, Upper, BLOCK_SIZE};
pub use cut::Snapshot;
pub use files::Opened;

/// Index entries at which an upper is sealed by itself: comfortably below what the format allows.
pub const AUTO_SEAL: u64 = 900_000;
/// Frozen uppers that may wait for [`Image::settle`] before a writer does the work itself.
const MAX_FROZEN: usize = 4;

/// A writable disk; see the module.
#[derive(Debug)]
pub struct Image {
    dir: PathBuf,
    durability: Durability,
    cache: Arc<ChainCache>,
    auto_seal: u64,
    view: RwLock<Arc<View>>,
    manifest: Mutex<Manifest>,
    /// Uppers that were frozen and are not yet durable layers, oldest first.
    unsealed: Mutex<Vec<Arc<Upper>>>,
    /// Held while the upper is exchanged or resized.
    swap: Mutex<()>,
    /// Held while frozen uppers become layers, and while layers are replaced.
    settling: Mutex<()>,
}

/// For exporting a disk that nobody writes to.
impl ReadAt for Image {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.read(buf, offset)
    }
    fn size(&self) -> u64 {
        self.virtual_size()
    }
}

/// What reads and writes go to. Never changes; a new view replaces it.
#[derive(Debug)]
struct View {
    upper: Arc<Upper>,
    below: Below,
}

#[derive(Debug, Clone)]
struct Below {
    /// Newest first.
    frozen: Vec<Arc<Upper>>,
    stack: Arc<Stack>,
}

/// Frozen uppers over the stack. Reads as zeros behind the end.
impl ReadAt for Below {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        read_below(&self.frozen, &self.stack, buf, offset)?;
        Ok(buf.len())
    }
    fn size(&self) -> u64 {
        u64::MAX
    }
}

fn read_below(frozen: &[Arc<Upper>], stack: &Stack, buf: &mut [u8], offset: u64) -> io::Result<()> {
    let Some((newest, older)) = frozen.split_first() else {
        let got = stack.read_at(buf, offset)?;
        buf[got..].fill(0);
        return Ok(());
    };
    let inside = newest
        .virtual_size()
        .saturating_sub(offset)
        .min(buf.len() as u64) as usize;
    buf[inside..].fill(0);
    let older = Older(older, stack);
    newest.read(&mut buf[..inside], offset, &older)
}

struct Older<'a>(&'a [Arc<Upper>], &'a Stack);

impl ReadAt for Older<'_> {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        read_below(self.0, self.1, buf, offset)?;
        Ok(buf.len())
    }
    fn size(&self) -> u64 {
        u64::MAX
    }
}

impl Image {
    /// Seals by itself at another number of index entries than [`AUTO_SEAL`], which is also the most.
    pub fn set_auto_seal(&mut self, entries: u64) {
        self.auto_seal = entries.clamp(1, AUTO_SEAL);
    }

    /// Size of the disk in bytes.
    pub fn virtual_size(&self) -> u64 {
        self.view().upper.virtual_size()
    }

    /// Layers below the upper, without those frozen uppers that were not settled yet.
    pub fn stack(&self) -> Arc<Stack> {
        self.view().below.stack.clone()
    }

    /// Frozen uppers that are not on stable storage yet and wait for [`Image::settle`].
    pub fn unsettled(&self) -> usize {
        locked(&self.unsealed).len()
    }

    /// Bytes of current data in the live upper, and bytes of its file in use.
    pub fn upper_usage(&self) -> (u64, u64) {
        self.view().upper.usage()
    }

    /// The roles as recorded.
    pub fn roles(&self) -> Roles {
        locked(&self.manifest).roles().clone()
    }

    /// Reads bytes of any alignment. Returns fewer than asked for only at the end of the disk.
    pub fn read(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let view = self.view();
        let len = (buf.len() as u64).min(view.upper.virtual_size().saturating_sub(offset)) as usize;
        view.upper.read(&mut buf[..len], offset, &view.below)?;
        Ok(len)
    }

    /// Writes bytes of any alignment; must end within the disk.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.change(|view| view.upper.write(offset, data, &view.below))
    }

    /// Makes a range of bytes read as zeros: discard and write-zeroes. Must end within the disk.
    pub fn zero(&self, offset: u64, length: u64) -> Result<()> {
        self.change(|view| view.upper.zero(offset, length, &view.below))
    }

    /// Runs a change on the live upper, again on its successor if the upper is frozen or full meanwhile.
    fn change(&self, run: impl Fn(&View) -> Result<()>) -> Result<()> {
        let mut was_full = false;
        loop {
            let view = self.view();
            match run(&view) {
                Ok(()) if view.upper.entries() >= self.auto_seal => {
                    return self.rotate(&view.upper)
                }
                Ok(()) => return Ok(()),
                // The successor is in place before anyone is let in again.
                Err(Error::Frozen) => {}
                Err(Error::Limit { .. }) if !was_full => {
                    was_full = true;
                    self.rotate(&view.upper)?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Freezes a full upper unless somebody else did, and settles when too many wait.
    fn rotate(&self, full: &Arc<Upper>) -> Result<()> {
        {
            let swap = locked(&self.swap);
            if Arc::ptr_eq(&self.view().upper, full) {
                self.exchange(&swap)?;
            }
        }
        if self.unsettled() >= MAX_FROZEN {
            self.settle(true)?;
        }
        Ok(())
    }

    /// Makes acknowledged writes durable, as far as the durability promises that.
    pub fn flush(&self) -> Result<()> {
        if self.durability != Durability::Flush {
            return Ok(());
        }
        let view = self.view();
        // First what the roles are, then what was written before the live upper existed.
        locked(&self.manifest).sync()?;
        let older: Vec<_> = locked(&self.unsealed).clone();
        for upper in older {
            upper.flush()?;
        }
        view.upper.flush()
    }

    /// Changes the size of the disk in bytes. No reads and writes beyond the old or the new end while it runs.
    pub fn resize(&self, virtual_size: u64) -> Result<()> {
        // The layers below have to be in the stack, to hide what they have beyond the old end.
        let (_swap, view) = loop {
            self.absorb(&locked(&self.settling))?;
            let swap = locked(&self.swap);
            let view = self.view();
            if view.below.frozen.is_empty() {
                break (swap, view);
            }
        };
        let old = view.upper.virtual_size();
        if virtual_size < old {
            // What shares a block with the new end must not come back when the disk grows.
            let end = virtual_size.next_multiple_of(BLOCK_SIZE).min(old);
            view.upper
                .zero(virtual_size, end - virtual_size, &view.below)?;
        }
        view.upper.resize(virtual_size)?;
        self.hide_below(old..virtual_size)
    }

    /// Zeros what layers below have in a part of the disk that just came into being. There are no frozen uppers.
    fn hide_below(&self, range: Range<u64>) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let view = self.view();
        let sectors = range.start / SECTOR..range.end.div_ceil(SECTOR);
        view.below.stack.pieces(sectors, &mut |piece| {
            let from = (piece.start * SECTOR).max(range.start);
            let to = (piece.end() * SECTOR).min(range.end);
            match piece.origin {
                Origin::Data { .. } => view.upper.zero(from, to - from, &view.below),
                Origin::Hole | Origin::Zero => Ok(()),
            }
        })
    }

    fn view(&self) -> Arc<View> {
        self.view
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
