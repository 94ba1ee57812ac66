//! What the tests share: the real program, raw HTTP connections, and scripted servers that play guests.
#![allow(dead_code)]

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{json, Value};

/// Longest any single step of a test may take.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Polls until `done` yields a value.
pub fn eventually<T>(what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = done() {
            return value;
        }
        assert!(Instant::now() < deadline, "gave up waiting: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A directory that is removed at the end.
pub struct TempDir(pub PathBuf);

impl TempDir {
    pub fn new() -> TempDir {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!(
            "aenv-edge-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        TempDir(path)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A running edge.
pub struct Edge {
    pub child: Child,
    pub dir: TempDir,
    pub address: SocketAddr,
    stdout: BufReader<ChildStdout>,
}

impl Edge {
    pub fn start() -> Edge {
        Edge::with(&[])
    }

    pub fn with(args: &[&str]) -> Edge {
        let dir = TempDir::new();
        let mut child = Edge::command(&dir.0, "127.0.0.1:0")
            .args(args)
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(dir.0.join("log")).unwrap())
            .spawn()
            .unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        let mut edge = Edge {
            child,
            dir,
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            stdout,
        };
        edge.address = edge.status()["listen"].as_str().unwrap().parse().unwrap();
        edge
    }

    pub fn command(dir: &Path, listen: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_aenv-edge"));
        command
            .args(["--listen", listen, "--control"])
            .arg(dir.join("control.sock"))
            .arg("--api")
            .arg(dir.join("api.sock"));
        command
    }

    pub fn control_path(&self) -> PathBuf {
        self.dir.0.join("control.sock")
    }

    pub fn api_path(&self) -> PathBuf {
        self.dir.0.join("api.sock")
    }

    /// One call on the control socket.
    pub fn control(&self, method: &str, path: &str, body: &str) -> Reply {
        let mut conn = Conn::new(UnixStream::connect(self.control_path()).unwrap());
        conn.send(format!(
            "{method} {path} HTTP/1.1\r\nhost: edge\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        ));
        conn.reply()
    }

    pub fn status(&self) -> Value {
        self.control("GET", "/v1/status", "").json()
    }

    pub fn put(&self, route: Value) {
        let path = format!("/v1/routes/{}", route["sandbox_id"].as_str().unwrap());
        let reply = self.control("PUT", &path, &route.to_string());
        assert_eq!(reply.status, 204, "{}", reply.text());
    }

    /// Routes `id` to 127.0.0.1 in our own namespace.
    pub fn route(&self, id: &str) {
        self.put(route(id));
    }

    pub fn delete(&self, id: &str) {
        let reply = self.control("DELETE", &format!("/v1/routes/{id}"), "");
        assert_eq!(reply.status, 204);
    }

    pub fn connect(&self) -> Conn {
        Conn::new(TcpStream::connect(self.address).unwrap())
    }

    /// A GET to a port of a sandbox on a connection of its own.
    pub fn get(&self, id: &str, port: u16, path: &str) -> Reply {
        self.connect().get(id, port, path)
    }

    pub fn open_files(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id()))
            .unwrap()
            .count()
    }

    /// Waits until no client is connected, which also means that their leases are gone.
    pub fn wait_until_unconnected(&self) {
        eventually("clients to be gone", || {
            (self.status()["connections"] == 0).then_some(())
        });
    }

    pub fn wait_exit(&mut self) -> i32 {
        eventually("the edge to exit", || self.child.try_wait().unwrap())
            .code()
            .unwrap_or(-1)
    }
}

impl Drop for Edge {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let log = std::fs::read_to_string(self.dir.0.join("log")).unwrap_or_default();
        if std::thread::panicking() {
            eprintln!("log of the edge:\n{log}");
        } else {
            // A panic takes one connection only, so no answer would tell.
            assert!(!log.contains("panicked"), "{log}");
        }
    }
}

pub fn route(id: &str) -> Value {
    json!({ "sandbox_id": id, "generation": 1, "address": "127.0.0.1", "netns": null })
}

/// An address of this host that no other test uses, for servers that need a certain port.
pub fn own_loopback() -> Ipv4Addr {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    let pid = std::process::id();
    Ipv4Addr::new(
        127,
        (pid >> 8) as u8 | 1,
        pid as u8,
        NEXT.fetch_add(1, Ordering::Relaxed) as u8,
    )
}

pub trait Stream: Read + Write + Send {
    fn set_patience(&self, limit: Duration);
    fn finish_writing(&self);
}

impl Stream for TcpStream {
    fn set_patience(&self, limit: Duration) {
        self.set_read_timeout(Some(limit)).unwrap();
        self.set_write_timeout(Some(limit)).unwrap();
        self.set_nodelay(true).unwrap();
    }

    fn finish_writing(&self) {
        self.shutdown(std::net::Shutdown::Write).unwrap();
    }
}

impl Stream for UnixStream {
    fn set_patience(&self, limit: Duration) {
        self.set_read_timeout(Some(limit)).unwrap();
        self.set_write_timeout(Some(limit)).unwrap();
    }

    fn finish_writing(&self) {
        self.shutdown(std::net::Shutdown::Write).unwrap();
    }
}

/// A raw connection, either side of HTTP/1.1. Reads fail after [`PATIENCE`].
pub struct Conn<S: Stream = TcpStream> {
    pub stream: S,
    buffer: Vec<u8>,
}

/// The head of a message, lines as they came.
#[derive(Debug, Clone)]
pub struct Head {
    pub start: String,
    pub headers: Vec<(String, String)>,
}

impl Head {
    pub fn get(&self, name: &str) -> Option<&str> {
        let found = self
            .headers
            .iter()
            .find(|(known, _)| known.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str())
    }

    pub fn path(&self) -> &str {
        self.start.split(' ').nth(1).unwrap()
    }

    pub fn method(&self) -> &str {
        self.start.split(' ').next().unwrap()
    }
}

#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub head: Head,
    pub body: Vec<u8>,
}

impl Reply {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {:?}", self.text()))
    }
}

impl<S: Stream> Conn<S> {
    pub fn new(stream: S) -> Conn<S> {
        stream.set_patience(PATIENCE);
        Conn {
            stream,
            buffer: Vec::new(),
        }
    }

    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).unwrap();
    }

    fn fill(&mut self) -> io::Result<usize> {
        let mut chunk = [0u8; 64 * 1024];
        let n = self.stream.read(&mut chunk)?;
        self.buffer.extend_from_slice(&chunk[..n]);
        Ok(n)
    }

    fn fill_some(&mut self) -> io::Result<()> {
        match self.fill()? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    /// Exactly `n` bytes.
    pub fn take(&mut self, n: usize) -> io::Result<Vec<u8>> {
        while self.buffer.len() < n {
            self.fill_some()?;
        }
        Ok(self.buffer.drain(..n).collect())
    }

    pub fn line(&mut self) -> io::Result<String> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|w| w == b"\r\n") {
                let line = self.take(end)?;
                self.take(2)?;
                return Ok(String::from_utf8_lossy(&line).into_owned());
            }
            self.fill_some()?;
        }
    }

    pub fn head(&mut self) -> io::Result<Head> {
        let start = self.line()?;
        let mut headers = Vec::new();
        loop {
            let line = self.line()?;
            if line.is_empty() {
                return Ok(Head { start, headers });
            }
            let (name, value) = line.split_once(':').unwrap();
            headers.push((name.to_owned(), value.trim().to_owned()));
        }
    }

    /// One chunk of a chunked body; empty at its end, after the trailers were skipped.
    pub fn chunk(&mut self) -> io::Result<Vec<u8>> {
        let size = usize::from_str_radix(&self.line()?, 16).unwrap();
        if size == 0 {
            while !self.line()?.is_empty() {}
            return Ok(Vec::new());
        }
        let chunk = self.take(size)?;
        self.take(2)?;
        Ok(chunk)
    }

    fn body(&mut self, head: &Head, default: usize) -> io::Result<Vec<u8>> {
        let mut body = Vec::new();
        if head.get("transfer-encoding").is_some() {
            loop {
                let chunk = self.chunk()?;
                if chunk.is_empty() {
                    return Ok(body);
                }
                body.extend(chunk);
            }
        }
        let length = head
            .get("content-length")
            .map_or(default, |n| n.parse().unwrap());
        if length == usize::MAX {
            while self.fill()? > 0 {}
            return Ok(std::mem::take(&mut self.buffer));
        }
        self.take(length)
    }

    /// A whole response to anything but HEAD.
    pub fn try_reply(&mut self) -> io::Result<Reply> {
        let head = self.head()?;
        let status: u16 = head.start.split(' ').nth(1).unwrap().parse().unwrap();
        let body = match status {
            100..=199 | 204 | 304 => Vec::new(),
            _ => self.body(&head, usize::MAX)?,
        };
        Ok(Reply { status, head, body })
    }

    pub fn reply(&mut self) -> Reply {
        self.try_reply().unwrap()
    }

    /// A whole request: its head and body.
    pub fn request(&mut self) -> io::Result<(Head, Vec<u8>)> {
        let head = self.head()?;
        let body = self.body(&head, 0)?;
        Ok((head, body))
    }

    pub fn get(&mut self, id: &str, port: u16, path: &str) -> Reply {
        self.send(request("GET", id, port, path, ""));
        self.reply()
    }

    /// Answers a request with a plain body.
    pub fn answer(&mut self, body: impl AsRef<[u8]>) -> io::Result<()> {
        let body = body.as_ref();
        write!(
            self.stream,
            "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n",
            body.len()
        )?;
        self.stream.write_all(body)
    }

    /// What comes next is the end of the connection: true for a reset, false for an ordinary end. Bytes before it are
    /// thrown away.
    pub fn ends_with_reset(&mut self) -> bool {
        loop {
            match self.fill() {
                Ok(0) => return false,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return true,
                Err(error) => panic!("the connection did not end: {error}"),
            }
        }
    }

    /// True when the reset of the connection has already arrived, behind whatever data came before.
    pub fn is_reset_already(&mut self) -> bool {
        self.stream.set_patience(Duration::from_micros(1));
        loop {
            match self.fill() {
                Ok(0) => return false,
                Ok(_) => {}
                Err(error) => return error.kind() == io::ErrorKind::ConnectionReset,
            }
        }
    }

    /// True while the peer has neither closed the connection nor sent anything.
    pub fn is_quiet_for(&mut self, time: Duration) -> bool {
        assert!(self.buffer.is_empty());
        self.stream.set_patience(time);
        let read = self.fill();
        self.stream.set_patience(PATIENCE);
        matches!(read, Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }
}

