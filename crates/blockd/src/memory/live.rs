//! The content of a layer that is not a file yet.

use std::io;
use std::sync::{Arc, PoisonError, RwLock};

use lsmt::header::SECTOR;
use lsmt::index::{Index, Origin};
use lsmt::source::ReadAt;
use lsmt::stack::Stack;

use super::guest::{read_below, Guest};
use super::staging::Staging;
use crate::crew::blocking;

/// Answers the guest memory of a capture from wherever it is. Positions are those in the image. It has an answer for every
/// page of the guest, changed or not, because which ones are is not known in the beginning.
pub struct Live {
    size: u64,
    below: Arc<Stack>,
    state: RwLock<Arc<State>>,
}

/// Where pages are.
pub enum State {
    /// In the frozen process; nobody has looked yet which ones.
    Unscanned(Arc<Guest>),
    /// In the frozen process, those that the index has as data.
    Scanned(Arc<Guest>, Arc<Index>),
    /// In memory of ours.
    Copied(Staging, Arc<Index>),
    /// In the finished layer file; the stack is that layer over those below.
    File(Arc<Stack>),
    /// Nowhere any more.
    Lost(String),
}

impl Live {
    /// Memory of `size` bytes over the image `below`.
    pub fn new(size: u64, below: Arc<Stack>, state: State) -> Live {
        Live {
            size,
            below,
            state: RwLock::new(Arc::new(state)),
        }
    }

    /// The image below.
    pub fn below(&self) -> &Arc<Stack> {
        &self.below
    }

    /// Moves the content. What is being read at the old place is finished there.
    pub fn set(&self, state: State) {
        *self.state.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(state);
    }

    /// Where pages are now.
    pub fn state(&self) -> Arc<State> {
        self.state
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Reads what an index describes; `data` reads what it calls data.
    fn read_indexed(
        &self,
        index: &Index,
        buf: &mut [u8],
        offset: u64,
        data: impl Fn(&mut [u8], u64) -> io::Result<()>,
    ) -> io::Result<()> {
        let end = offset + buf.len() as u64;
        for piece in index.pieces(offset / SECTOR..end.div_ceil(SECTOR)) {
            let from = (piece.start * SECTOR).max(offset);
            let to = (piece.end() * SECTOR).min(end);
            let target = &mut buf[(from - offset) as usize..(to - offset) as usize];
            match piece.origin {
                Origin::Data { .. } => data(target, from)?,
                Origin::Zero => target.fill(0),
                Origin::Hole => read_below(&self.below, target, from)?,
            }
        }
        Ok(())
    }
}

impl ReadAt for Live {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let len = (buf.len() as u64).min(self.size.saturating_sub(offset)) as usize;
        let buf = &mut buf[..len];
        match &*self.state() {
            // A page may be swapped out, and the process may hold locks.
            State::Unscanned(guest) => {
                blocking(|| guest.read_unscanned(buf, offset, &self.below))?;
            }
            State::Scanned(guest, index) => {
                self.read_indexed(index, buf, offset, |target, from| {
                    blocking(|| guest.read_private(target, from))
                })?;
            }
            State::Copied(staging, index) => {
                self.read_indexed(index, buf, offset, |target, from| {
                    staging.read(target, from)
                })?;
            }
            State::File(stack) => read_below(stack, buf, offset)?,
            State::Lost(cause) => return Err(io::Error::other(cause.clone())),
        }
        Ok(len)
    }

    fn size(&self) -> u64 {
        self.size
    }
}
