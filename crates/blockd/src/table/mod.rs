//! The table of images and layers: what the daemon must know again after a crash.
//!
//! The state is a pure function of the records ([`State`]). Every record is written before the effect it
//! announces, so that a restart can finish or undo what a crash interrupted:
//!
//! | record | then | after a crash in between |
//! |---|---|---|
//! | `Opening` | files of the image are made | they are removed: nobody was told of the image |
//! | `Ready` | the image is attached, the caller answered | it is attached again |
//! | `Closed` | the image is detached, its files removed | they are removed |
//! | `Layer` | the caller is told of the layer | it is there |
//! | `Dropped` | the file of the layer is removed | it is removed |
//!
//! A file in the state directory that no record knows is removed at the start. Files are never renamed. The table itself
//! is a series of numbered logs (`table-N`), each beginning with the whole state; the newest complete one counts.

mod log;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use self::log::Log;
use crate::failpoint;
use crate::origin::Remote;

/// Records that no longer mean anything at which a log is replaced by a shorter one.
const REWRITE: u64 = 4096;

/// How an image is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// A block device.
    Disk,
    /// Guest memory, mapped privately by VMMs. Always read-only.
    Memory,
}

/// What a guest's flush promises.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Durability {
    /// Nothing: data survives the daemon, and the machine once it is sealed.
    #[default]
    None,
    /// Flushed data survives the machine.
    Flush,
}

/// A layer as callers name it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LayerRef {
    /// A file made by anyone, absolute path.
    Path(PathBuf),
    /// A layer made here.
    Id(String),
    /// A layer that is somewhere else.
    Remote(Remote),
}

/// What an image is made of. Enough to open it again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// Layers, bottom first.
    pub layers: Vec<LayerRef>,
    /// Bytes; 0 takes the size of the topmost layer that has one.
    pub virtual_size: u64,
    pub mode: Mode,
    pub read_only: bool,
    pub durability: Durability,
    pub uid: u32,
    pub gid: u32,
    /// Permission bits of the file.
    pub permissions: u32,
    /// Seconds since 1970.
    pub created: u64,
}

/// An image of the table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    pub id: String,
    pub spec: Spec,
    /// Whether anyone was told of it.
    pub ready: bool,
    /// Bytes it was last known to have.
    pub size: u64,
}

/// A layer made here and not dropped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// Absolute path of its file.
    pub path: PathBuf,
    /// Whether it is a complete file on stable storage. If not, it is being written; see `source`.
    pub sealed: bool,
    /// Where an unsealed layer of memory comes from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<serde_json::Value>,
}

/// A change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Record {
    /// Numbers below this one were used; the first record of a log.
    Next(u64),
    /// A whole image, in the first part of a log.
    Image(u64, Image),
    /// The first part of the log is complete.
    Complete,
    Opening {
        number: u64,
        id: String,
        spec: Spec,
    },
    /// The image can be used and has so many bytes. Written again when it grows.
    Ready {
        number: u64,
        size: u64,
    },
    Closed(u64),
    Layer(String, Layer),
    Dropped(String),
}

/// What the records say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    /// Number of the next image. Numbers are never used again, because the kernel caches by number.
    pub next: u64,
    /// Images by number.
    pub images: BTreeMap<u64, Image>,
    /// Layers by id.
    pub layers: BTreeMap<String, Layer>,
}

/// Number of the first image; the mount itself has number 1.
const FIRST: u64 = 2;

impl State {
    /// Why a record does not fit the state, if so.
    fn objection(&self, record: &Record) -> Option<String> {
        match record {
            Record::Opening { number, id, .. } => {
                let twice =
                    *number < self.next || self.images.values().any(|image| image.id == *id);
                twice.then(|| format!("image {id} number {number} is opened twice"))
            }
            Record::Ready { number, .. } if !self.images.contains_key(number) => {
                Some(format!("image {number} is ready but was never opened"))
            }
            _ => None,
        }
    }

