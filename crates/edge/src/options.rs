//! Command line.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::log::Level;

pub const USAGE: &str = "\
usage: aenv-edge --listen ADDR:PORT --control PATH --api PATH [options]

  --listen ADDR:PORT          the TCP port for API and sandbox traffic
  --control PATH              Unix socket for the control plane (created, mode 0600)
  --api PATH                  Unix socket of the control API
  --log-level LEVEL           error, warn, info (default) or debug
  --max-connections N         open client connections (default: fitted to the file limit, at most 16384)
  --max-per-sandbox N         requests and tunnels served at once for one sandbox (default 2048)
  --header-timeout-ms N       time to send the head of a request (default 30000)
  --idle-timeout-ms N         silence on a connection between requests (default 660000)
  --stream-timeout-ms N       silence on a connection while a request is served (default 3600000)
  --connect-timeout-ms N      one attempt to connect to a guest (default 5000)
  --version, --help
";

/// Sizes and times that bound what a client or a guest can make the edge hold.
#[derive(Clone, Debug)]
pub struct Limits {
    pub max_connections: Option<usize>,
    pub max_per_sandbox: usize,
    pub header_timeout: Duration,
    pub idle_timeout: Duration,
    pub stream_timeout: Duration,
    pub connect_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            max_connections: None,
            max_per_sandbox: 2048,
            header_timeout: Duration::from_secs(30),
            // Clients keep idle connections for up to 300 s; the side that closes first must be the client, or it may
            // send a request into a connection that is just being closed.
            idle_timeout: Duration::from_secs(660),
            stream_timeout: Duration::from_secs(3600),
            connect_timeout: Duration::from_secs(5),
        }
    }
}

#[derive(Clone, Debug)]
pub struct Options {
    pub listen: SocketAddr,
    pub control: PathBuf,
    pub api: PathBuf,
    pub log_level: Level,
    pub limits: Limits,
}

/// What the command line asks for.
pub enum Command {
    Run(Options),
    Print(String),
}

/// Reads the arguments after the program name. The error is one line for the user.
pub fn parse<I>(args: I) -> Result<Command, String>
where
    I: IntoIterator,
    I::Item: Into<std::ffi::OsString>,
{
    use lexopt::prelude::*;

    let (mut listen, mut control, mut api) = (None, None, None);
    let mut log_level = Level::Info;
    let mut limits = Limits::default();
    let mut parser = lexopt::Parser::from_args(args);
    while let Some(arg) = parser.next().map_err(|e| e.to_string())? {
        let Long(name) = arg else {
            return Err(arg.unexpected().to_string());
        };
        let name = name.to_owned();
        match name.as_str() {
            "help" => return Ok(Command::Print(USAGE.into())),
            "version" => {
                return Ok(Command::Print(
                    concat!("aenv-edge ", env!("CARGO_PKG_VERSION"), "\n").into(),
                ))
            }
            "listen" | "control" | "api" | "log-level" | "max-connections" | "max-per-sandbox"
            | "header-timeout-ms" | "idle-timeout-ms" | "stream-timeout-ms"
            | "connect-timeout-ms" => {}
            other => return Err(format!("unknown option --{other}; try --help")),
        }
        let value = parser.value().map_err(|e| e.to_string())?;
        if name == "control" || name == "api" {
            let slot = if name == "control" {
                &mut control
            } else {
                &mut api
            };
            *slot = Some(PathBuf::from(value));
            continue;
        }
        let value = value
            .into_string()
            .map_err(|v| format!("--{name}: {} is not UTF-8", v.to_string_lossy()))?;
        let count = || -> Result<usize, String> {
            match value.parse() {
                Ok(n) if n > 0 => Ok(n),
                _ => Err(format!(
                    "--{name} wants a whole number above 0, not {value:?}"
                )),
            }
        };
        let millis = || count().map(|n| Duration::from_millis(n as u64));
        match name.as_str() {
            "listen" => {
                listen = Some(value.parse().map_err(|_| {
                    format!(
                    "--listen wants an IP address and a port such as 0.0.0.0:3000, not {value:?}"
                )
                })?)
            }
            "log-level" => log_level = value.parse()?,
            "max-connections" => limits.max_connections = Some(count()?),
            "max-per-sandbox" => limits.max_per_sandbox = count()?,
            "header-timeout-ms" => limits.header_timeout = millis()?,
            "idle-timeout-ms" => limits.idle_timeout = millis()?,
            "stream-timeout-ms" => limits.stream_timeout = millis()?,
            _ => limits.connect_timeout = millis()?,
        }
    }
    let missing = |name: &str| format!("--{name} is missing; try --help");
    Ok(Command::Run(Options {
        listen: listen.ok_or_else(|| missing("listen"))?,
        control: control.ok_or_else(|| missing("control"))?,
        api: api.ok_or_else(|| missing("api"))?,
        log_level,
        limits,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(args: &[&str]) -> Result<Options, String> {
        match parse(args.iter().copied())? {
            Command::Run(options) => Ok(options),
            Command::Print(text) => Err(text),
        }
    }

    #[test]
    fn reads_a_full_command_line() {
        let options = run(&[
            "--listen",
            "127.0.0.1:0",
            "--control=/c",
            "--api",
            "/a",
            "--log-level",
            "debug",
            "--max-per-sandbox",
            "7",
        ])
        .unwrap();
        assert_eq!(options.listen.port(), 0);
        assert_eq!(options.control, PathBuf::from("/c"));
        assert_eq!(options.api, PathBuf::from("/a"));
        assert_eq!(options.log_level, Level::Debug);
        assert_eq!(options.limits.max_per_sandbox, 7);
    }

    #[test]
    fn names_what_is_wrong() {
        for (args, part) in [
            (&["--listen", "nowhere"][..], "--listen wants"),
            (
                &["--listen", "127.0.0.1:1", "--api", "/a"],
                "--control is missing",
            ),
            (&["--max-connections", "0"], "--max-connections wants"),
            (&["--colour", "red"], "unknown option --colour"),
            (&["extra"], "extra"),
            (&["--log-level", "loud"], "loud"),
        ] {
            let error = run(args).unwrap_err();
            assert!(error.contains(part), "{args:?}: {error}");
        }
    }
}
