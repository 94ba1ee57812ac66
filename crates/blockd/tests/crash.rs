//! The daemon dies at every step of every operation; what it finds afterwards is a state it could have been in.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use common::{open_rw, path_in, patterned, read_at, Node};
use serde_json::{json, Value};

const MIB: u64 = 1 << 20;

/// Steps of opening, sealing, closing and dropping. `:n` is the n-th time a point is passed.
const POINTS: &[&str] = &[
    "open-recorded",
    "open-created",
    "open-ready",
    "seal-frozen",
    "seal-registered",
    "seal-settled",
    "close-recorded",
    "drop-recorded",
    "table-before-append:1",
    "table-before-append:2",
    "table-before-append:3",
    "table-before-append:4",
    "table-before-append:5",
    "table-before-append:6",
    "table-before-append:7",
    "table-before-append:8",
    "table-after-append:1",
    "table-after-append:2",
    "table-after-append:3",
    "table-after-append:4",
    "table-after-append:5",
    "table-after-append:6",
    "table-after-append:7",
    "table-after-append:8",
];

/// A script that passes every point. Each step says whether it was answered; the first that was not ends it.
fn script(node: &Node, base: &Value) -> usize {
    let steps: [(&str, &str, Value); 6] = [
        (
            "PUT",
            "/v1/images/fork",
            json!({ "layers": base, "mode": "disk", "read_only": false }),
        ),
        ("POST", "/v1/images/disk/seal", json!({ "wait_ms": 60_000 })),
        (
            "PUT",
            "/v1/images/fixed",
            json!({ "layers": base, "mode": "memory", "read_only": true }),
        ),
        ("DELETE", "/v1/images/fork", Value::Null),
        ("DELETE", "/v1/images/old", Value::Null),
        (
            "DELETE",
            &format!("/v1/layers/{}", old_layer(node)),
            Value::Null,
        ),
    ];
    for (at, (method, path, body)) in steps.iter().enumerate() {
        match node.try_call(
            method,
            path,
            &if body.is_null() {
                String::new()
            } else {
                body.to_string()
            },
        ) {
            Some((status, answer)) => {
                assert!((200..300).contains(&status), "{method} {path}: {answer}")
            }
            None => return at,
        }
    }
    steps.len()
}

/// The layer that was sealed from the image `old`.
fn old_layer(node: &Node) -> String {
    fs::read_to_string(node.dir.path().join("old-layer")).unwrap()
}

#[test]
fn every_point_of_death_leaves_a_legal_state() {
    for point in POINTS {
        let mut node = Node::start();
        let data = patterned(9, 300_000);
        let disk = open_rw(&node.disk("disk", 4 * MIB));
        disk.write_all_at(&data, 0).unwrap();
        let base = node.seal("disk");
        let later = patterned(10, 200_000);
        disk.write_all_at(&later, 250_000).unwrap();
        open_rw(&node.disk("old", MIB))
            .write_all_at(&data[..4096], 0)
            .unwrap();
        let old = node.seal("old");
        fs::write(
            node.dir.path().join("old-layer"),
            old[0]["id"].as_str().unwrap(),
        )
        .unwrap();
        node.kill();

        node.launch(&[("AENV_FAILPOINT", point)]);
        let answered = script(&node, &base);
        assert!(answered < 6, "{point} was never reached");
        node.wait_for_death();
        node.launch(&[]);

        // Nothing acknowledged is lost.
        let mut oracle = vec![0; 4 << 20];
        oracle[..data.len()].copy_from_slice(&data);
        oracle[250_000..450_000].copy_from_slice(&later);
        assert!(
            read_at(&disk, 0, 4 << 20) == oracle,
            "{point}: the disk changed"
        );
        let images = node.ok("GET", "/v1/images", Value::Null);
        let ids: BTreeSet<&str> = images["images"]
            .as_array()
            .unwrap()
            .iter()
            .map(|i| i["id"].as_str().unwrap())
            .collect();
        assert!(
            images["images"]
                .as_array()
                .unwrap()
                .iter()
                .all(|i| i["state"] == "ready"),
            "{point}: {images}"
        );
        if (1..3).contains(&answered) {
            assert!(
                ids.contains("fork"),
                "{point}: an image that was answered is gone"
            );
        }
        if answered > 4 {
            assert!(!ids.contains("old"), "{point}: a closed image is back");
        }
        // An older snapshot is there, whatever happened to newer ones.
        let snapshot = node.fixed("snapshot", "disk", &base);
        let mut older = vec![0; 4 << 20];
        older[..data.len()].copy_from_slice(&data);
        assert!(
            fs::read(&snapshot).unwrap() == older,
            "{point}: the old snapshot changed"
        );
        // What was interrupted can be done again.
        assert_eq!(script(&node, &base), 6, "{point}");
        let sealed = node.seal("disk");
        let again = node.fixed("again", "disk", &sealed);
        assert!(
            fs::read(&again).unwrap() == oracle,
            "{point}: a new snapshot is wrong"
        );
        assert_no_strangers(&mut node, point);
    }
}

