//! Long chains become short ones under their users.

mod common;

use std::fs;
use std::os::unix::fs::FileExt;

use common::{open_rw, patterned, read_at, Node};
use rustix::fs::{fallocate, FallocateFlags};
use serde_json::{json, Value};

const MIB: u64 = 1 << 20;

fn uuid(number: u32) -> String {
    format!("00000000-0000-4000-8000-{number:012}")
}

fn merge(node: &Node, number: u32, layers: &[Value]) -> (u16, Value) {
    node.call(
        "PUT",
        &format!("/v1/layers/{}", uuid(number)),
        json!({ "layers": layers, "merge": true }),
    )
}

fn wait(node: &Node, number: u32) -> Value {
    node.ok(
        "GET",
        &format!("/v1/layers/{}?wait_ms=60000", uuid(number)),
        Value::Null,
    )
}

/// An image with several layers; returns what every point in time looks like, and the layers.
fn history(node: &Node, points: u64) -> (Vec<Vec<u8>>, Vec<Value>) {
    let disk = open_rw(&node.disk("disk", 2 * MIB));
    let mut content = vec![0; 2 << 20];
    let mut contents = Vec::new();
    let mut layers = Value::Null;
    for point in 0..points {
        let data = patterned(point, 100_000);
        let at = (point as usize * 170_000) % (2 << 20) / 2;
        disk.write_all_at(&data, at as u64).unwrap();
        content[at..at + data.len()].copy_from_slice(&data);
        let hole = (point as usize * 50_000) % (1 << 20);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&disk, flags, hole as u64, 30_000).unwrap();
        content[hole..hole + 30_000].fill(0);
        contents.push(content.clone());
        layers = node.seal("disk");
    }
    (contents, layers.as_array().unwrap().clone())
}

#[test]
fn merged_layers_take_the_place_of_those_they_were_made_from() {
    let mut node = Node::start();
    let (contents, layers) = history(&node, 8);
    let disk = open_rw(&node.mount().join("disk"));
    // Something unsealed on top, and the middle of the chain merged.
    disk.write_all_at(&[0xab; 5000], 77_777).unwrap();
    let mut expected = contents[7].clone();
    expected[77_777..82_777].fill(0xab);
    let (status, answer) = merge(&node, 1, &layers[2..6]);
    assert_eq!(status, 200, "{answer}");
    assert_eq!(wait(&node, 1)["state"], "sealed");
    assert_eq!(merge(&node, 1, &layers[2..6]).1["state"], "sealed");
    assert_eq!(merge(&node, 1, &layers[2..5]).0, 409);
    let replaced = node.ok(
        "POST",
        "/v1/images/disk/replace",
        json!({ "with": uuid(1) }),
    );
    let short = [&layers[..2], &[json!({ "id": uuid(1) })], &layers[6..]].concat();
    assert_eq!(replaced["layers"], json!(short));
    assert!(read_at(&disk, 0, 2 << 20) == expected);
    // The old chain still works for whoever has it, the new one is the same.
    for (id, chain) in [("old", &layers), ("new", &short)] {
        assert!(
            fs::read(node.fixed(id, "disk", &json!(chain))).unwrap() == contents[7],
            "{id}"
        );
    }
    node.ok("DELETE", "/v1/images/old", Value::Null);
    let name = |layer: &Value| format!("/v1/layers/{}", layer["id"].as_str().unwrap());
    assert_eq!(node.call("DELETE", &name(&layers[0]), Value::Null).0, 409);
    layers[2..6]
        .iter()
        .for_each(|layer| drop(node.ok("DELETE", &name(layer), Value::Null)));

    // It goes on, over a crash as well.
    disk.write_all_at(&[0xcd; 100], 1).unwrap();
    expected[1..101].fill(0xcd);
    node.kill();
    node.launch(&[]);
    assert!(read_at(&disk, 0, 2 << 20) == expected);
    let chain = node.seal("disk");
    assert_eq!(chain.as_array().unwrap().len(), 6);
    let (status, answer) = merge(&node, 2, chain.as_array().unwrap());
    assert_eq!(status, 200, "{answer}");
    assert_eq!(wait(&node, 2)["state"], "sealed");
    node.ok(
        "POST",
        "/v1/images/disk/replace",
        json!({ "with": uuid(2) }),
    );
    assert!(read_at(&disk, 0, 2 << 20) == expected);
    assert!(fs::read(node.fixed("one", "disk", &json!([{ "id": uuid(2) }]))).unwrap() == expected);
}

#[test]
fn merges_that_make_no_sense_are_refused() {
    let node = Node::start();
    let (_, layers) = history(&node, 4);
    assert_eq!(merge(&node, 1, &[]).0, 400);
    assert_eq!(merge(&node, 1, &layers[..1]).0, 400);
    assert_eq!(
        merge(&node, 1, &[layers[0].clone(), layers[2].clone()]).0,
        400
    );
    assert_eq!(
        merge(&node, 1, &[layers[2].clone(), layers[1].clone()]).0,
        400
    );
    assert_eq!(
        merge(&node, 1, &[layers[0].clone(), json!({ "id": uuid(7) })]).0,
        404
    );
    assert_eq!(
        node.call(
            "PUT",
            "/v1/layers/x",
            json!({ "layers": layers, "merge": true })
        )
        .0,
        400
    );
    assert_eq!(
        node.call(
            "PUT",
            &format!("/v1/layers/{}", uuid(1)),
            json!({ "layers": layers })
        )
        .0,
        400
    );
    assert_eq!(merge(&node, 1, &layers[..2]).0, 200);
    assert_eq!(wait(&node, 1)["state"], "sealed");
    node.disk("other", MIB);
    for (image, with, wanted) in [
        ("other", uuid(1), 409),
        ("none", uuid(1), 404),
        ("disk", uuid(9), 409),
    ] {
        let (status, answer) = node.call(
            "POST",
            &format!("/v1/images/{image}/replace"),
            json!({ "with": with }),
        );
        assert_eq!(status, wanted, "{answer}");
    }
    let own = layers[0]["id"].as_str().unwrap();
    assert_eq!(
        node.call("POST", "/v1/images/disk/replace", json!({ "with": own }))
            .0,
        409
    );
}

#[test]
fn a_merge_that_was_interrupted_is_forgotten_and_can_be_made_again() {
    for point in ["merge-recorded", "merge-written"] {
        let mut node = Node::start();
        let (contents, layers) = history(&node, 3);
        node.kill();
        node.launch(&[("AENV_FAILPOINT", point)]);
        let body = json!({ "layers": layers, "merge": true }).to_string();
        let _ = node.try_call("PUT", &format!("/v1/layers/{}", uuid(1)), &body);
        node.wait_for_death();
        node.launch(&[]);
        assert_eq!(
            node.call("GET", &format!("/v1/layers/{}", uuid(1)), Value::Null)
                .0,
            404,
            "{point}"
        );
        assert_eq!(
            fs::read_dir(node.state().join("layers")).unwrap().count(),
            0,
            "{point}"
        );
        assert_eq!(merge(&node, 1, &layers).0, 200, "{point}");
        assert_eq!(wait(&node, 1)["state"], "sealed", "{point}");
        assert!(
            fs::read(node.fixed("one", "disk", &json!([{ "id": uuid(1) }]))).unwrap()
                == contents[2]
        );
    }
}
