//! What the edge costs: the same requests to the same server, directly and through the edge, in the same run.
//!
//! ```text
//! cargo build --release -p aenv-edge
//! cargo run --release -p aenv-edge --example load -- [EDGE PROGRAM] [--netns PATH] [--requests N]
//! ```
//!
//! Closed loop: each connection sends a request, waits for the response and sends the next. Rounds of direct and edge
//! traffic alternate, so that a slow moment of the machine hits both. The server answers from memory and runs in this
//! process; client, server and edge share the cores of this machine, so requests per second with many connections
//! measure the sum of all three. With `--netns` the server listens inside that network namespace.
//!
//! Not measured: TLS, real networks, and what happens inside a virtual machine.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use aenv_edge::netns::Namespaces;
use rustix::thread::{move_into_link_name_space, LinkNameSpaceType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};

const ROUNDS: usize = 6;
const BULK: usize = 256 << 20;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

#[tokio::main]
async fn main() -> Result<()> {
    let mut program = PathBuf::from("target/x86_64-unknown-linux-gnu/release/aenv-edge");
    let mut netns: Option<PathBuf> = None;
    let mut requests = 24_000;
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--netns" => netns = Some(args.next().ok_or("--netns wants a path")?.into()),
            "--requests" => requests = args.next().ok_or("--requests wants a number")?.parse()?,
            path => program = path.into(),
        }
    }
    let inside: Option<Arc<OwnedFd>> = match &netns {
        Some(path) => Some(Arc::new(File::open(path)?.into())),
        None => None,
    };
    let server = listen(inside.clone())?;
    let port = server.local_addr()?.port();
    tokio::spawn(serve(server));

    let edge = Edge::start(&program, port, netns.as_deref())?;
    let direct = Arc::new(Path {
        label: "direct",
        address: SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
        namespaces: Some((Namespaces::start()?, inside)),
        host: "x".into(),
    });
    let through = Arc::new(Path {
        label: "edge",
        address: edge.address,
        namespaces: None,
        host: format!("{port}-bench.x"),
    });
    let cores = std::thread::available_parallelism()?;
    println!(
        "{cores} cores, {} rounds each, N = {requests} requests a row",
        ROUNDS
    );
    println!("case                 path     req/s      p50 us   p95 us   p99 us   max us");
    for (case, target, connections) in [
        ("keep-alive", "/", 1),
        ("keep-alive", "/", 16),
        ("keep-alive", "/", 128),
        ("guest closes", "/close", 1),
        ("guest closes", "/close", 16),
    ] {
        let mut rows = [(&direct, Sample::default()), (&through, Sample::default())];
        let mut cpu = Duration::ZERO;
        for _ in 0..ROUNDS {
            let before = edge.cpu_time()?;
            for (path, sample) in &mut rows {
                sample.add(path.round(target, connections, requests / ROUNDS).await?);
            }
            cpu += edge.cpu_time()? - before;
        }
        let mut medians = Vec::new();
        for (path, sample) in &mut rows {
            let label = format!("{case}, c={connections}");
            medians.push(sample.print(&label, path.label));
        }
        let added: Vec<f64> = medians[1]
            .iter()
            .zip(medians[0])
            .map(|(edge, direct)| edge - direct)
            .collect();
        println!(
            "{:<20} added    {:>18.1} {:>8.1} {:>8.1}   edge cpu {:.1} us a request",
            "",
            added[0],
            added[1],
            added[2],
            cpu.as_secs_f64() * 1e6 / requests as f64
        );
    }
    println!("bulk, {} MiB on one connection", BULK >> 20);
    for path in [&direct, &through, &direct, &through] {
        let (down, up) = (path.download().await?, path.upload().await?);
        println!(
            "  {:<8} download {down:>6.2} GB/s   upload {up:>6.2} GB/s",
            path.label
        );
    }
    Ok(())
}

#[derive(Default)]
struct Sample {
    micros: Vec<f64>,
    elapsed: Duration,
}

impl Sample {
    fn add(&mut self, (micros, elapsed): (Vec<f64>, Duration)) {
        self.micros.extend(micros);
        self.elapsed += elapsed;
    }

