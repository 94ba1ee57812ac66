//! What the first process and the agent both need from the operating system.

pub mod cgroups;
pub mod ext4;
pub mod names;
pub mod read;
pub mod signals;
