//! From what a guest wrote to a layer.
//!
//! 1. *Cut*: a new upper takes the place of the old one. Writers wait for microseconds.
//! 2. The old upper's index becomes that of a layer, in memory. Forks can be opened from here on.
//! 3. *Settle*: data, index and trailer go to stable storage, then the table says that the layer is sealed.
//!
//! After a crash before 3, the journal of the old upper still has its index, and the daemon settles it when it starts.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

use serde_json::json;
use tokio::sync::watch;

use super::{Daemon, Slot};
use crate::failpoint;
use crate::failure::{Failure, Result};
use crate::image::{Image, Link};
use crate::log;
use crate::progress::{Phase, Progress};
use crate::table::{Layer, LayerRef, Record};

/// A layer and how far it is.
#[derive(Debug, Clone)]
pub struct LayerState {
    pub id: String,
    pub path: PathBuf,
    pub phase: Phase,
    /// Bytes of private memory found by a capture that is not sealed yet.
    pub captured: Option<u64>,
}

/// What sealing an image gives.
pub struct Seal {
    /// The layer with what was written since the last seal.
    pub layer: LayerState,
    /// All layers of that moment, bottom first.
    pub layers: Vec<LayerRef>,
}

impl Daemon {
    /// Seals what was written to an image. Returns when the new layer can be read; whoever needs it to be on stable
    /// storage waits for its phase.
    pub fn seal(self: &Arc<Self>, id: &str) -> Result<Seal> {
        let image = self.image(id)?;
        let (top, layers) = {
            let _changing = image.changing();
            let cut = image.cut()?;
            self.register(&cut.chain, Phase::Writing)?;
            let names = cut.chain.into_iter().map(|link| link.name).collect();
            (cut.top.to_string(), names)
        };
        failpoint::hit("seal-registered");
        self.settle_later(image);
        let layer = self.layer(&top)?;
        Ok(Seal { layer, layers })
    }

    /// Puts own layers of a chain on record that are not yet.
    fn register(&self, chain: &[Link], phase: Phase) -> Result<()> {
        for link in chain {
            let (Some(path), LayerRef::Id(id)) = (&link.own, &link.name) else {
                continue;
            };
            let mut table = self.table();
            if table.state().layers.contains_key(id) {
                continue;
            }
            self.layers
                .adopt(path, &link.layer)
                .map_err(Failure::io(format!("find the file of layer {id}")))?;
            let layer = Layer {
                path: path.clone(),
                sealed: phase == Phase::Sealed,
                source: None,
            };
            table
                .record(Record::Layer(id.clone(), layer), false)
                .map_err(Failure::io(format!("record layer {id}")))?;
            drop(table);
            self.progress()
                .insert(id.clone(), Arc::new(Progress::new()));
        }
        Ok(())
    }

    /// Settles in a thread of its own.
    pub(super) fn settle_later(self: &Arc<Self>, image: Arc<Image>) {
        let daemon = self.clone();
        let worker = image.clone();
        let started = thread::Builder::new().name("settle".into()).spawn(move || {
            if let Err(failure) = daemon.settle(&worker) {
                log::error(
                    "a sealed layer could not be written; sealing the image again tries once more",
                    json!({ "image": worker.id, "cause": failure.message }),
                );
            }
        });
        if let Err(error) = started {
            log::error(
                "cannot start a thread to write a sealed layer",
                json!({ "image": image.id, "cause": error.to_string() }),
            );
        }
    }

    /// Puts all cuts of an image on stable storage and says so.
    pub(super) fn settle(&self, image: &Image) -> Result<()> {
        // What is on record now is covered by what follows.
        let writing: Vec<(String, PathBuf)> = {
            let directory = self.image_directory(image.number);
            let table = self.table();
            let layers = table.state().layers.iter();
            layers
                .filter(|(_, layer)| !layer.sealed && layer.path.starts_with(&directory))
                .map(|(id, layer)| (id.clone(), layer.path.clone()))
                .collect()
        };
        if writing.is_empty() && !image.unsettled() {
            return Ok(());
        }
        let settled = image.settle().and_then(|()| {
            failpoint::hit("seal-settled");
            self.record_sealed(&writing)
        });
        let phase = match &settled {
            Ok(()) => Phase::Sealed,
            Err(failure) => Phase::Failed(failure.message.clone()),
        };
        self.tell(&writing, &phase);
        settled
    }

    fn record_sealed(&self, layers: &[(String, PathBuf)]) -> Result<()> {
        for (at, (id, path)) in layers.iter().enumerate() {
            let layer = Layer {
                path: path.clone(),
                sealed: true,
                source: None,
            };
            let last = at + 1 == layers.len();
            self.table()
                .record(Record::Layer(id.clone(), layer), last)
                .map_err(Failure::io(format!("record layer {id}")))?;
        }
        Ok(())
    }

