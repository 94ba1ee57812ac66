//! Where requests go and what reaches the other side.

mod common;

use std::net::TcpListener;
use std::time::{Duration, Instant};

use common::*;
use serde_json::json;

#[test]
fn api_requests_arrive_untouched_but_for_the_connection() {
    let edge = Edge::start();
    let _api = Api::start(edge.api_path(), keep_alive(describe));
    let mut conn = edge.connect();
    conn.send(
        "POST /templates/ns%2Fname%3Atag/../x//y?a=%20b&c=+d HTTP/1.1\r\nhost: api.sandbox.test\r\n\
         x-api-key: k\r\nx-forwarded-for: 6.6.6.6\r\nx-aenv-control: stolen\r\nconnection: x-hop, keep-alive\r\n\
         x-hop: 1\r\nkeep-alive: 1\r\nte: trailers\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n",
    );
    let seen = conn.reply().json();
    assert_eq!(
        seen["start"],
        "POST /templates/ns%2Fname%3Atag/../x//y?a=%20b&c=+d HTTP/1.1"
    );
    assert_eq!(
        seen["headers"],
        json!({
            "host": "api.sandbox.test", "x-api-key": "k", "x-forwarded-for": "127.0.0.1", "transfer-encoding": "chunked",
        })
    );
    assert_eq!(seen["body"], "abcde");
    // The same connection again, with a known length.
    conn.send("DELETE /x HTTP/1.1\r\nhost: api\r\ncontent-length: 2\r\n\r\nhi");
    let seen = conn.reply().json();
    assert_eq!(seen["headers"]["content-length"], "2");
    assert_eq!(seen["body"], "hi");
}

#[test]
fn sandbox_requests_are_routed_by_label_or_headers() {
    let edge = Edge::start();
    let _api = Api::start(edge.api_path(), keep_alive(|_, _| b"api".to_vec()));
    let guest = Server::echo();
    edge.route("abc");
    let port = guest.port;
    let mut conn = edge.connect();

    let seen = conn.get("abc", port, "/p%2Fq?x").json();
    assert_eq!(seen["start"], "GET /p%2Fq?x HTTP/1.1");
    assert_eq!(seen["headers"]["host"], format!("{port}-abc.sandbox.test"));
    assert_eq!(seen["headers"]["x-forwarded-for"], "127.0.0.1");

    for host in ["localhost", "127.0.0.1:80", "sandbox.x.y", "anything.test"] {
        conn.send(format!(
            "GET / HTTP/1.1\r\nHost: {host}\r\nE2b-Sandbox-Id: abc\r\nE2b-Sandbox-Port: {port}\r\n\r\n"
        ));
        assert_eq!(conn.reply().json()["headers"]["host"], host);
    }
    // A label wins over headers.
    conn.send(request(
        "GET",
        "abc",
        port,
        "/",
        "E2b-Sandbox-Id: other\r\nE2b-Sandbox-Port: 1\r\n",
    ));
    assert_eq!(conn.reply().status, 200);
    // An absolute target stands for its host.
    conn.send(format!(
        "GET http://{port}-abc.x/a%62?q HTTP/1.1\r\nhost: {port}-abc.x\r\n\r\n"
    ));
    assert_eq!(conn.reply().json()["start"], "GET /a%62?q HTTP/1.1");
    conn.send("OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n");
    assert_eq!(conn.reply().text(), "api");
    assert_eq!(
        guest.accepted(),
        1,
        "the connection to the guest was not kept"
    );
}

#[test]
fn one_client_connection_serves_many_sandboxes() {
    let edge = Edge::start();
    let (first, second) = (
        Server::http(|_, _| b"one".to_vec()),
        Server::http(|_, _| b"two".to_vec()),
    );
    edge.route("one");
    edge.route("two");
    let mut conn = edge.connect();
    for _ in 0..50 {
        assert_eq!(conn.get("one", first.port, "/").text(), "one");
        assert_eq!(conn.get("two", second.port, "/").text(), "two");
    }
    assert_eq!((first.accepted(), second.accepted()), (1, 1));
}

