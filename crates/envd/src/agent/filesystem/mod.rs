//! Files of the guest: the `filesystem.Filesystem` service and what `/files` shares with it.

pub mod entry;
pub mod metadata;
pub mod path;
pub mod rpc;
mod tree;
pub mod walk;
mod watch;
pub mod watchers;
