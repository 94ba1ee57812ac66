//! The listener and its connections.

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::sockopt;
use std::convert::Infallible;
use std::io;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use super::{control, forward, router, Agent};

/// Connections at once; more wait in the backlog of the kernel.
const CONNECTION_LIMIT: usize = 2048;
/// Connections the kernel accepts for us meanwhile.
const BACKLOG: i32 = 1024;
/// Buffer of a connection, which also bounds the size of request headers, in bytes.
const BUFFER_SIZE: usize = 64 << 10;
/// How long a connection may be idle. Longer than any proxy keeps one, so that it is the proxy who
/// closes and no request meets a closing connection.
const IDLE_LIMIT: Duration = Duration::from_secs(650);

/// Serves until the agent is told to stop.
/// Servers on loopback are made reachable at `outside`.
pub async fn serve(
    agent: Arc<Agent>,
    listener: std::net::TcpListener,
    outside: Option<Ipv4Addr>,
) -> Result<(), String> {
    let address = listener
        .local_addr()
        .map_err(|e| format!("cannot listen: {e}"))?;
    // A longer queue than the default of the standard library.
    let listener = rustix::net::listen(&listener, BACKLOG)
        .map_err(io::Error::from)
        .and_then(|()| listener.set_nonblocking(true))
        .and_then(|()| TcpListener::from_std(listener))
        .map_err(|e| format!("cannot listen on {address}: {e}"))?;
    match agent.kernel.guest {
        Some(_) => eprintln!("aenv-envd: ready"),
        None => eprintln!("aenv-envd: listening on {address}"),
    }
    if let Some(outside) = outside {
        tokio::spawn(forward::run(agent.clone(), outside, address.port()));
    }
    let slots = Arc::new(Semaphore::new(CONNECTION_LIMIT));
    let mut stop = agent.stop.subscribe();
    loop {
        let Ok(slot) = slots.clone().acquire_owned().await else {
            return Ok(());
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stop.wait_for(|stop| *stop) => return Ok(()),
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // A client that gave up, or no descriptors left for a moment.
                eprintln!("aenv-envd: cannot accept a connection: {error}");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        configure(&stream);
        let agent = agent.clone();
        tokio::spawn(async move {
            converse(&agent, stream).await;
            drop(slot);
        });
    }
}

/// Serves one connection to its end.
async fn converse(agent: &Arc<Agent>, stream: TcpStream) {
    let farewell = AtomicBool::new(false);
    let service = service_fn(|request| async {
        let response = router::route(agent.clone(), request).await;
        if response.extensions().get::<control::Farewell>().is_some() {
            farewell.store(true, Ordering::Relaxed);
        }
        Ok::<_, Infallible>(response)
    });
    // Errors are those of the client: broken requests are answered, broken connections are not.
    let _ = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE_LIMIT)
        .max_buf_size(BUFFER_SIZE)
        .serve_connection(TokioIo::new(stream), service)
        .await;
    if farewell.load(Ordering::Relaxed) {
        control::end(agent);
    }
}

/// Connections that came through a snapshot of the machine have no other end any more. Probes find
/// them, so that streams on them end; failing to set an option only makes that slower.
fn configure(stream: &TcpStream) {
    let _ = stream.set_nodelay(true);
    let _ = sockopt::set_socket_keepalive(stream, true);
    let _ = sockopt::set_tcp_keepidle(stream, Duration::from_secs(60));
    let _ = sockopt::set_tcp_keepintvl(stream, Duration::from_secs(10));
    let _ = sockopt::set_tcp_keepcnt(stream, 3);
}
