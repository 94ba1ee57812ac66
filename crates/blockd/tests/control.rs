//! What the control socket does with nonsense, and what its calls promise.

mod common;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use common::{open_rw, patterned, Node};
use serde_json::{json, Value};

const MIB: u64 = 1 << 20;

#[test]
fn nonsense_is_refused_with_a_reason() {
    let node = Node::start();
    let good = json!({ "layers": [], "virtual_size": MIB, "mode": "disk", "read_only": false });
    let with = |key: &str, value: Value| {
        let mut spec = good.clone();
        spec[key] = value;
        spec.to_string()
    };
    let long_path = format!("/{}", "x".repeat(5000));
    let many: Vec<Value> = (0..256)
        .map(|i| json!({ "path": format!("/{i}") }))
        .collect();
    let cases: Vec<(&str, &str, String, u16)> = vec![
        ("GET", "/", String::new(), 404),
        ("GET", "/v2/status", String::new(), 404),
        ("PUT", "/v1/status", String::new(), 405),
        ("POST", "/v1/images/a", String::new(), 405),
        ("GET", "/v1/images/none", String::new(), 404),
        ("POST", "/v1/images/none/seal", String::new(), 404),
        (
            "POST",
            "/v1/images/none/resize",
            r#"{"virtual_size":4096}"#.into(),
            404,
        ),
        ("POST", "/v1/images/none/resize", "{}".into(), 400),
        ("GET", "/v1/layers/none", String::new(), 404),
        ("GET", "/v1/layers/none?wait_ms=x", String::new(), 400),
        ("GET", "/v1/layers/none?wait_ms=600001", String::new(), 400),
        ("PUT", "/v1/images/a", String::new(), 400),
        ("PUT", "/v1/images/a", "[]".into(), 400),
        ("PUT", "/v1/images/a", "{\"layers\":".into(), 400),
        ("PUT", "/v1/images/.a", good.to_string(), 400),
        ("PUT", "/v1/images/..", good.to_string(), 400),
        ("PUT", "/v1/images/a%2Fb", good.to_string(), 400),
        ("PUT", "/v1/images/", good.to_string(), 400),
        (
            "PUT",
            &*Box::leak(format!("/v1/images/{}", "a".repeat(129)).into_boxed_str()),
            good.to_string(),
            400,
        ),
        ("PUT", "/v1/images/a", with("virtual_size", json!(0)), 400),
        ("PUT", "/v1/images/a", with("virtual_size", json!(100)), 400),
        ("PUT", "/v1/images/a", with("virtual_size", json!(-1)), 400),
        (
            "PUT",
            "/v1/images/a",
            with("virtual_size", json!(u64::MAX)),
            400,
        ),
        ("PUT", "/v1/images/a", with("mode", json!("tape")), 400),
        ("PUT", "/v1/images/a", with("mode", json!("memory")), 400),
        (
            "PUT",
            "/v1/images/a",
            with("durability", json!("maybe")),
            400,
        ),
        (
            "PUT",
            "/v1/images/a",
            with("permissions", json!(0o4755)),
            400,
        ),
        (
            "PUT",
            "/v1/images/a",
            with("layers", json!([{ "path": "relative" }])),
            400,
        ),
        (
            "PUT",
            "/v1/images/a",
            with("layers", json!([{ "path": "/does/not/exist" }])),
            404,
        ),
        (
            "PUT",
            "/v1/images/a",
            with("layers", json!([{ "path": "/dev/zero" }])),
            400,
        ),
        (
            "PUT",
            "/v1/images/a",
            with("layers", json!([{ "path": "/etc/passwd" }])),
            400,
        ),
        (
            "PUT",
            "/v1/images/a",
            with("layers", json!([{ "path": "/etc" }])),
            400,
        ),
        (
            "PUT",
            "/v1/images/a",
            with("layers", json!([{ "path": long_path }])),
            400,
        ),
        (
            "PUT",
            "/v1/images/a",
            with("layers", json!([{ "path": "/a\u{0}b" }])),
            400,
        ),
        (
            "PUT",
            "/v1/images/a",
            with("layers", json!([{ "id": "no-such-layer" }])),
            404,
        ),
        (
            "PUT",
            "/v1/images/a",
            with("layers", json!([{ "id": "../../etc" }])),
            400,
        ),
        (
            "PUT",
            "/v1/images/a",
            with("layers", json!([{ "digest": "x" }])),
            400,
        ),
        ("PUT", "/v1/images/a", with("layers", json!(many)), 400),
    ];
    for (method, path, body, wanted) in cases {
        let (status, answer) = node.try_call(method, path, &body).expect("an answer");
        assert_eq!(status, wanted, "{method} {path} {body}: {answer}");
        assert_eq!(answer["code"], wanted);
        assert!(
            answer["message"].as_str().is_some_and(|m| m.len() > 10),
            "{answer}"
        );
    }
    let own = json!([{ "path": node.mount().join("a") }]);
    let (status, answer) = node.call(
        "PUT",
        "/v1/images/a",
        json!({ "layers": own, "mode": "disk", "read_only": true }),
    );
    assert_eq!(status, 400, "{answer}");
    let pipe = node.dir.path().join("pipe");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &pipe,
        rustix::fs::FileType::Fifo,
        0o600.into(),
        0,
    )
    .unwrap();
    let pipe = json!([{ "path": pipe }]);
    let (status, answer) = node.call(
        "PUT",
        "/v1/images/a",
        json!({ "layers": pipe, "mode": "disk", "read_only": true }),
    );
    assert_eq!(status, 400, "{answer}");
    // Nothing half-done is left of any of them.
    assert_eq!(
        node.ok("GET", "/v1/images", Value::Null)["images"],
        json!([])
    );
    assert_eq!(
        fs::read_dir(node.state().join("images")).unwrap().count(),
        0
    );
}

