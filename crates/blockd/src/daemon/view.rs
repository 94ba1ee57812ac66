//! What callers are shown.

use std::path::PathBuf;
use std::sync::Arc;

use serde::Serialize;

use super::sealing::{LayerState, Seal};
use super::Daemon;
use crate::attach::Disk;
use crate::image::Image;
use crate::progress::Phase;
use crate::table::{Durability, LayerRef, Mode};

/// An image.
#[derive(Debug, Serialize)]
pub struct ImageView {
    pub id: String,
    pub path: PathBuf,
    pub number: u64,
    pub state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    pub mode: Mode,
    pub read_only: bool,
    pub durability: Durability,
    pub virtual_size: u64,
    pub layers: Vec<LayerRef>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upper: Option<UpperView>,
    pub created: u64,
}

/// The writable part of an image.
#[derive(Debug, Serialize)]
pub struct UpperView {
    /// Bytes of current data.
    pub live: u64,
    /// Bytes of the file.
    pub file: u64,
}

/// A layer made here.
#[derive(Debug, Serialize)]
pub struct LayerView {
    pub id: String,
    pub path: PathBuf,
    pub state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub captured: Option<u64>,
}

/// What sealing gives.
#[derive(Debug, Serialize)]
pub struct SealView {
    pub layer: LayerView,
    pub layers: Vec<LayerRef>,
}

/// The daemon.
#[derive(Debug, Serialize)]
pub struct StatusView {
    pub version: &'static str,
    pub pid: u32,
    pub uptime_ms: u64,
    pub mount: PathBuf,
    pub images: usize,
    pub images_failed: usize,
    pub layers: usize,
    pub layers_open: usize,
    pub cached_bytes: u64,
    pub workers: usize,
    pub requests_failed: u64,
}

impl From<&LayerState> for LayerView {
    fn from(layer: &LayerState) -> LayerView {
        let (state, cause) = match &layer.phase {
            Phase::Writing => ("writing", None),
            Phase::Copied => ("copied", None),
            Phase::Sealed => ("sealed", None),
            Phase::Failed(cause) => ("failed", Some(cause.clone())),
        };
        LayerView {
            id: layer.id.clone(),
            path: layer.path.clone(),
            state,
            cause,
            captured: layer.captured,
        }
    }
}

impl From<Seal> for SealView {
    fn from(seal: Seal) -> SealView {
        SealView {
            layer: LayerView::from(&seal.layer),
            layers: seal.layers,
        }
    }
}

impl Daemon {
    /// Describes an image.
    pub fn view(&self, image: &Image) -> ImageView {
        ImageView {
            id: image.id.clone(),
            path: self.attach.directory().join(&image.id),
            number: image.number,
            state: if image.failed().is_some() {
                "failed"
            } else {
                "ready"
            },
            cause: image.failed().map(str::to_owned),
            mode: image.spec.mode,
            read_only: image.spec.read_only,
            durability: image.spec.durability,
            virtual_size: image.size(),
            layers: image.uses(),
            upper: image
                .upper_usage()
                .map(|(live, file)| UpperView { live, file }),
            created: image.spec.created,
        }
    }

    /// Describes the daemon.
    pub fn status(self: &Arc<Self>) -> StatusView {
        let images = self.images();
        StatusView {
            version: env!("CARGO_PKG_VERSION"),
            pid: std::process::id(),
            uptime_ms: self.started.elapsed().as_millis() as u64,
            mount: self.attach.directory().to_owned(),
            images_failed: images
                .iter()
                .filter(|image| image.failed().is_some())
                .count(),
            images: images.len(),
            layers: self.table().state().layers.len(),
            layers_open: self.layers.count(),
            cached_bytes: self.layers.cached(),
            workers: self.attach.workers(),
            requests_failed: self.attach.failures(),
        }
    }
}