    /// Prints a row; returns p50, p95 and p99.
    fn print(&mut self, case: &str, path: &str) -> [f64; 3] {
        self.micros.sort_by(f64::total_cmp);
        let at = |share: f64| self.micros[((self.micros.len() - 1) as f64 * share) as usize];
        let rate = self.micros.len() as f64 / self.elapsed.as_secs_f64();
        let (p50, p95, p99, max) = (at(0.5), at(0.95), at(0.99), at(1.0));
        println!("{case:<20} {path:<8} {rate:>8.0} {p50:>10.1} {p95:>8.1} {p99:>8.1} {max:>8.0}");
        [p50, p95, p99]
    }
}

/// One way to the server.
struct Path {
    label: &'static str,
    address: SocketAddr,
    namespaces: Option<(Namespaces, Option<Arc<OwnedFd>>)>,
    host: String,
}

impl Path {
    async fn connect(&self) -> Result<TcpStream> {
        let stream = match &self.namespaces {
            None => TcpStream::connect(self.address).await?,
            Some((namespaces, inside)) => {
                let socket = namespaces.socket(inside.as_ref()).await?;
                TcpSocket::from_std_stream(socket.into())
                    .connect(self.address)
                    .await?
            }
        };
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    async fn round(
        self: &Arc<Self>,
        target: &str,
        connections: usize,
        requests: usize,
    ) -> Result<(Vec<f64>, Duration)> {
        let request: Arc<[u8]> = format!(
            "GET {target} HTTP/1.1\r\nhost: {}\r\naccept: */*\r\n\r\n",
            self.host
        )
        .into_bytes()
        .into();
        // A direct client of a server that closes has to connect each time; through the edge its connection stays.
        let reconnects = target == "/close" && self.namespaces.is_some();
        let each = requests / connections;
        let started = Instant::now();
        let mut workers = tokio::task::JoinSet::new();
        for _ in 0..connections {
            let (path, request) = (self.clone(), request.clone());
            workers.spawn(async move {
                let mut micros = Vec::with_capacity(each);
                let mut stream = path.connect().await?;
                for n in 0..each {
                    let begun = Instant::now();
                    if reconnects && n > 0 {
                        stream = path.connect().await?;
                    }
                    exchange(&mut stream, &request).await?;
                    micros.push(begun.elapsed().as_nanos() as f64 / 1000.0);
                }
                Result::Ok(micros)
            });
        }
        let mut micros = Vec::with_capacity(requests);
        while let Some(done) = workers.join_next().await {
            micros.extend(done??);
        }
        Ok((micros, started.elapsed()))
    }

    async fn download(&self) -> Result<f64> {
        let mut stream = self.connect().await?;
        let started = Instant::now();
        let request = format!("GET /bulk HTTP/1.1\r\nhost: {}\r\n\r\n", self.host);
        let size = exchange(&mut stream, request.as_bytes()).await?;
        Ok(size as f64 / started.elapsed().as_secs_f64() / 1e9)
    }

    async fn upload(&self) -> Result<f64> {
        let mut stream = self.connect().await?;
        let started = Instant::now();
        let head = format!(
            "PUT / HTTP/1.1\r\nhost: {}\r\ncontent-length: {BULK}\r\n\r\n",
            self.host
        );
        stream.write_all(head.as_bytes()).await?;
        let block = vec![0u8; 256 << 10];
        for _ in 0..BULK / block.len() {
            stream.write_all(&block).await?;
        }
        exchange(&mut stream, b"").await?;
        Ok(BULK as f64 / started.elapsed().as_secs_f64() / 1e9)
    }
}

/// Sends a request and reads its response; returns the size of the body.
async fn exchange(stream: &mut TcpStream, request: &[u8]) -> Result<usize> {
    stream.write_all(request).await?;
    let mut buffer = vec![0u8; 16 << 10];
    let mut filled = 0;
    let (head, length) = loop {
        let n = stream.read(&mut buffer[filled..]).await?;
        if n == 0 {
            return Err("the connection ended before the response".into());
        }
        filled += n;
        if let Some(head) = end_of_head(&buffer[..filled]) {
            if !buffer.starts_with(b"HTTP/1.1 200") {
                return Err(String::from_utf8_lossy(&buffer[..filled])
                    .into_owned()
                    .into());
            }
            break (head, content_length(&buffer[..head]));
        }
    };
    let mut left = length - (filled - head);
    if left > 0 {
        buffer.resize(256 << 10, 0);
    }
    while left > 0 {
        let n = stream.read(&mut buffer).await?;
        if n == 0 {
            return Err("the connection ended inside the response".into());
        }
        left -= n;
    }
    Ok(length)
}

fn end_of_head(bytes: &[u8]) -> Option<usize> {
    bytes
        .windows(4)
        .position(|w| w == b"\r\n\r\n")
        .map(|at| at + 4)
}

fn content_length(head: &[u8]) -> usize {
    let text = String::from_utf8_lossy(head).to_ascii_lowercase();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("content-length:"));
    line.and_then(|n| n.trim().parse().ok()).unwrap_or(0)
}

