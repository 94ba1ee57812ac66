//! The daemon: images by id, layers by id, and the order of effects that survives a crash.
//!
//! State directory:
//!
//! ```text
//! lock               held by the running daemon
//! table-N            what exists, see [`crate::table`]
//! images/<number>/   files of a writable image, and the layers it was sealed into
//! layers/            layers that were not made by sealing an image
//! cache/             what is here of remote layers//! ```
//! Locks are taken in the order *changing* of an image, `slots`, `captures`, `table`, `progress`, and none is held while the kernel is told of a
//! change or while data is written.

mod capturing;
mod merging;
mod recovery;
mod sealing;
pub mod view;

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use lsmt::manifest::MAX_NAME;
use serde_json::json;
use uuid::Uuid;

use crate::attach::fuse::FuseAttach;
use crate::attach::{Attach, Disk};
use crate::failpoint;
use crate::failure::{Failure, Result};
use crate::image::Image;
use crate::layers::Layers;
use crate::log;
use crate::progress::Progress;
use crate::table::{Durability, LayerRef, Mode, Record, Spec, Table};
use crate::turnstile::Turnstile;

use self::capturing::Captured;
pub use recovery::{lock, lock_mount};

/// Most images open at once.
const MAX_IMAGES: usize = 65_536;
/// Most layers in an image, as in the format.
pub const MAX_LAYERS: usize = lsmt::stack::MAX_LAYERS;

/// A running daemon. All operations may be called from any thread; they block.
pub struct Daemon {
    directory: PathBuf,
    attach: Arc<FuseAttach>,
    layers: Layers,
    table: Mutex<Table>,
    slots: Mutex<HashMap<String, Slot>>,
    /// Layers not yet on stable storage.
    progress: Mutex<HashMap<String, Arc<Progress>>>,
    captures: Mutex<HashMap<String, Captured>>,
    /// Captures that write their files at the same time.
    drains: Turnstile,
    started: Instant,
}

/// What an id stands for.
enum Slot {
    /// Somebody is opening or closing it; it needs these layers.
    Busy(&'static str, Vec<LayerRef>),
    Open(Arc<Image>),
}

impl Daemon {
    /// Opens an image. The same call again answers the same; another image of that id is a conflict.
    pub fn open(&self, id: &str, mut spec: Spec) -> Result<Arc<Image>> {
        check_id(id)?;
        check_spec(&spec)?;
        {
            let mut slots = self.slots();
            match slots.get(id) {
                None if slots.len() >= MAX_IMAGES => {
                    return Err(Failure::new(
                        503,
                        format!("{MAX_IMAGES} images are open; close some first"),
                    ))
                }
                None => {
                    let needs = spec.layers.clone();
                    slots.insert(id.to_owned(), Slot::Busy("opened", needs));
                }
                Some(Slot::Open(image)) => {
                    spec.created = image.spec.created;
                    if image.spec == spec {
                        return Ok(image.clone());
                    }
                    return Err(Failure::conflict(format!(
                        "image {id} is open and consists of something else; close it or use another id"
                    )));
                }
                Some(Slot::Busy(how, _)) => return Err(busy(id, how)),
            }
        }
        let opened = self.open_new(id, spec);
        let mut slots = self.slots();
        match &opened {
            Ok(image) => slots.insert(id.to_owned(), Slot::Open(image.clone())),
            Err(_) => slots.remove(id),
        };
        opened
    }

    fn open_new(&self, id: &str, mut spec: Spec) -> Result<Arc<Image>> {
        spec.created = now();
        let number = {
            let mut table = self.table();
            let number = table.state().next;
            let record = Record::Opening {
                number,
                id: id.to_owned(),
                spec: spec.clone(),
            };
            table
                .record(record, false)
                .map_err(Failure::io(format!("record image {id}")))?;
            number
        };
        failpoint::hit("open-recorded");
        let made = self.make(number, id, spec);
        if made.is_err() {
            self.forget(number);
        }
        made
    }

