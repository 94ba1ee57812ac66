//! The life of the daemon process.
//!
//! The order matters: lock, table, images, attachments, and only then the mount, whose waiting requests may concern any
//! image. The end needs no order: what is not finished is done by the successor, as after a crash.

use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
use serde_json::json;
use tokio::signal::unix::{signal, SignalKind};
use tokio::sync::watch;

use crate::attach::fuse::{canonical, remove_mount, Connection, FuseAttach, Terms};
use crate::control::{self, Control, End};
use crate::daemon::{self, Daemon};
use crate::holder::{Holder, Kept};
use crate::log;
use crate::options::Serve;
use crate::origin::http::HttpOrigin;
use crate::origin::Cache;

/// Free workers on small and on large machines.
const WORKERS: std::ops::RangeInclusive<usize> = 2..=16;

/// From `linux/prctl.h`.
const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// Runs the daemon until it is told to end.
pub fn run(options: &Serve) -> Result<(), String> {
    let say = |action: &str, path: &Path| {
        let place = format!("cannot {action} {}: ", path.display());
        move |error: io::Error| format!("{place}{error}")
    };
    prepare_process();
    let mount = canonical(&options.mount).map_err(say("use the mount point", &options.mount))?;
    let mount_lock = daemon::lock_mount(&mount).map_err(say("use the mount point", &mount))?;
    let lock =
        daemon::lock(&options.state).map_err(say("use the state directory", &options.state))?;
    let state = options
        .state
        .canonicalize()
        .map_err(say("use the state directory", &options.state))?;
    // After the way to the mount was made, which VMMs of other users have to pass.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    let listener = control::bind(&options.control)
        .map_err(say("bind the control socket", &options.control))?;

    let processors = thread::available_parallelism().map_or(2, usize::from);
    let attach = Arc::new(FuseAttach::new(&mount));
    let cache = match &options.origin {
        Some(path) => {
            let origin = Box::new(HttpOrigin::new(path));
            let directory = state.join("cache");
            let cache = Cache::open(&directory, options.cache_bytes, origin)
                .map_err(say("open the cache", &directory))?;
            Some(Arc::new(cache))
        }
        None => None,
    };
    let daemon = Daemon::start(&state, attach.clone(), cache).map_err(|failure| failure.message)?;
    let connection =
        connect(&options.holder, &mount, processors).map_err(say("mount the images on", &mount))?;
    let terms = connection.terms.clone();
    attach
        .serve(
            connection,
            options
                .workers
                .unwrap_or(processors.clamp(*WORKERS.start(), *WORKERS.end())),
        )
        .map_err(say("serve the mount", &mount))?;
    let leaving = Arc::new(AtomicBool::new(false));
    keep_holder(&options.holder, &attach, &terms, &leaving)
        .map_err(say("hand the mount to the holder at", &options.holder))?;

    let end = control_loop(&daemon, &attach, listener)
        .map_err(|error| format!("cannot serve: {error}"))?;
    let _ = std::fs::remove_file(&options.control);
    if end == End::Lost {
        log::flush();
        return Err(format!(
            "the mount {} was removed by somebody else",
            mount.display()
        ));
    }
    if end == End::Unmount {
        leaving.store(true, SeqCst);
        remove_mount(&mount).map_err(say("unmount", &mount))?;
        if let Ok(holder) = Holder::connect(&options.holder) {
            let _ = holder.quit();
        }
    }
    log::info("stopped", json!({ "unmounted": end == End::Unmount }));
    log::flush();
    drop((lock, mount_lock));
    Ok(())
}

fn prepare_process() {
    // Each image has two files, each layer one.
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        log::warn(
            "cannot raise the limit of open files",
            json!({ "cause": error.to_string() }),
        );
    }
    // When memory is short the kernel may ask file systems to write back. Ours must not wait for itself then.
    // SAFETY: this prctl takes four integers and changes only a flag of the process.
    if unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) } != 0 {
        let error = io::Error::last_os_error();
        log::info(
            "the kernel does not treat this process as part of its storage; avoid swapping on this host",
            json!({ "cause": error.to_string(), "needs": "CAP_SYS_RESOURCE" }),
        );
    }
}

