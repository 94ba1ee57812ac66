//! What happens to open connections when a sandbox goes.

mod common;

use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{channel, Receiver};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::*;
use serde_json::json;

/// A guest that answers `/` plainly, streams without end on `/stream`, stays silent on `/silent`, becomes an echo on
/// `/tunnel`, and tells when a connection other than a plain one ends.
fn guest() -> Guest {
    let (gone, told) = channel();
    let gone = Mutex::new(gone);
    let busy = Arc::new(AtomicUsize::new(0));
    let count = busy.clone();
    let server = Server::raw(move |mut conn| {
        while let Ok(head) = conn.head() {
            let path = head.path().to_owned();
            match path.as_str() {
                "/" => {
                    conn.answer("plain").unwrap();
                    continue;
                }
                "/stream" => {
                    conn.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")
                }
                "/length" => conn.send("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nfirst"),
                "/close" => conn.send("HTTP/1.0 200 OK\r\n\r\nfirst"),
                "/tunnel" => {
                    conn.send("HTTP/1.1 101 Go\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nfirst")
                }
                _ => {}
            }
            count.fetch_add(1, SeqCst);
            let _ = conn.stream.read_to_end(&mut Vec::new());
            let _ = gone.lock().unwrap().send(path);
            return;
        }
    });
    Guest {
        port: server.port,
        told,
        busy,
    }
}

struct Guest {
    port: u16,
    told: Receiver<String>,
    busy: Arc<AtomicUsize>,
}

/// Opens one connection in each state in which a sandbox can serve it.
fn busy_connections(edge: &Edge, id: &str, guest: &Guest) -> Vec<(&'static str, Conn)> {
    let before = guest.busy.load(SeqCst);
    let mut all = Vec::new();
    for path in [
        "/stream", "/length", "/close", "/tunnel", "/silent", "/upload",
    ] {
        let mut conn = edge.connect();
        let extra = match path {
            "/tunnel" => "connection: upgrade\r\nupgrade: x\r\n",
            "/upload" => "content-length: 1000\r\n",
            _ => "",
        };
        conn.send(request("POST", id, guest.port, path, extra));
        match path {
            "/stream" => {
                conn.head().unwrap();
                assert_eq!(conn.chunk().unwrap(), b"first");
            }
            "/length" | "/close" | "/tunnel" => {
                conn.head().unwrap();
                let first = if path == "/close" {
                    conn.chunk()
                } else {
                    conn.take(5)
                };
                assert_eq!(first.unwrap(), b"first");
            }
            _ => conn.send("some"),
        }
        all.push((path, conn));
    }
    eventually("all requests to be at the guest", || {
        (guest.busy.load(SeqCst) == before + all.len()).then_some(())
    });
    all
}

#[test]
fn a_delete_resets_what_the_sandbox_serves_and_nothing_else() {
    let edge = Edge::start();
    let _api = Api::start(edge.api_path(), keep_alive(|_, _| b"api".to_vec()));
    let dying = guest();
    let other = guest();
    edge.route("dying");
    edge.route("other");

    let mut idle = edge.connect();
    assert_eq!(idle.get("dying", dying.port, "/").text(), "plain");
    let mut elsewhere = edge.connect();
    assert_eq!(elsewhere.get("dying", dying.port, "/").text(), "plain");
    elsewhere.send(request("GET", "other", other.port, "/stream", ""));
    elsewhere.head().unwrap();
    assert_eq!(elsewhere.chunk().unwrap(), b"first");
    let mut fresh = edge.connect();
    let busy = busy_connections(&edge, "dying", &dying);

    edge.delete("dying");

    // By the time of the answer the resets are out.
    for (path, mut conn) in busy {
        assert!(conn.is_reset_already(), "{path} was not reset");
    }
    let mut gone: Vec<String> = (0..6)
        .map(|_| dying.told.recv_timeout(PATIENCE).unwrap())
        .collect();
    gone.sort();
    assert_eq!(
        gone,
        ["/close", "/length", "/silent", "/stream", "/tunnel", "/upload"]
    );
    for conn in [&mut idle, &mut fresh] {
        let reply = conn.get("dying", dying.port, "/");
        assert_eq!(
            (reply.status, reply.json()["message"].as_str()),
            (502, Some("The sandbox was not found"))
        );
        assert_eq!(conn.get("other", other.port, "/").text(), "plain");
        conn.send("GET / HTTP/1.1\r\nhost: api\r\n\r\n");
        assert_eq!(conn.reply().text(), "api");
    }
    assert!(
        elsewhere.is_quiet_for(Duration::from_millis(100)),
        "a connection of another sandbox was touched"
    );
    assert_eq!(edge.status()["routes"], 1);
    edge.delete("dying");
}

