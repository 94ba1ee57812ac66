//! Connections from clients: admission, the bookkeeping that lets the edge reset or expire them, and their life.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{ready, Context, Poll};
use std::time::{Duration, Instant};

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore};
use tokio::time::Sleep;
use tokio_util::sync::CancellationToken;

use crate::answer::SERVER_FULL;
use crate::edge::Edge;
use crate::log::Level;
use crate::options::Limits;
use crate::proxy;
use crate::tunnel::{self, Tunnel};

/// Largest head of a request, and the read buffer of a connection, in bytes. The number of headers is limited to the
/// 100 of the HTTP library. Beyond either the client gets a 431.
const MAX_HEAD: usize = 64 * 1024;
const MAX_BUFFER: usize = 64 * 1024;
/// How long and how much a connection that ends in the middle of an upload is still read. Closing it at once would reset
/// it, and the client would lose the answer that says why.
const LINGER: Duration = Duration::from_secs(3);
const LINGER_BYTES: usize = 64 << 20;
/// Connections beyond the limit that may linger after their 503 at a time.
const LINGERING_REFUSALS: usize = 128;

/// One connection from a client.
///
/// Times are milliseconds since the start of the edge, 0 for "not now".
pub struct Client {
    pub peer: SocketAddr,
    epoch: Instant,
    stop: CancellationToken,
    reset: AtomicBool,
    requests: AtomicUsize,
    upload_open: AtomicBool,
    active_at: AtomicU64,
    head_since: AtomicU64,
    tunnel: Mutex<Option<Tunnel>>,
}

impl Client {
    fn new(peer: SocketAddr, epoch: Instant) -> Client {
        let client = Client {
            peer,
            epoch,
            stop: CancellationToken::new(),
            reset: AtomicBool::new(false),
            requests: AtomicUsize::new(0),
            upload_open: AtomicBool::new(false),
            active_at: AtomicU64::new(0),
            head_since: AtomicU64::new(0),
            tunnel: Mutex::new(None),
        };
        client.touch();
        client.head_since.store(client.now(), Relaxed);
        client
    }

    fn now(&self) -> u64 {
        self.epoch.elapsed().as_millis() as u64 + 1
    }

    fn touch(&self) {
        self.active_at.store(self.now(), Relaxed);
    }

    /// Ends the connection with a TCP reset. What was not yet sent is never sent.
    pub fn abort(&self) {
        self.reset.store(true, Relaxed);
        self.stop.cancel();
    }

    /// Ends the connection with an ordinary close.
    fn close(&self) {
        self.stop.cancel();
    }

    /// Resolves when the connection has to end.
    pub async fn stopped(&self) {
        self.stop.cancelled().await;
    }

    /// Marks the connection as busy until the guard is dropped.
    pub fn begin(self: &Arc<Self>) -> Busy {
        self.head_since.store(0, Relaxed);
        self.upload_open.store(false, Relaxed);
        self.requests.fetch_add(1, Relaxed);
        Busy(self.clone())
    }

    pub fn upload_started(&self) {
        self.upload_open.store(true, Relaxed);
    }

    pub fn upload_ended(&self) {
        self.upload_open.store(false, Relaxed);
    }

    /// Leaves a tunnel to be run once the 101 response is out.
    pub fn set_tunnel(&self, tunnel: Tunnel) {
        *self.tunnel.lock().unwrap_or_else(PoisonError::into_inner) = Some(tunnel);
    }

    fn take_tunnel(&self) -> Option<Tunnel> {
        self.tunnel
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    /// Ends the connection if it was silent for too long.
    fn expire(&self, limits: &Limits) {
        let now = self.now();
        let past =
            |since: u64, limit: Duration| now.saturating_sub(since) > limit.as_millis() as u64;
        let head_since = self.head_since.load(Relaxed);
        let active_at = self.active_at.load(Relaxed);
        if self.requests.load(Relaxed) > 0 {
            if past(active_at, limits.stream_timeout) {
                self.abort();
            }
        } else if past(active_at, limits.idle_timeout)
            || (head_since != 0 && past(head_since, limits.header_timeout))
        {
            self.close();
        }
    }
}

/// A request in progress.
pub struct Busy(pub Arc<Client>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.touch();
        self.0.requests.fetch_sub(1, Relaxed);
    }
}

/// All open connections from clients.
pub struct Clients {
    epoch: Instant,
    max: usize,
    next: AtomicU64,
    table: Mutex<HashMap<u64, Arc<Client>>>,
    emptied: Notify,
    refusals: Arc<Semaphore>,
}

impl Clients {
    pub fn new(max: usize) -> Clients {
        Clients {
            epoch: Instant::now(),
            max,
            next: AtomicU64::new(0),
            table: Mutex::default(),
            emptied: Notify::new(),
            refusals: Arc::new(Semaphore::new(LINGERING_REFUSALS)),
        }
    }

    fn table(&self) -> MutexGuard<'_, HashMap<u64, Arc<Client>>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn len(&self) -> usize {
        self.table().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// `None` when there are too many.
    fn admit(self: &Arc<Self>, peer: SocketAddr) -> Option<Registered> {
        let mut table = self.table();
        if table.len() >= self.max {
            return None;
        }
        let client = Arc::new(Client::new(peer, self.epoch));
        let key = self.next.fetch_add(1, Relaxed);
        table.insert(key, client.clone());
        Some(Registered {
            clients: self.clone(),
            client,
            key,
        })
    }

    pub fn expire(&self, limits: &Limits) {
        for client in self.table().values() {
            client.expire(limits);
        }
    }

