//! Layers that are open, found by the file they are in.
//!
//! A layer is opened once, however many images use it: index and descriptor are shared. What nobody uses is closed, but
//! for the most recent chains, which the [`ChainCache`] keeps.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use lsmt::blob::open_layer;
use lsmt::cache::ChainCache;
use lsmt::layer::{Layer, LayerKey};
use lsmt::source::ReadAt;
use rustix::io::{Errno, IoSliceMut, ReadWriteFlags};

use crate::crew::blocking;
use crate::origin::{Cache, Remote, RemoteSource};

/// Chains kept open although nobody uses them.
const KEPT_CHAINS: usize = 32;

/// From `linux/magic.h`.
const TMPFS: rustix::fs::FsWord = 0x0102_1994;

/// What tells a file from another one under the same path.
type Identity = (u64, u64, u64);

struct Known {
    layer: Weak<Layer>,
    file: Identity,
}

/// The layers of this process.
pub struct Layers {
    known: Mutex<HashMap<PathBuf, Known>>,
    remote: Mutex<HashMap<Remote, Weak<Layer>>>,
    /// Where remote layers come from, if anywhere.
    cache: Option<Arc<Cache>>,
    /// Merged indexes.
    pub chains: Arc<ChainCache>,
}

impl Layers {
    /// No layer is open; remote ones come from `cache`.
    pub fn new(cache: Option<Arc<Cache>>) -> Layers {
        Layers {
            known: Mutex::default(),
            remote: Mutex::default(),
            cache,
            chains: Arc::new(ChainCache::new(KEPT_CHAINS)),
        }
    }

    /// A remote layer, opened if it is not open yet.
    pub fn open_remote(&self, remote: &Remote) -> lsmt::Result<Arc<Layer>> {
        let io = |source| lsmt::Error::Io {
            action: format!("open the remote layer {}", remote.digest),
            source,
        };
        let Some((cache, key)) = self.cache.as_ref().zip(remote.key()) else {
            return Err(lsmt::Error::Argument(
                "this daemon has no origin for remote layers; start it with --origin".into(),
            ));
        };
        let open =
            |layers: &HashMap<Remote, Weak<Layer>>| layers.get(remote).and_then(Weak::upgrade);
        if let Some(layer) = open(&self.lock_remote()) {
            return Ok(layer);
        }
        let source = Arc::new(RemoteSource::open(cache, remote).map_err(io)?);
        let layer = Arc::new(open_layer(source.clone(), LayerKey::from_digest(key))?);
        source.opened();
        let mut layers = self.lock_remote();
        // Somebody else may have been faster.
        if let Some(layer) = open(&layers) {
            return Ok(layer);
        }
        layers.retain(|_, layer| layer.strong_count() > 0);
        layers.insert(remote.clone(), Arc::downgrade(&layer));
        Ok(layer)
    }

    /// Bytes of remote layers that are kept here.
    pub fn cached(&self) -> u64 {
        self.cache.as_ref().map_or(0, |cache| cache.used())
    }

    fn lock_remote(&self) -> MutexGuard<'_, HashMap<Remote, Weak<Layer>>> {
        self.remote.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The layer in the file at `path`, opened if it is not open yet. The file may be compressed or wrapped in a tar
    /// archive. Layer files never change.
    pub fn open(&self, path: &Path) -> lsmt::Result<Arc<Layer>> {
        let io = |source| lsmt::Error::Io {
            action: format!("open the layer {}", path.display()),
            source,
        };
        let file = identity(&regular_file(path).map_err(io)?);
        if let Some(layer) = self.find(path, file) {
            return Ok(layer);
        }
        let source = LayerFile::open(path).map_err(io)?;
        let layer = Arc::new(open_layer(Arc::new(source), LayerKey::unique())?);
        let mut known = self.lock();
        // Somebody else may have been faster.
        if let Some(layer) = present(&known, path, file) {
            return Ok(layer);
        }
        insert(&mut known, path, file, &layer);
        Ok(layer)
    }

    /// Makes a layer that was built in memory known as the content of the file at `path`.
    pub fn adopt(&self, path: &Path, layer: &Arc<Layer>) -> io::Result<()> {
        let file = identity(&std::fs::metadata(path)?);
        // A file that is still being sealed grows; its number stays.
        insert(&mut self.lock(), path, (file.0, file.1, u64::MAX), layer);
        Ok(())
    }

    /// Layers in use.
    pub fn count(&self) -> usize {
        let alive = |known: &&Known| known.layer.strong_count() > 0;
        self.lock().values().filter(alive).count()
    }

