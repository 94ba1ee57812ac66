//! Hostile and greedy clients and guests.

mod common;

use std::io::{Read, Write};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use common::*;

#[test]
fn slow_heads_are_cut_off_and_idle_connections_are_not() {
    let edge = Edge::with(&["--header-timeout-ms", "300", "--idle-timeout-ms", "1500"]);
    let guest = Server::echo();
    edge.route("abc");
    let started = Instant::now();
    let mut mute = edge.connect();
    let mut dripping = edge.connect();
    let mut second = edge.connect();
    assert_eq!(second.get("abc", guest.port, "/").status, 200);
    second.send("GET / HTTP/1.1\r\nx-drip: ");
    let mut idle = edge.connect();
    assert_eq!(idle.get("abc", guest.port, "/").status, 200);
    // A byte now and then must not extend the time for the whole head.
    while dripping.stream.write_all(b"G").is_ok() {
        assert!(started.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(20));
    }
    mute.ends_with_reset();
    second.ends_with_reset();
    let cut = started.elapsed();
    assert!(
        cut > Duration::from_millis(300) && cut < Duration::from_millis(1400),
        "{cut:?}"
    );
    assert!(idle.is_quiet_for(Duration::from_millis(200)));
    assert_eq!(idle.get("abc", guest.port, "/").status, 200);
    let idle_since = Instant::now();
    assert!(
        !idle.ends_with_reset(),
        "an idle connection ends with an ordinary close"
    );
    assert!(
        idle_since.elapsed() > Duration::from_millis(1400),
        "{:?}",
        idle_since.elapsed()
    );
}

#[test]
fn a_request_that_takes_long_is_not_idle() {
    let edge = Edge::with(&[
        "--header-timeout-ms",
        "100",
        "--idle-timeout-ms",
        "100",
        "--stream-timeout-ms",
        "1500",
    ]);
    let guest = Server::raw(|mut conn| {
        while let Ok((head, _)) = conn.request() {
            if head.path() == "/slow" {
                std::thread::sleep(Duration::from_millis(600));
                conn.answer("slow").unwrap();
            } else {
                conn.send("HTTP/1.1 101 Go\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n");
            }
        }
    });
    edge.route("abc");
    assert_eq!(edge.get("abc", guest.port, "/slow").text(), "slow");
    // A tunnel without traffic ends in the end.
    let mut conn = edge.connect();
    conn.send(request(
        "GET",
        "abc",
        guest.port,
        "/x",
        "connection: upgrade\r\nupgrade: x\r\n",
    ));
    conn.head().unwrap();
    let started = Instant::now();
    assert!(conn.ends_with_reset());
    assert!(started.elapsed() > Duration::from_millis(1400));
}

#[test]
fn oversized_heads_are_refused() {
    let edge = Edge::start();
    let guest = Server::echo();
    edge.route("abc");
    let large = format!("x-large: {}\r\n", "x".repeat(100_000));
    let endless = format!("x-endless: {}", "x".repeat(4 << 20));
    let many: String = (0..150).map(|n| format!("x-{n}: 1\r\n")).collect();
    for extra in [large, endless, many] {
        let mut conn = edge.connect();
        // The edge may answer before it has everything.
        let _ = conn
            .stream
            .write_all(request("GET", "abc", guest.port, "/", &extra).as_bytes());
        assert_eq!(conn.reply().status, 431, "{} bytes", extra.len());
    }
    let fine: String = (0..60)
        .map(|n| format!("x-{n}: {}\r\n", "y".repeat(800)))
        .collect();
    let mut conn = edge.connect();
    conn.send(request("GET", "abc", guest.port, "/", &fine));
    assert_eq!(conn.reply().status, 200);
    assert_eq!(guest.accepted(), 1);
}

#[test]
fn connections_are_limited() {
    let edge = Edge::with(&["--max-connections", "5"]);
    let guest = Server::echo();
    edge.route("abc");
    let mut open: Vec<Conn> = (0..5).map(|_| edge.connect()).collect();
    for conn in &mut open {
        assert_eq!(conn.get("abc", guest.port, "/").status, 200);
    }
    for _ in 0..20 {
        let mut conn = edge.connect();
        let reply = conn.reply();
        assert_eq!(
            (reply.status, reply.json()["code"].as_u64()),
            (503, Some(503))
        );
        assert_eq!(reply.head.get("retry-after"), Some("1"));
    }
    for conn in &mut open {
        assert_eq!(conn.get("abc", guest.port, "/").status, 200);
    }
    open.pop();
    eventually("the free place to be found", || {
        let mut conn = edge.connect();
        conn.send(request("GET", "abc", guest.port, "/", ""));
        (conn.reply().status == 200).then_some(())
    });
}

