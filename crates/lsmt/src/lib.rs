//! Layered block images in the open overlaybd format.
//!
//! A disk, or the memory of a machine, is a stack of immutable *layers* with an optional writable *upper* on top. A layer
//! maps runs of 512-byte sectors to places in a file; where a layer maps nothing, the one below shows through, and at the
//! bottom everything is zero.
//!
//! ```text
//!  Image                 image     reads, writes, snapshots, resizing; a directory with a manifest
//!   ├─ Upper             upper     writable top: append log with private index and journal
//!   └─ Stack             stack     layers with one searchable index, shared through ChainCache (cache)
//!       └─ Layer         layer     sealed file: strict reader          sources: anything that can ReadAt (source)
//!           └─ Index     index     sorted entries (entry), put together by merge
//!
//!  commit                write dense layers: commit, merge, flatten
//!  blob = tar → zfile → layer      what registries store
//!  pair, sparse, warp, trace       other files of the format: live uppers, turboOCI layers, prefetch traces
//! ```
//!
//! # The layer file
//!
//! ```text
//! 0      4096 B header   magic, flags, virtual size, uuid, parent uuid, tag
//! 4096   data            whole sectors, in any order, not all of it necessarily referred to
//! D      index           16 B per entry, sorted by sector, padded
//! end    4096 B trailer  like the header, plus position and length of the index
//! ```
//! An entry maps 1 to 16383 sectors of the image, either to data in the file or to zeros that hide lower layers. Only the
//! trailer says whether a file is complete. The format has no checksums: integrity comes from the zfile around a layer or
//! from the digest of the blob. So the reader checks every number against every other before it believes one: order,
//! overlap, bounds in the image and in the file, and the limit of a million entries. See [`header`], [`entry`], [`layer`].
//!
//! # Trust
//!
//! Files may come from a registry, and what a guest writes ends up in them. No number found in a file sizes an allocation
//! before it was checked against what is there; damage is an [`Error`], never a panic. Roles of files (live, frozen, sealed)
//! come from the manifest and never from their content, which a guest could forge.
//!
//! # Threads
//!
//! Everything is synchronous and may be called from any thread. The only threads of its own are the compressors of
//! [`zfile::ZWriter`], and only when asked for.
//!
//! # Example
//!
//! ```
//! use std::sync::Arc;
//! use lsmt::{cache::ChainCache, image::Image, source::ReadAt, upper::Durability};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let dir = tempfile::tempdir()?;
//! let cache = Arc::new(ChainCache::new(16));
//! let disk = Image::create(dir.path(), &[], 1 << 30, Durability::Process, cache)?;
//! disk.write(4096, b"hello")?;
//! let snapshot = disk.snapshot()?;
//! disk.write(4096, b"world")?;
//!
//! let mut then = [0; 5];
//! snapshot.stack.read_exact_at(&mut then, 4096)?;
//! assert_eq!(&then, b"hello");
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]
#![warn(missing_docs)]

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
