//! Requests nobody should send, and the rules about who may ask for what.

mod common;

use common::*;
use proptest::prelude::*;
use serde_json::{json, Value};
use std::io::{Read, Write};

const START: &str = "/process.Process/Start";

fn post(agent: &Agent, path: &str, kind: &str, body: &[u8]) -> Response {
    agent.request("POST", path, &[("content-type", kind)], body)
}

/// The error of a stream that is answered at once.
fn stream_error(agent: &Agent, procedure: &str, body: &[u8]) -> Value {
    let response = post(agent, procedure, "application/connect+json", body);
    assert_eq!(
        (response.status, response.header("content-type")),
        (200, Some("application/connect+json"))
    );
    assert_eq!(response.body[0], 2, "not an end of stream");
    serde_json::from_slice::<Value>(&response.body[5..]).unwrap()["error"].clone()
}

#[test]
fn broken_envelopes_are_answered() {
    let agent = Agent::start();
    let good = envelope(0, shell("echo x").to_string().as_bytes());
    let mut giant = vec![0, 0xff, 0xff, 0xff, 0xff];
    giant.extend(b"{}");
    for (body, code) in [
        (vec![], "invalid_argument"),
        (vec![0], "invalid_argument"),
        (good[..good.len() - 1].to_vec(), "invalid_argument"),
        (giant, "resource_exhausted"),
        (envelope(1, b"{}"), "invalid_argument"),
        (envelope(2, b"{}"), "invalid_argument"),
        (envelope(0x80, b"{}"), "invalid_argument"),
        (envelope(0, b"not json"), "invalid_argument"),
        (envelope(0, b"[1,2]"), "invalid_argument"),
        (envelope(0, b"\xff\xfe"), "invalid_argument"),
        (
            envelope(0, "[".repeat(100_000).as_bytes()),
            "invalid_argument",
        ),
        (envelope(0, br#"{"process":{"cmd":7}}"#), "invalid_argument"),
        ([good.clone(), good.clone()].concat(), "invalid_argument"),
    ] {
        for procedure in [START, "/process.Process/Connect"] {
            if procedure != START && body.starts_with(&good) {
                continue;
            }
            let error = stream_error(&agent, procedure, &body);
            assert_eq!(
                error["code"],
                code,
                "{procedure} {:?}: {error}",
                &body[..body.len().min(30)]
            );
        }
    }
    assert_eq!(
        stream_error(&agent, "/process.Process/StreamInput", b"")["code"],
        "invalid_argument"
    );
    let no_start = envelope(0, br#"{"data":{"input":{"stdin":""}}}"#);
    assert_eq!(
        stream_error(&agent, "/process.Process/StreamInput", &no_start)["code"],
        "invalid_argument"
    );
    assert_eq!(
        agent.ok("/process.Process/List", json!({}))["processes"],
        json!([])
    );
}

#[test]
fn a_large_length_is_refused_before_its_data_comes() {
    let agent = Agent::start();
    let mut stream = agent.connect();
    let headers = [("content-type", "application/connect+json")];
    stream
        .write_all(&head("POST", START, &headers, None))
        .unwrap();
    stream.write_all(&chunk(&[0, 0x40, 0, 0, 1])).unwrap();
    assert_eq!(Stream::read(stream).error()["code"], "resource_exhausted");
}

#[test]
fn broken_unary_calls_are_answered_with_their_status() {
    let agent = Agent::start();
    let call = |body: &[u8]| {
        post(
            &agent,
            "/process.Process/SendInput",
            "application/json",
            body,
        )
    };
    for body in [
        &b"nope"[..],
        b"[]",
        b"\xff",
        b"{\"process\":{\"pid\":-1}}",
        b"{\"input\":{\"stdin\":\"***\"}}",
    ] {
        let response = call(body);
        assert_eq!(
            (response.status, &response.json()["code"]),
            (400, &json!("invalid_argument")),
            "{body:?}"
        );
    }
    let response = call(&vec![b' '; (4 << 20) + 1]);
    assert_eq!(
        (response.status, &response.json()["code"]),
        (429, &json!("resource_exhausted"))
    );
    for kind in [
        "application/proto",
        "application/connect+json",
        "text/plain",
        "",
    ] {
        let response = post(&agent, "/process.Process/List", kind, b"{}");
        assert_eq!(
            (response.status, response.header("accept-post")),
            (415, Some("application/json")),
            "{kind}"
        );
    }
    assert_eq!(post(&agent, START, "application/json", b"{}").status, 415);
    for body in [&b""[..], b"{}", b" ", br#"{"later":{"a":[1]},"x":null}"#] {
        assert_eq!(
            post(
                &agent,
                "/process.Process/List",
                "application/json; charset=utf-8",
                body
            )
            .status,
            200
        );
    }
    let gzip = [
        ("content-type", "application/json"),
        ("content-encoding", "gzip"),
    ];
    assert_eq!(
        agent
            .request("POST", "/process.Process/List", &gzip, b"{}")
            .status,
        501
    );
    let identity = [
        ("content-type", "application/json"),
        ("content-encoding", "identity"),
    ];
    assert_eq!(
        agent
            .request("POST", "/process.Process/List", &identity, b"{}")
            .status,
        200
    );
    let version = [
        ("content-type", "application/json"),
        ("connect-protocol-version", "2"),
    ];
    assert_eq!(
        agent
            .request("POST", "/process.Process/List", &version, b"{}")
            .status,
        400
    );
}

#[test]
fn unknown_places_and_methods_are_named() {
    let agent = Agent::start();
    for path in [
        "/",
        "/x",
        "/process.Process/Nothing",
        "/process.Process/",
        "/other.Service/Start",
        "//",
        "/health/x",
    ] {
        let response = post(&agent, path, "application/json", b"{}");
        assert_eq!(
            (response.status, &response.json()["code"]),
            (404, &json!(404)),
            "{path}"
        );
    }
    for (method, path, allow) in [
        ("GET", START, "POST"),
        ("POST", "/health", "GET"),
        ("GET", "/init", "POST"),
        ("DELETE", "/metrics", "GET"),
        ("GET", "/shutdown", "POST"),
    ] {
        let response = agent.request(method, path, &[], b"");
        assert_eq!(
            (response.status, response.header("allow")),
            (405, Some(allow)),
            "{method} {path}"
        );
    }
}

#[test]
fn bytes_that_are_no_http_do_not_matter() {
    let agent = Agent::start();
    let long = format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(200_000));
    let headers = format!("GET /health HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(5000));
    for bytes in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\0\0\0\0\r\n\r\n",
        b"POST /process.Process/List HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: -5\r\n\r\n",
        b"POST /process.Process/List HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /process.Process/List HTTP/1.1\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        long.as_bytes(),
        headers.as_bytes(),
    ] {
        let mut stream = agent.connect();
        // The agent may close before it has read it all.
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = stream.read_to_end(&mut Vec::new());
    }
    assert_eq!(agent.get("/health").status, 204);
}

#[test]
fn a_token_closes_everything_but_health() {
    let agent = Agent::start();
    let init = |token: &str, body: Value| {
        agent
            .request(
                "POST",
                "/init",
                &[("x-aenv-control", token)],
                body.to_string().as_bytes(),
            )
            .status
    };
    assert_eq!(init("control", json!({"accessToken": "secret"})), 204);
    let unauthorized =
        "unauthorized access, please provide a valid access token or method signing if supported";
    let list = |token: Option<&str>| {
        let mut headers = vec![("content-type", "application/json")];
        headers.extend(token.map(|t| ("x-access-token", t)));
        agent.request("POST", "/process.Process/List", &headers, b"{}")
    };
    for token in [None, Some(""), Some("secre"), Some("secret2")] {
        let response = list(token);
        assert_eq!(
            (response.status, response.json()),
            (401, json!({"code": 401, "message": unauthorized}))
        );
    }
    assert_eq!(list(Some("secret")).status, 200);
    for path in ["/metrics", "/envs", "/nothing"] {
        assert_eq!(agent.get(path).status, 401, "{path}");
    }
    let body = envelope(0, shell("true").to_string().as_bytes());
    assert_eq!(
        post(&agent, START, "application/connect+json", &body).status,
        401
    );
    assert_eq!(agent.get("/health").status, 204);
    let preflight = [
        ("origin", "https://x"),
        ("access-control-request-method", "POST"),
    ];
    let response = agent.request("OPTIONS", START, &preflight, b"");
    assert_eq!(
        (
            response.status,
            response.header("access-control-allow-origin")
        ),
        (204, Some("*"))
    );
    // An empty token opens again; an absent one changes nothing.
    assert_eq!(init("control", json!({"envVars": {"A": "b"}})), 204);
    assert_eq!(list(None).status, 401);
    let envs = agent.request("GET", "/envs", &[("x-access-token", "secret")], b"");
    assert_eq!(envs.json(), json!({"A": "b", "E2B_SANDBOX": "true"}));
    assert_eq!(init("control", json!({"accessToken": ""})), 204);
    assert_eq!(list(None).status, 200);
}

#[test]
fn control_calls_need_the_first_control_token() {
    let mut agent = Agent::start();
    let call = |path: &str, token: Option<&str>, body: &str| {
        let headers: Vec<_> = token.map(|t| ("x-aenv-control", t)).into_iter().collect();
        agent.request("POST", path, &headers, body.as_bytes())
    };
    assert_eq!(call("/init", None, "{}").status, 401);
    assert_eq!(call("/shutdown", Some("guess"), "").status, 401);
    assert_eq!(call("/init", Some("first"), "").status, 204);
    assert_eq!(call("/init", Some("second"), "{}").status, 401);
    for bad in [
        "nope",
        "[]",
        r#"{"envVars":[]}"#,
        r#"{"envVars":{"A=B":"c"}}"#,
        r#"{"envVars":{"":"c"}}"#,
        r#"{"timestamp":"yesterday"}"#,
        r#"{"timestamp":"1969-12-31T23:00:00Z"}"#,
        r#"{"hostname":"a b"}"#,
        r#"{"hostname":""}"#,
        r#"{"entropy":"AAAA"}"#,
        r#"{"entropy":"!"}"#,
        r#"{"defaultWorkdir":"rel"}"#,
    ] {
        let response = call("/init", Some("first"), bad);
        assert_eq!(
            (response.status, &response.json()["code"]),
            (400, &json!(400)),
            "{bad}"
        );
    }
    let good = json!({
        "timestamp": "2026-01-02T03:04:05.123456789+02:00", "hostname": "sandbox-1", "entropy": "A".repeat(64),
        "defaultUser": "root", "defaultWorkdir": "/usr", "templateId": null, "unknown": {"a": 1},
    });
    assert_eq!(call("/init", Some("first"), &good.to_string()).status, 204);
    assert_eq!(agent.run("pwd; echo $USER").text(), "/usr\nroot\n");
    let mut sleeper = agent.start_shell("sleep 60");
    let pid = sleeper.pid();
    assert_eq!(call("/shutdown", Some("wrong"), "").status, 401);
    assert_eq!(call("/shutdown", Some("first"), "").status, 204);
    assert!(agent.wait().success());
    let dead = || (!std::path::Path::new(&format!("/proc/{pid}/exe")).exists()).then_some(());
    eventually("the process ends with the agent", dead);
}

#[test]
fn two_first_clients_cannot_both_win() {
    for _ in 0..20 {
        let agent = Agent::start();
        let claim = |token: &'static str| {
            let agent = &agent;
            move || {
                agent
                    .request("POST", "/init", &[("x-aenv-control", token)], b"{}")
                    .status
            }
        };
        let (a, b) = std::thread::scope(|scope| {
            let (a, b) = (scope.spawn(claim("a")), scope.spawn(claim("b")));
            (a.join().unwrap(), b.join().unwrap())
        });
        assert_eq!(a + b, 204 + 401, "{a} {b}");
    }
}

#[test]
fn missing_default_directories_fall_back() {
    let agent = Agent::start();
    let body = json!({"defaultWorkdir": "/gone", "defaultUser": "nobody"}).to_string();
    assert_eq!(
        agent
            .request("POST", "/init", &[("x-aenv-control", "c")], body.as_bytes())
            .status,
        204
    );
    // The home of nobody does not exist either.
    assert_eq!(agent.run("pwd; id -un").text(), "/\nnobody\n");
}

#[test]
fn users_stay_known_when_their_files_are_gone() {
    let agent = Agent::in_root();
    let write = |user: &str| {
        let path = format!("/files?path=/tmp/{user}&username={user}");
        agent
            .request(
                "POST",
                &path,
                &[("content-type", "application/octet-stream")],
                b"",
            )
            .status
    };
    assert_eq!(
        (write("user"), write("root"), write("ghost")),
        (200, 200, 401)
    );
    std::fs::remove_dir_all(agent.path("etc")).unwrap();
    std::fs::remove_dir_all(agent.path("home")).unwrap();
    assert_eq!(
        (write("user"), write("root"), write("ghost")),
        (200, 200, 401)
    );
    let owner =
        std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(agent.path("tmp/user")).unwrap());
    assert_eq!(owner, 1000);
    // A directory, a FIFO or an endless file in their place must not stop anything either.
    for make in [
        "mkdir -p etc/passwd",
        "rmdir etc/passwd; mkfifo etc/passwd etc/group",
        "rm etc/*; truncate -s 1T etc/passwd",
    ] {
        let script = format!("cd {} && {make}", agent.dir.path().display());
        assert!(std::process::Command::new("sh")
            .args(["-c", &script])
            .status()
            .unwrap()
            .success());
        assert_eq!((write("user"), write("root")), (200, 200), "{make}");
    }
    std::fs::remove_file(agent.path("etc/passwd")).unwrap();
    std::fs::write(agent.path("etc/passwd"), "root:x:0:0::/root:/bin/sh\n").unwrap();
    assert_eq!(
        (write("user"), write("root")),
        (401, 200),
        "a readable file is the truth"
    );
}

