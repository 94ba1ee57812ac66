//! A full disk hurts who needs room, for as long as there is none, and nobody else.

mod common;

use std::fs;
use std::os::unix::fs::FileExt;

use common::{errno, open_rw, patterned, read_at, Node};
use serde_json::{json, Value};

const MIB: u64 = 1 << 20;

#[test]
fn writes_fail_while_there_is_no_room_and_nothing_is_corrupted() {
    let mut node = Node::on_small_disk(16);
    let (greedy, modest) = (
        open_rw(&node.disk("greedy", 64 * MIB)),
        open_rw(&node.disk("modest", MIB)),
    );
    let small = patterned(1, 8192);
    modest.write_all_at(&small, 0).unwrap();
    let layers = node.seal("modest");
    let fixed = node.fixed("fixed", "disk", &layers);

    // Until it fails.
    let mut written = 0u64;
    let failure = loop {
        let data = patterned(100 + written, 256 << 10);
        match greedy.write_at(&data, written * (256 << 10)) {
            Ok(count) => assert_eq!(count, data.len()),
            Err(error) => break error,
        }
        written += 1;
        assert!(written < 64, "the disk is larger than it should be");
    };
    assert_eq!(errno::<()>(Err(failure)), libc::ENOSPC);
    let intact = |node: &Node| {
        for block in 0..written {
            let data = patterned(100 + block, 256 << 10);
            let file = open_rw(&node.mount().join("greedy"));
            assert!(
                read_at(&file, block * (256 << 10), 256 << 10) == data,
                "block {block}"
            );
        }
        assert!(fs::read(&fixed).unwrap()[..8192] == small);
    };
    intact(&node);
    // Sealing and opening need room, too, say so, and can be done later.
    let (status, answer) = node.call(
        "POST",
        "/v1/images/greedy/seal",
        json!({ "wait_ms": 30_000 }),
    );
    assert_eq!(status, 507, "{answer}");
    assert!(
        answer["message"]
            .as_str()
            .unwrap()
            .contains("free some space"),
        "{answer}"
    );
    let spec = json!({ "layers": [], "virtual_size": MIB, "mode": "disk", "read_only": false });
    let (status, answer) = node.call("PUT", "/v1/images/more", spec.clone());
    assert_eq!(status, 507, "{answer}");
    // The daemon may even die now.
    node.kill();
    node.launch(&[]);
    intact(&node);

    node.enlarge_disk(64);
    greedy.write_all_at(&patterned(100, 256 << 10), 0).unwrap();
    intact(&node);
    node.seal("greedy");
    node.ok("PUT", "/v1/images/more", spec);
    intact(&node);
    let images = node.ok("GET", "/v1/images", Value::Null);
    assert!(
        images["images"]
            .as_array()
            .unwrap()
            .iter()
            .all(|image| image["state"] == "ready"),
        "{images}"
    );
}
