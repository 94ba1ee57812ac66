//! The one error type of the crate.

use std::fmt;
use std::io;

/// Result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, with which object, and what can be done about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused or failed an operation.
    #[error("{action}: {source}")]
    Io {
        /// What was being done, naming the object.
        action: String,
        /// Cause as the system told it.
        #[source]
        source: io::Error,
    },
    /// Bytes do not follow their format. Nothing was changed; the object has to be fetched or built again.
    #[error("{object} is damaged or not what it claims to be: {reason}")]
    Format {
        /// The kind of object that was read.
        object: &'static str,
        /// The broken rule with the offending numbers.
        reason: String,
    },
    /// A well-formed object uses a feature this crate does not have.
    #[error("{object} cannot be used: {reason}")]
    Unsupported {
        /// The kind of object that was read.
        object: &'static str,
        /// The missing feature.
        reason: String,
    },
    /// An unsealed upper was left inconsistent by a crash. Opening it with repair keeps what is provably good.
    #[error("{object} was left inconsistent by a crash: {reason}; open it with repair to keep the {good} good entries before that point")]
    Torn {
        /// The kind of object that was read.
        object: &'static str,
        /// The first inconsistency.
        reason: String,
        /// Number of entries that precede it.
        good: u64,
    },
    /// A limit of the format or of this crate would be exceeded.
    #[error("{what} is {value}, the limit is {max}; {remedy}")]
    Limit {
        /// The counted thing.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The greatest allowed value.
        max: u64,
        /// What the caller can do.
        remedy: &'static str,
    },
    /// The caller passed something that makes no sense.
    #[error("invalid argument: {0}")]
    Argument(String),
    /// The upper was frozen by a seal; the write belongs into its successor.
    #[error("the upper is frozen; write to its successor")]
    Frozen,
}

impl Error {
    /// An operating system error with its context, which is only put into words when there is an error.
    pub(crate) fn io(action: impl fmt::Display) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::Io {
            action: action.to_string(),
            source,
        }
    }

    pub(crate) fn format(object: &'static str, reason: impl Into<String>) -> Error {
        Error::Format {
            object,
            reason: reason.into(),
        }
    }

    pub(crate) fn unsupported(object: &'static str, reason: impl Into<String>) -> Error {
        Error::Unsupported {
            object,
            reason: reason.into(),
        }
    }
}

impl From<Error> for io::Error {
    /// Keeps the kind of an operating system error; everything else becomes `InvalidData` or `InvalidInput`.
    fn from(error: Error) -> io::Error {
        let kind = match &error {
            Error::Io { source, .. } => source.kind(),
            Error::Format { .. } | Error::Unsupported { .. } | Error::Torn { .. } => {
                io::ErrorKind::InvalidData
            }
            Error::Limit { .. } | Error::Argument(_) => io::ErrorKind::InvalidInput,
            Error::Frozen => io::ErrorKind::ReadOnlyFilesystem,
        };
        io::Error::new(kind, error)
    }
}
