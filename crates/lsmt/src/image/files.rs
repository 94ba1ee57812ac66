//! The files of an image: made, opened again, and found when they are of no use.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, RwLock};

use uuid::Uuid;

use super::{locked, Below, Image, View, AUTO_SEAL};
use crate::cache::ChainCache;
use crate::error::{Error, Result};
use crate::header::Identity;
use crate::layer::{Layer, LayerKey};
use crate::manifest::{Event, LayerRef, Manifest, Roles};
use crate::source::FileSource;
use crate::stack::Stack;
use crate::upper::{self, Durability, Recovery, Upper};

/// What opening an image found.
#[derive(Debug, Default)]
pub struct Opened {
    /// Bytes cut off the end of the manifest.
    pub manifest_cut: u64,
    /// Uppers that were recovered, bottom first; the last is the live one.
    pub uppers: Vec<(Uuid, Recovery)>,
    /// Uppers without a journal, whose content is gone: the price of [`Durability::None`].
    pub lost: Vec<Uuid>,
}

impl Image {
    /// Creates an image in an existing directory without a manifest. `lowers` are other people's layers, bottom first, under
    /// the names by which [`Image::open`] will ask for them. `virtual_size` 0 takes the size of the lowers.
    pub fn create(
        dir: &Path,
        lowers: &[(String, Arc<Layer>)],
        virtual_size: u64,
        durability: Durability,
        cache: Arc<ChainCache>,
    ) -> Result<Image> {
        let keys: Vec<_> = lowers.iter().map(|(_, layer)| layer.key()).collect();
        let stack = cache.stack(&keys, |i| Ok(lowers[i].1.clone()))?;
        let virtual_size = if virtual_size == 0 {
            stack.virtual_size()
        } else {
            virtual_size
        };
        let upper = create_upper(dir, top_id(&stack), virtual_size, durability)?;
        let layers = lowers
            .iter()
            .map(|(name, _)| LayerRef::Lower(name.clone()))
            .collect();
        let roles = Roles {
            layers,
            upper: Some(upper.identity().uuid),
        };
        let durable = durability == Durability::Flush;
        let manifest = Manifest::create(&dir.join("manifest"), roles, durable)
            .inspect_err(|_| discard_upper(&upper))?;
        let below = Below {
            frozen: Vec::new(),
            stack,
        };
        let image = Image::assemble(dir, durability, cache, upper, below, manifest, Vec::new());
        // A layer below may hold more than the topmost one lets see.
        image.hide_below(image.stack().virtual_size()..virtual_size)?;
        Ok(image)
    }

    /// Opens an image after a clean end or a crash. `resolve` supplies other people's layers by name. Frozen uppers are
    /// frozen again and wait for [`Image::settle`].
    pub fn open(
        dir: &Path,
        durability: Durability,
        cache: Arc<ChainCache>,
        resolve: &mut dyn FnMut(&str) -> Result<Arc<Layer>>,
    ) -> Result<(Image, Opened)> {
        let (mut manifest, manifest_cut) = Manifest::open(&dir.join("manifest"))?;
        let mut opened = Opened {
            manifest_cut,
            ..Opened::default()
        };
        if durability == Durability::None {
            opened.lost = forget_lost(dir, &mut manifest)?;
        }
        let mut stack = Stack::default();
        let mut frozen = Vec::new();
        let mut open_upper = |uuid: Uuid| {
            let (upper, recovery) = Upper::open(&data_path(dir, uuid), durability)?;
            opened.uppers.push((uuid, recovery));
            Ok::<_, Error>(Arc::new(upper))
        };
        let roles = manifest.roles().clone();
        for layer in &roles.layers {
            let layer = match layer {
                LayerRef::Frozen(uuid) => {
                    let upper = open_upper(*uuid)?;
                    upper.freeze();
                    frozen.push(upper);
                    continue;
                }
                // Seals are recorded in order, so a sealed layer cannot lie over a frozen one.
                _ if !frozen.is_empty() => {
                    let reason = format!("{layer:?} lies over a layer that is not sealed");
                    return Err(Error::format("the manifest", reason));
                }
                LayerRef::Lower(name) => resolve(name)?,
                LayerRef::Sealed(uuid) => {
                    let source = Arc::new(FileSource::open(data_path(dir, *uuid))?);
                    Arc::new(Layer::open(source, LayerKey::unique())?)
                }
            };
            stack = stack.push(layer)?;
        }
        let stack = cache.insert(stack.levelled()?);
        let upper = match roles.upper {
            Some(uuid) => open_upper(uuid)?,
            None => {
                let parent = roles
                    .layers
                    .last()
                    .and_then(LayerRef::uuid)
                    .unwrap_or(top_id(&stack));
                let upper = create_upper(dir, parent, stack.virtual_size(), durability)?;
                manifest
                    .record(&Event::Upper(upper.identity().uuid))
                    .inspect_err(|_| discard_upper(&upper))?;
                upper
            }
        };
        let below = Below {
            frozen: frozen.iter().rev().cloned().collect(),
            stack,
        };
        Ok((
            Image::assemble(dir, durability, cache, upper, below, manifest, frozen),
            opened,
        ))
    }