#[test]
fn one_sandbox_cannot_take_the_place_of_others() {
    let edge = Edge::with(&["--max-per-sandbox", "4"]);
    let greedy = Server::raw(|mut conn| {
        let _ = conn.request();
        let _ = conn.stream.read(&mut [0u8; 1]);
    });
    let modest = Server::echo();
    edge.route("greedy");
    edge.route("modest");
    let mut hanging: Vec<Conn> = (0..4)
        .map(|_| {
            let mut conn = edge.connect();
            conn.send(request("GET", "greedy", greedy.port, "/", ""));
            conn
        })
        .collect();
    eventually("four requests to hang", || {
        (greedy.accepted() == 4).then_some(())
    });
    let mut conn = edge.connect();
    let reply = conn.get("greedy", greedy.port, "/");
    assert_eq!(
        (reply.status, reply.json()["code"].as_u64()),
        (429, Some(429))
    );
    assert_eq!(reply.head.get("retry-after"), Some("1"));
    assert_eq!(conn.get("modest", modest.port, "/").status, 200);
    // A client that leaves makes room.
    hanging.pop();
    eventually("a free place", || {
        let mut conn = edge.connect();
        conn.send(request("GET", "greedy", greedy.port, "/", ""));
        (greedy.accepted() == 5).then_some(())
    });
}

#[test]
fn guests_that_do_not_speak_http_get_nothing_through() {
    let edge = Edge::start();
    let large = format!(
        "HTTP/1.1 200 OK\r\nx-large: {}\r\n\r\n",
        "x".repeat(200_000)
    );
    let many: String = (0..200).map(|n| format!("x-{n}: 1\r\n")).collect();
    let many = format!("HTTP/1.1 200 OK\r\n{many}\r\n");
    let cases = [
        "SSH-2.0-OpenSSH_9.6\r\n".to_owned(),
        "HTTP/1.1 200 OK\r\nbad header\r\n\r\n".to_owned(),
        "HTTP/1.1 200 OK\r\nx: a\r\n folded\r\n\r\n".to_owned(),
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!".to_owned(),
        "HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\nhello".to_owned(),
        "HTTP/1.1 101 Go\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n".to_owned(),
        "HTTP/2 200\r\n\r\n".to_owned(),
        "\0\0\0\0\0\0".to_owned(),
        String::new(),
        large,
        many,
    ];
    let scripted = cases.clone();
    let guest = Server::raw(move |mut conn| {
        let (head, _) = conn.request().unwrap();
        let n: usize = head.path()[1..].parse().unwrap();
        let _ = conn.stream.write_all(scripted[n].as_bytes());
    });
    edge.route("abc");
    let mut conn = edge.connect();
    for (n, case) in cases.iter().enumerate() {
        let reply = conn.get("abc", guest.port, &format!("/{n}"));
        assert_eq!(reply.status, 502, "{:.60}", case);
        let report = reply.json();
        assert_eq!(
            (report["code"].as_u64(), report["sandboxId"].as_str()),
            (Some(502), Some("abc"))
        );
        assert!(!report["message"]
            .as_str()
            .unwrap()
            .contains("was not found"));
    }
}

