//! Bytes pass as they come, in both directions, and ends pass too.

mod common;

use std::io::{Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::{channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::*;

#[test]
fn a_response_streams_piece_by_piece() {
    let edge = Edge::start();
    let (next, wanted) = sync_channel::<()>(0);
    let wanted = Mutex::new(wanted);
    let guest = Server::raw(move |mut conn| {
        conn.request().unwrap();
        conn.send("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n");
        for n in 0..10 {
            // The next event is made only after the client has seen the one before.
            wanted.lock().unwrap().recv_timeout(PATIENCE).unwrap();
            let event = format!("data: {n}\n\n");
            conn.send(format!("{:x}\r\n{event}\r\n", event.len()));
        }
        conn.send("0\r\nx-trailer: harmless\r\n\r\n");
        keep_alive(|_, _| b"again".to_vec())(conn);
    });
    edge.route("abc");
    let mut conn = edge.connect();
    conn.send(request("GET", "abc", guest.port, "/events", ""));
    assert_eq!(
        conn.head().unwrap().get("content-type"),
        Some("text/event-stream")
    );
    for n in 0..10 {
        next.send(()).unwrap();
        assert_eq!(conn.chunk().unwrap(), format!("data: {n}\n\n").into_bytes());
    }
    assert!(conn.chunk().unwrap().is_empty());
    assert_eq!(conn.get("abc", guest.port, "/").text(), "again");
    assert_eq!(guest.accepted(), 1);
}

#[test]
fn a_request_streams_while_its_response_does() {
    let edge = Edge::start();
    let guest = Server::raw(|mut conn| {
        conn.head().unwrap();
        conn.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n");
        loop {
            let chunk = conn.chunk().unwrap();
            conn.send(format!("{:x}\r\n", chunk.len()));
            conn.send(&chunk);
            conn.send("\r\n");
            if chunk.is_empty() {
                return;
            }
        }
    });
    edge.route("abc");
    let mut conn = edge.connect();
    conn.send(request(
        "POST",
        "abc",
        guest.port,
        "/",
        "transfer-encoding: chunked\r\n",
    ));
    assert_eq!(conn.head().unwrap().start, "HTTP/1.1 200 OK");
    for n in 0..10 {
        conn.send(format!("5\r\nping{n}\r\n"));
        assert_eq!(conn.chunk().unwrap(), format!("ping{n}").into_bytes());
    }
    conn.send("0\r\nx-trailer: harmless\r\n\r\n");
    assert!(conn.chunk().unwrap().is_empty());
}

#[test]
fn large_bodies_arrive_complete() {
    const SIZE: usize = 48 << 20;
    let byte = |n: usize| (n % 251) as u8;
    let edge = Edge::start();
    let guest = Server::raw(move |mut conn| {
        while let Ok((head, body)) = conn.request() {
            let good = body.len() == SIZE && body.iter().enumerate().all(|(n, b)| *b == byte(n));
            assert!(good, "{}: {} bytes", head.start, body.len());
            conn.answer(body).unwrap();
        }
    });
    edge.route("abc");
    let body: Vec<u8> = (0..SIZE).map(byte).collect();
    let mut conn = edge.connect();
    for chunked in [false, true] {
        let framing = match chunked {
            true => "transfer-encoding: chunked\r\n".into(),
            false => format!("content-length: {SIZE}\r\n"),
        };
        conn.send(request("PUT", "abc", guest.port, "/", &framing));
        let mut writer = Conn::new(conn.stream.try_clone().unwrap());
        let body = &body;
        let reply = std::thread::scope(|scope| {
            scope.spawn(move || {
                if !chunked {
                    writer.send(body);
                    return;
                }
                for piece in body.chunks(70_001) {
                    writer.send(format!("{:x}\r\n", piece.len()));
                    writer.send(piece);
                    writer.send("\r\n");
                }
                writer.send("0\r\n\r\n");
            });
            conn.reply()
        });
        assert!(reply.body == *body);
    }
}

#[test]
fn expect_continue_is_between_client_and_guest() {
    let edge = Edge::start();
    let guest = Server::raw(|mut conn| {
        while let Ok(head) = conn.head() {
            assert_eq!(head.get("expect"), Some("100-continue"));
            match head.path() {
                "/take" => {
                    conn.send("HTTP/1.1 100 Continue\r\n\r\n");
                    let body = conn.take(5).unwrap();
                    conn.answer(body).unwrap();
                }
                "/ignore" => {
                    let body = conn.take(5).unwrap();
                    conn.answer(body).unwrap();
                }
                _ => {
                    conn.send("HTTP/1.1 413 Too Much\r\ncontent-length: 3\r\n\r\nno!");
                    assert!(conn.take(1).is_err(), "the body came though it was refused");
                    return;
                }
            }
        }
    });
    edge.route("abc");
    let expect = "content-length: 5\r\nexpect: 100-continue\r\n";
    for path in ["/take", "/ignore"] {
        let mut conn = edge.connect();
        conn.send(request("POST", "abc", guest.port, path, expect));
        assert_eq!(conn.head().unwrap().start, "HTTP/1.1 100 Continue");
        conn.send("hello");
        assert_eq!(conn.reply().text(), "hello");
    }
    for (id, status, text) in [("abc", 413, "no!"), ("gone", 502, "was not found")] {
        let mut conn = edge.connect();
        conn.send(request("POST", id, guest.port, "/refuse", expect));
        let reply = conn.reply();
        assert_eq!(reply.status, status, "no 100 may come first");
        assert!(reply.text().contains(text));
        assert!(!conn.ends_with_reset());
    }
}

#[test]
fn websockets_pass() {
    let edge = Edge::start();
    let guest = Server::raw(|conn| {
        let mut socket = tungstenite::accept(conn.stream).unwrap();
        while let Ok(message) = socket.read() {
            if message.is_text() || message.is_binary() {
                socket.send(message).unwrap();
            }
        }
    });
    edge.route("abc");
    let stream = edge.connect().stream;
    let url = format!("ws://{}-abc.sandbox.test/chat?x=1", guest.port);
    let (mut socket, response) = tungstenite::client(url, stream).unwrap();
    assert_eq!(response.status(), 101);
    for n in 0..100 {
        let text = format!("message {n} {}", "x".repeat(n * 100));
        socket
            .send(tungstenite::Message::text(text.clone()))
            .unwrap();
        assert_eq!(socket.read().unwrap().into_text().unwrap().as_str(), text);
    }
    let big = vec![7u8; 4 << 20];
    socket
        .send(tungstenite::Message::binary(big.clone()))
        .unwrap();
    assert!(socket.read().unwrap().into_data() == big);
    socket.close(None).unwrap();
    while socket.read().is_ok() {}
    drop(socket);
    edge.wait_until_unconnected();
}

#[test]
fn tunnels_carry_what_was_sent_early_and_half_closes() {
    let edge = Edge::start();
    let guest = Server::raw(|mut conn| {
        let (head, _) = conn.request().unwrap();
        assert_eq!(
            (head.get("connection"), head.get("upgrade")),
            (Some("upgrade"), Some("echo/1"))
        );
        conn.send(
            "HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: echo/1\r\n\r\nwelcome ",
        );
        let mut all = Vec::new();
        while let Ok(byte) = conn.take(1) {
            all.extend(byte);
        }
        conn.send(&all);
    });
    edge.route("abc");
    let mut conn = edge.connect();
    conn.send(
        request(
            "GET",
            "abc",
            guest.port,
            "/",
            "connection: keep-alive, Upgrade\r\nupgrade: echo/1\r\n",
        ) + "early",
    );
    let head = conn.head().unwrap();
    assert_eq!(head.start, "HTTP/1.1 101 Switching");
    assert_eq!(
        (head.get("connection"), head.get("upgrade")),
        (Some("upgrade"), Some("echo/1"))
    );
    assert_eq!(conn.take(8).unwrap(), b"welcome ");
    conn.send(" and late");
    conn.stream.finish_writing();
    assert_eq!(conn.take(14).unwrap(), b"early and late");
    assert!(!conn.ends_with_reset());
    edge.wait_until_unconnected();
}

#[test]
fn an_upgrade_that_is_refused_is_an_ordinary_response() {
    let edge = Edge::start();
    let guest = Server::echo();
    edge.route("abc");
    let mut conn = edge.connect();
    for _ in 0..2 {
        conn.send(request(
            "GET",
            "abc",
            guest.port,
            "/",
            "connection: upgrade\r\nupgrade: websocket\r\n",
        ));
        assert_eq!(conn.reply().json()["headers"]["upgrade"], "websocket");
    }
    assert_eq!(guest.accepted(), 1);
}

#[test]
fn a_client_that_leaves_is_noticed_by_the_guest() {
    let edge = Edge::start();
    let (gone, told) = channel();
    let gone = Mutex::new(gone);
    let guest = Server::raw(move |mut conn| {
        let (head, _) = conn.request().unwrap();
        if head.path() == "/stream" {
            conn.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n");
        }
        let ended = !matches!(conn.stream.read(&mut [0u8; 1]), Ok(n) if n > 0);
        gone.lock()
            .unwrap()
            .send((head.path().to_owned(), ended))
            .unwrap();
    });
    edge.route("abc");
    for path in ["/stream", "/silent"] {
        let mut conn = edge.connect();
        conn.send(request("GET", "abc", guest.port, path, ""));
        if path == "/stream" {
            conn.head().unwrap();
            assert_eq!(conn.chunk().unwrap(), b"hi");
        } else {
            eventually("the guest to have the request", || {
                (guest.accepted() == 2).then_some(())
            });
        }
        drop(conn);
        assert_eq!(
            told.recv_timeout(PATIENCE).unwrap(),
            (path.to_owned(), true)
        );
    }
}

#[test]
fn an_early_answer_to_an_upload_reaches_the_client() {
    let edge = Edge::start();
    let guest = Server::raw(|mut conn| {
        conn.head().unwrap();
        conn.send("HTTP/1.1 403 No\r\ncontent-length: 2\r\n\r\nno");
        // Neither read nor closed.
        std::thread::sleep(PATIENCE);
    });
    edge.route("abc");
    for id in ["abc", "gone"] {
        let mut conn = edge.connect();
        conn.send(request(
            "POST",
            id,
            guest.port,
            "/",
            "content-length: 33554432\r\n",
        ));
        let block = vec![0u8; 1 << 20];
        for _ in 0..32 {
            // A client that sends everything before it looks at the answer.
            if conn.stream.write_all(&block).is_err() {
                break;
            }
        }
        let status = conn.reply().status;
        assert_eq!(status, if id == "abc" { 403 } else { 502 });
    }
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let edge = Edge::start();
    let guest = Server::http(|head, _| head.path().as_bytes().to_vec());
    edge.route("abc");
    let mut conn = edge.connect();
    let all: String = (0..20)
        .map(|n| request("GET", "abc", guest.port, &format!("/{n}"), ""))
        .collect();
    conn.send(all);
    for n in 0..20 {
        assert_eq!(conn.reply().text(), format!("/{n}"));
    }
}

#[test]
fn a_guest_that_closes_idle_connections_costs_no_request() {
    let edge = Edge::start();
    // Closes after each response without announcing it.
    let guest = Server::raw(|mut conn| {
        if let Ok((_, body)) = conn.request() {
            conn.answer(body).unwrap();
        }
    });
    edge.route("abc");
    let mut conn = edge.connect();
    for n in 0..300 {
        let body = format!("body {n}");
        let length = format!("content-length: {}\r\n", body.len());
        conn.send(request("POST", "abc", guest.port, "/", &length) + &body);
        assert_eq!(conn.reply().text(), body);
        if n % 3 == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    assert_eq!(guest.accepted(), 300);
}

#[test]
fn requests_that_cross_a_closing_connection_are_answered() {
    let edge = Edge::start();
    let accepted = Arc::new(AtomicUsize::new(0));
    // Closes each connection a little after its response: at once, or up to some 100 microseconds later.
    let guest = Server::raw(move |mut conn| {
        let n = accepted.fetch_add(1, SeqCst);
        if conn.request().is_ok() {
            conn.answer("ok").unwrap();
            let since = Instant::now();
            while since.elapsed() < Duration::from_micros(n as u64 % 150) {
                std::hint::spin_loop();
            }
        }
    });
    edge.route("abc");
    let mut conn = edge.connect();
    for _ in 0..6000 {
        assert_eq!(conn.get("abc", guest.port, "/").text(), "ok");
    }
}

#[test]
fn only_harmless_requests_are_sent_twice() {
    let edge = Edge::start();
    let (seen, log) = channel();
    let seen = Mutex::new(seen);
    // Takes the second request on a connection and closes without an answer.
    let guest = Server::raw(move |mut conn| {
        for n in 0..2 {
            let Ok((head, _)) = conn.request() else {
                return;
            };
            seen.lock().unwrap().send(head.method().to_owned()).unwrap();
            if n == 0 {
                conn.answer(head.method()).unwrap();
            }
        }
    });
    edge.route("abc");
    let mut conn = edge.connect();
    for (method, status) in [("GET", 200), ("GET", 200), ("POST", 502)] {
        let extra = if method == "POST" {
            "content-length: 0\r\n"
        } else {
            ""
        };
        // Long enough that the idle connection counts as one the server means to keep.
        std::thread::sleep(Duration::from_millis(50));
        conn.send(request(method, "abc", guest.port, "/", extra));
        let reply = conn.reply();
        assert_eq!(reply.status, status, "{method}: {}", reply.text());
    }
    let seen: Vec<String> = log.try_iter().collect();
    assert_eq!(
        seen,
        ["GET", "GET", "GET", "POST"],
        "the second GET is sent twice, the POST once"
    );
}