#[test]
fn requests_that_name_no_target_are_refused() {
    let edge = Edge::start();
    let mut conn = edge.connect();
    for head in [
        "GET / HTTP/1.1\r\nhost: x\r\nE2b-Sandbox-Id: abc\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: x\r\nE2b-Sandbox-Port: 80\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: x\r\nE2b-Sandbox-Id: a-b\r\nE2b-Sandbox-Port: 80\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: x\r\nE2b-Sandbox-Id: abc\r\nE2b-Sandbox-Port: 70000\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: x\r\nE2b-Sandbox-Id: abc\r\nE2b-Sandbox-Id: abc\r\nE2b-Sandbox-Port: 80\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: 0-abc.x\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: 80-abc.x\r\nhost: 81-abc.x\r\n\r\n",
        "GET http://81-abc.x/ HTTP/1.1\r\nhost: 80-abc.x\r\n\r\n",
        "GET / HTTP/1.1\r\n\r\n",
        "POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        "POST / HTTP/1.1\r\nhost: x\r\nE2b-Sandbox-Id: abc\r\ncontent-length: 5\r\n\r\nhello",
        "POST / HTTP/1.1\r\nhost: x\r\nE2b-Sandbox-Id: abc\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
    ] {
        conn.send(head);
        let reply = conn.reply();
        assert_eq!(reply.status, 400, "{head}");
        assert_eq!(reply.json()["code"], 400);
        assert!(!reply.json()["message"].as_str().unwrap().is_empty());
    }
    conn.send("CONNECT example.com:443 HTTP/1.1\r\nhost: example.com:443\r\n\r\n");
    assert_eq!(conn.reply().status, 400);
}

#[test]
fn unknown_sandboxes_and_closed_ports_answer_502() {
    let edge = Edge::start();
    let reply = edge.get("nobody", 49983, "/health");
    assert_eq!(reply.status, 502);
    assert_eq!(reply.head.get("content-type"), Some("application/json"));
    assert_eq!(
        reply.text(),
        r#"{"sandboxId":"nobody","message":"The sandbox was not found","code":502}"#
    );

    edge.route("abc");
    let free = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let started = Instant::now();
    let mut conn = edge.connect();
    conn.send(request("POST", "abc", free, "/", "content-length: 4\r\n") + "body");
    let reply = conn.reply();
    let took = started.elapsed();
    assert_eq!(reply.status, 502);
    assert_eq!(
        reply.text(),
        format!(
            r#"{{"sandboxId":"abc","message":"The sandbox is running but port is not open","port":{free},"code":502}}"#
        )
    );
    assert!(
        took > Duration::from_millis(900) && took < Duration::from_secs(3),
        "{took:?}"
    );
    // The connection of the client is still good.
    assert_eq!(conn.get("nobody", 80, "/").status, 502);
}

#[test]
fn a_port_that_opens_late_is_waited_for() {
    let edge = Edge::start();
    edge.route("abc");
    let listener =
        socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    let any: std::net::SocketAddr = "127.0.0.1:0".parse().unwrap();
    listener.bind(&any.into()).unwrap();
    let port = listener.local_addr().unwrap().as_socket().unwrap().port();
    let mut conn = edge.connect();
    conn.send(request("GET", "abc", port, "/", ""));
    assert!(
        conn.is_quiet_for(Duration::from_millis(300)),
        "answered before the retries were over"
    );
    listener.listen(16).unwrap();
    let _guest = Server::on(listener.into(), keep_alive(|_, _| b"late".to_vec()));
    assert_eq!(conn.reply().text(), "late");
}

#[test]
fn private_sandboxes_want_their_token() {
    let edge = Edge::start();
    let address = own_loopback();
    let guest = Server::on(
        TcpListener::bind((address, 0)).unwrap(),
        keep_alive(describe),
    );
    let _agent = Server::on(
        TcpListener::bind((address, 49983)).unwrap(),
        keep_alive(describe),
    );
    let mut spec = route("abc");
    spec["address"] = json!(address);
    spec["traffic_token"] = json!("s3cret");
    edge.put(spec.clone());
    let mut conn = edge.connect();
    for extra in [
        "",
        "e2b-traffic-access-token: wrong!\r\n",
        "e2b-traffic-access-token: s3cre\r\n",
    ] {
        conn.send(request("GET", "abc", guest.port, "/", extra));
        let reply = conn.reply();
        assert_eq!(
            (reply.status, reply.json()["code"].as_u64()),
            (403, Some(403)),
            "{extra}"
        );
        assert_eq!(reply.json()["sandboxId"], "abc");
    }
    conn.send(request(
        "GET",
        "abc",
        guest.port,
        "/",
        "E2B-Traffic-Access-Token: s3cret\r\n",
    ));
    let seen = conn.reply().json();
    assert!(
        seen["headers"].get("e2b-traffic-access-token").is_none(),
        "the guest saw the token"
    );
    // The agent has a token of its own.
    assert_eq!(conn.get("abc", 49983, "/health").status, 200);
    // Dropping the token opens the sandbox without a new generation.
    spec.as_object_mut().unwrap().remove("traffic_token");
    edge.put(spec);
    assert_eq!(conn.get("abc", guest.port, "/").status, 200);
}