#[test]
fn a_taken_port_is_an_error_with_a_cause() {
    let agent = Agent::start();
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_aenv-envd"))
        .args(["agent", "--listen", &agent.address.to_string()])
        .output()
        .unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        message.contains(&agent.address.to_string()) && message.contains("in use"),
        "{message}"
    );
    for args in [
        &[][..],
        &["agent"],
        &["agent", "--listen", "x"],
        &["agent", "--what"],
        &["unknown"],
        &["init"],
    ] {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_aenv-envd"))
            .args(args)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
    }
    let version = std::process::Command::new(env!("CARGO_BIN_EXE_aenv-envd"))
        .arg("--version")
        .output()
        .unwrap();
    assert_eq!(
        version.stdout,
        format!("aenv-envd {}\n", env!("CARGO_PKG_VERSION")).as_bytes()
    );
}

#[test]
fn metrics_are_plausible() {
    let agent = Agent::start();
    let metrics = agent.get("/metrics").json();
    let number = |key: &str| {
        metrics[key]
            .as_f64()
            .unwrap_or_else(|| panic!("{key} is missing in {metrics}"))
    };
    assert!(number("cpu_count") >= 1.0 && (0.0..=100.0).contains(&number("cpu_used_pct")));
    assert!(
        number("mem_used") > 0.0
            && number("mem_used") < number("mem_total")
            && number("mem_cache") > 0.0
    );
    assert!(number("disk_used") > 0.0 && number("disk_used") <= number("disk_total"));
    assert!(number("ts") > 1_700_000_000.0);
}