#[test]
fn broken_clients_hurt_nobody() {
    let node = Node::start();
    let mut idle = Vec::new();
    for bytes in [
        &b""[..],
        b"\0\0\0\0",
        b"GET /v1/status HTTP/1.1\r\n",
        b"PUT /v1/images/a HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000000\r\n\r\n",
        b"PUT /v1/images/a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
        b"POST /v1/images/a/seal HTTP/9.9\r\n\r\n",
    ] {
        let mut socket = UnixStream::connect(node.control()).unwrap();
        socket.write_all(bytes).unwrap();
        idle.push(socket);
    }
    let mut big = UnixStream::connect(node.control()).unwrap();
    big.set_write_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    big.write_all(b"PUT /v1/images/a HTTP/1.1\r\nHost: x\r\nContent-Length: 8000000\r\n\r\n")
        .unwrap();
    let _ = big.write_all(&vec![b' '; 8_000_000]);
    let mut answer = String::new();
    let _ = big.read_to_string(&mut answer);
    assert!(
        answer.is_empty() || answer.starts_with("HTTP/1.1 400"),
        "{answer}"
    );
    assert_eq!(node.ok("GET", "/v1/status", Value::Null)["images"], 0);
    drop(idle);
    node.disk("disk", MIB);
}

#[test]
fn opening_twice_is_opening_once_and_something_else_is_a_conflict() {
    let node = Node::start();
    let spec = json!({ "layers": [], "virtual_size": MIB, "mode": "disk", "read_only": false });
    let one = node.ok("PUT", "/v1/images/a", spec.clone());
    let two = node.ok("PUT", "/v1/images/a", spec.clone());
    assert_eq!(one, two);
    let mut other = spec;
    other["virtual_size"] = json!(2 * MIB);
    let (status, answer) = node.call("PUT", "/v1/images/a", other);
    assert_eq!(status, 409, "{answer}");
}

#[test]
fn a_layer_in_use_cannot_be_dropped() {
    let node = Node::start();
    let data = patterned(5, 8192);
    open_rw(&node.disk("a", MIB))
        .write_all_at(&data, 0)
        .unwrap();
    let layers = node.seal("a");
    let id = layers[0]["id"].as_str().unwrap();
    let path = node.ok("GET", &format!("/v1/layers/{id}"), Value::Null)["path"]
        .as_str()
        .unwrap()
        .to_owned();
    let drop_it = || {
        node.call("DELETE", &format!("/v1/layers/{id}"), Value::Null)
            .0
    };
    assert_eq!(drop_it(), 409);
    // Used by path, after its image was closed.
    let user = node.fixed("b", "disk", &json!([{ "path": path }]));
    node.ok("DELETE", "/v1/images/a", Value::Null);
    assert_eq!(drop_it(), 409);
    assert!(fs::read(user).unwrap()[..8192] == data);
    node.ok("DELETE", "/v1/images/b", Value::Null);
    assert_eq!(drop_it(), 204);
    assert_eq!(drop_it(), 204);
    assert!(!std::path::Path::new(&path).exists());
    assert_eq!(
        fs::read_dir(node.state().join("images")).unwrap().count(),
        0
    );
}

#[test]
fn layers_that_do_not_belong_together_are_refused() {
    let node = Node::start();
    for id in ["a", "b"] {
        let disk = open_rw(&node.disk(id, MIB));
        disk.write_all_at(&[1; 4096], 0).unwrap();
        node.seal(id);
        disk.write_all_at(&[2; 4096], 0).unwrap();
    }
    let (a, b) = (node.seal("a"), node.seal("b"));
    let mixed = json!({ "layers": [a[0], b[1]], "mode": "disk", "read_only": true });
    let (status, answer) = node.call("PUT", "/v1/images/mixed", mixed);
    assert_eq!(status, 400, "{answer}");
    assert!(
        answer["message"].as_str().unwrap().contains("belongs on"),
        "{answer}"
    );
}

#[test]
fn the_control_socket_is_for_its_owner() {
    let node = Node::start();
    let mode = fs::metadata(node.control()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let holder = fs::metadata(node.state().join("holder"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(holder & 0o777, 0o600);
}

#[test]
fn the_chain_of_an_image_can_reach_the_limit_and_not_pass_it() {
    let node = Node::start();
    let disk = open_rw(&node.disk("a", MIB));
    let mut layers = Value::Null;
    for round in 0..40u8 {
        disk.write_all_at(&[round; 512], u64::from(round) * 512)
            .unwrap();
        layers = node.seal("a");
    }
    let layers = layers.as_array().unwrap();
    assert_eq!(layers.len(), 40);
    // Every point in time can be opened.
    for count in [1, 20, 40] {
        let path = node.fixed(&format!("at{count}"), "disk", &json!(layers[..count]));
        let found = fs::read(path).unwrap();
        for round in 0..40 {
            let wanted = if round < count { round as u8 } else { 0 };
            assert_eq!(
                found[round * 512 + 5],
                wanted,
                "{count} layers, sector {round}"
            );
        }
    }
}