#[test]
fn internal_routes_of_the_agent_stay_internal() {
    let edge = Edge::start();
    let address = own_loopback();
    let agent = Server::on(
        TcpListener::bind((address, 49983)).unwrap(),
        keep_alive(describe),
    );
    let guest = Server::on(
        TcpListener::bind((address, 0)).unwrap(),
        keep_alive(describe),
    );
    let mut spec = route("abc");
    spec["address"] = json!(address);
    edge.put(spec);
    let mut conn = edge.connect();
    assert_eq!(conn.get("abc", 49983, "/health").status, 200);
    let seen = agent.accepted();
    for path in [
        "/init",
        "//init",
        "/./init",
        "/x/../init",
        "/%69nit",
        "/%2569nit",
        "/init/",
        "/INIT",
        "/init?x=y",
        "/init;a",
        "/shutdown",
        "/freeze",
        "/unfreeze",
        "/collapse",
        "/fsfreeze",
        "/fsthaw",
        "/upgrade",
        "http://49983-abc.sandbox.test/init",
    ] {
        for method in ["GET", "POST", "PUT"] {
            conn.send(request(method, "abc", 49983, path, "x-aenv-control: t\r\n"));
            let reply = conn.reply();
            assert_eq!(
                (reply.status, reply.json()["code"].as_u64()),
                (404, Some(404)),
                "{method} {path}"
            );
        }
    }
    for path in ["/files", "/initial", "/files/init"] {
        assert_eq!(conn.get("abc", 49983, path).status, 200, "{path}");
    }
    conn.send(request(
        "GET",
        "abc",
        49983,
        "/x",
        "x-aenv-control: t\r\nupgrade: h2c\r\nconnection: upgrade\r\n",
    ));
    let headers = &conn.reply().json()["headers"];
    assert!(headers.get("x-aenv-control").is_none());
    assert!(
        headers.get("upgrade").is_none(),
        "a tunnel would lead past the check"
    );
    assert_eq!(
        agent.accepted(),
        seen,
        "an internal request reached the agent"
    );
    // On any other port these are paths like all others.
    assert_eq!(conn.get("abc", guest.port, "/init").status, 200);
}

#[test]
fn hosts_can_be_masked() {
    let edge = Edge::start();
    let guest = Server::echo();
    let mut spec = route("abc");
    spec["mask_request_host"] = json!("localhost:${PORT}");
    edge.put(spec);
    let headers = &edge.get("abc", guest.port, "/").json()["headers"];
    assert_eq!(headers["host"], format!("localhost:{}", guest.port));
    assert_eq!(
        headers["x-forwarded-host"],
        format!("{}-abc.sandbox.test", guest.port)
    );
}

#[test]
fn responses_without_a_body_keep_their_form() {
    let edge = Edge::start();
    let guest = Server::raw(|mut conn| {
        while let Ok((head, _)) = conn.request() {
            conn.send(match head.path() {
                "/head" => "HTTP/1.1 200 Fine\r\ncontent-length: 1234\r\nconnection: x-private\r\nx-private: 1\r\n\r\n",
                "/204" => "HTTP/1.1 204 No Content\r\n\r\n",
                "/304" => "HTTP/1.1 304 Not Modified\r\netag: \"x\"\r\ncontent-length: 77\r\n\r\n",
                _ => "HTTP/1.1 418 Short And Stout\r\ncontent-length: 0\r\n\r\n",
            });
        }
    });
    edge.route("abc");
    let mut conn = edge.connect();
    conn.send(request("HEAD", "abc", guest.port, "/head", ""));
    let head = conn.head().unwrap();
    assert_eq!(head.start, "HTTP/1.1 200 Fine");
    assert_eq!(head.get("content-length"), Some("1234"));
    assert_eq!(
        (head.get("x-private"), head.get("connection")),
        (None, None)
    );
    assert_eq!(conn.get("abc", guest.port, "/204").status, 204);
    let reply = conn.get("abc", guest.port, "/304");
    assert_eq!((reply.status, reply.head.get("etag")), (304, Some("\"x\"")));
    assert_eq!(
        conn.get("abc", guest.port, "/").head.start,
        "HTTP/1.1 418 Short And Stout"
    );
    assert_eq!(guest.accepted(), 1);
}

#[test]
fn old_clients_and_old_servers_are_understood() {
    let edge = Edge::start();
    // A server that ends its body with the connection.
    let guest = Server::raw(|mut conn| {
        conn.request().unwrap();
        conn.send("HTTP/1.0 200 OK\r\n\r\nuntil the end");
    });
    edge.route("abc");
    let mut conn = edge.connect();
    for _ in 0..2 {
        assert_eq!(conn.get("abc", guest.port, "/").text(), "until the end");
    }
    let echo = Server::echo();
    let mut old = edge.connect();
    old.send(format!(
        "GET / HTTP/1.0\r\nE2b-Sandbox-Id: abc\r\nE2b-Sandbox-Port: {}\r\n\r\n",
        echo.port
    ));
    let reply = old.reply();
    assert_eq!(reply.json()["start"], "GET / HTTP/1.1");
    assert_eq!(
        reply.json()["headers"]["host"],
        format!("127.0.0.1:{}", echo.port)
    );
    assert!(
        !old.ends_with_reset(),
        "HTTP/1.0 connections close after the response"
    );
}