/// A listener on a free port of 127.0.0.1, inside a namespace if given.
fn listen(inside: Option<Arc<OwnedFd>>) -> Result<TcpListener> {
    let bind = move || -> io::Result<std::net::TcpListener> {
        if let Some(namespace) = inside {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
        }
        std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
    };
    let listener = std::thread::spawn(bind)
        .join()
        .map_err(|_| "the listening thread failed")??;
    listener.set_nonblocking(true)?;
    Ok(TcpListener::from_std(listener)?)
}

async fn serve(listener: TcpListener) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(answer(stream));
    }
}

async fn answer(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = vec![0u8; 256 << 10];
    let mut filled = 0;
    loop {
        let n = stream.read(&mut buffer[filled..]).await?;
        if n == 0 {
            return Ok(());
        }
        filled += n;
        let Some(head) = end_of_head(&buffer[..filled]) else {
            continue;
        };
        let mut left = content_length(&buffer[..head]).saturating_sub(filled - head);
        let (bulk, close) = (
            buffer.starts_with(b"GET /bulk"),
            buffer.starts_with(b"GET /close"),
        );
        filled = 0;
        while left > 0 {
            match stream.read(&mut buffer).await? {
                0 => return Ok(()),
                n => left -= n,
            }
        }
        if bulk {
            stream
                .write_all(format!("HTTP/1.1 200 OK\r\ncontent-length: {BULK}\r\n\r\n").as_bytes())
                .await?;
            for _ in 0..BULK / buffer.len() {
                stream.write_all(&buffer).await?;
            }
        } else if close {
            return stream
                .write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok")
                .await;
        } else {
            stream
                .write_all(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\nok",
                )
                .await?;
        }
    }
}

struct Edge {
    child: Child,
    address: SocketAddr,
    dir: PathBuf,
}

impl Edge {
    fn start(
        program: &std::path::Path,
        port: u16,
        netns: Option<&std::path::Path>,
    ) -> Result<Edge> {
        let dir = std::env::temp_dir().join(format!("aenv-edge-load-{}", std::process::id()));
        std::fs::create_dir_all(&dir)?;
        let control = dir.join("control.sock");
        // A free port, found by taking it for a moment.
        let address = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
        let mut child = Command::new(program)
            .args(["--listen", &address.to_string(), "--control"])
            .arg(&control)
            .arg("--api")
            .arg(dir.join("api.sock"))
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| format!("cannot start {}: {e}; build it first", program.display()))?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().ok_or("no stdout")?).read_line(&mut line)?;
        let edge = Edge {
            child,
            address,
            dir,
        };
        let route = serde_json::json!({
            "sandbox_id": "bench", "generation": 1, "address": "127.0.0.1", "netns": netns,
        });
        use std::io::{Read, Write};
        let mut call = std::os::unix::net::UnixStream::connect(control)?;
        let body = route.to_string();
        write!(
            call,
            "PUT /v1/routes/bench HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )?;
        let mut reply = String::new();
        call.read_to_string(&mut reply)?;
        if !reply.starts_with("HTTP/1.1 204") {
            return Err(format!("port {port}: {reply}").into());
        }
        Ok(edge)
    }
}

impl Edge {
    /// Processor time the edge has used, user and system.
    fn cpu_time(&self) -> Result<Duration> {
        let mut time = 0;
        // Nanoseconds per thread; `/proc/PID/stat` counts in ticks of 10 ms.
        for task in std::fs::read_dir(format!("/proc/{}/task", self.child.id()))? {
            let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
            time += text.split(' ').next().unwrap_or("").parse::<u64>()?;
        }
        Ok(Duration::from_nanos(time))
    }
}

impl Drop for Edge {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
