//! Connections to guests and to the control API, and the pool that keeps them between requests.
//!
//! A connection has no task of its own. Whoever uses it polls it: while a request is sent and its response is awaited
//! ([`Upstream::send`]), then from the body of the response. That saves a wake-up across threads for every piece of
//! data, and an idle connection costs nothing but its socket.

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::pin::{pin, Pin};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{ready, Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use rustix::net::RecvFlags;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpSocket, TcpStream, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::body::RequestBody;

/// Largest head of a response, and the read buffer of a connection, in bytes.
const MAX_HEAD: usize = 64 * 1024;
const MAX_BUFFER: usize = 64 * 1024;

/// How much may be read until the head of the final response is complete: the largest head and what one read may take
/// in beyond it. Without this, a guest could keep the parser busy for ever with interim responses.
const HEAD_ALLOWANCE: u64 = (MAX_HEAD + 2 * MAX_BUFFER) as u64;
const UNLIMITED: u64 = u64::MAX;

pub struct Socket {
    stream: Stream,
    /// Bytes that may still be read, shared with the [`Upstream`] that knows the state of the exchange.
    allowance: Arc<AtomicU64>,
}

enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Socket {
    fn new(stream: Stream) -> Socket {
        Socket {
            stream,
            allowance: Arc::new(AtomicU64::new(UNLIMITED)),
        }
    }
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        match &self.stream {
            Stream::Tcp(stream) => stream.as_raw_fd(),
            Stream::Unix(stream) => stream.as_raw_fd(),
        }
    }
}

/// A connection into a guest ends at once, with a reset. An orderly end would leave the socket to wait for the answer of
/// a guest that may be gone by then, and the waiting socket would keep the namespace of the sandbox alive for minutes.
impl Drop for Socket {
    fn drop(&mut self) {
        if let Stream::Tcp(stream) = &self.stream {
            let _ = stream.set_zero_linger();
        }
    }
}

/// Calls the same method on whichever socket it is.
macro_rules! on_socket {
    ($socket:expr, $method:ident $(, $arg:expr)*) => {
        match &mut $socket.stream {
            Stream::Tcp(stream) => Pin::new(stream).$method($($arg),*),
            Stream::Unix(stream) => Pin::new(stream).$method($($arg),*),
        }
    };
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(on_socket!(self, poll_read, cx, buf))?;
        let read = (buf.filled().len() - before) as u64;
        match self.allowance.load(Relaxed) {
            UNLIMITED => {}
            allowance if allowance >= read => self.allowance.store(allowance - read, Relaxed),
            _ => {
                return Poll::Ready(Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "endless response head",
                )))
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        on_socket!(self, poll_write, cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        on_socket!(self, poll_write_vectored, cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_socket!(self, poll_flush, cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_socket!(self, poll_shutdown, cx)
    }
}

/// Connects an unconnected non-blocking TCP socket, whatever namespace it is from.
pub async fn connect_tcp(
    socket: OwnedFd,
    address: Ipv4Addr,
    port: u16,
    limit: Duration,
) -> io::Result<Socket> {
    let socket = TcpSocket::from_std_stream(std::net::TcpStream::from(socket));
    socket.set_nodelay(true)?;
    let connect = socket.connect(SocketAddr::from((address, port)));
    match tokio::time::timeout(limit, connect).await {
        Ok(connected) => connected.map(|stream| Socket::new(Stream::Tcp(stream))),
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
    }
}

/// Connects to a Unix socket. Unlike TCP, the kernel does not wait for room in the queue of a listener that is behind
/// with accepting, so we do.
pub async fn connect_unix(path: &Path, limit: Duration) -> io::Result<Socket> {
    let deadline = Instant::now() + limit;
    let mut wait = Duration::from_millis(1);
    loop {
        match UnixStream::connect(path).await {
            Err(error)
                if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline =>
            {
                tokio::time::sleep(wait).await;
                wait = (wait * 2).min(Duration::from_millis(50));
            }
            connected => return connected.map(|stream| Socket::new(Stream::Unix(stream))),
        }
    }
}

/// True when a socket could not be made for lack of files or memory.
pub fn is_exhaustion(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let errno = Errno::from_io_error(error);
    matches!(
        errno,
        Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS)
    )
}

/// True when a response was given up because its head did not end.
pub fn is_endless(error: &hyper::Error) -> bool {
    let cause =
        std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<io::Error>());
    cause.is_some_and(|cause| cause.kind() == io::ErrorKind::InvalidData)
}

