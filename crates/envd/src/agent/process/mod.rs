//! Processes: started, observed and controlled through the `process.Process` service.

mod messages;
pub mod rpc;
mod spawn;
pub mod stream;
mod table;

pub use table::Processes;