    fn apply(&mut self, record: Record) {
        match record {
            Record::Next(next) => self.next = self.next.max(next),
            Record::Complete => {}
            Record::Image(number, image) => {
                self.next = self.next.max(number + 1);
                self.images.insert(number, image);
            }
            Record::Opening { number, id, spec } => {
                self.next = number + 1;
                let (ready, size) = (false, spec.virtual_size);
                let image = Image {
                    id,
                    spec,
                    ready,
                    size,
                };
                self.images.insert(number, image);
            }
            Record::Ready { number, size } => {
                if let Some(image) = self.images.get_mut(&number) {
                    image.ready = true;
                    image.size = size;
                }
            }
            Record::Closed(number) => {
                self.images.remove(&number);
            }
            Record::Layer(id, layer) => {
                self.layers.insert(id, layer);
            }
            Record::Dropped(id) => {
                self.layers.remove(&id);
            }
        }
    }
}

/// The table of one daemon. For one thread at a time.
#[derive(Debug)]
pub struct Table {
    directory: PathBuf,
    /// Of the log.
    number: u64,
    log: Log,
    state: State,
}

impl Table {
    /// Opens the table in `directory`, or makes one. The caller holds the lock on the directory.
    pub fn open(directory: &Path) -> io::Result<Table> {
        let mut logs = numbered(directory)?;
        let mut newest = None;
        while let Some((number, path)) = logs.pop() {
            if let Some((log, payloads)) = Log::open(&path)? {
                if let Some(state) = replay(&path, &payloads)? {
                    newest = Some((number, log, state));
                    break;
                }
            }
            // A crash while it was written; its predecessor is still whole.
            fs::remove_file(&path)?;
        }
        let (number, log, state) = match newest {
            Some(found) => found,
            None => {
                let state = State {
                    next: FIRST,
                    ..State::default()
                };
                (1, write(directory, 1, &state)?, state)
            }
        };
        // What is left are predecessors.
        for (_, path) in logs {
            fs::remove_file(path)?;
        }
        let mut table = Table {
            directory: directory.to_owned(),
            number,
            log,
            state,
        };
        table.tidy()?;
        Ok(table)
    }

    /// Replaces a log that consists mostly of the past.
    fn tidy(&mut self) -> io::Result<()> {
        let alive = (self.state.images.len() + self.state.layers.len()) as u64;
        if self.log.len() <= REWRITE + 4 * alive {
            return Ok(());
        }
        self.log = write(&self.directory, self.number + 1, &self.state)?;
        let old = log_path(&self.directory, self.number);
        self.number += 1;
        fs::remove_file(old)
    }

    /// The current state.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Writes a record. It survives the process when this returns; with `durable`, the machine, too.
    pub fn record(&mut self, record: Record, durable: bool) -> io::Result<()> {
        // Refused before it is written, or every later start would fail.
        if let Some(reason) = self.state.objection(&record) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        }
        failpoint::hit("table-before-append");
        self.log.append(&encode(&record))?;
        self.state.apply(record);
        failpoint::hit("table-after-append");
        if durable {
            self.log.sync()?;
        }
        if let Err(error) = self.tidy() {
            // The record is safe where it is.
            crate::log::warn(
                "the table could not be rewritten",
                serde_json::json!({ "cause": error.to_string() }),
            );
        }
        Ok(())
    }
}

/// Writes a complete log with a state, durably.
fn write(directory: &Path, number: u64, state: &State) -> io::Result<Log> {
    let path = log_path(directory, number);
    let run = || -> io::Result<Log> {
        let mut log = Log::create(&path)?;
        let mut put = |record: &Record| log.append(&encode(record));
        put(&Record::Next(state.next))?;
        for (number, image) in &state.images {
            put(&Record::Image(*number, image.clone()))?;
        }
        for (id, layer) in &state.layers {
            put(&Record::Layer(id.clone(), layer.clone()))?;
        }
        failpoint::hit("table-rewrite");
        put(&Record::Complete)?;
        log.sync()?;
        File::open(directory)?.sync_all()?;
        Ok(log)
    };
    run().inspect_err(|_| drop(fs::remove_file(&path)))
}

