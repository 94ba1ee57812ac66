//! The control socket, the control API behind the edge, and the process itself.

mod common;

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Stdio;
use std::sync::Arc;

use common::*;
use serde_json::json;

#[test]
fn status_counts() {
    let edge = Edge::start();
    let guest = Server::echo();
    edge.route("abc");
    edge.route("def");
    let mut conn = edge.connect();
    conn.get("abc", guest.port, "/");
    conn.get("nobody", 1, "/");
    let status = edge.status();
    assert_eq!(status["pid"], edge.child.id());
    assert_eq!(status["listen"], edge.address.to_string());
    assert_eq!(status["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(
        (&status["routes"], &status["connections"]),
        (&json!(2), &json!(1))
    );
    assert_eq!(
        (&status["requests_total"], &status["upstream_errors_total"]),
        (&json!(2), &json!(0))
    );
    assert!(status["uptime_ms"].is_u64());
    assert_eq!(
        edge.control("GET", "/v1/routes", "").json(),
        json!({ "routes": [route("abc"), route("def")] })
    );
}

#[test]
fn bad_calls_are_explained_and_change_nothing() {
    let edge = Edge::start();
    edge.route("abc");
    let long = "x".repeat(65);
    let good = route("abc").to_string();
    let cases = [
        ("PUT", "/v1/routes/abc", "", 400, "not valid"),
        ("PUT", "/v1/routes/abc", "[]", 400, "not valid"),
        (
            "PUT",
            "/v1/routes/abc",
            r#"{"sandbox_id":"abc","generation":1,"address":"127.0.0.1"}"#,
            400,
            "netns",
        ),
        (
            "PUT",
            "/v1/routes/abc",
            r#"{"sandbox_id":"abc","generation":-1,"address":"127.0.0.1","netns":null}"#,
            400,
            "u64",
        ),
        (
            "PUT",
            "/v1/routes/abc",
            r#"{"sandbox_id":"abc","generation":2,"address":"::1","netns":null}"#,
            400,
            "address",
        ),
        (
            "PUT",
            "/v1/routes/abc",
            r#"{"sandbox_id":"abc","generation":2,"address":"1.2.3.4","netns":"x"}"#,
            400,
            "absolute",
        ),
        (
            "PUT",
            "/v1/routes/abc",
            r#"{"sandbox_id":"abc","generation":2,"address":"1.2.3.4","netns":"/nowhere"}"#,
            400,
            "/nowhere",
        ),
        (
            "PUT",
            "/v1/routes/abc",
            r#"{"sandbox_id":"abc","generation":2,"address":"1.2.3.4","netns":"/etc/passwd"}"#,
            400,
            "network namespace",
        ),
        (
            "PUT",
            "/v1/routes/abc",
            r#"{"sandbox_id":"abc","generation":2,"address":"1.2.3.4","netns":null,"traffic_token":""}"#,
            400,
            "traffic_token",
        ),
        (
            "PUT",
            "/v1/routes/abc",
            r#"{"sandbox_id":"abc","generation":2,"address":"1.2.3.4","netns":null,"mask_request_host":"a\nb"}"#,
            400,
            "mask_request_host",
        ),
        (
            "PUT",
            "/v1/routes/def",
            good.as_str(),
            400,
            "the path names def",
        ),
        (
            "PUT",
            "/v1/routes/A-B",
            good.as_str(),
            400,
            "not a sandbox id",
        ),
        (
            "DELETE",
            &format!("/v1/routes/{long}"),
            "",
            400,
            "not a sandbox id",
        ),
        ("PUT", "/v1/routes", r#"{}"#, 400, "routes"),
        (
            "PUT",
            "/v1/routes",
            &format!(r#"{{"routes":[{good},{good}]}}"#),
            400,
            "twice",
        ),
        (
            "PUT",
            "/v1/routes",
            r#"{"routes":[{"sandbox_id":"x y","generation":1,"address":"127.0.0.1","netns":null}]}"#,
            400,
            "sandbox_id",
        ),
        ("POST", "/v1/routes", "", 405, "POST"),
        ("DELETE", "/v1/status", "", 405, "DELETE"),
        ("GET", "/v1/routes/abc", "", 405, "GET"),
        ("GET", "/v2/status", "", 404, "/v2/status"),
    ];
    for (method, path, body, status, part) in cases {
        let reply = edge.control(method, path, body);
        assert_eq!(reply.status, status, "{method} {path} {body}");
        let message = reply.json()["message"].as_str().unwrap().to_owned();
        assert_eq!(reply.json()["code"], status);
        assert!(message.contains(part), "{method} {path} {body}: {message}");
    }
    assert_eq!(
        edge.control("GET", "/v1/routes", "").json(),
        json!({ "routes": [route("abc")] })
    );
    // Unknown fields are for later versions.
    let mut later = route("abc");
    later["colour"] = json!("red");
    edge.put(later);
}

#[test]
fn only_its_owner_may_use_the_control_socket() {
    let edge = Edge::start();
    let mode = std::fs::metadata(edge.control_path())
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn the_control_api_may_come_and_go() {
    let edge = Edge::start();
    let guest = Server::echo();
    edge.route("abc");
    let mut api_conn = edge.connect();
    let mut sandbox_conn = edge.connect();
    for round in 0..3 {
        for _ in 0..2 {
            api_conn.send("POST /sandboxes HTTP/1.1\r\nhost: api\r\ncontent-length: 2\r\n\r\n{}");
            let reply = api_conn.reply();
            assert_eq!(
                (reply.status, reply.json()["code"].as_u64()),
                (503, Some(503))
            );
            assert_eq!(reply.head.get("retry-after"), Some("1"));
            assert_eq!(sandbox_conn.get("abc", guest.port, "/").status, 200);
        }
        let api = Api::start(edge.api_path(), move |mut conn| {
            // Ends with the process: one request, then the connection breaks.
            let (_, body) = conn.request().unwrap();
            conn.answer([format!("{round} ").into_bytes(), body].concat())
                .unwrap();
        });
        for _ in 0..3 {
            api_conn.send("POST /sandboxes HTTP/1.1\r\nhost: api\r\ncontent-length: 2\r\n\r\n{}");
            assert_eq!(api_conn.reply().text(), format!("{round} {{}}"));
        }
        drop(api);
        eventually("the API to be gone", || {
            UnixStream::connect(edge.api_path()).is_err().then_some(())
        });
    }
    assert_eq!(guest.accepted(), 1);
}

#[test]
fn a_burst_of_api_requests_waits_for_a_slow_accept() {
    let edge = Edge::start();
    // Room for two connections in the queue of the listener.
    let socket = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap();
    socket
        .bind(&socket2::SockAddr::unix(edge.api_path()).unwrap())
        .unwrap();
    socket.listen(1).unwrap();
    let edge = Arc::new(edge);
    let clients: Vec<_> = (0..40)
        .map(|_| {
            let edge = edge.clone();
            std::thread::spawn(move || {
                let mut conn = edge.connect();
                conn.send("GET / HTTP/1.1\r\nhost: api\r\n\r\n");
                conn.reply().status
            })
        })
        .collect();
    eventually("the burst to have arrived", || {
        (edge.status()["requests_total"].as_u64() == Some(40)).then_some(())
    });
    let listener = UnixListener::from(socket);
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || keep_alive(|_, _| b"ok".to_vec())(Conn::new(stream)));
        }
    });
    for client in clients {
        assert_eq!(client.join().unwrap(), 200);
    }
}

