//! What the first process and the agent both need from the operating system.

pub mod names;
pub mod read;