    fn find(&self, path: &Path, file: Identity) -> Option<Arc<Layer>> {
        present(&self.lock(), path, file)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<PathBuf, Known>> {
        // Single insertions and removals leave the map whole.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn present(known: &HashMap<PathBuf, Known>, path: &Path, file: Identity) -> Option<Arc<Layer>> {
    let entry = known.get(path)?;
    let same = entry.file == file || entry.file == (file.0, file.1, u64::MAX);
    same.then(|| entry.layer.upgrade()).flatten()
}

fn insert(known: &mut HashMap<PathBuf, Known>, path: &Path, file: Identity, layer: &Arc<Layer>) {
    if known.len() == known.capacity() {
        known.retain(|_, known| known.layer.strong_count() > 0);
    }
    let layer = Arc::downgrade(layer);
    known.insert(path.to_owned(), Known { layer, file });
}

/// Refuses what callers may name by mistake, and what would wait for somebody when it is opened.
pub fn regular_file(path: &Path) -> io::Result<std::fs::Metadata> {
    let metadata = std::fs::metadata(path)?;
    if metadata.is_file() {
        return Ok(metadata);
    }
    Err(io::Error::new(
        io::ErrorKind::InvalidInput,
        "it is not a regular file",
    ))
}

fn identity(metadata: &std::fs::Metadata) -> Identity {
    (metadata.dev(), metadata.ino(), metadata.len())
}

/// A local layer file. What is in the page cache is read at once; what is not is waited for as slow work, so that a cold
/// image does not hold up those who find theirs in memory.
struct LayerFile {
    file: File,
    size: u64,
    /// Whether the file system can tell what is in memory.
    tells: AtomicBool,
    /// The file system is memory.
    never_waits: bool,
}

impl LayerFile {
    fn open(path: &Path) -> io::Result<LayerFile> {
        let metadata = regular_file(path)?;
        let file = File::open(path)?;
        Ok(LayerFile {
            size: metadata.len(),
            tells: AtomicBool::new(true),
            never_waits: rustix::fs::fstatfs(&file).is_ok_and(|fs| fs.f_type == TMPFS),
            file,
        })
    }

    /// Bytes that could be read without waiting.
    fn read_ready(&self, buf: &mut [u8], offset: u64) -> usize {
        let read = if self.never_waits {
            rustix::io::pread(&self.file, buf, offset)
        } else if self.tells.load(Relaxed) {
            let mut slices = [IoSliceMut::new(buf)];
            let flags = ReadWriteFlags::NOWAIT;
            rustix::io::preadv2(self.file.as_fd(), &mut slices, offset, flags)
        } else {
            Ok(0)
        };
        if read == Err(Errno::OPNOTSUPP) {
            self.tells.store(false, Relaxed);
        }
        // What is really wrong shows in the read that waits.
        read.unwrap_or(0)
    }
}

impl ReadAt for LayerFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let len = (buf.len() as u64).min(self.size.saturating_sub(offset)) as usize;
        let buf = &mut buf[..len];
        let ready = self.read_ready(buf, offset);
        if ready == len {
            return Ok(len);
        }
        // The size was taken when the file was opened: less than that means somebody cut it.
        blocking(|| {
            self.file
                .read_exact_at(&mut buf[ready..], offset + ready as u64)
        })?;
        Ok(len)
    }

    fn size(&self) -> u64 {
        self.size
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lsmt::header::Identity;
    use lsmt::index::Index;

    fn layer_file(path: &Path) {
        let options = lsmt::commit::Options {
            identity: Identity::default(),
            virtual_size: 1 << 20,
            ..Default::default()
        };
        let mut out = Vec::new();
        lsmt::commit::commit(&Index::default(), &[], &options, &mut out).unwrap();
        std::fs::write(path, out).unwrap();
    }

    #[test]
    fn a_layer_is_opened_once_and_a_new_file_is_another_layer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("layer");
        layer_file(&path);
        let layers = Layers::new(None);
        let one = layers.open(&path).unwrap();
        assert!(Arc::ptr_eq(&one, &layers.open(&path).unwrap()));
        assert_eq!(layers.count(), 1);
        let other = dir.path().join("other");
        layer_file(&other);
        std::fs::rename(&other, &path).unwrap();
        assert!(!Arc::ptr_eq(&one, &layers.open(&path).unwrap()));
        assert!(layers.open(dir.path()).is_err());
    }
}