    fn make(&self, number: u64, id: &str, spec: Spec) -> Result<Arc<Image>> {
        let durable = spec.durability == Durability::Flush && !spec.read_only;
        let resolve = |name: &LayerRef| self.resolve(name);
        let directory = self.image_directory(number);
        let image = Image::create(number, id, spec, &directory, &self.layers, &resolve)?;
        failpoint::hit("open-created");
        let size = image.size();
        self.table()
            .record(Record::Ready { number, size }, durable)
            .map_err(Failure::io(format!("record image {id}")))?;
        failpoint::hit("open-ready");
        let image = Arc::new(image);
        self.attach
            .attach(number, id, image.shape(), image.clone())
            .map_err(Failure::io(format!("attach image {id}")))?;
        Ok(image)
    }

    /// Removes an image that nobody was told of, or that was closed.
    fn forget(&self, number: u64) {
        let recorded = self.table().record(Record::Closed(number), false);
        if let Err(error) = recorded {
            // It comes back after a restart, and can be closed again then.
            log::warn(
                "cannot record that an image is gone",
                json!({ "number": number, "cause": error.to_string() }),
            );
            return;
        }
        failpoint::hit("close-recorded");
        self.attach.detach(number);
        self.clean(number);
    }

    /// Closes an image: its path is gone, its unsealed data is dropped, layers sealed from it stay. An image that does
    /// not exist is closed already.
    pub fn close(&self, id: &str) -> Result<()> {
        let image = {
            let mut slots = self.slots();
            let image = match slots.get(id) {
                None => return Ok(()),
                Some(Slot::Busy(how, _)) => return Err(busy(id, how)),
                Some(Slot::Open(image)) => image.clone(),
            };
            slots.insert(id.to_owned(), Slot::Busy("closed", image.uses()));
            image
        };
        let changing = image.changing();
        if image.unsettled() {
            // Layers that were promised must not go with the image.
            if let Err(failure) = self.settle(&image) {
                drop(changing);
                self.slots().insert(id.to_owned(), Slot::Open(image));
                return Err(Failure::new(
                    failure.code,
                    format!("image {id} stays open, because a layer sealed from it would be lost: {failure}"),
                ));
            }
        }
        self.forget(image.number);
        drop(changing);
        self.slots().remove(id);
        Ok(())
    }

    /// Makes an image larger.
    pub fn grow(&self, id: &str, size: u64) -> Result<Arc<Image>> {
        let image = self.image(id)?;
        {
            let _changing = image.changing();
            image.grow(size)?;
            // Only needed to show the size of an image that cannot be opened any more.
            let number = image.number;
            self.table()
                .record(Record::Ready { number, size }, false)
                .map_err(Failure::io(format!("record the size of image {id}")))?;
        }
        self.attach.resized(image.number);
        Ok(image)
    }

    /// The open image with this id.
    pub fn image(&self, id: &str) -> Result<Arc<Image>> {
        match self.slots().get(id) {
            Some(Slot::Open(image)) => Ok(image.clone()),
            Some(Slot::Busy(how, _)) => Err(busy(id, how)),
            None => Err(Failure::not_found(format!("there is no image {id}"))),
        }
    }

    /// All open images, by id.
    pub fn images(&self) -> Vec<Arc<Image>> {
        let mut images: Vec<_> = self
            .slots()
            .values()
            .filter_map(|slot| match slot {
                Slot::Open(image) => Some(image.clone()),
                Slot::Busy(..) => None,
            })
            .collect();
        images.sort_unstable_by(|a, b| a.id.cmp(&b.id));
        images
    }

    /// The layer a caller or a manifest names.
    fn resolve(&self, name: &LayerRef) -> Result<Arc<lsmt::layer::Layer>> {
        if let LayerRef::Id(id) = name {
            if let Some(layer) = self.captured_layer(id)? {
                return Ok(layer);
            }
        }
        if let LayerRef::Id(id) = name {
            if self.is_being_merged(id) {
                return Err(Failure::conflict(format!(
                    "layer {id} is still being written; wait for it first"
                )));
            }
        }
        if let LayerRef::Remote(remote) = name {
            return self
                .layers
                .open_remote(remote)
                .map_err(Failure::lsmt(format!("open layer {}", remote.digest)));
        }
        let path = self.path_of(name)?;
        self.layers
            .open(&path)
            .map_err(Failure::lsmt(format!("open layer {}", path.display())))
    }

