//! An image: layers, for a writable one an upper on top, behind the interface that attachments serve.
//!
//! Writable images keep their files in a directory of their own (`images/<number>`); what they do with them is the
//! business of [`lsmt::image`]. Read-only images have no files. An image that could not be opened after a restart is
//! kept as a failed one: who uses it gets errors and who asks is told why, while all others work.

pub mod trace;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lsmt::header::{MAX_VIRTUAL_SIZE, SECTOR};
use lsmt::image::Image as Writable;
use lsmt::index::Origin;
use lsmt::layer::Layer;
use lsmt::manifest::LayerRef as Role;
use lsmt::source::ReadAt;
use lsmt::stack::Stack;
use lsmt::upper;
use uuid::Uuid;

use self::trace::Recorder;
use crate::attach::{Disk, Seek, Shape};
use crate::crew::blocking;
use crate::failure::{Failure, Result};
use crate::layers::Layers;
use crate::origin::Remote;
use crate::table::{Durability, LayerRef, Mode, Spec};

/// Prefixes of the names of layers made here and of remote ones, in manifests of images. Other names are absolute paths.
const BY_ID: &str = "id:";
const REMOTE: &str = "remote:";

/// How long locked files are waited for.
const PATIENCE: Duration = Duration::from_secs(2);

/// An open image. Its operations may be called from any thread; those that change it exclude each other.
pub struct Image {
    pub number: u64,
    pub id: String,
    pub spec: Spec,
    content: Content,
    /// Held by operations that change what the image consists of.
    changing: Mutex<()>,
    /// First reads of the layers below.
    pub recorder: Recorder,
}

enum Content {
    Writable {
        image: Box<Writable>,
        directory: PathBuf,
    },
    Fixed {
        stack: Arc<Stack>,
        size: u64,
    },
    Failed {
        cause: String,
        size: u64,
    },
}

impl Content {
    fn writable(image: Writable, directory: &Path) -> Content {
        Content::Writable {
            image: Box::new(image),
            directory: directory.to_owned(),
        }
    }
}

/// A moment of a writable image as a list of layers.
pub struct Cut {
    /// Id of the layer that holds what was written since the last cut.
    pub top: Uuid,
    /// All layers up to that one, bottom first.
    pub chain: Vec<Link>,
}

/// One layer of a chain.
pub struct Link {
    /// How to name it.
    pub name: LayerRef,
    /// The file, if the image made it.
    pub own: Option<PathBuf>,
    pub layer: Arc<Layer>,
}

/// Finds layers by the names callers and manifests use.
pub type Resolve<'a> = dyn Fn(&LayerRef) -> Result<Arc<Layer>> + 'a;

impl Image {
    /// Makes a new image. Writable ones get a new directory at `directory`; on failure nothing is left of it.
    pub fn create(
        number: u64,
        id: &str,
        spec: Spec,
        directory: &Path,
        layers: &Layers,
        resolve: &Resolve<'_>,
    ) -> Result<Image> {
        let action = format!("open image {id}");
        let mut lowers = Vec::with_capacity(spec.layers.len());
        for name in &spec.layers {
            lowers.push((to_name(name), resolve(name)?));
        }
        let keys: Vec<_> = lowers.iter().map(|(_, layer)| layer.key()).collect();
        let stack = layers
            .chains
            .stack(&keys, |at| Ok(lowers[at].1.clone()))
            .and_then(|stack| stack.check_parents().map(|()| stack))
            .map_err(Failure::lsmt(&action))?;
        let size = checked_size(&spec, &stack)?;
        let content = if spec.read_only {
            Content::Fixed { stack, size }
        } else {
            fs::create_dir(directory).map_err(Failure::io(&action))?;
            let durability = durability(&spec);
            let created =
                Writable::create(directory, &lowers, size, durability, layers.chains.clone());
            let writable = created.map_err(|error| {
                let _ = fs::remove_dir_all(directory);
                Failure::lsmt(&action)(error)
            })?;
            Content::writable(writable, directory)
        };
        Ok(Image::new(number, id, spec, content))
    }