fn log_path(directory: &Path, number: u64) -> PathBuf {
    directory.join(format!("table-{number}"))
}

fn encode(record: &Record) -> Vec<u8> {
    serde_json::to_vec(record).expect("a record has no maps with odd keys")
}

/// The state in a log; `None` if its first part is not complete.
fn replay(path: &Path, payloads: &[Vec<u8>]) -> io::Result<Option<State>> {
    let mut state = State::default();
    let mut complete = false;
    for (number, payload) in payloads.iter().enumerate() {
        let applied = serde_json::from_slice::<Record>(payload)
            .map_err(|e| e.to_string())
            .and_then(|record| match state.objection(&record) {
                Some(reason) => Err(reason),
                None => {
                    complete |= record == Record::Complete;
                    state.apply(record);
                    Ok(())
                }
            });
        if let Err(reason) = applied {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "record {number} of {} makes no sense to this version: {reason}",
                    path.display()
                ),
            ));
        }
    }
    Ok(complete.then_some(state))
}

/// The logs in a directory, oldest first.
fn numbered(directory: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let number = name
            .to_str()
            .and_then(|name| name.strip_prefix("table-"))
            .and_then(|number| number.parse().ok());
        if let Some(number) = number {
            found.push((number, entry.path()));
        }
    }
    found.sort_unstable();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> Spec {
        Spec {
            layers: vec![LayerRef::Path("/a/b".into()), LayerRef::Id("0f".into())],
            virtual_size: 1 << 20,
            mode: Mode::Disk,
            read_only: false,
            durability: Durability::Flush,
            uid: 1,
            gid: 2,
            permissions: 0o600,
            created: 3,
        }
    }

    fn opening(number: u64, id: &str) -> Record {
        Record::Opening {
            number,
            id: id.into(),
            spec: spec(),
        }
    }

    #[test]
    fn the_table_comes_back_and_numbers_are_not_used_again() {
        let dir = tempfile::tempdir().unwrap();
        let mut table = Table::open(dir.path()).unwrap();
        table.record(opening(2, "a"), false).unwrap();
        let ready = Record::Ready {
            number: 2,
            size: 77,
        };
        table.record(ready, true).unwrap();
        table.record(opening(3, "b"), false).unwrap();
        table.record(Record::Closed(3), false).unwrap();
        assert!(table.record(opening(3, "c"), false).is_err());
        assert!(table.record(opening(4, "a"), false).is_err());
        let before = table.state().clone();
        drop(table);
        let table = Table::open(dir.path()).unwrap();
        assert_eq!(*table.state(), before);
        assert_eq!(table.state().next, 4);
        assert!(table.state().images[&2].ready);
        assert_eq!(table.state().images[&2].size, 77);
    }

    #[test]
    fn a_long_log_is_replaced_and_half_a_replacement_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let mut table = Table::open(dir.path()).unwrap();
        for number in 2..2 + REWRITE {
            table.record(opening(number, "x"), false).unwrap();
            table.record(Record::Closed(number), false).unwrap();
        }
        table.record(opening(2 + REWRITE, "last"), false).unwrap();
        let before = table.state().clone();
        // While it is in use.
        let number = match numbered(dir.path()).unwrap().as_slice() {
            [(number, _)] => *number,
            several => panic!("{several:?}"),
        };
        assert!(number > 1);
        drop(table);
        assert_eq!(*Table::open(dir.path()).unwrap().state(), before);

        let (half, torn) = (
            log_path(dir.path(), number + 1),
            log_path(dir.path(), number + 2),
        );
        let mut log = Log::create(&half).unwrap();
        log.append(&encode(&Record::Next(99))).unwrap();
        drop(log);
        assert_eq!(*Table::open(dir.path()).unwrap().state(), before);
        fs::write(&torn, b"AENV").unwrap();
        assert_eq!(*Table::open(dir.path()).unwrap().state(), before);
        assert!(!half.exists() && !torn.exists());
    }
}