    fn path_of(&self, name: &LayerRef) -> Result<PathBuf> {
        match name {
            LayerRef::Path(path) => self.off_the_mount(path).map(|()| path.clone()),
            LayerRef::Id(id) => match self.table().state().layers.get(id) {
                Some(layer) => Ok(layer.path.clone()),
                None => Err(Failure::not_found(format!("there is no layer {id}"))),
            },
            LayerRef::Remote(remote) => {
                Err(Failure::not_found(format!("{} has no file", remote.digest)))
            }
        }
    }

    /// Refuses paths on our own mount: reading them would need another thread of ours for each one that waits.
    pub fn off_the_mount(&self, path: &Path) -> Result<()> {
        if !path.starts_with(self.attach.directory()) {
            return Ok(());
        }
        Err(Failure::bad_request(format!(
            "{} is on the mount of this daemon; name the layers of the image instead",
            path.display()
        )))
    }

    fn image_directory(&self, number: u64) -> PathBuf {
        self.directory.join("images").join(number.to_string())
    }

    /// Removes the files of an image that is not open, but for layers that are on record.
    fn clean(&self, number: u64) {
        let keep: Vec<PathBuf> = {
            let table = self.table();
            let layers = table.state().layers.values();
            layers.map(|layer| layer.path.clone()).collect()
        };
        if let Err(error) = clean_directory(&self.image_directory(number), &keep) {
            log::warn(
                "cannot remove the files of an image",
                json!({ "number": number, "cause": error.to_string() }),
            );
        }
    }

    // Every step under these locks leaves its map or table whole.
    fn slots(&self) -> MutexGuard<'_, HashMap<String, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn captures(&self) -> MutexGuard<'_, HashMap<String, Captured>> {
        self.captures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn progress(&self) -> MutexGuard<'_, HashMap<String, Arc<Progress>>> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Removes everything in a directory but `keep`, and the directory if nothing is kept. Absence is fine.
fn clean_directory(directory: &Path, keep: &[PathBuf]) -> io::Result<()> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    let mut kept = 0;
    for entry in entries {
        let path = entry?.path();
        if keep.contains(&path) {
            kept += 1;
        } else {
            fs::remove_file(&path)?;
        }
    }
    if kept == 0 {
        fs::remove_dir(directory)?;
    }
    Ok(())
}

fn busy(id: &str, how: &str) -> Failure {
    Failure::conflict(format!("image {id} is just being {how}; try again"))
}

/// Ids are file names on the mount.
pub fn check_id(id: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if (1..=128).contains(&id.len()) && !id.starts_with('.') && id.chars().all(plain) {
        return Ok(());
    }
    Err(Failure::bad_request(
        "an id has 1 to 128 letters, digits, dots, hyphens and underscores, and does not start with a dot",
    ))
}

fn check_spec(spec: &Spec) -> Result<()> {
    if spec.mode == Mode::Memory && !spec.read_only {
        return Err(Failure::bad_request(
            "memory images are always read-only; what a VMM writes stays in its private mapping",
        ));
    }
    check_layers(&spec.layers)
}

fn check_layers(layers: &[LayerRef]) -> Result<()> {
    if layers.len() > MAX_LAYERS {
        return Err(Failure::bad_request(format!(
            "an image has at most {MAX_LAYERS} layers, not {}; merge some of them first",
            layers.len()
        )));
    }
    for layer in layers {
        match layer {
            LayerRef::Path(path) => {
                let text = path.to_string_lossy();
                if !path.is_absolute() || text.len() > MAX_NAME || text.contains('\0') {
                    return Err(Failure::bad_request(format!(
                        "the path of a layer is absolute and has at most {MAX_NAME} bytes: {text:?}"
                    )));
                }
            }
            LayerRef::Id(id) => check_id(id)?,
            LayerRef::Remote(remote) => remote.check().map_err(Failure::bad_request)?,
        }
    }
    Ok(())
}

fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// Ids that callers choose for layers.
fn parse_uuid(id: &str) -> Result<Uuid> {
    let uuid = Uuid::try_parse(id)
        .ok()
        .filter(|uuid| uuid.to_string() == id && !uuid.is_nil());
    uuid.ok_or_else(|| {
        Failure::bad_request(format!(
            "the id of a layer is a UUID in lower case, not {id:?}"
        ))
    })
}