    /// Opens an image that existed before, and had `size` bytes. Does not fail: see [`Image::failed`].
    pub fn reopen(
        number: u64,
        id: &str,
        spec: Spec,
        size: u64,
        directory: &Path,
        layers: &Layers,
        resolve: &Resolve<'_>,
    ) -> Image {
        let opened = if spec.read_only {
            Image::create(number, id, spec.clone(), directory, layers, resolve)
        } else {
            let action = format!("open image {id} again");
            let mut missing = None;
            let mut find = |name: &str| {
                resolve(&from_name(name)).map_err(|failure| {
                    let message = failure.message.clone();
                    missing = Some(failure);
                    lsmt::Error::Argument(message)
                })
            };
            let durability = durability(&spec);
            let mut open =
                || Writable::open(directory, durability, layers.chains.clone(), &mut find);
            patiently(&mut open)
                .map_err(Failure::lsmt(&action))
                .map(|(writable, _)| {
                    let content = Content::writable(writable, directory);
                    Image::new(number, id, spec.clone(), content)
                })
                .map_err(|failure| missing.unwrap_or(failure))
        };
        opened.unwrap_or_else(|failure| {
            let content = Content::Failed {
                cause: failure.message,
                size,
            };
            Image::new(number, id, spec, content)
        })
    }

    fn new(number: u64, id: &str, spec: Spec, content: Content) -> Image {
        Image {
            number,
            id: id.to_owned(),
            spec,
            content,
            changing: Mutex::new(()),
            recorder: Recorder::default(),
        }
    }

    /// Why the image could not be opened, if so.
    pub fn failed(&self) -> Option<&str> {
        match &self.content {
            Content::Failed { cause, .. } => Some(cause),
            _ => None,
        }
    }

    /// What the attachment looks like.
    pub fn shape(&self) -> Shape {
        Shape {
            read_only: self.spec.read_only,
            uid: self.spec.uid,
            gid: self.spec.gid,
            mode: self.spec.permissions,
            created: self.spec.created,
        }
    }

