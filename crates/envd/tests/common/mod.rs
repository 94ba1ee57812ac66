//! A real agent on a loopback port, and a client that speaks to it in raw HTTP.
//!
//! The tests need root, as the agent does.

#![allow(dead_code, reason = "each test binary uses its own part of this")]

use base64::engine::general_purpose::STANDARD;
use base64::Engine;
use serde_json::{json, Value};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// No single wait of a test takes longer, unless something is broken.
pub const PATIENCE: Duration = Duration::from_secs(30);

pub struct Agent {
    child: Child,
    pub address: SocketAddr,
    /// A directory for the test. With [`Agent::in_root`] it is the root of the agent.
    pub dir: TempDir,
}

impl Agent {
    /// An agent that sees the root of this machine.
    pub fn start() -> Agent {
        let command = Command::new(env!("CARGO_BIN_EXE_aenv-envd"));
        Agent::launch(command, &[], tempfile::tempdir().unwrap())
    }

    /// An agent whose root is [`Agent::dir`], with the accounts `root` and `user` (uid 1000).
    pub fn in_root() -> Agent {
        let dir = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| std::fs::write(dir.path().join(path), text).unwrap();
        std::fs::set_permissions(
            dir.path(),
            std::os::unix::fs::PermissionsExt::from_mode(0o755),
        )
        .unwrap();
        for path in ["etc", "root", "home/user", "tmp"] {
            std::fs::create_dir_all(dir.path().join(path)).unwrap();
        }
        put(
            "etc/passwd",
            "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n",
        );
        put("etc/group", "root:x:0:\nuser:x:1000:\nteam:x:2000:user\n");
        std::os::unix::fs::chown(dir.path().join("home/user"), Some(1000), Some(1000)).unwrap();
        let command = Command::new(env!("CARGO_BIN_EXE_aenv-envd"));
        let root = dir.path().to_str().unwrap().to_owned();
        Agent::launch(command, &["--root", &root], dir)
    }

