//! Captures of memory: who is captured, how far it is, and going on after a restart. See [`crate::memory`].

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use lsmt::layer::{Layer, LayerKey};
use lsmt::source::FileSource;
use lsmt::stack::Stack;
use serde::{Deserialize, Serialize};
use serde_json::json;
use uuid::Uuid;

use super::sealing::LayerState;
use super::Daemon;
use crate::failpoint;
use crate::failure::{Failure, Result};
use crate::log;
use crate::memory::{Capture, Plan};
use crate::progress::{Phase, Progress};
use crate::table::{self, LayerRef, Record};

/// Captures that write at the same time: more only compete for the same memory and disk.
pub(super) const MAX_DRAINS: usize = 2;

/// A capture that is not sealed.
pub(super) struct Captured {
    source: Source,
    /// `None` while it is being started.
    capture: Option<Arc<Capture>>,
}

/// What the table says of an unsealed layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Source {
    /// As asked for.
    plan: Plan,
    /// When the process started.
    start_time: u64,
    layers: Vec<LayerRef>,
}

impl Daemon {
    /// Captures memory as layer `id`, a UUID of the caller's choice. Returns when the layer can be read. The same call
    /// again answers how far it is, and tries again what failed and can be tried again.
    pub fn capture(
        self: &Arc<Self>,
        id: &str,
        layers: Vec<LayerRef>,
        mut plan: Plan,
    ) -> Result<LayerState> {
        let uuid = super::parse_uuid(id)?;
        plan.check()?;
        super::check_layers(&layers)?;
        let source = Source {
            start_time: plan.start_time.unwrap_or_default(),
            plan,
            layers,
        };
        let path = self.directory.join("layers").join(format!("{uuid}.lsmt"));
        {
            // Entered first, so that no layer below is dropped meanwhile.
            let mut captures = self.captures();
            if let Some(known) = captures.get(id) {
                let Captured {
                    source: other,
                    capture,
                } = known;
                if other.plan != source.plan || other.layers != source.layers {
                    return Err(Failure::conflict(format!(
                        "layer {id} is a capture of something else"
                    )));
                }
                let capture = capture.clone();
                drop(captures);
                return self.again(id, &path, capture);
            }
            let known = self.table().state().layers.get(id).cloned();
            match known {
                None => {}
                Some(layer) if layer.path == path && layer.sealed => {
                    drop(captures);
                    return self.layer(id);
                }
                Some(_) => return Err(Failure::conflict(format!("there is a layer {id} already"))),
            }
            let source = source.clone();
            let capture = None;
            captures.insert(id.to_owned(), Captured { source, capture });
        }
        let started = self.start_capture(uuid, id, &path, source, true);
        if started.is_err() {
            self.captures().remove(id);
        }
        started?;
        self.layer(id)
    }

    fn start_capture(
        self: &Arc<Self>,
        uuid: Uuid,
        id: &str,
        path: &Path,
        mut source: Source,
        new: bool,
    ) -> Result<()> {
        let below = self.stack_of(&source.layers)?;
        let mut plan = source.plan.clone();
        if !new {
            plan.start_time = Some(source.start_time);
        }
        let capture = Arc::new(Capture::start(uuid, plan, below)?);
        source.start_time = capture.start_time;
        failpoint::hit("capture-scanned");
        if new {
            let layer = table::Layer {
                path: path.to_owned(),
                sealed: false,
                source: Some(json!(source)),
            };
            self.table()
                .record(Record::Layer(id.to_owned(), layer), false)
                .map_err(Failure::io(format!("record layer {id}")))?;
        }
        failpoint::hit("capture-recorded");
        let captured = Captured {
            source,
            capture: Some(capture.clone()),
        };
        self.captures().insert(id.to_owned(), captured);
        self.progress()
            .insert(id.to_owned(), Arc::new(Progress::new()));
        self.drain_later(id, path, capture);
        Ok(())
    }

    /// The same capture was asked for again.
    fn again(
        self: &Arc<Self>,
        id: &str,
        path: &Path,
        capture: Option<Arc<Capture>>,
    ) -> Result<LayerState> {
        let Some(capture) = capture else {
            return Err(Failure::conflict(format!(
                "layer {id} is just being captured; try again"
            )));
        };
        let progress = self.progress().get(id).cloned();
        let failed = progress.filter(|progress| matches!(progress.phase(), Phase::Failed(_)));
        if let Some(progress) = failed.filter(|_| capture.can_retry()) {
            progress.set(Phase::Writing);
            self.drain_later(id, path, capture);
        }
        self.layer(id)
    }

    fn drain_later(self: &Arc<Self>, id: &str, path: &Path, capture: Arc<Capture>) {
        let (daemon, name, place) = (self.clone(), id.to_owned(), path.to_owned());
        let started = thread::Builder::new().name("drain".into()).spawn(move || {
            let _turn = daemon.drains.enter();
            failpoint::hold("drain");
            let drained = daemon.drain(&name, &place, &capture);
            if let Err(failure) = drained {
                log::error(
                    "captured memory could not be written",
                    json!({ "layer": name, "cause": failure.message }),
                );
                daemon.set_phase(&name, Phase::Failed(failure.message));
            }
        });
        if let Err(error) = started {
            self.set_phase(id, Phase::Failed(format!("cannot start a thread: {error}")));
        }
    }

