//! The block daemon of a node: layered disk and memory images, each shown as one file.

pub mod attach;
pub mod crew;
pub mod failpoint;
pub mod holder;
pub mod log;
