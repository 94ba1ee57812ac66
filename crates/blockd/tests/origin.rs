//! Layers that come from an origin, good and bad.

mod common;

use std::collections::HashMap;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use common::{errno, open_rw, patterned, read_at, Node};
use lsmt::zfile::{Options, ZWriter};
use serde_json::{json, Value};
use sha2::{Digest, Sha256};

const MIB: usize = 1 << 20;
const CHUNK: usize = 256 << 10;

/// What an origin does instead of answering well.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    Status(u16),
    /// Closes the connection without an answer.
    Close,
    /// Announces everything and sends half of it.
    Half,
    /// Sends other bytes.
    Lie,
    Rubbish,
}

#[derive(Default)]
struct Shared {
    blobs: HashMap<String, Vec<u8>>,
    /// Used up one by one.
    faults: Vec<Fault>,
    delay: Duration,
    /// Ranges that were asked for.
    requests: Vec<(u64, u64)>,
}

/// An origin that keeps its layers in memory and does what tests want it to do.
struct Origin {
    shared: Arc<Mutex<Shared>>,
    path: PathBuf,
}

impl Origin {
    fn start(directory: &Path) -> Origin {
        let path = directory.join("origin");
        let shared: Arc<Mutex<Shared>> = Arc::default();
        let listener = UnixListener::bind(&path).unwrap();
        let state = shared.clone();
        thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let state = state.clone();
                thread::spawn(move || serve(connection, &state));
            }
        });
        Origin { shared, path }
    }

    fn add(&self, bytes: Vec<u8>) -> Value {
        let digest = hex(&bytes);
        let digests: Vec<u8> = bytes
            .chunks(CHUNK)
            .flat_map(|c| Sha256::digest(c).to_vec())
            .collect();
        let name =
            json!({ "remote": { "digest": digest, "size": bytes.len(), "chunks": hex(&digests) } });
        self.lock().blobs.insert(digest, bytes);
        name
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Shared> {
        self.shared.lock().unwrap()
    }

    fn requests(&self) -> Vec<(u64, u64)> {
        std::mem::take(&mut self.lock().requests)
    }
}

fn hex(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    let hex: String = digest.iter().map(|b| format!("{b:02x}")).collect();
    format!("sha256:{hex}")
}

fn serve(mut connection: UnixStream, state: &Mutex<Shared>) {
    let mut pending = Vec::new();
    loop {
        let end = loop {
            if let Some(at) = pending.windows(4).position(|w| w == b"\r\n\r\n") {
                break at + 4;
            }
            let mut buf = [0; 1024];
            match connection.read(&mut buf) {
                Ok(0) | Err(_) => return,
                Ok(count) => pending.extend_from_slice(&buf[..count]),
            }
        };
        let head = String::from_utf8(pending.drain(..end).collect()).unwrap();
        let target = head.split(' ').nth(1).unwrap().to_owned();
        let range = head
            .lines()
            .find_map(|l| l.strip_prefix("Range: bytes="))
            .map(|r| {
                let (first, last) = r.split_once('-').unwrap();
                (first.parse::<u64>().unwrap(), last.parse::<u64>().unwrap())
            });
        let (answer, fault, delay) = {
            let mut state = state.lock().unwrap();
            if let Some(range) = range {
                state.requests.push(range);
            }
            let digest = target.split('/').nth(3).unwrap();
            let answer = state.blobs.get(digest).map(|bytes| match range {
                Some((first, last)) => (206, bytes[first as usize..=last as usize].to_vec()),
                None => (
                    200,
                    bytes
                        .chunks(CHUNK)
                        .flat_map(|c| Sha256::digest(c).to_vec())
                        .collect(),
                ),
            });
            let fault = (!state.faults.is_empty()).then(|| state.faults.remove(0));
            (answer, fault, state.delay)
        };
        thread::sleep(delay);
        let (status, mut body) = answer.unwrap_or((404, Vec::new()));
        let mut head = format!(
            "HTTP/1.1 {status} x\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        match fault {
            None => {}
            Some(Fault::Status(status)) => {
                head = format!("HTTP/1.1 {status} x\r\nContent-Length: 0\r\n\r\n");
                body.clear();
            }
            Some(Fault::Close) => return,
            Some(Fault::Half) => body.truncate(body.len() / 2),
            Some(Fault::Lie) => body.iter_mut().for_each(|b| *b ^= 0x55),
            Some(Fault::Rubbish) => head = "SSH-2.0-x\r\n\r\n".into(),
        }
        let sent = connection
            .write_all(head.as_bytes())
            .and_then(|()| connection.write_all(&body));
        if sent.is_err() || matches!(fault, Some(Fault::Half | Fault::Rubbish)) {
            return;
        }
    }
}