    /// An agent started by another program, such as `unshare`.
    pub fn launch(mut command: Command, more: &[&str], dir: TempDir) -> Agent {
        let mut child = command
            .args(["agent", "--listen", "127.0.0.1:0"])
            .args(more)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        log.read_line(&mut line).unwrap();
        let address = line.trim().rsplit(' ').next().unwrap().parse();
        let address =
            address.unwrap_or_else(|_| panic!("the agent did not start (run as root?): {line}"));
        std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::stderr()));
        Agent {
            child,
            address,
            dir,
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the agent to end by itself.
    pub fn wait(&mut self) -> std::process::ExitStatus {
        eventually("the agent ends", || self.child.try_wait().unwrap())
    }

    pub fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Sends a request on a connection of its own and reads the whole response.
    pub fn request(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Response {
        let mut stream = self.connect();
        stream
            .write_all(&head(method, path, headers, Some(body.len())))
            .unwrap();
        // A server may answer before it has read everything.
        let _ = stream.write_all(body);
        Response::read(stream, method == "HEAD")
    }

    pub fn get(&self, path: &str) -> Response {
        self.request("GET", path, &[], b"")
    }

    /// A unary call as `user` (none: the default user): status and message.
    pub fn unary_as(&self, user: Option<&str>, procedure: &str, message: Value) -> (u16, Value) {
        let authorization = basic(user);
        let mut headers = vec![("content-type", "application/json")];
        if let Some(value) = &authorization {
            headers.push(("authorization", value));
        }
        let response = self.request("POST", procedure, &headers, message.to_string().as_bytes());
        (response.status, response.json())
    }

    pub fn unary(&self, procedure: &str, message: Value) -> (u16, Value) {
        self.unary_as(None, procedure, message)
    }

    /// A unary call that must succeed.
    pub fn ok(&self, procedure: &str, message: Value) -> Value {
        let (status, answer) = self.unary(procedure, message);
        assert_eq!(status, 200, "{procedure}: {answer}");
        answer
    }

    /// A unary call that must fail: its code.
    pub fn fails(&self, procedure: &str, message: Value) -> String {
        let (status, answer) = self.unary(procedure, message);
        assert_ne!(status, 200, "{procedure}: {answer}");
        answer["code"].as_str().unwrap().to_owned()
    }

    /// Opens a server stream.
    pub fn stream(&self, procedure: &str, headers: &[(&str, &str)], message: &Value) -> Stream {
        let mut all = vec![
            ("content-type", "application/connect+json"),
            ("connect-protocol-version", "1"),
        ];
        all.extend_from_slice(headers);
        let body = envelope(0, message.to_string().as_bytes());
        let mut stream = self.connect();
        stream
            .write_all(&head("POST", procedure, &all, Some(body.len())))
            .unwrap();
        stream.write_all(&body).unwrap();
        Stream::read(stream)
    }

    /// Starts `/bin/sh -c script`.
    pub fn start_shell(&self, script: &str) -> Stream {
        self.stream("/process.Process/Start", &[], &shell(script))
    }

    /// Runs `/bin/sh -c script` to its end.
    pub fn run(&self, script: &str) -> Outcome {
        self.start_shell(script).outcome()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn shell(script: &str) -> Value {
    json!({ "process": { "cmd": "/bin/sh", "args": ["-c", script] }, "stdin": false })
}

pub fn basic(user: Option<&str>) -> Option<String> {
    user.map(|user| format!("Basic {}", STANDARD.encode(format!("{user}:"))))
}

pub fn envelope(flags: u8, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![flags];
    bytes.extend((payload.len() as u32).to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// A request head; `length` none means a chunked body.
pub fn head(method: &str, path: &str, headers: &[(&str, &str)], length: Option<usize>) -> Vec<u8> {
    let mut text = format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\n");
    match length {
        Some(length) => text.push_str(&format!("content-length: {length}\r\n")),
        None => text.push_str("transfer-encoding: chunked\r\n"),
    }
    for (name, value) in headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    text.push_str("\r\n");
    text.into_bytes()
}

/// One chunk of a chunked body; an empty one ends it.
pub fn chunk(data: &[u8]) -> Vec<u8> {
    let mut bytes = format!("{:x}\r\n", data.len()).into_bytes();
    bytes.extend(data);
    bytes.extend(b"\r\n");
    bytes
}

/// Polls until `condition` holds; the name is for the failure.
pub fn eventually<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn exists(path: &str) -> Option<()> {
    Path::new(path).exists().then_some(())
}

#[derive(Debug)]
pub struct Response {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Response {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, v)| v.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|_| panic!("not JSON: {:?}", String::from_utf8_lossy(&self.body)))
    }

    pub fn read(stream: TcpStream, no_body: bool) -> Response {
        let mut reader = BufReader::new(stream);
        let (status, headers) = read_head(&mut reader);
        let mut response = Response {
            status,
            headers,
            body: Vec::new(),
        };
        if no_body || status == 204 || status == 304 {
            return response;
        }
        match response.header("content-length") {
            Some(length) => {
                response.body = vec![0; length.parse().unwrap()];
                reader.read_exact(&mut response.body).unwrap();
            }
            None => Chunked {
                reader,
                left: 0,
                ended: false,
            }
            .read_to_end(&mut response.body)
            .map(drop)
            .unwrap(),
        }
        response
    }
}

fn read_head(reader: &mut impl BufRead) -> (u16, Vec<(String, String)>) {
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let status = line
        .split(' ')
        .nth(1)
        .unwrap_or_else(|| panic!("no status line: {line:?}"))
        .parse()
        .unwrap();
    let mut headers = Vec::new();
    loop {
        line.clear();
        reader.read_line(&mut line).unwrap();
        let Some((name, value)) = line.trim_end().split_once(':') else {
            break;
        };
        headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
    }
    (status, headers)
}

/// The data of a chunked body.
struct Chunked {
    reader: BufReader<TcpStream>,
    left: usize,
    ended: bool,
}

impl Read for Chunked {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.left == 0 && !self.ended {
            let mut line = String::new();
            self.reader.read_line(&mut line)?;
            let size = usize::from_str_radix(line.trim(), 16);
            self.left = size
                .map_err(|_| std::io::Error::new(std::io::ErrorKind::UnexpectedEof, "cut off"))?;
            if self.left == 0 {
                self.ended = true;
                self.reader.read_line(&mut line)?;
            }
        }
        if self.ended {
            return Ok(0);
        }
        let size = buffer.len().min(self.left);
        let size = self.reader.read(&mut buffer[..size])?;
        self.left -= size;
        if self.left == 0 && !self.ended {
            let mut end = [0; 2];
            self.reader.read_exact(&mut end)?;
        }
        Ok(size)
    }
}

/// A running server stream.
pub struct Stream {
    body: Chunked,
    /// For a response that came as a whole.
    whole: Option<std::io::Cursor<Vec<u8>>>,
}

impl Stream {
    /// Reads the head of the response, which must be that of a stream.
    pub fn read(stream: TcpStream) -> Stream {
        let mut reader = BufReader::new(stream);
        let (status, headers) = read_head(&mut reader);
        let header = |name: &str| {
            headers
                .iter()
                .find(|(n, _)| n == name)
                .map(|(_, v)| v.as_str())
        };
        assert_eq!(
            (status, header("content-type")),
            (200, Some("application/connect+json"))
        );
        let whole = header("content-length").map(|length| {
            let mut body = vec![0; length.parse().unwrap()];
            reader.read_exact(&mut body).unwrap();
            std::io::Cursor::new(body)
        });
        Stream {
            body: Chunked {
                reader,
                left: 0,
                ended: false,
            },
            whole,
        }
    }

    fn fill(&mut self, buffer: &mut [u8]) -> std::io::Result<()> {
        match &mut self.whole {
            Some(whole) => whole.read_exact(buffer),
            None => self.body.read_exact(buffer),
        }
    }

    /// The next envelope: flags and message. `None` when the body ends.
    pub fn next(&mut self) -> Option<(u8, Value)> {
        let mut header = [0; 5];
        match self.fill(&mut header) {
            Ok(()) => {}
            Err(e) if e.kind() == std::io::ErrorKind::UnexpectedEof => return None,
            Err(e) => panic!("stream: {e}"),
        }
        let mut payload = vec![0; u32::from_be_bytes(header[1..].try_into().unwrap()) as usize];
        self.fill(&mut payload).unwrap();
        Some((header[0], serde_json::from_slice(&payload).unwrap()))
    }

    /// The pid of the start event, which must come next.
    pub fn pid(&mut self) -> u64 {
        let (flags, message) = self.next().unwrap();
        assert_eq!(flags, 0, "{message}");
        message["event"]["start"]["pid"]
            .as_u64()
            .unwrap_or_else(|| panic!("no start event: {message}"))
    }

    /// The error that ends the stream, which must come next.
    pub fn error(&mut self) -> Value {
        let (flags, message) = self.next().unwrap();
        assert_eq!(flags, 2, "{message}");
        message["error"].clone()
    }

    /// Reads on until the output so far contains `text`.
    pub fn until(&mut self, text: &str) -> String {
        let mut seen = Vec::new();
        while !String::from_utf8_lossy(&seen).contains(text) {
            let (flags, message) = self.next().unwrap();
            assert_eq!(
                flags,
                0,
                "ended before {text:?}: {message}, after {:?}",
                String::from_utf8_lossy(&seen)
            );
            seen.extend(data(&message).map(|(_, data)| data).unwrap_or_default());
        }
        String::from_utf8_lossy(&seen).into_owned()
    }

    /// Reads the stream to its end.
    pub fn outcome(mut self) -> Outcome {
        let mut outcome = Outcome::default();
        while let Some((flags, message)) = self.next() {
            if flags == 2 {
                outcome.error = message["error"].clone();
                assert!(
                    self.next().is_none(),
                    "something follows the end of the stream"
                );
                return outcome;
            }
            assert!(
                outcome.end.is_null(),
                "something follows the end event: {message}"
            );
            if let Some((name, data)) = data(&message) {
                let to = if name == "stderr" {
                    &mut outcome.stderr
                } else {
                    &mut outcome.stdout
                };
                to.extend(data);
            }
            outcome.end = message["event"]["end"].clone();
        }
        panic!("the stream has no end: {outcome:?}");
    }
}

/// Output of an event: which, and the bytes.
fn data(message: &Value) -> Option<(String, Vec<u8>)> {
    let (name, data) = message["event"]["data"].as_object()?.iter().next()?;
    Some((name.clone(), STANDARD.decode(data.as_str()?).unwrap()))
}

#[derive(Debug, Default)]
pub struct Outcome {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    /// The end event, or null.
    pub end: Value,
    /// The error of the stream, or null.
    pub error: Value,
}

impl Outcome {
    pub fn text(&self) -> String {
        assert!(self.error.is_null(), "{}", self.error);
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

/// Bytes that do not repeat in short distances, the same for the same seed.
pub fn noise(size: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut bytes = Vec::with_capacity(size + 8);
    while bytes.len() < size {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(size);
    bytes
}