/// Why a request got no response.
pub struct SendError {
    pub error: hyper::Error,
    /// The request, when nothing of it was sent.
    pub unsent: Option<Box<Request<RequestBody>>>,
}

/// One HTTP/1.1 connection.
pub struct Upstream {
    sender: SendRequest<RequestBody>,
    connection: Option<Box<Connection<TokioIo<Socket>, RequestBody>>>,
    fd: RawFd,
    allowance: Arc<AtomicU64>,
    /// The connection has read and written its last; only an upgraded one is still of use.
    pub ended: bool,
    /// It has served a request before, so its other side may have closed it by now.
    pub reused: bool,
}

impl Upstream {
    pub async fn new(socket: Socket) -> hyper::Result<Upstream> {
        let fd = socket.as_raw_fd();
        let allowance = socket.allowance.clone();
        let (sender, connection) = Builder::new()
            .max_header_size(MAX_HEAD)
            .max_buf_size(MAX_BUFFER)
            .handshake(TokioIo::new(socket))
            .await?;
        Ok(Upstream {
            sender,
            connection: Some(Box::new(connection)),
            fd,
            allowance,
            ended: false,
            reused: false,
        })
    }

    /// Lets the connection read and write what it can. Errors surface in the response or its body.
    pub fn poll(&mut self, cx: &mut Context<'_>) {
        if let Some(connection) = self.connection.as_mut().filter(|_| !self.ended) {
            self.ended = connection.poll_without_shutdown(cx).is_ready();
        }
    }

    /// Sends a request and waits for the head of the response. Dropping the future ends the connection.
    pub async fn send(
        &mut self,
        request: Request<RequestBody>,
    ) -> Result<Response<Incoming>, SendError> {
        self.allowance.store(HEAD_ALLOWANCE, Relaxed);
        let mut response = pin!(self.sender.try_send_request(request));
        let result = std::future::poll_fn(|cx| {
            self.poll(cx);
            let polled = response.as_mut().poll(cx);
            if polled.is_pending() && self.ended {
                // It closed before it took the request from its queue. The queue gives the request back when it goes.
                self.connection = None;
                return response.as_mut().poll(cx);
            }
            polled
        })
        .await;
        self.allowance.store(UNLIMITED, Relaxed);
        result.map_err(|mut failed| {
            let unsent = failed.take_message().map(Box::new);
            SendError {
                error: failed.into_error(),
                unsent,
            }
        })
    }

    /// True when the connection can take another request: the last exchange is complete in both directions.
    fn is_idle(&self) -> bool {
        !self.ended && self.sender.is_ready()
    }

    /// True when the other side has neither closed the idle connection nor sent anything unasked.
    fn is_silent(&self) -> bool {
        if self.connection.is_none() {
            return false;
        }
        // SAFETY: `fd` is the socket inside `connection`, which was just seen to be there and outlives the borrow.
        let fd = unsafe { BorrowedFd::borrow_raw(self.fd) };
        let mut byte = [0u8; 1];
        matches!(
            rustix::net::recv(fd, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT),
            Err(rustix::io::Errno::AGAIN)
        )
    }

    /// After a 101 response: the bare connection, and what was read of it beyond the response.
    pub async fn into_tunnel(mut self) -> hyper::Result<Option<(Socket, Bytes)>> {
        let Some(mut connection) = self.connection.take() else {
            return Ok(None);
        };
        if !self.ended {
            std::future::poll_fn(|cx| connection.poll_without_shutdown(cx)).await?;
        }
        let parts = connection.into_parts();
        Ok(Some((parts.io.into_inner(), parts.read_buf)))
    }
}

