//! The agent: processes, files and health of a guest over HTTP.

mod call;
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

use std::ffi::{OsStr, OsString};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::{FromRawFd, RawFd};
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
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
    pub async fn user(self: &Arc<Self>, name: &str) -> Result<User, String> {
        let given = !name.is_empty();
        let wanted = if given {
            name.to_owned()
        } else {
            self.identity().default_user.clone()
        };
        let agent = self.clone();
        // The account files belong to the user, who may have put them on anything.
        let found = tokio::task::spawn_blocking(move || match &*wanted {
            "" => agent
                .users
                .find(DEFAULT_USER)
                .or_else(|| agent.users.find("root"))
                .ok_or(wanted),
            name => agent.users.find(name).ok_or(wanted),
        });
        match found.await {
            Ok(Ok(user)) => Ok(user),
            Ok(Err(name)) => Err(format!("invalid username: '{name}'")),
            Err(e) => Err(format!("looking up the user failed: {e}")),
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
#[derive(Default)]
struct Options {
    listen: Option<SocketAddr>,
    root: Option<PathBuf>,
    /// What the first process of a guest passes: the root of the user and a listening socket.
    root_fd: Option<RawFd>,
    listen_fd: Option<RawFd>,
    /// Address of the guest, to forward from.
    address: Option<Ipv4Addr>,
}

impl Options {
    fn parse(args: &[OsString]) -> Result<Options, String> {
        let mut options = Options::default();
        let mut args = args.iter();
        while let Some(flag) = args.next() {
            let flag = flag.to_string_lossy();
            let value = args.next().ok_or_else(|| format!("{flag} needs a value"))?;
            match &*flag {
                "--listen" => options.listen = Some(parse(&flag, value)?),
                "--root" => options.root = Some(value.into()),
                "--root-fd" => options.root_fd = Some(parse(&flag, value)?),
                "--listen-fd" => options.listen_fd = Some(parse(&flag, value)?),
                "--address" => options.address = Some(parse(&flag, value)?),
                _ => return Err(format!("unknown argument {flag}")),
            }
        }
        if options.listen.is_some() == options.listen_fd.is_some() {
            return Err("--listen ADDR:PORT is needed, such as 127.0.0.1:49983".into());
        }
        Ok(options)
    }

    fn listener(&self) -> Result<TcpListener, String> {
        match (self.listen, self.listen_fd) {
            // SAFETY: the first process passes this descriptor for us to own; nothing else uses its number.
            (_, Some(fd)) => Ok(unsafe { TcpListener::from_raw_fd(fd) }),
            (Some(address), None) => {
                TcpListener::bind(address).map_err(|e| format!("cannot listen on {address}: {e}"))
            }
            (None, None) => Err("no address to listen on".into()),
        }
    }
}

fn parse<T: FromStr>(flag: &str, value: &OsStr) -> Result<T, String> {
    let parsed = value.to_str().and_then(|v| v.parse().ok());
    parsed.ok_or_else(|| format!("{flag} cannot be {}", value.to_string_lossy()))
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
    let listener = options.listener()?;
    let (kernel, identity) = setup::enter(options.root.as_deref(), options.root_fd)?;
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
    let result = runtime.block_on(server::serve(agent, listener, options.address));
    runtime.shutdown_background();
    result
}