fn node_with(cache: usize) -> (Node, Origin) {
    let mut node = Node::new();
    let origin = Origin::start(node.dir.path());
    node.arguments = vec![
        "--origin".into(),
        origin.path.display().to_string(),
        "--cache-bytes".into(),
        cache.to_string(),
    ];
    node.launch(&[]);
    (node, origin)
}

/// A layer file with `data` in it, made by the daemon.
fn layer_file(node: &Node, id: &str, data: &[u8]) -> Vec<u8> {
    open_rw(&node.disk(id, data.len() as u64))
        .write_all_at(data, 0)
        .unwrap();
    let layers = node.seal(id);
    let layer = node.ok(
        "GET",
        &format!("/v1/layers/{}", layers[0]["id"].as_str().unwrap()),
        Value::Null,
    );
    fs::read(common::path_in(&layer)).unwrap()
}

/// Bytes on disk of everything in the cache.
fn cache_usage(node: &Node) -> u64 {
    let files = fs::read_dir(node.state().join("cache")).unwrap();
    let data = files
        .map(|f| f.unwrap())
        .filter(|f| f.path().extension().is_some_and(|e| e == "data"));
    data.map(|f| f.metadata().unwrap().blocks() * 512).sum()
}

fn cold(path: &Path) -> fs::File {
    use std::os::fd::AsRawFd;
    let file = open_rw(path);
    // SAFETY: the kernel is only given a descriptor and numbers.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    file
}

#[test]
fn a_remote_layer_is_fetched_as_far_as_it_is_read_and_once() {
    let (mut node, origin) = node_with(64 * MIB);
    let data = patterned(1, 8 * MIB);
    let name = origin.add(layer_file(&node, "source", &data));
    let path = node.fixed("remote", "disk", &json!([name]));
    let opening = origin.requests();
    assert!(
        opening.iter().map(|(a, b)| b - a + 1).sum::<u64>() <= 3 * CHUNK as u64,
        "{opening:?}"
    );
    let file = cold(&path);
    assert!(read_at(&file, 5_000_000, 1000) == data[5_000_000..5_001_000]);
    let first = origin.requests();
    assert!(!first.is_empty() && first.len() <= 2, "{first:?}");
    assert!(fs::read(&path).unwrap() == data);
    let rest = origin.requests();
    assert!(
        rest.len() < 20,
        "a sequential read should make few requests, not {}",
        rest.len()
    );
    assert_eq!(cold(&path).metadata().unwrap().len(), data.len() as u64);
    assert!(fs::read(&path).unwrap() == data);
    assert_eq!(origin.requests(), [], "what is here was fetched again");
    // A fork shares it, and so does the next daemon, even while there is no origin.
    fs::remove_file(&origin.path).unwrap();
    origin.lock().faults = vec![Fault::Close; 1000];
    node.kill();
    node.launch(&[]);
    cold(&path);
    assert!(fs::read(&path).unwrap() == data);
    let fork = open_rw(&node.disk_over("fork", 0, &json!([name])));
    assert!(read_at(&fork, 0, 8 * MIB) == data);
    assert_eq!(origin.requests(), []);
}

#[test]
fn readers_of_the_same_chunk_wait_for_one_fetch_and_hold_up_nobody() {
    let (node, origin) = node_with(64 * MIB);
    let data = patterned(2, 4 * MIB);
    let name = origin.add(layer_file(&node, "source", &data));
    let path = node.fixed("remote", "disk", &json!([name]));
    let local = open_rw(&node.disk("local", MIB as u64));
    origin.requests();
    origin.lock().delay = Duration::from_millis(400);
    thread::scope(|scope| {
        let readers: Vec<_> = (0..12)
            .map(|i| {
                let (path, data) = (&path, &data);
                // Without the page cache, so that every reader really asks.
                scope.spawn(move || {
                    let file = common::open_direct(path);
                    let mut buffer = aenv_blockd::attach::fuse::Buffer::new(0, 4096).unwrap();
                    let at = 2 * MIB + CHUNK / 2 + i * 4096;
                    file.read_exact_at(&mut buffer.payload()[..4096], at as u64)
                        .unwrap();
                    assert!(buffer.payload()[..4096] == data[at..at + 4096]);
                })
            })
            .collect();
        // While they wait, another image is as fast as ever.
        let mut longest = Duration::ZERO;
        while !readers.iter().all(|r| r.is_finished()) {
            let start = Instant::now();
            local.write_all_at(&[1; 4096], 0).unwrap();
            longest = longest.max(start.elapsed());
        }
        assert!(
            longest < Duration::from_millis(200),
            "another image waited {longest:?}"
        );
    });
    let requests = origin.requests();
    assert!(
        requests.len() <= 2,
        "one fetch would have been enough: {requests:?}"
    );
}