    fn assemble(
        dir: &Path,
        durability: Durability,
        cache: Arc<ChainCache>,
        upper: Arc<Upper>,
        below: Below,
        manifest: Manifest,
        unsealed: Vec<Arc<Upper>>,
    ) -> Image {
        Image {
            dir: dir.to_owned(),
            durability,
            cache,
            auto_seal: AUTO_SEAL,
            view: RwLock::new(Arc::new(View { upper, below })),
            manifest: Mutex::new(manifest),
            unsealed: Mutex::new(unsealed),
            swap: Mutex::new(()),
            settling: Mutex::new(()),
        }
    }

    /// Data files and journals in the directory that have no role: what a crash left of an upper that was being made, and
    /// layers that were replaced. Nothing in the image needs them; other images may use a replaced layer.
    pub fn unreferenced(&self) -> Result<Vec<PathBuf>> {
        // No upper is being made while this is held.
        let _swap = locked(&self.swap);
        let roles = self.roles();
        let layers: Vec<Uuid> = roles
            .layers
            .iter()
            .filter_map(LayerRef::uuid)
            .chain(roles.upper)
            .collect();
        let sealed = |uuid: Uuid| roles.layers.contains(&LayerRef::Sealed(uuid));
        let list = || -> io::Result<Vec<PathBuf>> {
            let mut found = Vec::new();
            for entry in std::fs::read_dir(&self.dir)? {
                let path = entry?.path();
                let Some(uuid) = path
                    .file_stem()
                    .and_then(|stem| Uuid::try_parse(stem.to_str()?).ok())
                else {
                    continue;
                };
                let used = layers.contains(&uuid);
                let needed = match path.extension().and_then(|extension| extension.to_str()) {
                    Some("lsmt") => used,
                    Some("jrn") => used && !sealed(uuid),
                    _ => true,
                };
                if !needed {
                    found.push(path);
                }
            }
            Ok(found)
        };
        list().map_err(Error::io(format_args!("list {}", self.dir.display())))
    }
}

fn data_path(dir: &Path, uuid: Uuid) -> PathBuf {
    dir.join(format!("{uuid}.lsmt"))
}

fn top_id(stack: &Stack) -> Uuid {
    stack
        .layers()
        .last()
        .map_or(Uuid::nil(), |layer| layer.identity().uuid)
}

/// Goes back to the last seal: forgets the first upper without a journal and all that came later.
fn forget_lost(dir: &Path, manifest: &mut Manifest) -> Result<Vec<Uuid>> {
    let mut roles = manifest.roles().clone();
    let gone = |uuid: Uuid| !data_path(dir, uuid).with_extension("jrn").exists();
    let keep = roles
        .layers
        .iter()
        .position(|layer| matches!(layer, LayerRef::Frozen(uuid) if gone(*uuid)));
    let mut lost = Vec::new();
    if let Some(keep) = keep {
        lost.extend(roles.layers.drain(keep..).filter_map(|layer| layer.uuid()));
    }
    if let Some(upper) = roles.upper.filter(|upper| keep.is_some() || gone(*upper)) {
        lost.push(upper);
        roles.upper = None;
    }
    if !lost.is_empty() {
        manifest.record(&Event::State(roles))?;
        manifest.sync()?;
    }
    Ok(lost)
}

pub(super) fn create_upper(
    dir: &Path,
    parent: Uuid,
    virtual_size: u64,
    durability: Durability,
) -> Result<Arc<Upper>> {
    let identity = Identity::random(parent);
    let path = data_path(dir, identity.uuid);
    Upper::create(
        &path,
        &upper::Options {
            identity,
            virtual_size,
            durability,
        },
    )
    .map(Arc::new)
}

/// Removes the files of an upper nobody will ever know of; what stays behind does no harm.
pub(super) fn discard_upper(upper: &Upper) {
    let _ = std::fs::remove_file(upper.path());
    let _ = std::fs::remove_file(upper.path().with_extension("jrn"));
}
