//! Opening an upper that was not closed: every open is a recovery.

use std::fs::OpenOptions;
use std::io;
use std::path::Path;

use super::journal::{self, boot_id, Head, Journal, Record, Scan};
use super::persist::snapshot;
use super::space::{Segment, Space};
use super::{
    check_size, lock_file, new_map, sync_parent, Durability, JournalState, State, Upper,
    BLOCK_SIZE, FIRST_BLOCK, FIRST_RECORD,
};
use crate::error::{Error, Result};
use crate::extents::{Extent, ExtentMap};
use crate::header::{flags, Header, BLOCK};
use crate::source::{FileSource, ReadAt};

const OBJECT: &str = "the upper";

/// What opening an upper found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recovery {
    /// Records of the journal that were used.
    pub records: u64,
    /// Records that were intact but whose data may not have reached the disk before the machine went down.
    pub distrusted: u64,
    /// Bytes behind the last intact record.
    pub cut: u64,
    /// Whether the machine was started again since the upper was last open.
    pub machine_restarted: bool,
}

impl Upper {
    /// Opens an upper from its data file and journal, bringing both into a clean state. What is kept is exactly what the
    /// durability it was written with promises, see the module. Whether the upper is still writable, or was frozen or even
    /// sealed, is not stored here but by the owner: freeze it before use if so.
    pub fn open(path: &Path, durability: Durability) -> Result<(Upper, Recovery)> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(Error::io(format_args!("open {}", path.display())))?;
        lock_file(&file, path)?;
        let source = FileSource::open(path)?;
        let mut block = [0; BLOCK];
        source
            .read_exact_at(&mut block, 0)
            .map_err(Error::io(format_args!(
                "read the header of {}",
                path.display()
            )))?;
        let header = Header::decode(&block, "the header of the upper")?;
        if header.flags & !flags::SEALED != flags::HEADER | flags::DATA {
            return Err(Error::format(
                OBJECT,
                format!("flags {:#x} are not those of its data file", header.flags),
            ));
        }
        let journal_path = path.with_extension("jrn");
        let scan = journal::scan(&journal_path)?;
        if scan.head.upper != header.identity.uuid {
            return Err(Error::format(
                OBJECT,
                format!(
                    "the journal beside {} is that of upper {}",
                    path.display(),
                    scan.head.upper
                ),
            ));
        }
        let (trusted, recovery) = trust(&scan);
        let (map, virtual_size) = replay(&scan.head, trusted, source.size() / BLOCK_SIZE)?;
        let space = Space::around(FIRST_BLOCK, &used(&map)?);

        // What is behind the last block in use is garbage, or an index that a crash cut short.
        let tidy = |run: &dyn Fn() -> io::Result<()>| {
            run().map_err(Error::io(format_args!("recover {}", path.display())))
        };
        tidy(&|| file.set_len(u64::from(space.end()) * BLOCK_SIZE))?;
        let mut state = State::new(map, virtual_size);
        let journal = if durability == Durability::None {
            None
        } else {
            let flush = durability == Durability::Flush;
            let head = Head::fresh(header.identity.uuid, virtual_size);
            state.key = head.key;
            if flush {
                tidy(&|| file.sync_all())?;
            }
            let records = snapshot(&state.map, &head, FIRST_RECORD, flush);
            let journal = Journal::replace(&journal_path, &head, &records, flush)?;
            if flush {
                tidy(&|| sync_parent(path))?;
            }
            Some(JournalState {
                journal,
                written: FIRST_RECORD,
            })
        };
        let upper = Upper::assemble(
            file,
            path,
            header.identity,
            durability,
            state,
            space,
            journal,
        );
        Ok((upper, recovery))
    }
}

/// The records that may be believed.
fn trust(scan: &Scan) -> (&[(u64, Record)], Recovery) {
    let machine_restarted = scan.head.boot != boot_id();
    let mut count = scan.records.len();
    if machine_restarted {
        let covered = scan
            .records
            .iter()
            .rev()
            .find_map(|(_, record)| match record {
                Record::Barrier(covered) => Some(*covered),
                _ => None,
            });
        count = covered.map_or(0, |covered| {
            scan.records
                .partition_point(|(number, _)| *number <= covered)
        });
    }
    let (trusted, rest) = scan.records.split_at(count);
    let changes = |records: &[(u64, Record)]| {
        records
            .iter()
            .filter(|(_, record)| !matches!(record, Record::Barrier(_)))
            .count() as u64
    };
    let recovery = Recovery {
        records: changes(trusted),
        distrusted: changes(rest),
        cut: scan.cut,
        machine_restarted,
    };
    (trusted, recovery)
}

/// Replays records; `file_blocks` is the number of whole blocks in the data file.
///
/// Only what is left in the end has to be in the file: it may have become shorter than what later records replaced.
fn replay(head: &Head, records: &[(u64, Record)], file_blocks: u64) -> Result<(ExtentMap, u64)> {
    let mut map = new_map();
    let mut virtual_size = head.virtual_size;
    check_size(virtual_size)?;
    for (number, record) in records {
        match record {
            Record::Barrier(_) => {}
            Record::Resize(size) => {
                check_size(*size)?;
                virtual_size = *size;
                map.remove(size.div_ceil(BLOCK_SIZE) as u32..u32::MAX, &mut |_, _| {});
            }
            Record::Extents(extents) => {
                for extent in extents {
                    check(extent, virtual_size.div_ceil(BLOCK_SIZE)).map_err(|reason| {
                        Error::format(OBJECT, format!("record {number} of its journal {reason}"))
                    })?;
                    map.insert(*extent, &mut |_, _| {});
                }
            }
        }
    }
    let missing = |extent: &Extent| {
        let end = u64::from(extent.source) + u64::from(extent.len);
        !extent.zero && (extent.source < FIRST_BLOCK || end > file_blocks)
    };
    if let Some(extent) = map.iter().find(missing) {
        return Err(Error::format(
            OBJECT,
            format!("its journal needs {extent:?} of a file that has {file_blocks} blocks"),
        ));
    }
    Ok((map, virtual_size))
}

fn check(extent: &Extent, blocks: u64) -> Result<(), String> {
    if extent.len == 0 || u64::from(extent.start) + u64::from(extent.len) > blocks {
        return Err(format!(
            "maps {} blocks from {} of a disk of {blocks}",
            extent.len, extent.start
        ));
    }
    if !extent.zero && extent.source.checked_add(extent.len).is_none() {
        return Err(format!("points to block {}", extent.source));
    }
    Ok(())
}

/// Blocks the index refers to, in order of their place in the file.
fn used(map: &ExtentMap) -> Result<Vec<Segment>> {
    let mut used: Vec<Segment> = map
        .iter()
        .filter(|e| !e.zero)
        .map(|e| (e.source, e.len))
        .collect();
    used.sort_unstable();
    match used.windows(2).find(|w| w[0].0 + w[0].1 > w[1].0) {
        Some(w) => Err(Error::format(
            OBJECT,
            format!("two parts of the disk share block {} of its file", w[1].0),
        )),
        None => Ok(used),
    }
}