fn fails(mut command: std::process::Command) -> String {
    let output = command
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    text
}

#[test]
fn taken_addresses_are_named() {
    let edge = Edge::start();
    let dir = TempDir::new();
    let address = edge.address.to_string();
    let text = fails(Edge::command(&dir.0, &address));
    assert!(text.contains(&address) && text.contains("in use"), "{text}");
    assert!(!dir.0.join("control.sock").exists());

    let text = fails(Edge::command(&edge.dir.0, "127.0.0.1:0"));
    let control = edge.control_path().display().to_string();
    assert!(
        text.contains(&control) && text.contains("listens"),
        "{text}"
    );
    assert_eq!(edge.status()["routes"], 0, "the first edge must not notice");

    std::fs::write(dir.0.join("control.sock"), "precious").unwrap();
    let text = fails(Edge::command(&dir.0, "127.0.0.1:0"));
    assert!(text.contains("not a socket"), "{text}");
    assert_eq!(
        std::fs::read(dir.0.join("control.sock")).unwrap(),
        b"precious"
    );

    let text = fails(Edge::command(&dir.0, "nonsense"));
    assert!(text.contains("--listen"), "{text}");
}

#[test]
fn a_leftover_control_socket_is_replaced() {
    let mut edge = Edge::start();
    edge.child.kill().unwrap();
    edge.child.wait().unwrap();
    assert!(edge.control_path().exists());
    let mut again = Edge::command(&edge.dir.0, "127.0.0.1:0")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut ready = [0u8; 6];
    again.stdout.take().unwrap().read_exact(&mut ready).unwrap();
    assert_eq!(edge.status()["pid"], again.id());
    again.kill().unwrap();
    again.wait().unwrap();
}

#[test]
fn it_survives_its_parent() {
    let dir = TempDir::new();
    // Both ends of its output go away, and its terminal hangs up.
    let mut child = Edge::command(&dir.0, "127.0.0.1:0")
        .args(["--log-level", "debug"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut ready = [0u8; 6];
    child.stdout.take().unwrap().read_exact(&mut ready).unwrap();
    drop(child.stderr.take());
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::HUP).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::PIPE).unwrap();
    let call = |path: &str, method: &str, body: String| {
        let mut conn = Conn::new(UnixStream::connect(dir.0.join("control.sock")).unwrap());
        let length = body.len();
        conn.send(format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n{body}"
        ));
        conn.reply()
    };
    assert_eq!(
        call("/v1/routes/abc", "PUT", route("abc").to_string()).status,
        204
    );
    let listen = call("/v1/status", "GET", String::new()).json()["listen"]
        .as_str()
        .unwrap()
        .to_owned();
    let free = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    for _ in 0..2 {
        // Each of these writes a line to the log.
        let mut conn = Conn::new(std::net::TcpStream::connect(&listen).unwrap());
        assert_eq!(conn.get("abc", free, "/").status, 502);
    }
    assert_eq!(call("/v1/shutdown", "POST", String::new()).status, 204);
    let code = eventually("the edge to exit", || child.try_wait().unwrap()).code();
    assert_eq!(code, Some(0));
}

#[test]
fn its_log_is_json_and_quiet() {
    let dir = TempDir::new();
    let mut child = Edge::command(&dir.0, "127.0.0.1:0")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdout
        .take()
        .unwrap()
        .read_exact(&mut [0u8; 6])
        .unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let lines: Vec<serde_json::Value> = String::from_utf8(output.stderr)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let messages: Vec<_> = lines
        .iter()
        .map(|line| line["message"].as_str().unwrap())
        .collect();
    assert_eq!(messages, ["ready", "stopped"]);
}