#[test]
fn data_a_client_has_not_read_yet_is_followed_by_the_reset() {
    let edge = Edge::start();
    let guest = Server::raw(|mut conn| {
        conn.request().unwrap();
        conn.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n");
        let chunk = format!("1000\r\n{}\r\n", "x".repeat(4096)).into_bytes();
        while conn.stream.write_all(&chunk).is_ok() {}
    });
    edge.route("abc");
    let mut conn = edge.connect();
    conn.send(request("GET", "abc", guest.port, "/", ""));
    conn.head().unwrap();
    // Never reads: the edge is stuck with a full socket when the sandbox goes.
    let sent = || edge.status()["connections"] == 1;
    eventually("the connection to be open", || sent().then_some(()));
    edge.delete("abc");
    assert!(conn.ends_with_reset());
}

#[test]
fn a_broken_response_is_never_ended_politely() {
    let edge = Edge::start();
    let guest = Server::raw(|mut conn| {
        let (head, _) = conn.request().unwrap();
        match head.path() {
            "/length" => conn.send("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nfirst"),
            "/chunked" => {
                conn.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")
            }
            "/bad" => conn
                .send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\nzz\r\n"),
            _ => {
                conn.send("HTTP/1.1 101 Go\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nfirst");
                socket2::SockRef::from(&conn.stream)
                    .set_linger(Some(Duration::ZERO))
                    .unwrap();
            }
        }
    });
    edge.route("abc");
    for path in ["/length", "/chunked", "/bad", "/tunnel"] {
        let mut conn = edge.connect();
        let extra = if path == "/tunnel" {
            "connection: upgrade\r\nupgrade: x\r\n"
        } else {
            ""
        };
        conn.send(request("GET", "abc", guest.port, path, extra));
        assert!(conn.ends_with_reset(), "{path}");
    }
}