    fn drain(&self, id: &str, path: &Path, capture: &Capture) -> Result<()> {
        let open = || {
            let source = Arc::new(FileSource::open(path)?);
            Layer::open(source, LayerKey::unique()).map(Arc::new)
        };
        capture.drain(path, open)?;
        self.set_phase(id, Phase::Copied);
        failpoint::hit("capture-copied");
        let sync = || {
            File::open(path)?.sync_all()?;
            File::open(self.directory.join("layers"))?.sync_all()
        };
        sync().map_err(Failure::io(format!("put layer {id} on stable storage")))?;
        let layer = table::Layer {
            path: path.to_owned(),
            sealed: true,
            source: None,
        };
        self.table()
            .record(Record::Layer(id.to_owned(), layer), true)
            .map_err(Failure::io(format!("record layer {id}")))?;
        // From now on images are opened over the file.
        self.captures().remove(id);
        // Who is woken by the last phase finds a layer that nothing is known of but that it is sealed.
        let progress = self.progress().remove(id);
        if let Some(progress) = progress {
            progress.set(Phase::Sealed);
        }
        Ok(())
    }

    fn set_phase(&self, id: &str, phase: Phase) {
        if let Some(progress) = self.progress().get(id) {
            progress.set(phase);
        }
    }

    pub(super) fn stack_of(&self, names: &[LayerRef]) -> Result<Arc<Stack>> {
        let layers = names
            .iter()
            .map(|name| self.resolve(name))
            .collect::<Result<Vec<_>>>()?;
        let keys: Vec<_> = layers.iter().map(|layer| layer.key()).collect();
        self.layers
            .chains
            .stack(&keys, |at| Ok(layers[at].clone()))
            .map_err(Failure::lsmt("read the layers below"))
    }

    /// The layer of a capture that is not sealed; an error if it is lost.
    pub(super) fn captured_layer(&self, id: &str) -> Result<Option<Arc<Layer>>> {
        let captured = self
            .captures()
            .get(id)
            .map(|captured| captured.capture.clone());
        match captured {
            Some(Some(capture)) => Ok(Some(capture.layer.clone())),
            Some(None) => match self.progress().get(id).map(|progress| progress.phase()) {
                Some(Phase::Failed(cause)) => {
                    Err(Failure::conflict(format!("layer {id} is lost: {cause}")))
                }
                _ => Err(Failure::conflict(format!(
                    "layer {id} is just being captured; try again"
                ))),
            },
            None => Ok(None),
        }
    }

    pub(super) fn captured_bytes(&self, id: &str) -> Option<u64> {
        let captures = self.captures();
        let capture = captures.get(id)?.capture.as_ref()?;
        capture.bytes()
    }

    /// Whether a capture compares with this layer.
    pub(super) fn is_base_of_capture(&self, id: &str, path: &Path) -> bool {
        self.captures().values().any(|captured| {
            captured.source.layers.iter().any(|layer| match layer {
                LayerRef::Id(other) => other == id,
                LayerRef::Path(other) => other == path,
                LayerRef::Remote(_) => false,
            })
        })
    }

    /// Forgets a capture that failed; false if there is none.
    pub(super) fn forget_capture(&self, id: &str) -> bool {
        let mut captures = self.captures();
        let mut progress = self.progress();
        let failed = progress
            .get(id)
            .is_some_and(|p| matches!(p.phase(), Phase::Failed(_)));
        if !failed || captures.remove(id).is_none() {
            return false;
        }
        progress.remove(id);
        true
    }

    /// Goes on with what a predecessor was capturing, as far as the processes are still there.
    pub(super) fn resume_captures(self: &Arc<Self>) {
        let mut waiting: Vec<(String, PathBuf, Source)> = {
            let table = self.table();
            let layers = table.state().layers.iter();
            layers
                .filter(|(_, layer)| !layer.sealed)
                .filter_map(|(id, layer)| {
                    let source = serde_json::from_value(layer.source.clone()?).ok()?;
                    Some((id.clone(), layer.path.clone(), source))
                })
                .collect()
        };
        // A capture may lie over another one.
        let mut progressed = true;
        while std::mem::take(&mut progressed) {
            let ids: Vec<String> = waiting.iter().map(|(id, ..)| id.clone()).collect();
            let is_waiting =
                |layer: &LayerRef| matches!(layer, LayerRef::Id(id) if ids.contains(id));
            let (later, ready) = waiting
                .into_iter()
                .partition::<Vec<_>, _>(|(_, _, source)| source.layers.iter().any(is_waiting));
            waiting = later;
            for (id, path, source) in ready {
                progressed = true;
                self.resume_capture(&id, &path, source);
            }
        }
    }

    fn resume_capture(self: &Arc<Self>, id: &str, path: &Path, source: Source) {
        let resumed = super::parse_uuid(id).and_then(|uuid| {
            if source.plan.copy {
                return Err(Failure::conflict(
                    "the daemon ended before the memory it had copied was written",
                ));
            }
            self.start_capture(uuid, id, path, source.clone(), false)
        });
        if let Err(failure) = resumed {
            log::error(
                "captured memory is lost",
                json!({ "layer": id, "cause": failure.message }),
            );
            let capture = None;
            self.captures()
                .insert(id.to_owned(), Captured { source, capture });
            let progress = Progress::new();
            progress.set(Phase::Failed(failure.message));
            self.progress().insert(id.to_owned(), Arc::new(progress));
        }
    }
}
