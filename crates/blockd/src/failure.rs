//! Why a call fails, as the caller is told.

use std::fmt;
use std::io;

/// Code as in HTTP, and one sentence that names the object, the cause and the remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub code: u16,
    pub message: String,
}

/// Result of a call.
pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    pub fn bad_request(message: impl Into<String>) -> Failure {
        Failure::new(400, message)
    }

    pub fn not_found(message: impl Into<String>) -> Failure {
        Failure::new(404, message)
    }

    pub fn conflict(message: impl Into<String>) -> Failure {
        Failure::new(409, message)
    }

    pub fn new(code: u16, message: impl Into<String>) -> Failure {
        let message = message.into();
        Failure { code, message }
    }

    /// An error of the operating system during `action`.
    pub fn io(action: impl fmt::Display) -> impl FnOnce(io::Error) -> Failure {
        move |error| Failure::caused(&error, format!("cannot {action}: {error}"))
    }

    fn caused(error: &io::Error, mut message: String) -> Failure {
        let code = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => 507,
            io::ErrorKind::NotFound => 404,
            io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => 400,
            io::ErrorKind::AlreadyExists => 409,
            _ => 500,
        };
        if code == 507 {
            message += "; free some space and try again";
        }
        Failure { code, message }
    }

    /// An error of the storage library during `action`.
    pub fn lsmt(action: impl fmt::Display) -> impl FnOnce(lsmt::Error) -> Failure {
        move |error| {
            let message = format!("cannot {action}: {error}");
            match error {
                lsmt::Error::Io { source, .. } => Failure::caused(&source, message),
                lsmt::Error::Limit { .. } | lsmt::Error::Frozen => Failure::conflict(message),
                _ => Failure::bad_request(message),
            }
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
