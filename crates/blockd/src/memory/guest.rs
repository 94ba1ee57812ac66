//! The guest memory inside a frozen process.

use std::io;
use std::ops::Range;

use lsmt::entry::{Entry, FIRST_SECTOR, MAX_LEN, MAX_REAL_ENTRIES};
use lsmt::header::SECTOR;
use lsmt::index::{Index, Origin};
use lsmt::source::ReadAt;
use lsmt::stack::Stack;

use super::pagemap::Pagemap;
use super::process::{mappings, Mapping, Process};
use super::{Place, PAGE};

/// Longest entry in whole pages.
const ENTRY: u64 = MAX_LEN / (PAGE / SECTOR) * PAGE;

/// Guest memory: pieces of private mappings of a process, by their position in the image. All numbers are bytes in whole
/// pages. The process is frozen, so that nothing of this changes.
pub struct Guest {
    process: Process,
    pagemap: Pagemap,
    /// Sorted by position, without overlap.
    segments: Vec<Segment>,
}

/// Part of one mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Segment {
    place: Place,
    /// Pages without content of their own show a file, which is the image below; without a file they are zeros.
    has_file: bool,
}

/// What a scan found.
pub struct Scan {
    /// Every page at its own position: data, zeros that hide what is below, or nothing.
    pub index: Index,
    /// The data: position and length, sorted.
    pub runs: Vec<(u64, u64)>,
}

impl Guest {
    /// Checks that `places`, sorted by position, are private memory of the process.
    pub fn open(process: Process, places: &[Place]) -> io::Result<Guest> {
        let pagemap = Pagemap::open(process.pid())?;
        let mappings = mappings(process.pid())?;
        let mut segments = Vec::with_capacity(places.len());
        for place in places {
            divide(place, &mappings, &mut segments)?;
        }
        Ok(Guest {
            process,
            pagemap,
            segments,
        })
    }

    /// The process.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Finds all private pages. Costs some milliseconds for each 256 MiB of them.
    pub fn scan(&self, below: &Stack) -> io::Result<Scan> {
        let mut builder = Builder::default();
        for Segment { place, has_file } in &self.segments {
            let position = |address: u64| place.offset + (address - place.address);
            let end = place.address + place.size;
            let mut seen = place.address;
            let absent = |builder: &mut Builder, addresses: Range<u64>| {
                if !has_file {
                    builder.zeros(position(addresses.start)..position(addresses.end), below);
                }
            };
            self.pagemap
                .private(place.address..end, &mut |found| {
                    absent(&mut builder, seen..found.start);
                    builder.data(position(found.start)..position(found.end));
                    seen = found.end;
                })
                .map_err(|error| self.explain(error))?;
            absent(&mut builder, seen..end);
        }
        builder.finish()
    }

    /// Adds the addresses of a range of positions, which must be part of the guest memory, to `pieces`.
    pub fn addresses(
        &self,
        positions: Range<u64>,
        pieces: &mut Vec<(u64, usize)>,
    ) -> io::Result<()> {
        for (segment, part) in self.split(positions) {
            let segment = segment.ok_or_else(|| {
                io::Error::other(format!(
                    "no memory of the process belongs to position {}",
                    part.start
                ))
            })?;
            let address = segment.place.address + (part.start - segment.place.offset);
            pieces.push((address, (part.end - part.start) as usize));
        }
        Ok(())
    }

    /// Fills `buf` from private pages at `offset`.
    pub fn read_private(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let mut pieces = Vec::with_capacity(1);
        self.addresses(offset..offset + buf.len() as u64, &mut pieces)?;
        self.process.read(buf, &pieces)
    }