#[test]
fn the_bound_holds_at_every_moment_and_costs_only_a_refetch() {
    let (mut node, origin) = node_with(2 * MIB);
    let data = patterned(3, 12 * MIB);
    let name = origin.add(layer_file(&node, "source", &data));
    let path = node.fixed("remote", "disk", &json!([name]));
    let limit = 2 * MIB as u64 + 64 * 1024;
    thread::scope(|scope| {
        let readers: Vec<_> = (0..3u64)
            .map(|worker| {
                let (path, data) = (&path, &data);
                scope.spawn(move || {
                    for round in 0..40u64 {
                        let file = cold(path);
                        let at =
                            ((worker * 7919 + round * 104_729) * 4093 % (11 * MIB as u64)) as usize;
                        assert!(read_at(&file, at as u64, 70_000) == data[at..at + 70_000]);
                    }
                })
            })
            .collect();
        while !readers.iter().all(|r| r.is_finished()) {
            assert!(
                cache_usage(&node) <= limit,
                "{} bytes are kept",
                cache_usage(&node)
            );
        }
    });
    let status = node.ok("GET", "/v1/status", Value::Null);
    assert!(status["cached_bytes"].as_u64().unwrap() <= 2 * MIB as u64);
    // What is on record after a crash is what is there.
    node.kill();
    node.launch(&[]);
    assert!(cache_usage(&node) <= limit);
    cold(&path);
    assert!(fs::read(&path).unwrap() == data);
}

#[test]
fn faults_of_the_origin_are_survived_and_lies_are_not_believed() {
    let (node, origin) = node_with(64 * MIB);
    let data = patterned(4, 3 * MIB);
    let name = origin.add(layer_file(&node, "source", &data));
    for (round, fault) in [
        Fault::Status(500),
        Fault::Status(429),
        Fault::Close,
        Fault::Half,
        Fault::Lie,
        Fault::Rubbish,
    ]
    .into_iter()
    .enumerate()
    {
        // Another content each time, or nothing would be fetched.
        let data = patterned(100 + round as u64, MIB);
        let name = origin.add(layer_file(&node, &format!("source{round}"), &data));
        origin.lock().faults = vec![fault; 3];
        let path = node.fixed(&format!("remote{round}"), "disk", &json!([name]));
        origin.lock().faults = vec![fault; 3];
        assert!(fs::read(&path).unwrap() == data, "round {round}");
    }
    // What will not get better is told at once.
    origin.lock().faults.clear();
    let digest = name["remote"]["digest"].as_str().unwrap().to_owned();
    let bytes = origin.lock().blobs.remove(&digest).unwrap();
    let start = Instant::now();
    let spec = json!({ "layers": [name], "mode": "disk", "read_only": true });
    let (status, answer) = node.call("PUT", "/v1/images/missing", spec.clone());
    assert_eq!(status, 404, "{answer}");
    assert!(
        answer["message"]
            .as_str()
            .unwrap()
            .contains("does not have the layer"),
        "{answer}"
    );
    assert!(start.elapsed() < Duration::from_secs(5));
    // A layer that vanishes later is an error for who reads it, not for others.
    origin.lock().blobs.insert(digest.clone(), bytes);
    let path = path_of(&node.ok("PUT", "/v1/images/missing", spec));
    origin.lock().blobs.remove(&digest);
    assert_eq!(
        errno(cold(&path).read_at(&mut [0; 4096], 2 * MIB as u64 + 300_000)),
        libc::EIO
    );
    assert!(fs::read(node.mount().join("remote0")).unwrap() == patterned(100, MIB));
}

fn path_of(view: &Value) -> PathBuf {
    common::path_in(view)
}