/// Returns when the last worker has ended, which happens when somebody removed the mount.
async fn unserved(attach: &FuseAttach) {
    while attach.workers() > 0 {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// The connection of a predecessor, or a new one.
fn connect(holder: &Path, mount: &Path, queues: usize) -> io::Result<Connection> {
    let Kept { text, descriptors } = Holder::find(holder)?.give()?;
    if let Ok(terms) = serde_json::from_str::<Terms>(&text) {
        let connection = Connection {
            queues: descriptors,
            terms,
        };
        let alive = !connection.queues.is_empty() && connection.is_alive()?;
        if alive && connection.terms.directory() != mount {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "the holder keeps the mount {}, which VMMs may be using; start with that one, or unmount it first",
                    connection.terms.directory().display()
                ),
            ));
        }
        if alive {
            log::info(
                "took over the mount",
                json!({ "queues": connection.queues.len() }),
            );
            return Ok(connection);
        }
    }
    Connection::establish(mount, queues)
}

/// Hands the queues to the holder, and again to a new holder whenever the old one ends.
fn keep_holder(
    path: &Path,
    attach: &Arc<FuseAttach>,
    terms: &Terms,
    leaving: &Arc<AtomicBool>,
) -> io::Result<()> {
    let text = serde_json::to_string(terms).map_err(io::Error::other)?;
    let (path, attach, leaving) = (path.to_owned(), attach.clone(), leaving.clone());
    let hand_over = move || -> io::Result<Holder> {
        let holder = Holder::find(&path)?;
        holder.keep(&text, &attach.queues())?;
        Ok(holder)
    };
    let mut holder = hand_over()?;
    thread::Builder::new()
        .name("holder".into())
        .spawn(move || loop {
            holder.wait_for_end();
            if leaving.load(SeqCst) {
                return;
            }
            log::warn("the holder ended; starting another", json!({}));
            holder = loop {
                match hand_over() {
                    Ok(holder) => break holder,
                    Err(error) => {
                        log::error(
                            "no holder; if the daemon ends now, all images fail",
                            json!({ "cause": error.to_string() }),
                        );
                        thread::sleep(Duration::from_secs(1));
                    }
                }
            };
        })?;
    Ok(())
}

fn control_loop(
    daemon: &Arc<Daemon>,
    attach: &Arc<FuseAttach>,
    listener: std::os::unix::net::UnixListener,
) -> io::Result<End> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (end, mut ended) = watch::channel(None);
    let decided = runtime.block_on(async {
        let listener = tokio::net::UnixListener::from_std(listener)?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        // Registered and never read: a terminal that goes away does not end us.
        let _hangup = signal(SignalKind::hangup())?;
        let control = tokio::spawn(Control::new(daemon.clone(), end.clone()).serve(listener));
        log::info(
            "ready",
            json!({ "pid": std::process::id(), "images": daemon.images().len() }),
        );
        let mut stdout = io::stdout();
        let _ = stdout.write_all(b"ready\n").and_then(|()| stdout.flush());
        tokio::select! {
            _ = terminate.recv() => { end.send_replace(Some(End::Leave)); }
            _ = interrupt.recv() => { end.send_replace(Some(End::Leave)); }
            _ = ended.wait_for(Option::is_some) => {}
            () = unserved(attach) => {
                log::error("the mount is gone; ending, so that a new daemon can make another", json!({}));
                end.send_replace(Some(End::Lost));
            }
        }
        let _ = control.await;
        let decided = *ended.borrow();
        io::Result::Ok(decided.unwrap_or(End::Leave))
    })?;
    // Calls that still run are abandoned, as in a crash.
    runtime.shutdown_background();
    Ok(decided)
}
