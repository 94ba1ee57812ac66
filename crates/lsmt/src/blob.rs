//! From a blob of unknown wrapping to a layer: tar? then zfile? then LSMT.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::layer::{Layer, LayerKey};
use crate::source::{ReadAt, SubRange};
use crate::tar;
use crate::zfile::{is_zfile, ZFile};

/// What a layer was wrapped in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Wrapping {
    /// The blob is a tar archive.
    pub tar: bool,
    /// The content is compressed.
    pub zfile: bool,
}

/// Removes the wrapping of a blob. The result is the plain content, whatever it is.
pub fn unwrap(blob: Arc<dyn ReadAt>) -> Result<(Arc<dyn ReadAt>, Wrapping)> {
    let mut wrapping = Wrapping::default();
    let mut plain = blob;
    if let Some(range) = tar::locate(&*plain)? {
        wrapping.tar = true;
        plain = Arc::new(SubRange::new(plain, range.start, range.end - range.start));
    }
    if is_zfile(&*plain)? {
        wrapping.zfile = true;
        plain = Arc::new(ZFile::open(plain)?);
    }
    Ok((plain, wrapping))
}

/// Opens the layer in a blob, wrapped or not.
pub fn open_layer(blob: Arc<dyn ReadAt>, key: LayerKey) -> Result<Layer> {
    let (plain, wrapping) = unwrap(blob)?;
    Layer::open(plain, key).map_err(|error| match (error, wrapping) {
        (
            Error::Format { object, reason },
            Wrapping {
                tar: false,
                zfile: false,
            },
        ) => Error::format(
            object,
            format!("{reason} (and it is neither a tar archive nor a zfile)"),
        ),
        (error, _) => error,
    })
}
