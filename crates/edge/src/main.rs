use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use aenv_edge::control;
use aenv_edge::edge::Edge;
use aenv_edge::log::{Level, Log};
use aenv_edge::netns::Namespaces;
use aenv_edge::options::{self, Command, Options};
use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
use serde_json::json;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::signal::unix::{signal, SignalKind};

/// Connections the kernel holds for us before we accept them.
const BACKLOG: i32 = 4096;
/// File descriptors left for everything but connections of clients and guests.
const SPARE_FILES: u64 = 256;
/// A connection whose two sides are both stalled holds about 200 KiB; this many stay within 3 GiB.
const MAX_CONNECTIONS: u64 = 16384;

fn main() -> ExitCode {
    let options = match options::parse(std::env::args_os().skip(1)) {
        Ok(Command::Run(options)) => options,
        Ok(Command::Print(text)) => {
            let _ = io::stdout().write_all(text.as_bytes());
            return ExitCode::SUCCESS;
        }
        Err(message) => return fail(&message),
    };
    match run(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => fail(&message),
    }
}

fn fail(message: &str) -> ExitCode {
    let _ = writeln!(io::stderr(), "aenv-edge: {message}");
    ExitCode::from(2)
}

fn run(options: Options) -> Result<(), String> {
    let fitting = capacity();
    let max_connections = options.limits.max_connections.unwrap_or(fitting);
    // The sockets come first: a second edge must fail before it disturbs anything.
    let listener =
        listen(options.listen).map_err(|e| format!("cannot listen on {}: {e}", options.listen))?;
    let control = control::bind(&options.control).map_err(|e| {
        format!(
            "cannot bind the control socket {}: {e}",
            options.control.display()
        )
    })?;
    let served = serve(&options, max_connections, listener, control);
    remove(&options.control);
    served.map_err(|e| format!("cannot start: {e}"))
}

fn serve(
    options: &Options,
    max_connections: usize,
    listener: std::net::TcpListener,
    control: std::os::unix::net::UnixListener,
) -> io::Result<()> {
    let log = Log::start(options.log_level)?;
    let namespaces = Namespaces::start()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let control = tokio::net::UnixListener::from_std(control)?;
        let edge = Arc::new(Edge::new(
            listener.local_addr()?,
            options.api.clone(),
            options.limits.clone(),
            max_connections,
            log.clone(),
            namespaces,
        ));
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        // Registered and never read: a terminal that goes away does not end us.
        let _hangup = signal(SignalKind::hangup())?;
        let control = tokio::spawn(control::serve(edge.clone(), control));
        let traffic = tokio::spawn(edge.clone().run(listener));
        log.write(
            Level::Info,
            "ready",
            json!({ "listen": edge.listen.to_string(), "pid": std::process::id(), "max_connections": max_connections }),
        );
        let mut stdout = io::stdout();
        let _ = stdout.write_all(b"ready\n").and_then(|()| stdout.flush());
        tokio::select! {
            _ = terminate.recv() => edge.shutdown.cancel(),
            _ = interrupt.recv() => edge.shutdown.cancel(),
            () = edge.shutdown.cancelled() => {}
        }
        let _ = traffic.await;
        let _ = control.await;
        log.write(Level::Info, "stopped", json!({}));
        log.flush();
        io::Result::Ok(())
    })?;
    runtime.shutdown_timeout(Duration::from_secs(1));
    Ok(())
}

fn listen(address: SocketAddr) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        // `[::]` takes IPv4 clients too, whatever the default of the system.
        socket.set_only_v6(false)?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Raises the limit of open files as far as allowed and says how many clients fit into it. Each may need a connection to
/// a guest, half as many connections may be idle, and an eighth of the files is left for network namespaces.
fn capacity() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    let files = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    };
    let fitting = files.map_or(MAX_CONNECTIONS, |files| {
        (files - files / 8).saturating_sub(SPARE_FILES) * 2 / 5
    });
    fitting.clamp(16, MAX_CONNECTIONS) as usize
}

fn remove(path: &Path) {
    let _ = std::fs::remove_file(path);
}