    /// Excludes other operations that change the image.
    pub fn changing(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn writable(&self) -> Result<&Writable> {
        match &self.content {
            Content::Writable { image, .. } => Ok(image),
            Content::Fixed { .. } => Err(Failure::conflict(format!(
                "image {} is read-only; open a writable image over its layers",
                self.id
            ))),
            Content::Failed { cause, .. } => Err(Failure::conflict(format!(
                "image {} cannot be used: {cause}",
                self.id
            ))),
        }
    }

    /// Bytes of current data in the upper, and bytes of its file; `None` without an upper.
    pub fn upper_usage(&self) -> Option<(u64, u64)> {
        self.writable().ok().map(Writable::upper_usage)
    }

    /// Cuts the image at this moment. Writers wait for microseconds; the layers are readable at once, and on stable
    /// storage after [`Image::settle`].
    pub fn cut(&self) -> Result<Cut> {
        let writable = self.writable()?;
        let failure = |error| Failure::lsmt(format!("seal image {}", self.id))(error);
        let top = writable.freeze().map_err(failure)?;
        crate::failpoint::hit("seal-frozen");
        let chain = self.chain()?;
        let count = chain
            .iter()
            .position(|link| link.name == LayerRef::Id(top.to_string()))
            .map_or(chain.len(), |at| at + 1);
        let chain = chain.into_iter().take(count).collect();
        Ok(Cut { top, chain })
    }

    /// All layers below the upper, bottom first.
    pub fn chain(&self) -> Result<Vec<Link>> {
        let (writable, directory) = match &self.content {
            Content::Writable { image, directory } => (image, directory),
            Content::Failed { .. } => return self.writable().map(|_| Vec::new()),
            Content::Fixed { stack, .. } => {
                let named = self.spec.layers.iter().zip(stack.layers());
                let link = |(name, layer): (&LayerRef, &Arc<Layer>)| Link {
                    name: name.clone(),
                    own: None,
                    layer: layer.clone(),
                };
                return Ok(named.map(link).collect());
            }
        };
        // In memory only: frozen uppers become layers of the stack.
        writable.settle(false).map_err(Failure::lsmt(format!(
            "read the layers of image {}",
            self.id
        )))?;
        let stack = writable.stack();
        let roles = writable.roles().layers;
        let links = roles.iter().zip(stack.layers()).map(|(role, layer)| {
            let (name, own) = match role {
                Role::Lower(name) => (from_name(name), None),
                Role::Frozen(uuid) | Role::Sealed(uuid) => {
                    let path = layer_path(directory, *uuid);
                    (LayerRef::Id(uuid.to_string()), Some(path))
                }
            };
            Link {
                name,
                own,
                layer: layer.clone(),
            }
        });
        Ok(links.collect())
    }

    /// Whether a cut is not on stable storage yet.
    pub fn unsettled(&self) -> bool {
        self.writable()
            .is_ok_and(|writable| writable.unsettled() > 0)
    }

    /// Puts all cuts on stable storage. Can be repeated after a failure.
    pub fn settle(&self) -> Result<()> {
        let writable = self.writable()?;
        writable.settle(true).map_err(Failure::lsmt(format!(
            "write the layer sealed from image {}",
            self.id
        )))
    }

    /// Puts another layer with the same content in the place of `count` layers from the `first` on. All of them are
    /// settled.
    pub fn replace(
        &self,
        first: usize,
        count: usize,
        name: &LayerRef,
        layer: Arc<Layer>,
    ) -> Result<()> {
        self.writable()?
            .replace_layers(first, count, &[(to_name(name), layer)])
            .map_err(Failure::lsmt(format!(
                "replace layers of image {}",
                self.id
            )))
    }

    /// Makes the image larger; `size` in bytes.
    pub fn grow(&self, size: u64) -> Result<()> {
        let writable = self.writable()?;
        check_limits(size)?;
        let now = writable.virtual_size();
        if size < now {
            return Err(Failure::conflict(format!(
                "image {} has {now} bytes and can only grow, not shrink to {size}",
                self.id
            )));
        }
        writable
            .resize(size)
            .map_err(Failure::lsmt(format!("resize image {}", self.id)))
    }

    /// The layers below the upper, as one disk.
    pub fn stack(&self) -> Result<Arc<Stack>> {
        match &self.content {
            Content::Fixed { stack, .. } => Ok(stack.clone()),
            _ => Ok(self.writable()?.stack()),
        }
    }

    /// Names of the layers the image needs.
    pub fn uses(&self) -> Vec<LayerRef> {
        match &self.content {
            Content::Writable { image, .. } => {
                let name = |role: &Role| match role {
                    Role::Lower(name) => from_name(name),
                    Role::Frozen(uuid) | Role::Sealed(uuid) => LayerRef::Id(uuid.to_string()),
                };
                image.roles().layers.iter().map(name).collect()
            }
            _ => self.spec.layers.clone(),
        }
    }
}

/// The files of an image are locked. A predecessor that was killed may let go of them a moment later than of the lock on
/// the state directory.
fn patiently<T>(open: &mut dyn FnMut() -> lsmt::Result<T>) -> lsmt::Result<T> {
    let start = Instant::now();
    loop {
        match open() {
            Err(lsmt::Error::Io { source, .. })
                if source.kind() == io::ErrorKind::WouldBlock && start.elapsed() < PATIENCE =>
            {
                std::thread::sleep(Duration::from_millis(2));
            }
            other => return other,
        }
    }
}

/// Path of a layer an image made.
pub fn layer_path(directory: &Path, uuid: Uuid) -> PathBuf {
    directory.join(format!("{uuid}.lsmt"))
}

fn to_name(layer: &LayerRef) -> String {
    match layer {
        LayerRef::Path(path) => path.to_string_lossy().into_owned(),
        LayerRef::Id(id) => format!("{BY_ID}{id}"),
        LayerRef::Remote(remote) => format!("{REMOTE}{}", remote.to_text()),
    }
}

fn from_name(name: &str) -> LayerRef {
    let remote = name.strip_prefix(REMOTE).and_then(Remote::from_text);
    match (name.strip_prefix(BY_ID), remote) {
        (Some(id), _) => LayerRef::Id(id.to_owned()),
        (_, Some(remote)) => LayerRef::Remote(remote),
        _ => LayerRef::Path(name.into()),
    }
}

fn durability(spec: &Spec) -> upper::Durability {
    match spec.durability {
        // The daemon may be killed at any time without anyone noticing.
        Durability::None => upper::Durability::Process,
        Durability::Flush => upper::Durability::Flush,
    }
}

fn check_limits(size: u64) -> Result<()> {
    if size == 0 || size % SECTOR != 0 || size > MAX_VIRTUAL_SIZE {
        return Err(Failure::bad_request(format!(
            "an image has {SECTOR} to {MAX_VIRTUAL_SIZE} bytes in whole sectors of {SECTOR}, not {size}"
        )));
    }
    Ok(())
}

fn checked_size(spec: &Spec, stack: &Stack) -> Result<u64> {
    let size = match spec.virtual_size {
        0 => stack.virtual_size(),
        size => size,
    };
    check_limits(size)?;
    if spec.mode == Mode::Memory && size % 4096 != 0 {
        return Err(Failure::bad_request(format!(
            "memory has whole pages of 4096 bytes, {size} bytes are not"
        )));
    }
    Ok(size)
}

impl Disk for Image {
    fn size(&self) -> u64 {
        match &self.content {
            Content::Writable { image, .. } => image.virtual_size(),
            Content::Fixed { size, .. } | Content::Failed { size, .. } => *size,
        }
    }

