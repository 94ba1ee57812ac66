//! What is here of one remote layer.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicU8, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, RwLock};

use rustix::fs::{fallocate, FallocateFlags};

use super::journal::Journal;
use super::CHUNK;

/// States of a chunk.
const ABSENT: u8 = 0;
/// In the file, unless the machine went down before it got there.
const DOUBTFUL: u8 = 1;
const PRESENT: u8 = 2;
/// Set in addition when somebody used the chunk since the clock came by.
const USED: u8 = 0x80;
/// Set in addition while an open layer needs the chunk to be opened again.
const PINNED: u8 = 0x40;
const MARKS: u8 = USED | PINNED;

const PUNCH: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);

/// Longest request to an origin in chunks.
pub const MAX_RUN: u64 = 16;

/// One remote layer in the cache. Chunks are numbered from 0; the last one may be short.
pub struct Blob {
    pub digest: String,
    size: u64,
    path: PathBuf,
    file: File,
    chunks: Vec<AtomicU8>,
    crcs: Vec<AtomicU32>,
    journal: Mutex<Journal>,
    /// Held shared while chunks are read from the file, and exclusively while one is given up.
    keep: RwLock<()>,
    /// Fetches under way, by chunk.
    flights: Mutex<HashMap<u64, Arc<Flight>>>,
    /// SHA-256 digests of the chunks, if the layer is named with them.
    pub digests: OnceLock<Vec<u8>>,
    /// Chunk after the last that was fetched, and length of that fetch: to recognise sequential reads.
    next: AtomicU64,
    run: AtomicU64,
}

/// What a fetch brought, for all who waited for it.
type Landing = Result<Arc<Vec<u8>>, Arc<io::Error>>;

/// A fetch that several readers may wait for.
#[derive(Default)]
pub struct Flight {
    result: Mutex<Option<Landing>>,
    done: Condvar,
    first: u64,
}

impl Flight {
    /// Waits for the end and copies what `buf` wants at `offset` of the blob.
    pub fn wait(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let result = self.result.lock().unwrap_or_else(PoisonError::into_inner);
        let result = self
            .done
            .wait_while(result, |result| result.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        match result.as_ref().expect("waited for") {
            Ok(bytes) => {
                let from = (offset - self.first * CHUNK) as usize;
                buf.copy_from_slice(&bytes[from..from + buf.len()]);
                Ok(())
            }
            Err(error) => Err(io::Error::new(error.kind(), error.clone())),
        }
    }
}

/// What became of a read from the file.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    Here,
    Absent,
    /// It was here before the machine went down, and is damaged now.
    Damaged,
}

/// What to do about a chunk that is not here.
pub enum Miss {
    /// It came just now.
    Look,
    /// Somebody fetches it already.
    Wait(Arc<Flight>),
    /// The caller has to fetch these chunks and call [`Blob::land`].
    Fetch(Arc<Flight>, Range<u64>),
}