    fn tell(&self, layers: &[(String, PathBuf)], phase: &Phase) {
        let mut progress = self.progress();
        for (id, _) in layers {
            let waiting = match phase {
                Phase::Sealed => progress.remove(id),
                _ => progress.get(id).cloned(),
            };
            if let Some(waiting) = waiting {
                waiting.set(phase.clone());
            }
        }
    }

    /// A layer made here.
    pub fn layer(&self, id: &str) -> Result<LayerState> {
        let path = self.path_of(&LayerRef::Id(id.to_owned()))?;
        let phase = self
            .progress()
            .get(id)
            .map_or(Phase::Sealed, |progress| progress.phase());
        Ok(LayerState {
            id: id.to_owned(),
            path,
            phase,
            captured: self.captured_bytes(id),
        })
    }

    /// All layers made here, by id.
    pub fn all_layers(&self) -> Vec<LayerState> {
        let ids: Vec<String> = self.table().state().layers.keys().cloned().collect();
        ids.iter().filter_map(|id| self.layer(id).ok()).collect()
    }

    /// A way to wait until a layer is no longer being written; `None` if it is not.
    pub fn watch(&self, id: &str) -> Option<watch::Receiver<Phase>> {
        self.progress().get(id).map(|progress| progress.watch())
    }

    /// Puts the layers of an image that was opened again on record and settles what a crash interrupted.
    pub(super) fn resume_sealing(self: &Arc<Self>, image: &Arc<Image>) -> Result<()> {
        let directory = self.image_directory(image.number);
        let known: Vec<(String, bool)> = {
            let table = self.table();
            let layers = table.state().layers.iter();
            layers
                .filter(|(_, layer)| layer.path.starts_with(&directory))
                .map(|(id, layer)| (id.clone(), layer.sealed))
                .collect()
        };
        let waiting = known.iter().any(|(_, sealed)| !sealed);
        for (id, sealed) in &known {
            if !sealed {
                self.progress()
                    .insert(id.clone(), Arc::new(Progress::new()));
            }
        }
        if known.is_empty() && !image.unsettled() {
            return Ok(());
        }
        for link in image.chain()? {
            if let (Some(path), LayerRef::Id(id)) = (&link.own, &link.name) {
                if known.iter().any(|(other, _)| other == id) {
                    self.layers
                        .adopt(path, &link.layer)
                        .map_err(Failure::io(format!("find the file of layer {id}")))?;
                }
            }
        }
        if waiting || image.unsettled() {
            self.settle_later(image.clone());
        }
        Ok(())
    }

    /// Removes a layer that no image uses. Absence is fine.
    pub fn drop_layer(&self, id: &str) -> Result<()> {
        let path = match self.path_of(&LayerRef::Id(id.to_owned())) {
            Ok(path) => path,
            Err(_) => return Ok(()),
        };
        {
            // Held until the record is written, so that nobody opens an image over the layer meanwhile.
            let slots = self.slots();
            let names = |layers: &[LayerRef]| {
                layers.iter().any(|layer| match layer {
                    LayerRef::Id(other) => other == id,
                    LayerRef::Path(other) => *other == path,
                    LayerRef::Remote(_) => false,
                })
            };
            let user = slots.iter().find(|(_, slot)| match slot {
                Slot::Busy(_, layers) => names(layers),
                Slot::Open(image) => names(&image.uses()),
            });
            if let Some((image, _)) = user {
                return Err(Failure::conflict(format!(
                    "layer {id} is used by image {image}; close it first"
                )));
            }
            if self.is_base_of_capture(id, &path) {
                return Err(Failure::conflict(format!(
                    "layer {id} is below memory that is being captured; wait for it first"
                )));
            }
            let failed = self.forget_capture(id) || self.forget_failed_merge(id);
            if !failed && self.progress().contains_key(id) {
                return Err(Failure::conflict(format!(
                    "layer {id} is still being written; wait for it first"
                )));
            }
            self.table()
                .record(Record::Dropped(id.to_owned()), false)
                .map_err(Failure::io(format!("record that layer {id} is gone")))?;
        }
        failpoint::hit("drop-recorded");
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(Failure::io(format!("remove {}", path.display()))(error))
            }
            _ => {}
        }
        // The directory of an image that is closed goes with its last layer. A directory in use is not empty.
        if let Some(parent) = path.parent().filter(|parent| !parent.ends_with("layers")) {
            let _ = std::fs::remove_dir(parent);
        }
        Ok(())
    }
}