#[test]
fn damage_in_the_cache_is_noticed_by_checksums_and_fetched_again() {
    let (mut node, origin) = node_with(64 * MIB);
    let data = patterned(5, 2 * MIB);
    let plain = layer_file(&node, "source", &data);
    let mut writer = ZWriter::new(std::io::Cursor::new(Vec::new()), Options::default()).unwrap();
    writer.write_all(&plain).unwrap();
    let (packed, _) = writer.finish_seekable().unwrap();
    let name = origin.add(packed.into_inner());
    let path = node.fixed("remote", "disk", &json!([name]));
    assert!(fs::read(&path).unwrap() == data);
    // Bits rot in the file of the cache while nobody looks.
    let cache = node.state().join("cache");
    let damage = |from: u64| {
        for file in fs::read_dir(&cache).unwrap() {
            let file = file.unwrap().path();
            if file.extension().is_some_and(|e| e == "data") {
                open_rw(&file).write_all_at(&[0xee; 5000], from).unwrap();
            }
        }
    };
    damage(600_000);
    origin.requests();
    cold(&path);
    assert!(
        fs::read(&path).unwrap() == data,
        "the checksums of the zfile were not used"
    );
    assert!(!origin.requests().is_empty());

    // After a start of the machine everything is in doubt: here, because the journal carries another boot id.
    node.kill();
    damage(900_000);
    for file in fs::read_dir(node.state().join("cache")).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_some_and(|e| e == "journal") {
            let mut bytes = fs::read(&path).unwrap();
            bytes[10] ^= 1;
            let crc = crc32c::crc32c(&bytes[..32]);
            bytes[32..36].copy_from_slice(&crc.to_le_bytes());
            fs::write(&path, &bytes).unwrap();
        }
    }
    node.launch(&[]);
    cold(&path);
    origin.requests();
    assert!(
        fs::read(&path).unwrap() == data,
        "a chunk lost in a crash of the machine was used"
    );
    assert!(!origin.requests().is_empty());
}

#[test]
fn names_that_make_no_sense_are_refused() {
    let (node, origin) = node_with(MIB);
    let good = origin.add(vec![7; 10_000]);
    let change = |key: &str, value: Value| {
        let mut name = good.clone();
        name["remote"][key] = value;
        name
    };
    for (name, wanted) in [
        (good.clone(), 400),
        (change("digest", json!("md5:00")), 400),
        (change("digest", json!("sha256:../../etc/passwd")), 400),
        (change("size", json!(0)), 400),
        (change("size", json!(u64::MAX)), 400),
        (change("chunks", json!("sha256:zz")), 400),
        (json!({ "remote": {} }), 400),
    ] {
        let spec = json!({ "layers": [name], "mode": "disk", "read_only": true });
        let (status, answer) = node.call("PUT", "/v1/images/x", spec);
        assert_eq!(status, wanted, "{name}: {answer}");
    }
    let without = Node::start();
    let spec = json!({ "layers": [good], "mode": "disk", "read_only": true });
    let (status, answer) = without.call("PUT", "/v1/images/x", spec);
    assert_eq!(status, 400);
    assert!(
        answer["message"].as_str().unwrap().contains("--origin"),
        "{answer}"
    );
}

#[test]
fn what_a_first_start_read_can_be_fetched_before_the_next() {
    let (node, origin) = node_with(64 * MIB);
    let data = patterned(6, 8 * MIB);
    let name = origin.add(layer_file(&node, "source", &data));
    let wanted = [5 * MIB, MIB, 3 * MIB + 8192, MIB];
    let touch = |path: &Path| {
        let file = cold(path);
        wanted
            .iter()
            .for_each(|at| assert!(read_at(&file, *at as u64, 9000) == data[*at..*at + 9000]));
    };
    let first = node.disk_over("first", 0, &json!([name]));
    node.ok("POST", "/v1/images/first/trace", json!({}));
    touch(&first);
    let trace = node.dir.path().join("trace");
    let saved = node.ok("POST", "/v1/images/first/trace", json!({ "save": trace }));
    assert_eq!(
        (&saved["records"], &saved["bytes"]),
        (&json!(3), &json!(3 * 12_288)),
        "{saved}"
    );

    // Another node, where nothing is yet.
    let (other, elsewhere) = node_with(64 * MIB);
    let bytes = origin.lock().blobs.values().next().unwrap().clone();
    assert_eq!(elsewhere.add(bytes), name);
    let second = other.fixed("second", "disk", &json!([name]));
    elsewhere.requests();
    other.ok(
        "POST",
        "/v1/images/second/prefetch",
        json!({ "trace": trace }),
    );
    let mut fetched = Vec::new();
    common::eventually("the prefetch is done", || {
        fetched.extend(elsewhere.requests());
        fetched.len() >= 3
    });
    // Only what is still on its way may be asked for; then all of it is here.
    touch(&second);
    fetched.extend(elsewhere.requests());
    touch(&second);
    assert_eq!(elsewhere.requests(), []);
    assert!(fetched.len() <= 5, "{fetched:?}");
    for (id, file) in [
        ("none", trace.clone()),
        ("second", node.control()),
        ("second", "/does/not/exist".into()),
    ] {
        let (status, answer) = other.call(
            "POST",
            &format!("/v1/images/{id}/prefetch"),
            json!({ "trace": file }),
        );
        assert!((400..500).contains(&status), "{answer}");
    }
}