impl Blob {
    /// Opens the files of a blob in the cache directory, or makes them.
    pub fn open(directory: &Path, digest: &str, size: u64) -> io::Result<Blob> {
        let path = directory.join(digest.replace(':', "-"));
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path.with_extension("data"))?;
        file.set_len(size)?;
        let count = size.div_ceil(CHUNK) as usize;
        let journal_path = path.with_extension("journal");
        let (journal, chunks, trusted) = match Journal::open(&journal_path, size, count)? {
            // A journal from before a start of the machine is kept as it is, so that doubts last until they are resolved.
            Some((journal, found)) if !(found.trusted && journal.is_worn(count)) => {
                (journal, found.chunks, found.trusted)
            }
            Some((_, found)) => (
                Journal::create(&journal_path, size, &found.chunks)?,
                found.chunks,
                true,
            ),
            None => (
                Journal::create(&journal_path, size, &[])?,
                vec![None; count],
                true,
            ),
        };
        // What came without being on record, or went on record only, takes space nobody counts.
        let mut at = 0;
        for part in chunks.chunk_by(|a, b| a.is_some() == b.is_some()) {
            let end = at + part.len() as u64;
            if part[0].is_none() {
                let (start, end) = (at * CHUNK, (end * CHUNK).min(size));
                fallocate(&file, PUNCH, start, end - start)?;
            }
            at = end;
        }
        let state = |crc: &Option<u32>| match (crc, trusted) {
            (None, _) => ABSENT,
            (Some(_), true) => PRESENT,
            (Some(_), false) => DOUBTFUL,
        };
        Ok(Blob {
            digest: digest.to_owned(),
            size,
            path,
            file,
            crcs: chunks
                .iter()
                .map(|crc| AtomicU32::new(crc.unwrap_or(0)))
                .collect(),
            chunks: chunks.iter().map(|crc| AtomicU8::new(state(crc))).collect(),
            journal: Mutex::new(journal),
            keep: RwLock::new(()),
            flights: Mutex::default(),
            digests: OnceLock::new(),
            next: AtomicU64::new(0),
            run: AtomicU64::new(0),
        })
    }

    /// Bytes of the layer.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Where the digests of the chunks are kept.
    pub fn chunks_path(&self) -> PathBuf {
        self.path.with_extension("chunks")
    }

    /// Removes the files.
    pub fn remove(&self) {
        for extension in ["journal", "chunks", "data"] {
            let _ = std::fs::remove_file(self.path.with_extension(extension));
        }
    }

    /// Numbers of the chunks that take space.
    pub fn resident(&self) -> impl Iterator<Item = u64> + '_ {
        let states = self.chunks.iter().enumerate();
        states
            .filter(|(_, state)| state.load(SeqCst) & !MARKS != ABSENT)
            .map(|(chunk, _)| chunk as u64)
    }

    /// Bytes of the layer that a chunk holds.
    pub fn extent(&self, chunk: u64) -> Range<u64> {
        chunk * CHUNK..((chunk + 1) * CHUNK).min(self.size)
    }

    /// Reads from a chunk if it is here. `buf` does not reach beyond the chunk. With `pin` the chunk stays.
    pub fn read_present(
        &self,
        chunk: u64,
        buf: &mut [u8],
        offset: u64,
        pin: bool,
    ) -> io::Result<Found> {
        let state = &self.chunks[chunk as usize];
        let _keep = self.keep.read().unwrap_or_else(PoisonError::into_inner);
        let now = state.load(SeqCst);
        match now & !MARKS {
            PRESENT => {}
            DOUBTFUL if self.verify(chunk)? => {}
            DOUBTFUL => return Ok(Found::Damaged),
            _ => return Ok(Found::Absent),
        }
        let marks = if pin { MARKS } else { USED };
        if now & marks != marks {
            state.fetch_or(marks, SeqCst);
        }
        self.file.read_exact_at(buf, offset)?;
        Ok(Found::Here)
    }

    /// Lets go of all chunks that had to stay.
    pub fn unpin(&self) {
        self.chunks.iter().for_each(|state| {
            state.fetch_and(!PINNED, SeqCst);
        });
    }

    /// Checks a chunk that a crash of the machine may have lost.
    fn verify(&self, chunk: u64) -> io::Result<bool> {
        let extent = self.extent(chunk);
        let mut bytes = vec![0; (extent.end - extent.start) as usize];
        self.file.read_exact_at(&mut bytes, extent.start)?;
        let good = crc32c::crc32c(&bytes) == self.crcs[chunk as usize].load(SeqCst);
        if good {
            let state = &self.chunks[chunk as usize];
            let _ = state.compare_exchange(DOUBTFUL, PRESENT, SeqCst, SeqCst);
        }
        Ok(good)
    }

    /// What to do about a chunk that is not here. Sequential reads fetch more and more at once.
    pub fn miss(&self, chunk: u64) -> Miss {
        let mut flights = self.flights.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(flight) = flights.get(&chunk) {
            return Miss::Wait(flight.clone());
        }
        // A fetch ends by marking the chunk before it leaves the list.
        if self.chunks[chunk as usize].load(SeqCst) & !MARKS != ABSENT {
            return Miss::Look;
        }
        let run = match self.next.load(SeqCst) == chunk {
            true => (2 * self.run.load(SeqCst)).clamp(1, MAX_RUN),
            false => 1,
        };
        let count = self.chunks.len() as u64;
        let free = |c: &u64| {
            self.chunks[*c as usize].load(SeqCst) & !MARKS == ABSENT && !flights.contains_key(c)
        };
        let end = (chunk + 1..count.min(chunk + run)).find(|c| !free(c));
        let end = end.unwrap_or(count.min(chunk + run));
        let flight = Arc::new(Flight {
            first: chunk,
            ..Flight::default()
        });
        flights.extend((chunk..end).map(|c| (c, flight.clone())));
        self.next.store(end, SeqCst);
        self.run.store(end - chunk, SeqCst);
        Miss::Fetch(flight, chunk..end)
    }

    /// Puts fetched chunks into the file. Without room for them nothing is written, and readers use what is in memory.
    pub fn store(&self, chunks: Range<u64>, bytes: &[u8]) -> io::Result<()> {
        let offset = chunks.start * CHUNK;
        self.file.write_all_at(bytes, offset)?;
        for chunk in chunks {
            let extent = self.extent(chunk);
            let part = &bytes[(extent.start - offset) as usize..(extent.end - offset) as usize];
            let crc = crc32c::crc32c(part);
            self.crcs[chunk as usize].store(crc, SeqCst);
            self.log(chunk, Some(crc))?;
            self.chunks[chunk as usize].store(PRESENT | USED, SeqCst);
        }
        Ok(())
    }

    /// Ends a fetch.
    pub fn land(&self, flight: &Flight, chunks: Range<u64>, result: io::Result<Vec<u8>>) {
        *flight.result.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(result.map(Arc::new).map_err(Arc::new));
        flight.done.notify_all();
        let mut flights = self.flights.lock().unwrap_or_else(PoisonError::into_inner);
        chunks.for_each(|chunk| {
            flights.remove(&chunk);
        });
    }

    /// Lets the clock pass: true if the chunk may go, because nobody used it since the last time or needs it.
    pub fn pass(&self, chunk: u64) -> bool {
        self.chunks[chunk as usize].fetch_and(!USED, SeqCst) & MARKS == 0
    }

    /// Gives a chunk up. Readers of it are waited for.
    pub fn evict(&self, chunk: u64) -> io::Result<()> {
        let _alone = self.keep.write().unwrap_or_else(PoisonError::into_inner);
        // On record first: a chunk that is on record and a hole would read as zeros after a restart.
        self.log(chunk, None)?;
        self.chunks[chunk as usize].store(ABSENT, SeqCst);
        let extent = self.extent(chunk);
        fallocate(&self.file, PUNCH, extent.start, extent.end - extent.start)?;
        Ok(())
    }

    fn log(&self, chunk: u64, crc: Option<u32>) -> io::Result<()> {
        let mut journal = self.journal.lock().unwrap_or_else(PoisonError::into_inner);
        journal.append(chunk as u32, crc)?;
        if journal.is_worn(self.chunks.len()) {
            let current: Vec<Option<u32>> = self
                .chunks
                .iter()
                .zip(&self.crcs)
                .enumerate()
                .map(|(at, (state, known))| match at as u64 == chunk {
                    true => crc,
                    // A doubtful chunk would count as certain; it is forgotten with the next start instead.
                    false => (state.load(SeqCst) & !MARKS == PRESENT).then(|| known.load(SeqCst)),
                })
                .collect();
            let path = self.path.with_extension("journal");
            // Tried again with the next record.
            if let Ok(fresh) = Journal::create(&path, self.size, &current) {
                *journal = fresh;
            }
        }
        Ok(())
    }
}
