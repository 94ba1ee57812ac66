//! The cache of remote layers: bounded, filled by single fetches, emptied by a clock.
//!
//! Room is made before a chunk is written, so that the bound holds at every moment. A chunk that finds no room, or a full
//! disk, is handed to its readers from memory and not kept: a cache that cannot keep is slow, not wrong.

use std::collections::{HashMap, VecDeque};
use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use super::blob::{Blob, Found, Miss};
use super::{parse_digest, sha256, Origin, Remote, CHUNK};
use crate::crew::blocking;
use crate::log;
use crate::turnstile::Turnstile;

/// Requests to the origin at the same time.
const MAX_REQUESTS: usize = 16;
/// Pauses between attempts.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(2);
/// How long a guest may wait for an origin that does not answer.
const PATIENCE: Duration = Duration::from_secs(60);

/// The cache of one daemon.
pub struct Cache {
    directory: PathBuf,
    origin: Box<dyn Origin>,
    /// Chunks it may hold.
    limit: u64,
    inner: Mutex<Inner>,
    requests: Turnstile,
}

#[derive(Default)]
struct Inner {
    blobs: HashMap<String, Arc<Blob>>,
    /// All chunks that take space, in the order in which the clock passes them.
    clock: VecDeque<(Arc<Blob>, u64)>,
    /// Chunks that take space or are about to.
    used: u64,
}