    /// Fills `buf` with what the guest sees at `offset`, finding out about each page.
    pub fn read_unscanned(&self, buf: &mut [u8], offset: u64, below: &Stack) -> io::Result<()> {
        let end = offset + buf.len() as u64;
        let mut words = Vec::new();
        for (segment, part) in self.split(offset..end) {
            let Some(Segment { place, has_file }) = segment else {
                read_below(
                    below,
                    &mut buf[(part.start - offset) as usize..(part.end - offset) as usize],
                    part.start,
                )?;
                continue;
            };
            let first = part.start / PAGE * PAGE;
            let count = (part.end - first).div_ceil(PAGE) as usize;
            let address = place.address + (first - place.offset);
            self.pagemap
                .is_private(address, count, &mut words)
                .map_err(|error| self.explain(error))?;
            // Neighbours of a kind are read together.
            let mut page = 0;
            while page < count {
                let private = words[page];
                let next = (page..count)
                    .find(|p| words[*p] != private)
                    .unwrap_or(count);
                let from = part.start.max(first + page as u64 * PAGE);
                let to = part.end.min(first + next as u64 * PAGE);
                let target = &mut buf[(from - offset) as usize..(to - offset) as usize];
                if private {
                    let address = place.address + (from - place.offset);
                    let len = target.len();
                    self.process.read(target, &[(address, len)])?;
                } else if *has_file {
                    read_below(below, target, from)?;
                } else {
                    target.fill(0);
                }
                page = next;
            }
        }
        Ok(())
    }

    /// The page map of a process that has ended fails in several ways.
    fn explain(&self, error: io::Error) -> io::Error {
        if self.process.is_alive() {
            error
        } else {
            self.process.ended()
        }
    }

    /// Cuts a range of positions at the borders of segments; `None` is what no segment has.
    fn split(&self, positions: Range<u64>) -> impl Iterator<Item = (Option<&Segment>, Range<u64>)> {
        let mut at = positions.start;
        let mut next = self
            .segments
            .partition_point(|s| s.place.offset + s.place.size <= positions.start);
        std::iter::from_fn(move || {
            if at >= positions.end {
                return None;
            }
            let start = at;
            match self.segments.get(next) {
                Some(segment) if segment.place.offset <= at => {
                    at = positions.end.min(segment.place.offset + segment.place.size);
                    next += 1;
                    Some((Some(segment), start..at))
                }
                segment => {
                    at = segment.map_or(positions.end, |s| positions.end.min(s.place.offset));
                    Some((None, start..at))
                }
            }
        })
    }
}

/// What the layers below have; they may be shorter than the image.
pub fn read_below(below: &Stack, buf: &mut [u8], offset: u64) -> io::Result<()> {
    let got = below.read_at(buf, offset)?;
    buf[got..].fill(0);
    Ok(())
}

/// Cuts a place at the borders of mappings.
fn divide(place: &Place, mappings: &[Mapping], segments: &mut Vec<Segment>) -> io::Result<()> {
    let end = place.address + place.size;
    let mut at = place.address;
    let mut next = mappings.partition_point(|mapping| mapping.end <= at);
    while at < end {
        let refuse = |reason: &str| {
            let message = format!("the memory at {at:#x} {reason}");
            Err(io::Error::new(io::ErrorKind::InvalidInput, message))
        };
        let Some(mapping) = mappings.get(next).filter(|mapping| mapping.start <= at) else {
            return refuse("is not mapped");
        };
        if !mapping.private {
            return refuse(
                "is a shared mapping; only what is private to the process can be captured",
            );
        }
        let stop = end.min(mapping.end);
        segments.push(Segment {
            place: Place {
                address: at,
                size: stop - at,
                offset: place.offset + (at - place.address),
            },
            has_file: mapping.has_file,
        });
        at = stop;
        next += 1;
    }
    Ok(())
}

/// Collects entries in order of their position.
#[derive(Default)]
struct Builder {
    entries: Vec<Entry>,
    runs: Vec<(u64, u64)>,
}

impl Builder {
    fn data(&mut self, positions: Range<u64>) {
        match self.runs.last_mut() {
            Some((start, len)) if *start + *len == positions.start => {
                *len += positions.end - positions.start
            }
            _ => self
                .runs
                .push((positions.start, positions.end - positions.start)),
        }
        self.push(positions, false);
    }