/// A request to a sandbox by host label; `extra` are whole header lines.
pub fn request(method: &str, id: &str, port: u16, path: &str, extra: &str) -> String {
    format!("{method} {path} HTTP/1.1\r\nhost: {port}-{id}.sandbox.test\r\n{extra}\r\n")
}

/// A server with a thread for each connection.
pub struct Server {
    pub port: u16,
    pub accepted: Arc<AtomicUsize>,
}

impl Server {
    /// Runs `handle` for each connection, on a free port of 127.0.0.1.
    pub fn raw(handle: impl Fn(Conn) + Send + Sync + 'static) -> Server {
        Server::on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap(), handle)
    }

    pub fn on(listener: TcpListener, handle: impl Fn(Conn) + Send + Sync + 'static) -> Server {
        let port = listener.local_addr().unwrap().port();
        let accepted = Arc::new(AtomicUsize::new(0));
        let (handle, count) = (Arc::new(handle), accepted.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                count.fetch_add(1, Ordering::SeqCst);
                let handle = handle.clone();
                std::thread::spawn(move || handle(Conn::new(stream)));
            }
        });
        Server { port, accepted }
    }

    /// Answers every request with `answer(head, body)`, keeping connections open.
    pub fn http(answer: impl Fn(&Head, &[u8]) -> Vec<u8> + Send + Sync + 'static) -> Server {
        Server::raw(keep_alive(answer))
    }

    /// Tells about each request in its response.
    pub fn echo() -> Server {
        Server::http(describe)
    }

    pub fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }
}

