//! Layered images in the open overlaybd format.
#![forbid(unsafe_code)]

pub mod blob;
pub mod cache;
pub mod commit;
pub mod entry;
pub mod error;
pub mod extents;
pub mod header;
pub mod image;
pub mod index;
pub mod layer;
pub mod manifest;
pub mod merge;
pub mod pair;
pub mod source;
pub mod sparse;
pub mod stack;
mod tail;
pub mod tar;
pub mod trace;
pub mod upper;
pub mod warp;
pub mod zfile;

pub use error::{Error, Result};