    /// Resets every connection and waits until they are gone, at most `limit`.
    pub async fn abort_all(&self, limit: Duration) {
        for client in self.table().values() {
            client.abort();
        }
        let wait = async {
            loop {
                let emptied = self.emptied.notified();
                if self.is_empty() {
                    return;
                }
                emptied.await;
            }
        };
        let _ = tokio::time::timeout(limit, wait).await;
    }
}

/// A place in the table of clients.
struct Registered {
    clients: Arc<Clients>,
    client: Arc<Client>,
    key: u64,
}

impl Drop for Registered {
    fn drop(&mut self) {
        let mut table = self.clients.table();
        table.remove(&self.key);
        if table.is_empty() {
            self.clients.emptied.notify_waiters();
        }
    }
}

/// The socket of a client. How it closes depends on how the connection ended, so whoever drops it, the HTTP library or
/// a tunnel, does the right thing.
pub struct ClientIo {
    socket: TcpStream,
    shut: bool,
    linger: Option<(Pin<Box<Sleep>>, usize)>,
    // After the socket: the place is free when the socket is closed.
    place: Registered,
}

impl Drop for ClientIo {
    fn drop(&mut self) {
        if self.place.client.reset.load(Relaxed) {
            let _ = self.socket.set_zero_linger();
        }
    }
}

impl AsyncRead for ClientIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let result = ready!(Pin::new(&mut self.socket).poll_read(cx, buf));
        if buf.filled().len() > before {
            let client = &self.place.client;
            client.touch();
            if client.requests.load(Relaxed) == 0 && client.head_since.load(Relaxed) == 0 {
                client.head_since.store(client.now(), Relaxed);
            }
        }
        Poll::Ready(result)
    }
}

impl AsyncWrite for ClientIo {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = ready!(Pin::new(&mut self.socket).poll_write(cx, buf));
        self.place.client.touch();
        Poll::Ready(result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = ready!(Pin::new(&mut self.socket).poll_write_vectored(cx, bufs));
        self.place.client.touch();
        Poll::Ready(result)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let client = &this.place.client;
        if client.reset.load(Relaxed) {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        if !this.shut {
            ready!(Pin::new(&mut this.socket).poll_shutdown(cx))?;
            this.shut = true;
        }
        let sending = client.upload_open.load(Relaxed) || client.head_since.load(Relaxed) != 0;
        if !sending {
            return Poll::Ready(Ok(()));
        }
        let (deadline, discarded) = this
            .linger
            .get_or_insert_with(|| (Box::pin(tokio::time::sleep(LINGER)), 0));
        let mut scratch = [0u8; 16 * 1024];
        loop {
            let mut buf = ReadBuf::new(&mut scratch);
            match Pin::new(&mut this.socket).poll_read(cx, &mut buf) {
                Poll::Ready(Ok(())) if !buf.filled().is_empty() && *discarded < LINGER_BYTES => {
                    *discarded += buf.filled().len();
                }
                Poll::Ready(_) => return Poll::Ready(Ok(())),
                Poll::Pending => {
                    ready!(deadline.as_mut().poll(cx));
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

/// Accepts connections for as long as it is polled.
pub async fn accept(edge: Arc<Edge>, listener: TcpListener) {
    loop {
        match listener.accept().await {
            Ok((socket, peer)) => {
                prepare(&socket);
                match edge.clients.admit(peer) {
                    Some(place) => {
                        tokio::spawn(serve(edge.clone(), socket, place));
                    }
                    None => refuse(&edge.clients, socket),
                }
            }
            // The connection was gone before it was accepted.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset
                ) => {}
            Err(error) => {
                edge.log.write(
                    Level::Error,
                    "cannot accept connections",
                    serde_json::json!({ "cause": error.to_string() }),
                );
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

fn prepare(socket: &TcpStream) {
    let _ = socket.set_nodelay(true);
    // Finds clients that vanished without a word within two minutes.
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(60))
        .with_interval(Duration::from_secs(15))
        .with_retries(4);
    let _ = SockRef::from(socket).set_tcp_keepalive(&keepalive);
}

/// Answers a connection that is one too many. If many come at once, some are closed without a word.
fn refuse(clients: &Clients, mut socket: TcpStream) {
    if socket.try_write(SERVER_FULL).is_err() {
        return;
    }
    let Ok(permit) = clients.refusals.clone().try_acquire_owned() else {
        return;
    };
    let _ = SockRef::from(&socket).shutdown(std::net::Shutdown::Write);
    tokio::spawn(async move {
        let mut scratch = [0u8; 1024];
        let drain = async { while matches!(socket.read(&mut scratch).await, Ok(n) if n > 0) {} };
        let _ = tokio::time::timeout(Duration::from_secs(1), drain).await;
        drop(permit);
    });
}

async fn serve(edge: Arc<Edge>, socket: TcpStream, place: Registered) {
    let client = place.client.clone();
    let io = ClientIo {
        socket,
        shut: false,
        linger: None,
        place,
    };
    let service = {
        let client = client.clone();
        service_fn(move |request| {
            let (edge, client) = (edge.clone(), client.clone());
            async move { Ok::<_, Infallible>(proxy::serve(edge, client, request).await) }
        })
    };
    let mut connection = http1::Builder::new()
        .max_header_size(MAX_HEAD)
        .max_buf_size(MAX_BUFFER)
        // `Clients::expire` does this, so that an idle connection may stay open longer than a slow head.
        .header_read_timeout(None)
        .serve_connection(TokioIo::new(io), service);
    let ended = tokio::select! {
        biased;
        () = client.stopped() => return,
        ended = &mut connection => ended,
    };
    if let (Ok(()), Some(tunnel)) = (ended, client.take_tunnel()) {
        let parts = connection.into_parts();
        tunnel::run(parts.io.into_inner(), parts.read_buf, tunnel).await;
    }
}
