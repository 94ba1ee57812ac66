//! Several layers into one: what keeps chains short.
//!
//! A merged layer says for ever what it was made from. That is what makes replacing safe: an image swaps exactly those layers
//! for it and nothing else, while it is in use. What is replaced can be dropped when nobody uses it any more.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use lsmt::commit::{flatten, Elide, Options};
use lsmt::header::Identity;
use lsmt::stack::Stack;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::sealing::LayerState;
use super::Daemon;
use crate::failpoint;
use crate::failure::{Failure, Result};
use crate::image::Image;
use crate::log;
use crate::progress::{Phase, Progress};
use crate::table::{self, LayerRef, Record};

/// What the table says of a merged layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Source {
    /// Bottom first.
    merge: Vec<LayerRef>,
}

fn inputs(layer: &table::Layer) -> Option<Vec<LayerRef>> {
    let source: Source = serde_json::from_value(layer.source.clone()?).ok()?;
    Some(source.merge)
}

impl Daemon {
    /// Merges neighbouring layers, bottom first, into the new layer `id`, a UUID of the caller's choice, in the background.
    /// The same call again answers how far it is, and tries again what failed.
    pub fn merge(self: &Arc<Self>, id: &str, layers: Vec<LayerRef>) -> Result<LayerState> {
        let uuid = super::parse_uuid(id)?;
        super::check_layers(&layers)?;
        if layers.len() < 2 {
            return Err(Failure::bad_request(
                "there is nothing to merge in fewer than two layers",
            ));
        }
        let known = self.table().state().layers.get(id).cloned();
        if let Some(layer) = &known {
            if inputs(layer).as_ref() != Some(&layers) {
                return Err(Failure::conflict(format!(
                    "there is a layer {id} already, made from something else"
                )));
            }
            let state = self.layer(id)?;
            if !matches!(state.phase, Phase::Failed(_)) {
                return Ok(state);
            }
        }
        let stack = self.stack_of(&layers)?;
        stack
            .check_parents()
            .map_err(Failure::lsmt("merge layers that are not neighbours"))?;
        let path = self.directory.join("layers").join(format!("{uuid}.lsmt"));
        let layer = table::Layer {
            path: path.clone(),
            sealed: false,
            source: Some(json!(Source { merge: layers })),
        };
        {
            let mut progress = self.progress();
            if progress
                .get(id)
                .is_some_and(|other| other.phase() == Phase::Writing)
            {
                return Err(Failure::conflict(format!(
                    "layer {id} is just being merged; try again"
                )));
            }
            progress.insert(id.to_owned(), Arc::new(Progress::new()));
        }
        let started = self.start_merge(id, path, layer, stack);
        if started.is_err() {
            self.progress().remove(id);
        }
        started?;
        self.layer(id)
    }

    fn start_merge(
        self: &Arc<Self>,
        id: &str,
        path: PathBuf,
        layer: table::Layer,
        stack: Arc<Stack>,
    ) -> Result<()> {
        self.table()
            .record(Record::Layer(id.to_owned(), layer.clone()), false)
            .map_err(Failure::io(format!("record layer {id}")))?;
        failpoint::hit("merge-recorded");
        let (daemon, name) = (self.clone(), id.to_owned());
        let work = move || {
            let _turn = daemon.drains.enter();
            let merged = write(&stack, &path).and_then(|()| {
                failpoint::hit("merge-written");
                let layer = table::Layer {
                    sealed: true,
                    ..layer
                };
                daemon
                    .table()
                    .record(Record::Layer(name.clone(), layer), true)
                    .map_err(Failure::io(format!("record layer {name}")))
            });
            daemon.finish(&name, merged);
        };
        thread::Builder::new()
            .name("merge".into())
            .spawn(work)
            .map_err(Failure::io("start a thread"))?;
        Ok(())
    }

