//! The first process of a guest.

pub mod paths;

use std::process::ExitCode;

pub fn main() -> ExitCode {
    ExitCode::FAILURE
}

pub fn modprobe(_args: &[std::ffi::OsString]) -> ExitCode {
    ExitCode::FAILURE
}