impl Cache {
    /// Opens the cache in `directory`, which may hold `bytes`. What is there and not of this form is removed.
    pub fn open(directory: &Path, bytes: u64, origin: Box<dyn Origin>) -> io::Result<Cache> {
        fs::create_dir_all(directory)?;
        let mut inner = Inner::default();
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            let stem = path
                .file_stem()
                .and_then(|stem| stem.to_str())
                .unwrap_or_default();
            let digest = stem.replacen('-', ":", 1);
            let extension = path.extension().and_then(|extension| extension.to_str());
            match (parse_digest(&digest), extension) {
                (Some(_), Some("data")) => {
                    let size = fs::metadata(&path)?.len();
                    let blob = Arc::new(Blob::open(directory, &digest, size)?);
                    if blob.resident().next().is_none() {
                        blob.remove();
                        continue;
                    }
                    inner
                        .clock
                        .extend(blob.resident().map(|chunk| (blob.clone(), chunk)));
                    inner.blobs.insert(digest, blob);
                }
                (Some(_), Some("journal" | "chunks")) if path.with_extension("data").exists() => {}
                // Gone already with the file it belonged to, perhaps.
                _ => drop(fs::remove_file(&path)),
            }
        }
        inner.used = inner.clock.len() as u64;
        let cache = Cache {
            directory: directory.to_owned(),
            origin,
            limit: (bytes / CHUNK).max(1),
            inner: Mutex::new(inner),
            requests: Turnstile::new(MAX_REQUESTS),
        };
        // The limit may have become lower.
        let excess = cache.lock().used.saturating_sub(cache.limit);
        cache.evict(excess);
        Ok(cache)
    }

    /// Bytes that take space.
    pub fn used(&self) -> u64 {
        self.lock().used * CHUNK
    }

    /// The blob of a remote layer.
    fn known_blob(&self, remote: &Remote) -> io::Result<Arc<Blob>> {
        let mut inner = self.lock();
        if let Some(blob) = inner.blobs.get(&remote.digest) {
            if blob.size() == remote.size {
                return Ok(blob.clone());
            }
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "layer {} is known with {} bytes, not {}",
                    remote.digest,
                    blob.size(),
                    remote.size
                ),
            ));
        }
        let blob = Arc::new(Blob::open(&self.directory, &remote.digest, remote.size)?);
        inner.blobs.insert(remote.digest.clone(), blob.clone());
        Ok(blob)
    }

    /// The blob of a remote layer, with the digests of its chunks if it is named with them.
    pub(super) fn blob(&self, remote: &Remote) -> io::Result<Arc<Blob>> {
        let blob = self.known_blob(remote)?;
        let Some(wanted) = &remote.chunks else {
            return Ok(blob);
        };
        if blob.digests.get().is_none() {
            let is_right = |digests: &[u8]| Some(sha256(digests)) == parse_digest(wanted);
            let path = blob.chunks_path();
            let kept = fs::read(&path).ok().filter(|digests| is_right(digests));
            let digests = match kept {
                Some(digests) => digests,
                None => self.patiently(|| {
                    let digests = self.origin.chunk_digests(&remote.digest, remote.size)?;
                    if !is_right(&digests) {
                        return Err(io::Error::new(
                            io::ErrorKind::InvalidData,
                            format!(
                                "the chunk digests of {} are not those of {wanted}",
                                remote.digest
                            ),
                        ));
                    }
                    // Without it, they are asked for again.
                    let _ = fs::write(&path, &digests);
                    Ok(digests)
                })?,
            };
            let _ = blob.digests.set(digests);
        }
        Ok(blob)
    }

    /// Fills `buf`, which lies inside the blob. With `pin` the chunks stay as long as the blob is in use.
    pub(super) fn read(
        &self,
        blob: &Arc<Blob>,
        buf: &mut [u8],
        offset: u64,
        pin: bool,
    ) -> io::Result<()> {
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            let chunk = at / CHUNK;
            let count = (buf.len() - done).min((blob.extent(chunk).end - at) as usize);
            let part = &mut buf[done..done + count];
            match blob.read_present(chunk, part, at, pin)? {
                Found::Here => {}
                Found::Absent => {
                    if !blocking(|| self.read_missing(blob, chunk, part, at))? {
                        continue;
                    }
                }
                Found::Damaged => {
                    self.forget(blob, at, 1);
                    continue;
                }
            }
            done += count;
        }
        Ok(())
    }

    /// Fetches what is missing, or waits for who does. False if it is there meanwhile.
    fn read_missing(
        &self,
        blob: &Arc<Blob>,
        chunk: u64,
        buf: &mut [u8],
        offset: u64,
    ) -> io::Result<bool> {
        let flight = match blob.miss(chunk) {
            Miss::Look => return Ok(false),
            Miss::Wait(flight) => flight,
            Miss::Fetch(flight, chunks) => {
                let fetched = self.fetch(blob, chunks.clone());
                blob.land(&flight, chunks, fetched);
                flight
            }
        };
        flight.wait(buf, offset)?;
        Ok(true)
    }

    /// Gets chunks from the origin, checks them and keeps them if there is room.
    fn fetch(&self, blob: &Arc<Blob>, chunks: Range<u64>) -> io::Result<Vec<u8>> {
        let (start, end) = (chunks.start * CHUNK, blob.extent(chunks.end - 1).end);
        let mut bytes = vec![0; (end - start) as usize];
        self.patiently(|| {
            let _place = self.requests.enter();
            self.origin.read(&blob.digest, &mut bytes, start)?;
            check(blob, chunks.clone(), &bytes)
        })?;
        self.keep(blob, chunks, &bytes);
        Ok(bytes)
    }

    fn keep(&self, blob: &Arc<Blob>, chunks: Range<u64>, bytes: &[u8]) {
        let count = chunks.end - chunks.start;
        if !self.reserve(count) {
            return;
        }
        if let Err(error) = blob.store(chunks.clone(), bytes) {
            log::warn(
                "a fetched chunk could not be kept",
                json!({ "layer": blob.digest, "cause": error.to_string() }),
            );
            // Whatever of it was written goes again.
            chunks.clone().for_each(|chunk| drop(blob.evict(chunk)));
            self.lock().used -= count;
            return;
        }
        self.lock()
            .clock
            .extend(chunks.map(|chunk| (blob.clone(), chunk)));
    }

    /// Makes room for chunks, and takes it. False if there is none.
    fn reserve(&self, count: u64) -> bool {
        if count > self.limit {
            return false;
        }
        loop {
            let missing = {
                let mut inner = self.lock();
                let missing = (inner.used + count).saturating_sub(self.limit);
                if missing == 0 {
                    inner.used += count;
                    return true;
                }
                missing
            };
            if self.evict(missing) == 0 {
                return false;
            }
        }
    }

    /// Evicts up to `count` chunks that were not used lately; returns how many.
    fn evict(&self, count: u64) -> u64 {
        let mut evicted = 0;
        // Two rounds of the clock: after the first, nobody is marked as used but by use meanwhile.
        let mut steps = 2 * self.lock().clock.len();
        while evicted < count && steps > 0 {
            steps -= 1;
            let Some((blob, chunk)) = self.lock().clock.pop_front() else {
                break;
            };
            if !blob.pass(chunk) {
                self.lock().clock.push_back((blob, chunk));
                continue;
            }
            match blob.evict(chunk) {
                Ok(()) => {
                    evicted += 1;
                    self.lock().used -= 1;
                }
                Err(error) => {
                    log::warn(
                        "a chunk could not be evicted",
                        json!({ "layer": blob.digest, "cause": error.to_string() }),
                    );
                    self.lock().clock.push_back((blob, chunk));
                }
            }
        }
        evicted
    }

    /// Drops what is kept of a range, because its content was found to be wrong.
    pub(super) fn forget(&self, blob: &Arc<Blob>, offset: u64, len: u64) {
        let end = offset.saturating_add(len).min(blob.size());
        for chunk in offset / CHUNK..end.div_ceil(CHUNK) {
            let mut inner = self.lock();
            let place = inner
                .clock
                .iter()
                .position(|(b, c)| *c == chunk && Arc::ptr_eq(b, blob));
            if let Some(place) = place {
                inner.clock.remove(place);
                inner.used -= 1;
                drop(inner);
                let _ = blob.evict(chunk);
            }
        }
    }

    /// Tries until it succeeds, or fails for good, or patience ends.
    fn patiently<T>(&self, mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
        let start = Instant::now();
        let mut pause = FIRST_PAUSE;
        loop {
            let error = match attempt() {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            let last = matches!(
                error.kind(),
                io::ErrorKind::NotFound
                    | io::ErrorKind::PermissionDenied
                    | io::ErrorKind::InvalidInput
            ) && error.raw_os_error().is_none();
            if last || start.elapsed() + pause > PATIENCE {
                return Err(error);
            }
            // Readers that failed together do not come back together.
            let jitter = start.elapsed().subsec_nanos() % 1000;
            thread::sleep(pause * (500 + jitter) / 1000);
            pause = (2 * pause).min(LAST_PAUSE);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Counts and lists change together under the lock, without anything that can panic in between.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Compares chunks with their digests, if those are known.
fn check(blob: &Blob, chunks: Range<u64>, bytes: &[u8]) -> io::Result<()> {
    let Some(digests) = blob.digests.get() else {
        return Ok(());
    };
    let start = chunks.start * CHUNK;
    for chunk in chunks {
        let extent = blob.extent(chunk);
        let part = &bytes[(extent.start - start) as usize..(extent.end - start) as usize];
        let at = chunk as usize * 32;
        if sha256(part) != digests[at..at + 32] {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "chunk {chunk} of layer {} is not what its digest says",
                    blob.digest
                ),
            ));
        }
    }
    Ok(())
}
