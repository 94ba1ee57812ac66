//! Binding the control socket.

use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use rustix::fs::Mode;
use rustix::process::umask;

/// Binds the socket, mode 0600. A socket file nobody listens on is a leftover and is replaced; anything else is not ours
/// to remove. Must run before other threads create files, because it changes the umask for a moment.
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    if let Ok(found) = fs::symlink_metadata(path) {
        if !found.file_type().is_socket() {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "a file that is not a socket is in the way",
            ));
        }
        match UnixStream::connect(path) {
            Ok(_) => {
                return Err(io::Error::new(
                    io::ErrorKind::AddrInUse,
                    "another process listens on it",
                ))
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                fs::remove_file(path)?;
            }
            Err(error) => return Err(error),
        }
    }
    let previous = umask(Mode::from_raw_mode(0o177));
    let listener = UnixListener::bind(path);
    umask(previous);
    let listener = listener?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