#[test]
fn framing_cannot_be_confused() {
    let edge = Edge::start();
    let guest = Server::echo();
    edge.route("abc");
    let to_guest =
        |framing: &str, body: &str| request("POST", "abc", guest.port, "/first", framing) + body;
    let smuggled = request("GET", "abc", guest.port, "/smuggled", "");
    // Readers that disagree about the length would see a second request in the body.
    for (framing, body) in [
        (
            "content-length: 4\r\ncontent-length: 80\r\n",
            smuggled.as_str(),
        ),
        ("content-length: 1, 80\r\n", smuggled.as_str()),
        ("content-length: +4\r\n", smuggled.as_str()),
        ("transfer-encoding: xchunked\r\n", smuggled.as_str()),
        (
            "transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n",
            "0\r\n\r\n",
        ),
        ("transfer-encoding : chunked\r\n", "0\r\n\r\n"),
        ("x: a\r\n folded\r\n", ""),
        ("content-length: 0\nx: y\r\n", ""),
    ] {
        let mut conn = edge.connect();
        conn.send(to_guest(framing, body));
        // Refused or taken as exactly one request: what never happens is a second one that the client's side and the
        // guest's side see differently.
        let reply = conn.reply();
        if reply.status == 200 {
            assert_eq!(reply.json()["start"], "POST /first HTTP/1.1");
        } else {
            assert_eq!(reply.status, 400, "{framing}");
        }
    }
    // Both lengths: chunked wins, and only that reaches the guest.
    let mut conn = edge.connect();
    conn.send(to_guest(
        "content-length: 3\r\ntransfer-encoding: chunked\r\n",
        "5\r\nhello\r\n0\r\n\r\n",
    ));
    let seen = conn.reply().json();
    assert_eq!(seen["body"], "hello");
    assert!(seen["headers"].get("content-length").is_none());
    // A body that breaks off in its coding never becomes a whole request.
    let upload = Server::raw(|mut conn| {
        if conn.request().is_ok() {
            conn.answer("complete").unwrap();
        }
    });
    let mut conn = edge.connect();
    conn.send(
        request(
            "POST",
            "abc",
            upload.port,
            "/",
            "transfer-encoding: chunked\r\n",
        ) + "5\r\nhello\r\nzz\r\n",
    );
    assert!(!matches!(conn.try_reply(), Ok(reply) if reply.status == 200));
}

#[test]
fn what_a_guest_sends_unasked_reaches_nobody() {
    let edge = Edge::start();
    let guest = Server::raw(|mut conn| {
        while conn.request().is_ok() {
            conn.answer("good").unwrap();
            conn.send("HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil");
        }
    });
    edge.route("abc");
    let mut conn = edge.connect();
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(conn.get("abc", guest.port, "/").text(), "good");
    }
}

#[test]
fn endless_interim_responses_starve_nobody() {
    let edge = Edge::start();
    let flood = Server::raw(|mut conn| {
        let _ = conn.request();
        let block = "HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n".repeat(500);
        while conn.stream.write_all(block.as_bytes()).is_ok() {}
    });
    let modest = Server::echo();
    edge.route("flood");
    edge.route("modest");
    let mut flooded: Vec<Conn> = (0..6).map(|_| edge.connect()).collect();
    for conn in &mut flooded {
        conn.send(request("GET", "flood", flood.port, "/", ""));
    }
    eventually("the flood to flow", || {
        (flood.accepted() == 6).then_some(())
    });
    let mut conn = edge.connect();
    for _ in 0..20 {
        assert_eq!(conn.get("modest", modest.port, "/").status, 200);
    }
    for mut conn in flooded {
        let reply = conn.reply();
        assert_eq!(reply.status, 502);
        assert!(reply.text().contains("too large"), "{}", reply.text());
    }
}

#[test]
fn ten_thousand_requests_leave_nothing_open() {
    let edge = Edge::start();
    let guest = Server::echo();
    let closing = Server::raw(|mut conn| {
        if conn.request().is_ok() {
            conn.send("HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok");
        }
    });
    edge.route("abc");
    edge.get("abc", guest.port, "/");
    edge.wait_until_unconnected();
    let before = edge.open_files();
    let edge_ref = &edge;
    std::thread::scope(|scope| {
        for n in 0..10 {
            let port = if n % 2 == 0 { guest.port } else { closing.port };
            scope.spawn(move || {
                let mut conn = edge_ref.connect();
                for k in 0..1000 {
                    assert_eq!(conn.get("abc", port, "/").status, 200);
                    if k % 10 == 0 {
                        conn = edge_ref.connect();
                    }
                }
            });
        }
    });
    edge.wait_until_unconnected();
    assert!(edge.status()["requests_total"].as_u64().unwrap() >= 10_001);
    edge.delete("abc");
    eventually("all files to be closed", || {
        (edge.open_files() <= before).then_some(())
    });
}

