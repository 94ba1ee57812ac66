//! Files of the guest: the `filesystem.Filesystem` service and what `/files` shares with it.

pub mod metadata;
pub mod path;
pub mod walk;
