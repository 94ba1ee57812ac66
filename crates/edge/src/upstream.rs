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
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use rustix::net::RecvFlags;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpSocket, TcpStream, UnixStream};

use crate::body::RequestBody;

/// Largest head of a response, and the read buffer of a connection, in bytes.
const MAX_HEAD: usize = 64 * 1024;
const MAX_BUFFER: usize = 128 * 1024;

pub enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Socket::Tcp(socket) => socket.as_raw_fd(),
            Socket::Unix(socket) => socket.as_raw_fd(),
        }
    }
}

/// Calls the same method on whichever socket it is.
macro_rules! on_socket {
    ($socket:expr, $method:ident $(, $arg:expr)*) => {
        match $socket.get_mut() {
            Socket::Tcp(socket) => Pin::new(socket).$method($($arg),*),
            Socket::Unix(socket) => Pin::new(socket).$method($($arg),*),
        }
    };
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        on_socket!(self, poll_read, cx, buf)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        on_socket!(self, poll_write, cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        on_socket!(self, poll_write_vectored, cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_socket!(self, poll_flush, cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
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
        Ok(connected) => connected.map(Socket::Tcp),
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
            connected => return connected.map(Socket::Unix),
        }
    }
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
    connection: Box<Connection<TokioIo<Socket>, RequestBody>>,
    fd: RawFd,
    ended: bool,
    /// True when it has served a request before, so that its other side may have closed it by now.
    pub reused: bool,
}

impl Upstream {
    pub async fn new(socket: Socket) -> hyper::Result<Upstream> {
        let fd = socket.as_raw_fd();
        let (sender, connection) = Builder::new()
            .max_header_size(MAX_HEAD)
            .max_buf_size(MAX_BUFFER)
            .handshake(TokioIo::new(socket))
            .await?;
        Ok(Upstream {
            sender,
            connection: Box::new(connection),
            fd,
            ended: false,
            reused: false,
        })
    }

    /// Lets the connection read and write what it can. Errors surface in the response or its body.
    pub fn poll(&mut self, cx: &mut Context<'_>) {
        if !self.ended {
            self.ended = self.connection.poll_without_shutdown(cx).is_ready();
        }
    }

    /// Sends a request and waits for the head of the response. Dropping the future ends the connection.
    pub async fn send(
        &mut self,
        request: Request<RequestBody>,
    ) -> Result<Response<Incoming>, SendError> {
        let mut response = pin!(self.sender.try_send_request(request));
        let (connection, ended) = (&mut self.connection, &mut self.ended);
        std::future::poll_fn(|cx| {
            if !*ended {
                *ended = connection.poll_without_shutdown(cx).is_ready();
            }
            response.as_mut().poll(cx)
        })
        .await
        .map_err(|mut failed| {
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
        // SAFETY: `fd` is the socket inside `connection`, which lives as long as `self`.
        let fd = unsafe { BorrowedFd::borrow_raw(self.fd) };
        let mut byte = [0u8; 1];
        matches!(
            rustix::net::recv(fd, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT),
            Err(rustix::io::Errno::AGAIN)
        )
    }

    /// After a 101 response: the bare connection, and what was read of it beyond the response.
    pub async fn into_tunnel(mut self) -> hyper::Result<(Socket, Bytes)> {
        if !self.ended {
            std::future::poll_fn(|cx| self.connection.poll_without_shutdown(cx)).await?;
        }
        let parts = self.connection.into_parts();
        Ok((parts.io.into_inner(), parts.read_buf))
    }
}

struct Parked {
    since: Instant,
    upstream: Upstream,
}

#[derive(Default)]
struct Shelves {
    closed: bool,
    total: usize,
    by_port: HashMap<u16, Vec<Parked>>,
}

/// Idle connections to one guest (of one generation) by port, or to the control API. Bounded in number and time.
pub struct Pool {
    shelves: Mutex<Shelves>,
    max_per_port: usize,
    max_total: usize,
}

impl Pool {
    pub fn new(max_per_port: usize, max_total: usize) -> Pool {
        Pool {
            shelves: Mutex::default(),
            max_per_port,
            max_total,
        }
    }

    fn shelves(&self) -> MutexGuard<'_, Shelves> {
        // The table stays consistent between any two statements, so a panic elsewhere does not spoil it.
        self.shelves.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The most recently used idle connection that is still open.
    pub fn take(&self, port: u16) -> Option<Upstream> {
        loop {
            let parked = {
                let mut shelves = self.shelves();
                let parked = shelves.by_port.get_mut(&port)?.pop()?;
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
        upstream.reused = true;
        let mut shelves = self.shelves();
        if shelves.closed || shelves.total >= self.max_total {
            return;
        }
        let shelf = shelves.by_port.entry(port).or_default();
        if shelf.len() >= self.max_per_port {
            return;
        }
        let since = Instant::now();
        shelf.push(Parked { since, upstream });
        shelves.total += 1;
    }

    /// Drops connections idle for longer than `limit(port)`.
    pub fn expire(&self, limit: impl Fn(u16) -> Duration) {
        let mut expired = Vec::new();
        let mut shelves = self.shelves();
        if shelves.total == 0 {
            return;
        }
        shelves.by_port.retain(|port, shelf| {
            let limit = limit(*port);
            // Connections are pushed at the end when they become idle, so the oldest come first.
            let fresh = shelf
                .iter()
                .position(|parked| parked.since.elapsed() < limit);
            expired.extend(shelf.drain(..fresh.unwrap_or(shelf.len())));
            !shelf.is_empty()
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
