//! Command line.

use std::ffi::OsString;
use std::path::PathBuf;

pub const USAGE: &str = "\
usage: aenv-blockd serve --state DIR --mount DIR --control PATH [options]
       aenv-blockd holder --socket PATH

serve: the daemon
  --state DIR       what has to survive: the table of images, uppers, layers (created)
  --mount DIR       where images appear as files (created); no other mount may be on it
  --control PATH    Unix socket for the control plane (created, mode 0600)
  --holder PATH     Unix socket of the process that keeps the mount alive (default: <state>/holder); it is
                    started if none listens
  --origin PATH     Unix socket that answers byte ranges of remote layers (default: there are none)
  --cache-bytes N   what may be kept of remote layers (default: 10737418240)
  --workers N       threads that are free to serve requests (default: one per processor, 2 to 16)

holder: keeps descriptors while the daemon is being replaced
  --socket PATH     Unix socket (created, mode 0600)

  --version, --help
";

/// Where the daemon works.
#[derive(Debug)]
pub struct Serve {
    pub state: PathBuf,
    pub mount: PathBuf,
    pub control: PathBuf,
    pub holder: PathBuf,
    pub origin: Option<PathBuf>,
    pub cache_bytes: u64,
    pub workers: Option<usize>,
}

/// What the command line asks for.
#[derive(Debug)]
pub enum Command {
    Serve(Serve),
    Holder(PathBuf),
    Print(String),
}

/// Reads the arguments after the program name. The error is one line for the user.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Command, String> {
    use lexopt::prelude::*;

    let mut parser = lexopt::Parser::from_args(args);
    let mut command = None;
    let (mut state, mut mount, mut control, mut holder) = (None, None, None, None);
    let (mut socket, mut workers, mut origin) = (None, None, None);
    let mut cache_bytes = 10 << 30;
    while let Some(arg) = parser.next().map_err(|e| e.to_string())? {
        let path = |parser: &mut lexopt::Parser| {
            parser.value().map(PathBuf::from).map_err(|e| e.to_string())
        };
        match arg {
            Long("help") => return Ok(Command::Print(USAGE.into())),
            Long("version") => {
                let version = concat!("aenv-blockd ", env!("CARGO_PKG_VERSION"), "\n");
                return Ok(Command::Print(version.into()));
            }
            Value(name) if command.is_none() => command = Some(name),
            Long("state") => state = Some(path(&mut parser)?),
            Long("mount") => mount = Some(path(&mut parser)?),
            Long("control") => control = Some(path(&mut parser)?),
            Long("holder") => holder = Some(path(&mut parser)?),
            Long("socket") => socket = Some(path(&mut parser)?),
            Long("origin") => origin = Some(path(&mut parser)?),
            Long("cache-bytes") => {
                let value = parser.value().map_err(|e| e.to_string())?;
                cache_bytes = value.parse().map_err(|e| e.to_string())?;
            }
            Long("workers") => {
                let value = parser.value().map_err(|e| e.to_string())?;
                let number: usize = value.parse().map_err(|e| e.to_string())?;
                if !(1..=64).contains(&number) {
                    return Err(format!("--workers wants 1 to 64, not {number}"));
                }
                workers = Some(number);
            }
            other => return Err(other.unexpected().to_string()),
        }
    }
    let need =
        |value: Option<PathBuf>, name: &str| value.ok_or(format!("{name} is missing; see --help"));
    match command.as_ref().and_then(|name| name.to_str()) {
        Some("serve") => {
            let state = need(state, "--state")?;
            Ok(Command::Serve(Serve {
                mount: need(mount, "--mount")?,
                control: need(control, "--control")?,
                holder: holder.unwrap_or_else(|| state.join("holder")),
                state,
                origin,
                cache_bytes,
                workers,
            }))
        }
        Some("holder") => Ok(Command::Holder(need(socket, "--socket")?)),
        Some(other) => Err(format!("there is no command {other}; see --help")),
        None => Err("a command is missing: serve or holder; see --help".into()),
    }
}