/// A small generator of noise with a fixed seed, so that a failure can be repeated.
struct Noise(u64);

impl Noise {
    fn next(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % below as u64) as usize
    }

    /// Flips, drops, doubles and inserts a few bytes.
    fn damage(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..1 + self.next(6) {
            if bytes.is_empty() {
                return;
            }
            let at = self.next(bytes.len());
            match self.next(5) {
                0 => bytes[at] = self.next(256) as u8,
                1 => drop(bytes.remove(at)),
                2 => bytes.insert(at, b"\r\n :;,\0%/\t-"[self.next(11)]),
                3 => bytes.truncate(at),
                _ => {
                    let end = (at + 1 + self.next(40)).min(bytes.len());
                    let copy = bytes[at..end].to_vec();
                    bytes.splice(at..at, copy);
                }
            }
        }
    }
}

#[test]
fn damaged_messages_from_both_sides_harm_nobody() {
    let edge = Edge::start();
    // Not the strict servers of the other tests: what arrives here may be anything the edge took for a request.
    let open = Server::raw(|mut conn| {
        let mut taken = [0u8; 4096];
        // It would wait for the rest of a request, and the edge for the rest of its response.
        conn.stream.set_patience(Duration::from_millis(200));
        while matches!(conn.stream.read(&mut taken), Ok(n) if n > 0) {
            if conn.answer("fine").is_err() {
                return;
            }
        }
    });
    let responses = [
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: x\r\n\r\n5;a=b\r\nhello\r\n0\r\nx: y\r\n\r\n",
        "HTTP/1.1 101 Go\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nbytes",
        "HTTP/1.1 103 Hints\r\nlink: x\r\n\r\nHTTP/1.1 204 No Content\r\nconnection: close, x-a\r\nx-a: 1\r\n\r\n",
    ];
    let seed = AtomicU64::new(1);
    let hostile = Server::raw(move |mut conn| {
        let n = seed.fetch_add(1, SeqCst);
        let mut noise = Noise(n.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        let mut taken = [0u8; 4096];
        // It would wait for the rest of a request, and the edge for the rest of its response.
        conn.stream.set_patience(Duration::from_millis(200));
        while matches!(conn.stream.read(&mut taken), Ok(n) if n > 0) {
            let mut response = responses[noise.next(responses.len())].as_bytes().to_vec();
            noise.damage(&mut response);
            if conn.stream.write_all(&response).is_err() || noise.next(2) == 0 {
                return;
            }
        }
    });
    edge.route("abc");
    let (open, hostile) = (open.port, hostile.port);
    let requests = [
        request("GET", "abc", open, "/a/%2e%2e/b?c#d", "connection: x-y, close\r\nx-y: 1\r\n"),
        request("POST", "abc", open, "/", "transfer-encoding: chunked\r\n") + "3;x\r\nabc\r\n0\r\nt: u\r\n\r\n",
        request("PUT", "abc", hostile, "/", "content-length: 5\r\nexpect: 100-continue\r\n") + "hello",
        request("GET", "abc", hostile, "/", "connection: upgrade\r\nupgrade: x\r\n") + "early",
        request("GET", "abc", hostile, "/", ""),
        "GET http://80-abc.x/ HTTP/1.1\r\nhost: 80-abc.x\r\ne2b-sandbox-id: abc\r\ne2b-sandbox-port: 80\r\n\r\n".into(),
    ];
    let (edge_ref, requests) = (&edge, &requests);
    std::thread::scope(|scope| {
        for worker in 0..8u64 {
            scope.spawn(move || {
                let mut noise = Noise(0xABCD_EF01 + worker);
                for n in 0..250 {
                    let mut conn = edge_ref.connect();
                    let mut bytes = requests[n % requests.len()].clone().into_bytes();
                    if noise.next(4) > 0 {
                        noise.damage(&mut bytes);
                    }
                    let _ = conn.stream.write_all(&bytes);
                    let _ = conn.stream.shutdown(std::net::Shutdown::Write);
                    // Whatever comes, the connection comes to its end.
                    let _ = conn.ends_with_reset();
                }
            });
        }
    });
    edge.wait_until_unconnected();
    assert_eq!(edge.get("abc", open, "/").text(), "fine");
}
