//! Layers of guest memory, taken from the VMM's process.
//!
//! Guest memory is a private mapping of a memory image (or of nothing). What the guest changed are the *private* pages
//! of the mapping, which the kernel can list without having tracked anything. They become a layer over the image.
//!
//! # Life of a captured layer
//!
//! 1. *Scan*: private pages are listed ([`pagemap`]). The layer can be read from this moment: its pages are answered from
//!    the process ([`live`]), which has to stay frozen and alive. The successor of the VMM can already run on it.
//! 2. *Drain*: a thread copies all pages to the layer file, leaving out zeros and what equals the image below.
//! 3. *Copied*: reads go to the file. The process may go.
//! 4. *Sealed*: the file is on stable storage.
//!
//! With `copy`, all pages are copied to memory of ours in step 1, and the process may go on or go at once.
//!
//! If the process ends before the layer is copied, the layer has failed for good: reads of it return errors that say so.
//! If the daemon ends before, its successor scans again, as long as the process is still there and was not copied.

mod capture;
pub mod live;
pub mod pagemap;
pub mod process;
mod staging;

pub use capture::{Capture, Plan, Range};

/// Bytes in a page.
pub const PAGE: u64 = 4096;