/// After a restart every file in the state directory belongs to something that exists.
fn assert_no_strangers(node: &mut Node, point: &str) {
    node.kill();
    node.launch(&[]);
    let layers = node.ok("GET", "/v1/layers", Value::Null);
    let known: BTreeSet<PathBuf> = layers["layers"]
        .as_array()
        .unwrap()
        .iter()
        .map(path_in)
        .collect();
    for layer in &known {
        assert!(
            layer.exists(),
            "{point}: {} is on record and missing",
            layer.display()
        );
    }
    let images = node.ok("GET", "/v1/images", Value::Null);
    let numbers: BTreeSet<String> = images["images"]
        .as_array()
        .unwrap()
        .iter()
        .map(|i| i["number"].to_string())
        .collect();
    for directory in fs::read_dir(node.state().join("images")).unwrap() {
        let directory = directory.unwrap();
        if numbers.contains(directory.file_name().to_str().unwrap()) {
            continue;
        }
        for file in fs::read_dir(directory.path()).unwrap() {
            let path = file.unwrap().path().canonicalize().unwrap();
            assert!(
                known.contains(&path),
                "{point}: {} belongs to nothing",
                path.display()
            );
        }
    }
}

#[test]
fn a_layer_cut_before_the_crash_can_be_used_after_it() {
    let mut node = Node::start();
    let disk = open_rw(&node.disk("disk", MIB));
    let data = patterned(3, 1 << 20);
    disk.write_all_at(&data, 0).unwrap();
    node.kill();
    // Dies when the layer is on record but not on stable storage, with a fork already open over it.
    node.launch(&[("AENV_FAILPOINT", "seal-settled")]);
    let answer = node.try_call("POST", "/v1/images/disk/seal", r#"{"wait_ms":0}"#);
    node.wait_for_death();
    node.launch(&[]);
    let layers = node.ok("GET", "/v1/layers", Value::Null);
    let id = layers["layers"][0]["id"].as_str().unwrap().to_owned();
    if let Some((_, answer)) = answer {
        assert_eq!(answer["layer"]["id"], id);
    }
    let waited = node.ok(
        "GET",
        &format!("/v1/layers/{id}?wait_ms=60000"),
        Value::Null,
    );
    assert_eq!(waited["state"], "sealed");
    let fork = open_rw(&node.disk_over("fork", 0, &json!([{ "id": id }])));
    assert!(read_at(&fork, 0, 1 << 20) == data);
}

#[test]
fn a_damaged_image_fails_alone_and_says_why() {
    let mut node = Node::start();
    let good = open_rw(&node.disk("good", MIB));
    good.write_all_at(&[3; 4096], 0).unwrap();
    let bad = open_rw(&node.disk("bad", MIB));
    bad.write_all_at(&[4; 4096], 0).unwrap();
    let number = node.ok("GET", "/v1/images/bad", Value::Null)["number"].to_string();
    node.kill();
    fs::write(
        node.state().join("images").join(number).join("manifest"),
        b"rubbish",
    )
    .unwrap();
    node.launch(&[]);
    assert!(read_at(&good, 0, 4096) == [3; 4096]);
    let view = node.ok("GET", "/v1/images/bad", Value::Null);
    assert_eq!(view["state"], "failed");
    assert!(
        view["cause"].as_str().unwrap().contains("manifest"),
        "{view}"
    );
    assert_eq!(common::errno(bad.read_at(&mut [0; 512], 0)), libc::EIO);
    assert_eq!(node.call("POST", "/v1/images/bad/seal", json!({})).0, 409);
    node.ok("DELETE", "/v1/images/bad", Value::Null);
    assert_eq!(node.ok("GET", "/v1/status", Value::Null)["images"], 1);
}
