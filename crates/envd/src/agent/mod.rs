//! The agent: processes, files and health of a guest over HTTP.

mod connect;
mod control;
mod files;
mod filesystem;
mod forward;
mod http;
mod identity;
mod kernel;
mod metrics;
mod process;
mod router;
mod server;
mod setup;
mod token;
mod users;
mod wire;

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use connect::Error;
use identity::Identity;
use kernel::Kernel;
use process::Processes;
use users::{User, Users};

/// The user of calls that name none, unless the sandbox says otherwise.
const DEFAULT_USER: &str = "user";
/// Threads for file work, and their stacks in bytes.
const BLOCKING_THREADS: usize = 64;
const STACK_SIZE: usize = 512 << 10;

/// Everything the requests share.
pub struct Agent {
    pub kernel: Kernel,
    pub users: Users,
    pub processes: Arc<Processes>,
    pub watchers: filesystem::watchers::Watchers,
    identity: RwLock<Identity>,
    pub cpu: metrics::Cpu,
    /// Set when the agent shall end.
    pub stop: tokio::sync::watch::Sender<bool>,
}

impl Agent {
    pub fn identity(&self) -> RwLockReadGuard<'_, Identity> {
        self.identity.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The user named `name`; the default user if it is empty. The error is what clients see.
    pub fn user(&self, name: &str) -> Result<User, String> {
        if !name.is_empty() {
            return self
                .users
                .find(name)
                .ok_or_else(|| format!("invalid username: '{name}'"));
        }
        let default = self.identity().default_user.clone();
        match &*default {
            "" => Ok(self
                .users
                .find(DEFAULT_USER)
                .or_else(|| self.users.find("root")))
            .and_then(|user| user.ok_or_else(|| "invalid username: ''".to_owned())),
            name => self
                .users
                .find(name)
                .ok_or_else(|| format!("invalid username: '{name}'")),
        }
    }
}

/// Runs work that may block, such as file access, on a thread of its own.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let failed = |e| Error::internal(format!("the operation failed: {e}"));
    tokio::task::spawn_blocking(work).await.map_err(failed)?
}

/// The command line of the agent.
struct Options {
    listen: SocketAddr,
    root: Option<PathBuf>,
    /// Root directory passed by the first process of a guest.
    guest: Option<RawFd>,
    /// Address of the guest, to forward from.
    address: Option<Ipv4Addr>,
}

impl Options {
    fn parse(args: &[OsString]) -> Result<Options, String> {
        let mut options = Options {
            listen: SocketAddr::from(([0, 0, 0, 0], 0)),
            root: None,
            guest: None,
            address: None,
        };
        let mut listen = None;
        let mut args = args.iter();
        while let Some(flag) = args.next() {
            let mut value = || {
                args.next()
                    .ok_or_else(|| format!("{} needs a value", flag.to_string_lossy()))
            };
            match flag.to_str() {
                Some("--listen") => listen = value()?.to_str().and_then(|a| a.parse().ok()),
                Some("--root") => options.root = Some(value()?.into()),
                Some("--root-fd") => options.guest = value()?.to_str().and_then(|a| a.parse().ok()),
                Some("--address") => {
                    options.address = value()?.to_str().and_then(|a| a.parse().ok())
                }
                _ => return Err(format!("unknown argument {}", flag.to_string_lossy())),
            }
        }
        options.listen = listen.ok_or("--listen ADDR:PORT is needed, such as 127.0.0.1:49983")?;
        Ok(options)
    }
}

pub fn main(args: &[OsString]) -> ExitCode {
    let options = match Options::parse(args) {
        Ok(options) => options,
        Err(message) => {
            eprintln!("aenv-envd: {message}");
            return ExitCode::from(2);
        }
    };
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("aenv-envd: {message}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<(), String> {
    setup::seal_descriptors()?;
    let (kernel, identity) = setup::enter(options.root.as_deref(), options.guest)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_keep_alive(Duration::from_secs(5))
        .thread_stack_size(STACK_SIZE)
        .build()
        .map_err(|e| format!("cannot start the runtime: {e}"))?;
    let agent = Arc::new(Agent {
        kernel,
        users: Users::default(),
        processes: Arc::default(),
        watchers: Default::default(),
        identity: RwLock::new(identity),
        cpu: metrics::Cpu::default(),
        stop: tokio::sync::watch::Sender::new(false),
    });
    // Remembered for the time when the account files may be gone.
    for name in ["root", DEFAULT_USER, &agent.identity().default_user.clone()] {
        agent.users.find(name);
    }
    let result = runtime.block_on(server::serve(agent, options.listen, options.address));
    runtime.shutdown_background();
    result
}