#[test]
fn a_newer_generation_never_meets_old_connections() {
    let edge = Edge::start();
    let address = own_loopback();
    let listener = std::net::TcpListener::bind((address, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let old = Server::on(listener, keep_alive(|_, _| b"plain".to_vec()));
    let spec = |generation: u64| json!({ "sandbox_id": "abc", "generation": generation, "address": address, "netns": null });
    edge.put(spec(5));
    let mut conn = edge.connect();
    assert_eq!(conn.get("abc", port, "/").text(), "plain");
    // The same again changes nothing.
    edge.put(spec(5));
    edge.control(
        "PUT",
        "/v1/routes",
        &json!({ "routes": [spec(5)] }).to_string(),
    );
    assert_eq!(conn.get("abc", port, "/").text(), "plain");
    assert_eq!(old.accepted(), 1);
    edge.put(spec(6));
    assert_eq!(conn.get("abc", port, "/").text(), "plain");
    assert_eq!(
        old.accepted(),
        2,
        "a connection of the old generation was used"
    );
    // An older one is refused and changes nothing.
    let stale = edge.control("PUT", "/v1/routes/abc", &spec(4).to_string());
    assert_eq!(
        (stale.status, stale.json()["code"].as_u64()),
        (409, Some(409))
    );
    assert_eq!(conn.get("abc", port, "/").text(), "plain");
    assert_eq!(old.accepted(), 2);
    // A new control plane knows better.
    let all = edge.control(
        "PUT",
        "/v1/routes",
        &json!({ "routes": [spec(4)] }).to_string(),
    );
    assert_eq!(all.status, 204);
    assert_eq!(conn.get("abc", port, "/").text(), "plain");
    assert_eq!(old.accepted(), 3);
    assert_eq!(
        edge.control("GET", "/v1/routes", "").json(),
        json!({ "routes": [spec(4)] })
    );
}

#[test]
fn a_replaced_guest_resets_its_clients() {
    let edge = Edge::start();
    let guest = guest();
    edge.route("abc");
    let busy = busy_connections(&edge, "abc", &guest);
    let mut spec = route("abc");
    spec["generation"] = json!(2);
    edge.put(spec.clone());
    for (path, mut conn) in busy {
        assert!(conn.ends_with_reset(), "{path}");
    }
    let busy = busy_connections(&edge, "abc", &guest);
    spec["traffic_token"] = json!("new");
    edge.put(spec);
    for (path, mut conn) in busy {
        assert!(
            conn.is_quiet_for(Duration::from_millis(20)),
            "{path} was touched though the guest is the same"
        );
    }
    let empty = edge.control("PUT", "/v1/routes", r#"{"routes":[]}"#);
    assert_eq!(empty.status, 204);
    assert_eq!(edge.get("abc", guest.port, "/").status, 502);
}

#[test]
fn routes_are_replaced_under_load() {
    let edge = Edge::start();
    let (first, second) = (own_loopback(), own_loopback());
    let listener = std::net::TcpListener::bind((first, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let _first = Server::on(listener, keep_alive(|_, _| b"1".to_vec()));
    let _second = Server::on(
        std::net::TcpListener::bind((second, port)).unwrap(),
        keep_alive(|_, _| b"0".to_vec()),
    );
    let spec = |generation: u64| {
        let address = if generation % 2 == 1 { first } else { second };
        json!({ "sandbox_id": "abc", "generation": generation, "address": address, "netns": null })
    };
    edge.put(spec(1));
    // The generation being written, and the one the edge has confirmed.
    let (begun, confirmed) = (AtomicU64::new(1), AtomicU64::new(1));
    let (answers, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let mut conn = edge.connect();
                while !stop.load(SeqCst) {
                    let generation = confirmed.load(SeqCst);
                    let sent = conn
                        .stream
                        .write_all(request("GET", "abc", port, "/", "").as_bytes());
                    let Ok(reply) = sent.and_then(|()| conn.try_reply()) else {
                        conn = edge.connect();
                        continue;
                    };
                    assert_eq!(reply.status, 200);
                    // Unless a change had begun by now, only one guest may have answered.
                    if begun.load(SeqCst) == generation {
                        assert_eq!(reply.text(), (generation % 2).to_string());
                        answers.fetch_add(1, SeqCst);
                    }
                }
            });
        }
        let deadline = Instant::now() + PATIENCE;
        let mut generation = 1;
        while generation < 100 || answers.load(SeqCst) < 200 {
            assert!(
                Instant::now() < deadline,
                "generation {generation}, {answers:?} answers"
            );
            generation += 1;
            begun.store(generation, SeqCst);
            edge.put(spec(generation));
            confirmed.store(generation, SeqCst);
            let enough = answers.load(SeqCst) + 2;
            eventually("answers of this generation", || {
                (answers.load(SeqCst) >= enough).then_some(())
            });
        }
        stop.store(true, SeqCst);
    });
}

#[test]
fn a_shutdown_resets_everything() {
    for by_signal in [false, true] {
        let mut edge = Edge::start();
        let guest = guest();
        edge.route("abc");
        let mut idle = edge.connect();
        assert_eq!(idle.get("abc", guest.port, "/").text(), "plain");
        let mut busy = busy_connections(&edge, "abc", &guest);
        busy.push(("idle", idle));
        if by_signal {
            let pid = rustix::process::Pid::from_child(&edge.child);
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        } else {
            assert_eq!(edge.control("POST", "/v1/shutdown", "").status, 204);
        }
        for (path, mut conn) in busy {
            assert!(conn.ends_with_reset(), "{path}");
        }
        assert_eq!(edge.wait_exit(), 0);
        assert!(!edge.control_path().exists());
        assert!(std::net::TcpStream::connect(edge.address).is_err());
    }
}
