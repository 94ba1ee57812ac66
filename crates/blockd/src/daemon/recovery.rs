//! Starting: from what is in the state directory to a daemon that serves.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{flock, FlockOperation};
use serde_json::json;

use super::capturing::MAX_DRAINS;
use super::{clean_directory, Daemon, Slot};
use crate::attach::fuse::FuseAttach;
use crate::attach::Attach;
use crate::failure::{Failure, Result};
use crate::image::Image;
use crate::layers::Layers;
use crate::log;
use crate::origin::Cache;
use crate::table::{self, LayerRef, Record, Table};
use crate::turnstile::Turnstile;

/// How long a predecessor that was killed may take to end.
const PATIENCE: Duration = Duration::from_secs(10);
/// Threads that open images.
const OPENERS: usize = 8;

/// Takes the lock on a state directory, which is made if necessary. When this returns, no thread of a predecessor is
/// left that could still write.
pub fn lock(directory: &Path) -> io::Result<File> {
    for part in ["images", "layers"] {
        let part = directory.join(part);
        fs::create_dir_all(&part)?;
        // What guests wrote, and their memory, is nobody else's business.
        fs::set_permissions(&part, fs::Permissions::from_mode(0o700))?;
    }
    take(&directory.join("lock"), directory)
}

/// Takes the lock on a mount point: the mount of another daemon must not be removed as a leftover.
pub fn lock_mount(mount: &Path) -> io::Result<File> {
    take(&mount.with_extension("lock"), mount)
}

/// Locks a file on behalf of a directory.
fn take(path: &Path, directory: &Path) -> io::Result<File> {
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)?;
    let start = Instant::now();
    while let Err(error) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
        if start.elapsed() > PATIENCE {
            let mut owner = String::new();
            let _ = (&file).take(32).read_to_string(&mut owner);
            return Err(io::Error::new(
                io::ErrorKind::WouldBlock,
                format!(
                    "another aenv-blockd (process {}) uses {}: {error}",
                    owner.trim(),
                    directory.display()
                ),
            ));
        }
        thread::sleep(Duration::from_millis(2));
    }
    file.set_len(0)?;
    writeln!(file, "{}", std::process::id())?;
    Ok(file)
}

impl Daemon {
    /// Opens everything that was open before. `directory` is absolute and locked; images are attached to `attach`, which
    /// is not serving yet. Remote layers come from `cache`.
    pub fn start(
        directory: &Path,
        attach: Arc<FuseAttach>,
        cache: Option<Arc<Cache>>,
    ) -> Result<Arc<Daemon>> {
        let table = Table::open(directory).map_err(Failure::io(format!(
            "open the table in {}",
            directory.display()
        )))?;
        let daemon = Arc::new(Daemon {
            directory: directory.to_owned(),
            attach,
            layers: Layers::new(cache),
            table: Mutex::new(table),
            slots: Mutex::new(HashMap::new()),
            progress: Mutex::new(HashMap::new()),
            captures: Mutex::new(HashMap::new()),
            drains: Turnstile::new(MAX_DRAINS),
            started: Instant::now(),
        });
        daemon.tidy()?;
        // First: images may be open over layers that are still being captured.
        daemon.resume_captures();
        daemon.reopen_all();
        Ok(daemon)
    }

    /// Finishes what a crash interrupted, and removes files nobody knows.
    fn tidy(&self) -> Result<()> {
        let halves: Vec<u64> = {
            let table = self.table();
            let images = table.state().images.iter();
            let half = images.filter(|(_, image)| !image.ready);
            half.map(|(number, _)| *number).collect()
        };
        self.forget_merges()?;
        for number in halves {
            self.table()
                .record(Record::Closed(number), false)
                .map_err(Failure::io("record an image that was never complete"))?;
        }
        let (open, keep): (Vec<u64>, Vec<PathBuf>) = {
            let table = self.table();
            let state = table.state();
            let paths = state.layers.values().map(|layer| layer.path.clone());
            (state.images.keys().copied().collect(), paths.collect())
        };
        let explain = || Failure::io(format!("clean up {}", self.directory.display()));
        let images = self.directory.join("images");
        for entry in fs::read_dir(&images).map_err(explain())? {
            let entry = entry.map_err(explain())?;
            let number = entry
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok());
            if number.is_some_and(|number| !open.contains(&number)) {
                clean_directory(&entry.path(), &keep).map_err(explain())?;
            }
        }
        let layers = self.directory.join("layers");
        for entry in fs::read_dir(&layers).map_err(explain())? {
            let path = entry.map_err(explain())?.path();
            if !keep.contains(&path) {
                fs::remove_file(&path).map_err(explain())?;
            }
        }
        Ok(())
    }

    fn reopen_all(self: &Arc<Self>) {
        let (images, unsealed): (Vec<(u64, table::Image)>, Vec<PathBuf>) = {
            let table = self.table();
            let state = table.state();
            let unsealed = state.layers.values().filter(|layer| !layer.sealed);
            (
                state.images.iter().map(|(n, i)| (*n, i.clone())).collect(),
                unsealed.map(|layer| layer.path.clone()).collect(),
            )
        };
        // Images whose cuts are not settled come first, one after another: others, and later ones of themselves, need
        // these layers from memory.
        let (first, rest): (Vec<_>, Vec<_>) = images.into_iter().partition(|(number, _)| {
            let directory = self.image_directory(*number);
            unsealed.iter().any(|path| path.starts_with(&directory))
        });
        for (number, image) in first {
            self.reopen(number, image);
        }
        let next = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..OPENERS.min(rest.len()) {
                scope.spawn(|| {
                    while let Some((number, image)) = rest.get(next.fetch_add(1, Relaxed)) {
                        self.reopen(*number, image.clone());
                    }
                });
            }
        });
    }

    fn reopen(self: &Arc<Self>, number: u64, image: table::Image) {
        let directory = self.image_directory(number);
        let resolve = |name: &LayerRef| self.resolve(name);
        let open = || {
            Image::reopen(
                number,
                &image.id,
                image.spec.clone(),
                image.size,
                &directory,
                &self.layers,
                &resolve,
            )
        };
        let opened = Arc::new(open());
        let resumed = match opened.failed() {
            Some(cause) => Err(Failure::conflict(cause)),
            None => self.resume_sealing(&opened),
        };
        let attached = self
            .attach
            .attach(number, &image.id, opened.shape(), opened.clone())
            .map_err(Failure::io("attach it"));
        if let Err(failure) = resumed.and(attached.map(drop)) {
            log::error(
                "an image could not be opened again",
                json!({ "image": image.id, "cause": failure.message }),
            );
        }
        self.slots().insert(image.id, Slot::Open(opened));
    }
}