    fn read(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let got = match &self.content {
            Content::Writable { image, .. } => {
                if self.recorder.is_on() {
                    self.recorder.note(&image.stack(), offset, buf.len());
                }
                image.read(buf, offset)?
            }
            Content::Fixed { stack, .. } => {
                self.recorder.note(stack, offset, buf.len());
                stack.read_at(buf, offset)?
            }
            Content::Failed { cause, .. } => return Err(io::Error::other(cause.clone())),
        };
        // Layers may be shorter than the image.
        buf[got..].fill(0);
        Ok(())
    }

    fn write(&self, data: &[u8], offset: u64) -> io::Result<()> {
        match &self.content {
            Content::Writable { image, .. } => Ok(image.write(offset, data)?),
            _ => Err(io::Error::from_raw_os_error(libc::EROFS)),
        }
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        match &self.content {
            Content::Writable { image, .. } => Ok(blocking(|| image.zero(offset, len))?),
            _ => Err(io::Error::from_raw_os_error(libc::EROFS)),
        }
    }

    fn flush(&self) -> io::Result<()> {
        match &self.content {
            Content::Writable { image, .. } if self.spec.durability == Durability::Flush => {
                Ok(blocking(|| image.flush())?)
            }
            _ => Ok(()),
        }
    }

    fn seek(&self, offset: u64, target: Seek) -> io::Result<Option<u64>> {
        let size = self.size();
        let Content::Fixed { stack, .. } = &self.content else {
            // What is a hole changes while one looks; calling everything data is always right.
            return Ok(match target {
                Seek::Data => Some(offset),
                Seek::Hole => Some(size),
            });
        };
        let mut found = None;
        let sectors = offset / SECTOR..size.div_ceil(SECTOR);
        // The walk ends with an "error" as soon as the place is found.
        let _ = stack.pieces(sectors, &mut |piece| {
            let is_data = matches!(piece.origin, Origin::Data { .. });
            if is_data == (target == Seek::Data) {
                found = Some((piece.start * SECTOR).max(offset));
                return Err(());
            }
            Ok(())
        });
        Ok(match target {
            Seek::Data => found,
            Seek::Hole => Some(found.unwrap_or(size)),
        })
    }
}