    /// Zeros where the image below has something to hide.
    fn zeros(&mut self, positions: Range<u64>, below: &Stack) {
        if positions.is_empty() {
            return;
        }
        let sectors = positions.start / SECTOR..positions.end / SECTOR;
        let _ = below.pieces(sectors, &mut |piece| {
            if matches!(piece.origin, Origin::Data { .. }) {
                let from = (piece.start * SECTOR / PAGE * PAGE).max(positions.start);
                let to = (piece.end() * SECTOR)
                    .next_multiple_of(PAGE)
                    .min(positions.end);
                // Two pieces may share a page.
                let from = self
                    .entries
                    .last()
                    .map_or(from, |last| from.max(last.end() * SECTOR));
                self.push(from..to, true);
            }
            Ok::<(), ()>(())
        });
    }

    fn push(&mut self, positions: Range<u64>, zeroed: bool) {
        let mut at = positions.start;
        while at < positions.end {
            let len = (positions.end - at).min(ENTRY);
            let (sector, sectors) = (at / SECTOR, len / SECTOR);
            self.entries.push(if zeroed {
                Entry::zeroed(sector, sectors, FIRST_SECTOR, 0)
            } else {
                Entry::data(sector, sectors, sector, 0)
            });
            at += len;
        }
    }

    fn finish(self) -> io::Result<Scan> {
        if self.entries.len() as u64 > MAX_REAL_ENTRIES {
            let message = format!(
                "the changed memory is in {} pieces, a layer has at most {MAX_REAL_ENTRIES}",
                self.entries.len()
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        Ok(Scan {
            index: Index::new(self.entries).map_err(io::Error::from)?,
            runs: self.runs,
        })
    }
}

/// An index that sends every position of `places` to itself.
pub fn identity(places: &[Place]) -> io::Result<Index> {
    let mut builder = Builder::default();
    for place in places {
        builder.push(place.offset..place.offset + place.size, false);
    }
    builder.finish().map(|scan| scan.index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_become_addresses_across_places() {
        let own = Process::open(std::process::id(), None).unwrap();
        let pagemap = Pagemap::open(std::process::id()).unwrap();
        let segment = |address, size, offset| Segment {
            place: Place {
                address,
                size,
                offset,
            },
            has_file: true,
        };
        let guest = Guest {
            process: own,
            pagemap,
            segments: vec![
                segment(0x9000, 0x2000, 0),
                segment(0x1000, 0x1000, 0x2000),
                segment(0x50000, 0x1000, 0x8000),
            ],
        };
        let find = |positions: Range<u64>| {
            let mut pieces = Vec::new();
            guest.addresses(positions, &mut pieces).map(|()| pieces)
        };
        assert_eq!(
            find(0x1800..0x2800).unwrap(),
            [(0xa800, 0x800), (0x1000, 0x800)]
        );
        assert_eq!(find(0x8000..0x8010).unwrap(), [(0x50000, 16)]);
        assert!(find(0x2fff..0x3001).is_err());
        assert!(find(0x9000..0x9001).is_err());
    }

    #[test]
    fn a_place_is_cut_where_its_mappings_are() {
        let mapping = |start, end, private, has_file| Mapping {
            start,
            end,
            private,
            has_file,
        };
        let mappings = [
            mapping(0x1000, 0x3000, true, true),
            mapping(0x3000, 0x4000, true, false),
            mapping(0x5000, 0x6000, false, true),
        ];
        let cut = |address, size| {
            let mut segments = Vec::new();
            let place = Place {
                address,
                size,
                offset: 0x10000,
            };
            divide(&place, &mappings, &mut segments).map(|()| segments)
        };
        let segments = cut(0x2000, 0x2000).unwrap();
        assert_eq!(segments.len(), 2);
        assert_eq!((segments[0].has_file, segments[1].has_file), (true, false));
        assert_eq!(
            (segments[1].place.address, segments[1].place.offset),
            (0x3000, 0x11000)
        );
        assert!(cut(0x3000, 0x2000)
            .unwrap_err()
            .to_string()
            .contains("not mapped"));
        assert!(cut(0x5000, 0x1000)
            .unwrap_err()
            .to_string()
            .contains("shared"));
        assert!(cut(0, 0x1000).is_err());
    }
}