    fn finish(&self, id: &str, merged: Result<()>) {
        let mut progress = self.progress();
        match merged {
            Ok(()) => {
                if let Some(progress) = progress.remove(id) {
                    progress.set(Phase::Sealed);
                }
            }
            Err(failure) => {
                log::error(
                    "layers could not be merged",
                    json!({ "layer": id, "cause": failure.message }),
                );
                if let Some(progress) = progress.get(id) {
                    progress.set(Phase::Failed(failure.message));
                }
            }
        }
    }

    /// Puts a merged layer in the place of those it was made from, in an open writable image.
    pub fn replace(&self, id: &str, with: &str) -> Result<Arc<Image>> {
        let image = self.image(id)?;
        let name = LayerRef::Id(with.to_owned());
        let known = self.table().state().layers.get(with).cloned();
        let Some(inputs) = known.filter(|layer| layer.sealed).as_ref().and_then(inputs) else {
            return Err(Failure::conflict(format!(
                "{with} is not a merged layer that is sealed"
            )));
        };
        let layer = self.resolve(&name)?;
        let _changing = image.changing();
        let chain = image.uses();
        if chain.contains(&name) {
            return Ok(image.clone());
        }
        let Some(first) = chain
            .windows(inputs.len())
            .position(|window| *window == inputs)
        else {
            return Err(Failure::conflict(format!(
                "image {id} does not have the layers that {with} was merged from, one above the other"
            )));
        };
        // They have to be layers by now, not frozen uppers.
        self.settle(&image)?;
        image.replace(first, inputs.len(), &name, layer)?;
        Ok(image.clone())
    }

    /// Merges that a crash interrupted are forgotten; who wanted them asks again.
    pub(super) fn forget_merges(&self) -> Result<()> {
        let halves: Vec<String> = {
            let table = self.table();
            let layers = table.state().layers.iter();
            let half = layers.filter(|(_, layer)| !layer.sealed && inputs(layer).is_some());
            half.map(|(id, _)| id.clone()).collect()
        };
        for id in halves {
            self.table()
                .record(Record::Dropped(id), false)
                .map_err(Failure::io("record a merge that was never complete"))?;
        }
        Ok(())
    }

    /// Forgets a merge that failed; false if there is none.
    pub(super) fn forget_failed_merge(&self, id: &str) -> bool {
        let mut progress = self.progress();
        let failed = progress
            .get(id)
            .is_some_and(|p| matches!(p.phase(), Phase::Failed(_)));
        failed && self.is_being_merged(id) && progress.remove(id).is_some()
    }

    /// Whether a layer is a merge that cannot be read yet.
    pub(super) fn is_being_merged(&self, id: &str) -> bool {
        let table = self.table();
        let layer = table.state().layers.get(id);
        layer.is_some_and(|layer| !layer.sealed && inputs(layer).is_some())
    }
}

fn write(stack: &Stack, path: &Path) -> Result<()> {
    let action = || format!("write {}", path.display());
    // Others come first wherever the machine has a choice.
    // SAFETY: changes the priority of this thread only, and takes numbers.
    let _ = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 10) };
    let layers = stack.layers();
    let (Some(lowest), Some(highest)) = (layers.first(), layers.last()) else {
        return Ok(());
    };
    let options = Options {
        // In the chain it stands for both: for what lies above, and on what lies below.
        identity: Identity {
            uuid: highest.identity().uuid,
            parent: lowest.identity().parent,
            tag: Vec::new(),
        },
        virtual_size: stack.virtual_size(),
        elide: Elide::Zeros,
        ..Options::default()
    };
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)
        .map_err(Failure::io(action()))?;
    let mut out = BufWriter::with_capacity(1 << 20, file);
    flatten(stack, &options, &mut out).map_err(Failure::lsmt(action()))?;
    out.flush().map_err(Failure::io(action()))?;
    let parent = path.parent().unwrap_or(Path::new("/"));
    out.get_ref()
        .sync_all()
        .and_then(|()| File::open(parent)?.sync_all())
        .map_err(Failure::io(action()))
}
