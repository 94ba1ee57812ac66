//! A writable disk: a stack of layers, and an upper on top.
//!
//! ```text
//! directory/manifest      which file plays which role
//! directory/<uuid>.lsmt   uppers: the live one, frozen ones, and those that were sealed into layers
//! directory/<uuid>.jrn    journals of those not yet sealed
//! ```
//! A snapshot swaps in a new upper first ([`Image::freeze`], microseconds under a lock) and turns the old one into a layer
//! afterwards ([`Image::settle`]), while the disk is in use. Layers below, and their merged index, are shared with every
//! other image of the process through [`ChainCache`].
//!
//! All methods may be called from any thread. Nothing is done in threads of its own.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use uuid::Uuid;

use crate::cache::ChainCache;
use crate::error::{Error, Result};
use crate::header::{Identity, SECTOR};
use crate::index::Origin;
use crate::layer::{Layer, LayerKey};
use crate::manifest::{Event, LayerRef, Manifest, Roles};
use crate::source::{FileSource, ReadAt};
use crate::stack::Stack;
use crate::upper::{self, Durability, Recovery, Upper, BLOCK_SIZE};

/// Index entries at which an upper is sealed by itself: comfortably below what the format allows.
pub const AUTO_SEAL: u64 = 900_000;
/// Frozen uppers that may wait for [`Image::settle`] before a writer does the work itself.
const MAX_FROZEN: usize = 4;

/// A writable disk; see the module.
#[derive(Debug)]
pub struct Image {
    dir: PathBuf,
    durability: Durability,
    cache: Arc<ChainCache>,
    auto_seal: u64,
    view: RwLock<Arc<View>>,
    manifest: Mutex<Manifest>,
    /// Uppers that were frozen and are not yet durable layers, oldest first.
    unsealed: Mutex<Vec<Arc<Upper>>>,
    /// Held while the upper is exchanged or resized.
    swap: Mutex<()>,
    /// Held while frozen uppers become layers, and while layers are replaced.
    settling: Mutex<()>,
}

/// For exporting a disk that nobody writes to.
impl ReadAt for Image {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.read(buf, offset)
    }
    fn size(&self) -> u64 {
        self.virtual_size()
    }
}

/// What reads and writes go to. Never changes; a new view replaces it.
#[derive(Debug)]
struct View {
    upper: Arc<Upper>,
    below: Below,
}

#[derive(Debug, Clone)]
struct Below {
    /// Newest first.
    frozen: Vec<Arc<Upper>>,
    stack: Arc<Stack>,
}

/// Frozen uppers over the stack. Reads as zeros behind the end.
impl ReadAt for Below {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        read_below(&self.frozen, &self.stack, buf, offset)?;
        Ok(buf.len())
    }
    fn size(&self) -> u64 {
        u64::MAX
    }
}

fn read_below(frozen: &[Arc<Upper>], stack: &Stack, buf: &mut [u8], offset: u64) -> io::Result<()> {
    let Some((newest, older)) = frozen.split_first() else {
        let got = stack.read_at(buf, offset)?;
        buf[got..].fill(0);
        return Ok(());
    };
    let inside = newest
        .virtual_size()
        .saturating_sub(offset)
        .min(buf.len() as u64) as usize;
    buf[inside..].fill(0);
    let older = Older(older, stack);
    newest.read(&mut buf[..inside], offset, &older)
}

struct Older<'a>(&'a [Arc<Upper>], &'a Stack);

impl ReadAt for Older<'_> {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        read_below(self.0, self.1, buf, offset)?;
        Ok(buf.len())
    }
    fn size(&self) -> u64 {
        u64::MAX
    }
}