pub fn keep_alive<S: Stream>(
    answer: impl Fn(&Head, &[u8]) -> Vec<u8> + Send + Sync + 'static,
) -> impl Fn(Conn<S>) + Send + Sync + 'static {
    move |mut conn| {
        while let Ok((head, body)) = conn.request() {
            if conn.answer(answer(&head, &body)).is_err() {
                return;
            }
        }
    }
}

pub fn describe(head: &Head, body: &[u8]) -> Vec<u8> {
    let headers: serde_json::Map<String, Value> = head
        .headers
        .iter()
        .map(|(name, value)| (name.to_lowercase(), json!(value)))
        .collect();
    let text = String::from_utf8_lossy(body);
    json!({ "start": head.start, "headers": headers, "body": text })
        .to_string()
        .into_bytes()
}

/// A control API on a Unix socket; it stops listening when dropped, as a dying process would.
pub struct Api {
    path: PathBuf,
    stop: Arc<AtomicUsize>,
}

impl Api {
    pub fn start(path: PathBuf, handle: impl Fn(Conn<UnixStream>) + Send + Sync + 'static) -> Api {
        let _ = std::fs::remove_file(&path);
        let listener = UnixListener::bind(&path).unwrap();
        let stop = Arc::new(AtomicUsize::new(0));
        let (handle, stopped) = (Arc::new(handle), stop.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if stopped.load(Ordering::SeqCst) != 0 {
                    return;
                }
                let handle = handle.clone();
                std::thread::spawn(move || handle(Conn::new(stream)));
            }
        });
        Api { path, stop }
    }
}

impl Drop for Api {
    fn drop(&mut self) {
        self.stop.store(1, Ordering::SeqCst);
        let _ = UnixStream::connect(&self.path);
    }
}