struct Parked {
    since: Instant,
    upstream: Upstream,
    _place: OwnedSemaphorePermit,
}

/// The idle connections to one port, the longest idle first.
#[derive(Default)]
struct Shelf {
    parked: Vec<Parked>,
    /// A connection was used again with success: the server does not close after each response.
    proven: bool,
}

#[derive(Default)]
struct Shelves {
    closed: bool,
    total: usize,
    by_port: HashMap<u16, Shelf>,
}

/// Some servers close each connection after its first response without saying so. A request that must not be sent twice
/// could meet that close on its way, so until the server has proven better, such a request takes only connections whose
/// server had this long to close them.
const SETTLING: Duration = Duration::from_millis(20);

/// Idle connections to one guest (of one generation) by port, or to the control API. Bounded in number and time.
pub struct Pool {
    shelves: Mutex<Shelves>,
    places: Arc<Semaphore>,
    max_per_port: usize,
    max_total: usize,
}

impl Pool {
    /// `places` bounds the idle connections of all pools together, since each holds a file descriptor.
    pub fn new(places: Arc<Semaphore>, max_per_port: usize, max_total: usize) -> Pool {
        Pool {
            shelves: Mutex::default(),
            places,
            max_per_port,
            max_total,
        }
    }

    fn shelves(&self) -> MutexGuard<'_, Shelves> {
        // The table stays consistent between any two statements, so a panic elsewhere does not spoil it.
        self.shelves.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The most recently used idle connection that is still open. `once` is for a request that must not be sent twice.
    pub fn take(&self, port: u16, once: bool) -> Option<Upstream> {
        loop {
            let parked = {
                let mut shelves = self.shelves();
                let shelf = shelves.by_port.get_mut(&port)?;
                let careful = once && !shelf.proven;
                let fits = |parked: &Parked| !careful || parked.since.elapsed() >= SETTLING;
                let at = shelf.parked.iter().rposition(fits)?;
                let parked = shelf.parked.remove(at);
                shelves.total -= 1;
                parked
            };
            if parked.upstream.is_silent() {
                return Some(parked.upstream);
            }
        }
    }

    /// Keeps a connection whose exchange is over, or drops it when it cannot be used again.
    pub fn put(&self, port: u16, mut upstream: Upstream) {
        if !upstream.is_idle() {
            return;
        }
        let proven = std::mem::replace(&mut upstream.reused, true);
        let mut shelves = self.shelves();
        if shelves.closed || shelves.total >= self.max_total {
            return;
        }
        let shelf = shelves.by_port.entry(port).or_default();
        shelf.proven |= proven;
        if shelf.parked.len() >= self.max_per_port {
            return;
        }
        let Ok(place) = self.places.clone().try_acquire_owned() else {
            return;
        };
        shelf.parked.push(Parked {
            since: Instant::now(),
            upstream,
            _place: place,
        });
        shelves.total += 1;
    }

    /// Notes that an idle connection turned out to be closed.
    pub fn distrust(&self, port: u16) {
        if let Some(shelf) = self.shelves().by_port.get_mut(&port) {
            shelf.proven = false;
        }
    }

    /// Drops connections idle for longer than `limit(port)`.
    pub fn expire(&self, limit: impl Fn(u16) -> Duration) {
        let mut expired = Vec::new();
        let mut shelves = self.shelves();
        shelves.by_port.retain(|port, shelf| {
            let limit = limit(*port);
            let fresh = |parked: &Parked| parked.since.elapsed() < limit;
            let first = shelf.parked.iter().position(fresh);
            expired.extend(shelf.parked.drain(..first.unwrap_or(shelf.parked.len())));
            !shelf.parked.is_empty()
        });
        shelves.total -= expired.len();
        drop(shelves);
    }

    /// Drops everything, now and in future.
    pub fn close(&self) {
        let mut shelves = self.shelves();
        shelves.closed = true;
        shelves.total = 0;
        let dropped = std::mem::take(&mut shelves.by_port);
        drop(shelves);
        drop(dropped);
    }
}
