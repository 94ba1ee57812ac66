//! The content of a layer that is not a file yet.

use std::io;
use std::sync::{Arc, PoisonError, RwLock};

use lsmt::source::ReadAt;
use lsmt::stack::Stack;

use super::process::Process;
use super::staging::Staging;
use super::Range;
use crate::crew::blocking;

/// Answers pages of a captured layer from wherever they are. Positions are those in the image, so the index of a live layer
/// maps every page to itself.
pub struct Live {
    size: u64,
    place: RwLock<Arc<Place>>,
}

/// Where pages are.
pub enum Place {
    /// In the frozen process, under these addresses in order of their position.
    Process(Process, Vec<Range>),
    /// In memory of ours.
    Staging(Staging),
    /// In the finished layer file, on top of the layers below, which have what the file left out.
    File(Arc<Stack>),
    /// Nowhere any more.
    Lost(String),
}

impl Live {
    /// Content of an image of `size` bytes.
    pub fn new(size: u64, place: Place) -> Live {
        Live {
            size,
            place: RwLock::new(Arc::new(place)),
        }
    }

    /// Moves the content. What is being read at the old place is finished there.
    pub fn set(&self, place: Place) {
        *self.place.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(place);
    }

    /// Where pages are now.
    pub fn place(&self) -> Arc<Place> {
        self.place
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl ReadAt for Live {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let len = (buf.len() as u64).min(self.size.saturating_sub(offset)) as usize;
        let buf = &mut buf[..len];
        match &*self.place() {
            // A page may be swapped out, and the process may hold locks.
            Place::Process(process, ranges) => {
                blocking(|| process.read(buf, &addresses(ranges, offset, len)?))?
            }
            Place::Staging(staging) => staging.read(buf, offset)?,
            Place::File(stack) => {
                let got = stack.read_at(buf, offset)?;
                buf[got..].fill(0);
            }
            Place::Lost(cause) => return Err(io::Error::other(cause.clone())),
        }
        Ok(len)
    }

    fn size(&self) -> u64 {
        self.size
    }
}

/// The addresses of `len` bytes at `offset` of the image.
pub fn addresses(ranges: &[Range], offset: u64, len: usize) -> io::Result<Vec<(u64, usize)>> {
    let mut pieces = Vec::with_capacity(1);
    let (mut at, end) = (offset, offset + len as u64);
    let mut next = ranges.partition_point(|range| range.offset + range.size <= offset);
    while at < end {
        let Some(range) = ranges.get(next).filter(|range| range.offset <= at) else {
            return Err(io::Error::other(format!(
                "no memory of the process belongs to position {at}"
            )));
        };
        let stop = end.min(range.offset + range.size);
        pieces.push((range.address + (at - range.offset), (stop - at) as usize));
        at = stop;
        next += 1;
    }
    Ok(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_become_addresses_across_ranges() {
        let range = |address, size, offset| Range {
            address,
            size,
            offset,
        };
        let ranges = [
            range(0x9000, 0x2000, 0),
            range(0x1000, 0x1000, 0x2000),
            range(0x50000, 0x1000, 0x8000),
        ];
        assert_eq!(
            addresses(&ranges, 0x1800, 0x1000).unwrap(),
            [(0xa800, 0x800), (0x1000, 0x800)]
        );
        assert_eq!(addresses(&ranges, 0x8000, 16).unwrap(), [(0x50000, 16)]);
        assert!(addresses(&ranges, 0x2fff, 2).is_err());
        assert!(addresses(&ranges, 0x9000, 1).is_err());
    }
}