/// A point in time of an image, as an immutable disk.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Id of the layer the snapshot added.
    pub uuid: Uuid,
    /// All layers up to and with that one. Forks start from here.
    pub stack: Arc<Stack>,
}

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
        let manifest = Manifest::create(&dir.join("manifest"), roles)
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

    /// Seals by itself at another number of index entries than [`AUTO_SEAL`], which is also the most.
    pub fn set_auto_seal(&mut self, entries: u64) {
        self.auto_seal = entries.clamp(1, AUTO_SEAL);
    }

    /// Size of the disk in bytes.
    pub fn virtual_size(&self) -> u64 {
        self.view().upper.virtual_size()
    }

    /// Layers below the upper, without those frozen uppers that were not settled yet.
    pub fn stack(&self) -> Arc<Stack> {
        self.view().below.stack.clone()
    }

    /// Frozen uppers that are not on stable storage yet and wait for [`Image::settle`].
    pub fn unsettled(&self) -> usize {
        locked(&self.unsealed).len()
    }

    /// Bytes of current data in the live upper, and bytes of its file in use.
    pub fn upper_usage(&self) -> (u64, u64) {
        self.view().upper.usage()
    }

    /// The roles as recorded.
    pub fn roles(&self) -> Roles {
        locked(&self.manifest).roles().clone()
    }

    /// Reads bytes of any alignment. Returns fewer than asked for only at the end of the disk.
    pub fn read(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let view = self.view();
        let len = (buf.len() as u64).min(view.upper.virtual_size().saturating_sub(offset)) as usize;
        view.upper.read(&mut buf[..len], offset, &view.below)?;
        Ok(len)
    }

    /// Writes bytes of any alignment; must end within the disk.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.change(|view| view.upper.write(offset, data, &view.below))
    }

    /// Makes a range of bytes read as zeros: discard and write-zeroes. Must end within the disk.
    pub fn zero(&self, offset: u64, length: u64) -> Result<()> {
        self.change(|view| view.upper.zero(offset, length, &view.below))
    }

    /// Runs a change on the live upper, again on its successor if the upper is frozen or full meanwhile.
    fn change(&self, run: impl Fn(&View) -> Result<()>) -> Result<()> {
        let mut was_full = false;
        loop {
            let view = self.view();
            match run(&view) {
                Ok(()) if view.upper.entries() >= self.auto_seal => {
                    return self.rotate(&view.upper)
                }
                Ok(()) => return Ok(()),
                // The successor is in place before anyone is let in again.
                Err(Error::Frozen) => {}
                Err(Error::Limit { .. }) if !was_full => {
                    was_full = true;
                    self.rotate(&view.upper)?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Freezes a full upper unless somebody else did, and settles when too many wait.
    fn rotate(&self, full: &Arc<Upper>) -> Result<()> {
        {
            let swap = locked(&self.swap);
            if Arc::ptr_eq(&self.view().upper, full) {
                self.exchange(&swap)?;
            }
        }
        if self.unsettled() >= MAX_FROZEN {
            self.settle(true)?;
        }
        Ok(())
    }

    /// Makes acknowledged writes durable, as far as the durability promises that.
    pub fn flush(&self) -> Result<()> {
        if self.durability != Durability::Flush {
            return Ok(());
        }
        let view = self.view();
        // First what the roles are, then what was written before the live upper existed.
        locked(&self.manifest).sync()?;
        let older: Vec<_> = locked(&self.unsealed).clone();
        for upper in older {
            upper.flush()?;
        }
        view.upper.flush()
    }

    /// Changes the size of the disk in bytes. No reads and writes beyond the old or the new end while it runs.
    pub fn resize(&self, virtual_size: u64) -> Result<()> {
        // The layers below have to be in the stack, to hide what they have beyond the old end.
        let (_swap, view) = loop {
            self.absorb(&locked(&self.settling))?;
            let swap = locked(&self.swap);
            let view = self.view();
            if view.below.frozen.is_empty() {
                break (swap, view);
            }
        };
        let old = view.upper.virtual_size();
        if virtual_size < old {
            // What shares a block with the new end must not come back when the disk grows.
            let end = virtual_size.next_multiple_of(BLOCK_SIZE).min(old);
            view.upper
                .zero(virtual_size, end - virtual_size, &view.below)?;
        }
        view.upper.resize(virtual_size)?;
        self.hide_below(old..virtual_size)
    }

    /// Zeros what layers below have in a part of the disk that just came into being. There are no frozen uppers.
    fn hide_below(&self, range: Range<u64>) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let view = self.view();
        let sectors = range.start / SECTOR..range.end.div_ceil(SECTOR);
        view.below.stack.pieces(sectors, &mut |piece| {
            let from = (piece.start * SECTOR).max(range.start);
            let to = (piece.end() * SECTOR).min(range.end);
            match piece.origin {
                Origin::Data { .. } => view.upper.zero(from, to - from, &view.below),
                Origin::Hole | Origin::Zero => Ok(()),
            }
        })
    }

    /// Cuts the disk at this moment: what is acknowledged now is below, everything later above. Takes the time of creating
    /// a file; readers and writers are held up for microseconds. Follow with [`Image::settle`].
    pub fn freeze(&self) -> Result<Uuid> {
        let swap = locked(&self.swap);
        self.exchange(&swap)
    }

    fn exchange(&self, _swap: &MutexGuard<'_, ()>) -> Result<Uuid> {
        let old = self.view().upper.clone();
        let uuid = old.identity().uuid;
        let fresh = create_upper(&self.dir, uuid, old.virtual_size(), self.durability)?;
        locked(&self.manifest)
            .record(&Event::Upper(fresh.identity().uuid))
            .inspect_err(|_| discard_upper(&fresh))?;
        locked(&self.unsealed).push(old.clone());
        let mut view = self.view.write().unwrap_or_else(PoisonError::into_inner);
        old.freeze();
        let mut frozen = vec![old];
        frozen.extend(view.below.frozen.iter().cloned());
        *view = Arc::new(View {
            upper: fresh,
            below: Below {
                frozen,
                stack: view.below.stack.clone(),
            },
        });
        Ok(uuid)
    }

    /// Makes layers of all frozen uppers: in memory, and with `durable` on stable storage as well, by sealing them and
    /// recording that. What fails can be tried again; nothing is lost meanwhile.
    pub fn settle(&self, durable: bool) -> Result<()> {
        let settling = locked(&self.settling);
        if !durable {
            return self.absorb(&settling);
        }
        let waiting = {
            // An exchange is either complete or not begun.
            let _swap = locked(&self.swap);
            locked(&self.unsealed).clone()
        };
        self.absorb(&settling)?;
        for upper in waiting {
            // A seal must not be on record before the layer is on stable storage, or a crash makes the image unreadable.
            upper.seal(true)?;
            let mut manifest = locked(&self.manifest);
            manifest.record(&Event::Sealed(upper.identity().uuid))?;
            locked(&self.unsealed).retain(|other| !Arc::ptr_eq(other, &upper));
            // Nor may the journal go before the seal is on record.
            manifest.sync()?;
            drop(manifest);
            upper.remove_journal()?;
        }
        Ok(())
    }

    /// Moves frozen uppers into the stack, in memory.
    fn absorb(&self, _settling: &MutexGuard<'_, ()>) -> Result<()> {
        loop {
            let view = self.view();
            let Some(oldest) = view.below.frozen.last() else {
                return Ok(());
            };
            let stack = view
                .below
                .stack
                .push(Arc::new(oldest.layer()?))?
                .levelled()?;
            let stack = self.cache.insert(stack);
            let mut current = self.view.write().unwrap_or_else(PoisonError::into_inner);
            // Only this function removes from the list, so the oldest is still the same.
            let mut frozen = current.below.frozen.clone();
            frozen.pop();
            *current = Arc::new(View {
                upper: current.upper.clone(),
                below: Below { frozen, stack },
            });
        }
    }

    /// Cuts the disk and returns the state at that moment, to fork from at once. It is not durable before
    /// [`Image::settle`].
    pub fn cut(&self) -> Result<Snapshot> {
        let settling = locked(&self.settling);
        let uuid = self.freeze()?;
        self.absorb(&settling)?;
        // Another cut may already be on top.
        let stack = self.stack();
        let layers = stack.layers();
        let Some(position) = layers.iter().rposition(|l| l.identity().uuid == uuid) else {
            return Err(Error::Argument(format!(
                "layer {uuid} was removed while it was made"
            )));
        };
        let keys: Vec<_> = layers[..=position].iter().map(|l| l.key()).collect();
        let stack = self.cache.stack(&keys, |i| Ok(layers[i].clone()))?;
        Ok(Snapshot { uuid, stack })
    }

    /// Cuts the disk and returns the state at that moment, durably.
    pub fn snapshot(&self) -> Result<Snapshot> {
        let snapshot = self.cut()?;
        self.settle(true)?;
        Ok(snapshot)
    }

    /// Replaces layers `first..first + count` by others with the same content, under the names by which they will be
    /// asked for: what compaction does. Files of replaced layers are left to the caller.
    pub fn replace_layers(
        &self,
        first: usize,
        count: usize,
        with: &[(String, Arc<Layer>)],
    ) -> Result<()> {
        let _settling = locked(&self.settling);
        let _swap = locked(&self.swap);
        let view = self.view();
        let mut layers = view.below.stack.layers().to_vec();
        if first
            .checked_add(count)
            .is_none_or(|end| end > layers.len())
        {
            return Err(Error::Argument(format!(
                "there are {} layers, not {first} + {count}",
                layers.len()
            )));
        }
        layers.splice(
            first..first + count,
            with.iter().map(|(_, layer)| layer.clone()),
        );
        let stack = self.cache.insert(Stack::build(layers)?);
        let event = Event::Replaced {
            first: first as u32,
            count: count as u32,
            with: with
                .iter()
                .map(|(name, _)| LayerRef::Lower(name.clone()))
                .collect(),
        };
        let mut manifest = locked(&self.manifest);
        manifest.record(&event)?;
        manifest.sync()?;
        let below = Below {
            frozen: view.below.frozen.clone(),
            stack,
        };
        let mut current = self.view.write().unwrap_or_else(PoisonError::into_inner);
        *current = Arc::new(View {
            upper: current.upper.clone(),
            below,
        });
        Ok(())
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
        list().map_err(Error::io(format!("list {}", self.dir.display())))
    }

    fn view(&self) -> Arc<View> {
        self.view
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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

fn create_upper(
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
fn discard_upper(upper: &Upper) {
    let _ = std::fs::remove_file(upper.path());
    let _ = std::fs::remove_file(upper.path().with_extension("jrn"));
}