#[test]
fn arbitrary_messages_never_break_the_agent() {
    let agent = Agent::start();
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(300));
    let procedures = prop::sample::select(vec![
        "/process.Process/Connect",
        "/process.Process/StreamInput",
        "/process.Process/SendSignal",
        "/process.Process/Update",
        "/process.Process/SendInput",
        "/process.Process/CloseStdin",
        "/filesystem.Filesystem/Stat",
        "/filesystem.Filesystem/ListDir",
        "/files?path=%2Fno%2Fwhere",
        "/init",
    ]);
    let bodies = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..60),
        "\\{\"(process|path|input|start)\":[\\[\\]{}\"a-z0-9:,.-]{0,30}\\}"
            .prop_map(String::into_bytes),
    ];
    let kinds = prop::sample::select(vec![
        "application/json",
        "application/connect+json",
        "multipart/form-data; boundary=x",
    ]);
    runner
        .run(
            &(procedures, bodies, kinds, any::<bool>()),
            |(procedure, body, kind, framed)| {
                let body = if framed { envelope(0, &body) } else { body };
                let response = post(&agent, procedure, kind, &body);
                prop_assert!(
                    (200..600).contains(&response.status) && response.status != 500,
                    "{}",
                    response.status
                );
                Ok(())
            },
        )
        .unwrap();
    assert_eq!(agent.get("/health").status, 204);
}
