//! Layers of guest memory, taken from the VMM's process.
//!
//! Guest memory is a private mapping of a memory image (or of nothing). What the guest changed are the *private* pages
//! of the mapping, which the kernel can list without having tracked anything. They become a layer over the image.
//!
//! # Life of a captured layer
//!
//! 1. *Start*: the mappings are checked, nothing more. The layer can be read from this moment, whatever its size: its pages
//!    are answered from the process ([`live`]), which has to stay frozen and alive. The successor of the VMM can already run
//!    on it.
//! 2. *Scan*: private pages are listed ([`pagemap`]).
//! 3. *Drain*: a thread copies them to the layer file, leaving out zeros and what equals the image below.
//! 4. *Copied*: reads go to the file. The process may go.
//! 5. *Sealed*: the file is on stable storage.
//!
//! With `copy`, private pages are listed and copied to memory of ours in step 1, and the process may go on or go at once.
//!
//! If the process ends before the layer is copied, the layer has failed for good: reads of it return errors that say so.
//! If the daemon ends before, its successor starts again, as long as the process is still there and was not copied.

mod capture;
mod guest;
pub mod live;
pub mod pagemap;
pub mod process;
mod staging;

pub use capture::{Capture, Place, Plan};

/// Bytes in a page.
pub const PAGE: u64 = 4096;
