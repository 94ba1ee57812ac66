//! The block daemon of a node: layered disk and memory images, each shown as one file.

pub mod attach;
pub mod control;
pub mod crew;
pub mod daemon;
pub mod failpoint;
pub mod failure;
pub mod holder;
pub mod image;
pub mod layers;
pub mod log;
pub mod memory;
pub mod options;
pub mod origin;
pub mod progress;
pub mod serve;
pub mod table;
pub mod turnstile;
