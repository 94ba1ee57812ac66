//! Layers of memory taken from a process.

mod common;

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use common::frozen::Frozen;
use common::{errno, eventually, open_rw, path_in, patterned, read_at, Node};
use serde_json::{json, Value};

const MIB: usize = 1 << 20;
const PAGE: usize = 4096;

fn uuid(number: u32) -> String {
    format!("00000000-0000-4000-8000-{number:012}")
}

fn capture(node: &Node, number: u32, layers: &Value, plan: &Value) -> (u16, Value) {
    let body = json!({ "layers": layers, "capture": plan });
    node.call("PUT", &format!("/v1/layers/{}", uuid(number)), body)
}

fn wait(node: &Node, number: u32, until: &str) -> Value {
    let path = format!("/v1/layers/{}?wait_ms=60000&until={until}", uuid(number));
    node.ok("GET", &path, Value::Null)
}

fn with(layers: &Value, number: u32) -> Value {
    let mut all = layers.as_array().cloned().unwrap_or_default();
    all.push(json!({ "id": uuid(number) }));
    json!(all)
}

/// A memory image to start from.
fn template(node: &Node, data: &[u8]) -> (PathBuf, Value) {
    open_rw(&node.disk("template-disk", data.len() as u64))
        .write_all_at(data, 0)
        .unwrap();
    let layers = node.seal("template-disk");
    (node.fixed("template", "memory", &layers), layers)
}

/// Changes some pages, and writes to some without changing them.
fn scribble(memory: &mut [u8]) {
    let len = memory.len();
    memory[5 * PAGE..7 * PAGE].copy_from_slice(&patterned(50, 2 * PAGE));
    memory[len - PAGE..].copy_from_slice(&patterned(51, PAGE));
    memory[100 * PAGE..160 * PAGE].fill(0);
    for page in (200..250).step_by(2) {
        memory[page * PAGE + 17] ^= 0xff;
    }
    // Private pages with the old content.
    for page in 300..400 {
        let byte = memory[page * PAGE];
        memory[page * PAGE] = !byte;
        memory[page * PAGE] = byte;
    }
}

#[test]
fn a_captured_layer_shows_the_memory_of_the_process_before_and_after_it_ends() {
    for point in ["drain", "scanned"] {
        let mut node = Node::new();
        let hold = node.dir.path().join("hold");
        fs::write(&hold, "").unwrap();
        node.launch(&[("AENV_HOLD", &format!("{point}:{}", hold.display()))]);
        let data = patterned(1, 4 * MIB);
        let (path, layers) = template(&node, &data);
        let mut frozen = Frozen::new(Some(&path), data.len(), scribble);
        assert!(frozen.memory != data);

        let (status, layer) = capture(&node, 1, &layers, &frozen.plan());
        assert_eq!(
            (status, &layer["state"]),
            (200, &json!("writing")),
            "{layer}"
        );
        if point == "scanned" {
            let private = 2 + 1 + 60 + 25 + 100;
            let url = format!("/v1/layers/{}", uuid(1));
            eventually("the private pages are counted", || {
                node.ok("GET", &url, Value::Null)["captured"] == private * PAGE
            });
        }
        // The successor runs on it at once.
        let successor = node.fixed("successor", "memory", &with(&layers, 1));
        assert!(
            fs::read(&successor).unwrap() == frozen.memory,
            "live content"
        );
        let file = open_rw(&successor);
        drop_cache(&successor);
        for (at, len) in [
            (5 * PAGE - 3, 10),
            (99 * PAGE + 1, 2 * PAGE),
            (4 * MIB - 7, 7),
        ] {
            assert!(read_at(&file, at as u64, len) == frozen.memory[at..at + len]);
        }
        fs::remove_file(&hold).unwrap();
        let state = wait(&node, 1, "copied")["state"].clone();
        assert!(state == "copied" || state == "sealed", "{state}");
        frozen.kill();
        drop_cache(&successor);
        assert!(
            fs::read(&successor).unwrap() == frozen.memory,
            "content after the process ended"
        );
        let sealed = wait(&node, 1, "sealed");
        assert_eq!(sealed["state"], "sealed");
        let fresh = node.fixed("fresh", "memory", &with(&layers, 1));
        assert!(
            fs::read(&fresh).unwrap() == frozen.memory,
            "content of the file"
        );
        // Zeros and unchanged pages take no space: 28 pages of data, header, index and trailer.
        let size = fs::metadata(path_in(&sealed)).unwrap().len();
        assert_eq!(size as usize, (28 + 3) * PAGE);
        assert!(fs::read(&path).unwrap() == data, "the template changed");

        // What is there already is not captured again.
        let other = json!({ "pid": 1, "virtual_size": PAGE, "ranges": [{ "address": PAGE, "size": PAGE, "offset": 0 }] });
        assert_eq!(capture(&node, 1, &layers, &other).1["state"], "sealed");
    }
}

fn drop_cache(path: &Path) {
    let file = open_rw(path);
    // SAFETY: the kernel is only given a descriptor and numbers.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
}

#[test]
fn generations_of_captures_stack_up() {
    let node = Node::start();
    let data = patterned(2, 2 * MIB);
    let (mut path, mut layers) = template(&node, &data);
    for generation in 1..=6u32 {
        let frozen = Frozen::new(Some(&path), data.len(), |memory| {
            let at = generation as usize * 31 * PAGE;
            memory[at..at + 3 * PAGE].copy_from_slice(&patterned(u64::from(generation), 3 * PAGE));
        });
        let (status, layer) = capture(&node, generation, &layers, &frozen.plan());
        assert_eq!(status, 200, "{layer}");
        layers = with(&layers, generation);
        path = node.fixed(&format!("generation{generation}"), "memory", &layers);
        assert!(fs::read(&path).unwrap() == frozen.memory);
        assert_eq!(wait(&node, generation, "copied")["cause"], Value::Null);
    }
    for generation in 1..=6 {
        let sealed = wait(&node, generation, "sealed");
        assert_eq!(sealed["state"], "sealed");
        let size = fs::metadata(path_in(&sealed)).unwrap().len();
        assert_eq!(
            size as usize,
            (3 + 3) * PAGE,
            "only what changed since the last capture"
        );
    }
}

#[test]
fn fresh_memory_without_a_file_hides_what_is_below() {
    let node = Node::start();
    let data = patterned(3, MIB);
    let (_, layers) = template(&node, &data);
    let change =
        |memory: &mut [u8]| memory[40 * PAGE..44 * PAGE].copy_from_slice(&patterned(9, 4 * PAGE));
    // Over an image, pages that are not there are zeros; over nothing, they are nothing.
    for (number, layers) in [(1, layers), (2, json!([]))] {
        let mut frozen = Frozen::new(None, MIB, change);
        let (status, layer) = capture(&node, number, &layers, &frozen.plan());
        assert_eq!(status, 200, "{layer}");
        let image = node.fixed(&format!("image{number}"), "memory", &with(&layers, number));
        assert!(fs::read(&image).unwrap() == frozen.memory);
        assert_eq!(wait(&node, number, "sealed")["state"], "sealed");
        frozen.kill();
        let again = node.fixed(&format!("again{number}"), "memory", &with(&layers, number));
        assert!(fs::read(&again).unwrap() == frozen.memory);
    }
}

#[test]
fn copied_memory_needs_the_process_no_longer() {
    let mut node = Node::new();
    let hold = node.dir.path().join("hold");
    fs::write(&hold, "").unwrap();
    node.launch(&[("AENV_HOLD", &format!("drain:{}", hold.display()))]);
    let data = patterned(4, 40 * MIB);
    let (path, layers) = template(&node, &data);
    let mut frozen = Frozen::new(Some(&path), data.len(), |memory| {
        memory
            .chunks_mut(PAGE)
            .step_by(2)
            .for_each(|page| page[0] ^= 1);
        scribble(memory);
    });
    let mut plan = frozen.plan();
    plan["copy"] = json!(true);
    let (status, layer) = capture(&node, 1, &layers, &plan);
    assert_eq!(
        (status, &layer["state"]),
        (200, &json!("writing")),
        "{layer}"
    );
    frozen.kill();
    let image = node.fixed("image", "memory", &with(&layers, 1));
    assert!(fs::read(&image).unwrap() == frozen.memory);
    fs::remove_file(&hold).unwrap();
    assert_eq!(wait(&node, 1, "sealed")["state"], "sealed");
    let again = node.fixed("again", "memory", &with(&layers, 1));
    assert!(fs::read(&again).unwrap() == frozen.memory);
}

#[test]
fn a_process_that_ends_too_early_fails_its_layer_loudly() {
    let mut node = Node::new();
    let hold = node.dir.path().join("hold");
    fs::write(&hold, "").unwrap();
    node.launch(&[("AENV_HOLD", &format!("drain:{}", hold.display()))]);
    let data = patterned(5, MIB);
    let (path, layers) = template(&node, &data);
    let mut frozen = Frozen::new(Some(&path), data.len(), |memory| memory[0] ^= 1);
    assert_eq!(capture(&node, 1, &layers, &frozen.plan()).0, 200);
    let image = open_rw(&node.fixed("image", "memory", &with(&layers, 1)));
    frozen.kill();
    assert_eq!(errno(image.read_at(&mut [0; PAGE], 0)), libc::EIO);
    fs::remove_file(&hold).unwrap();
    let lost = wait(&node, 1, "sealed");
    assert_eq!(lost["state"], "failed");
    assert!(
        lost["cause"]
            .as_str()
            .unwrap()
            .contains("ended before its memory was copied"),
        "{lost}"
    );
    assert!(node.log().contains("ended before its memory was copied"));
    assert_eq!(errno(image.read_at(&mut [0; PAGE], 0)), libc::EIO);
    // In use it cannot be dropped; afterwards it can.
    let layer = format!("/v1/layers/{}", uuid(1));
    assert_eq!(node.call("DELETE", &layer, Value::Null).0, 409);
    node.ok("DELETE", "/v1/images/image", Value::Null);
    node.ok("DELETE", &layer, Value::Null);
    assert_eq!(node.call("GET", &layer, Value::Null).0, 404);
}

#[test]
fn a_capture_goes_on_after_the_daemon_died() {
    for point in [
        "capture-scanned",
        "capture-recorded",
        "capture-drained",
        "capture-copied",
    ] {
        let mut node = Node::start();
        let data = patterned(6, 2 * MIB);
        let (path, layers) = template(&node, &data);
        let frozen = Frozen::new(Some(&path), data.len(), scribble);
        node.kill();
        node.launch(&[("AENV_FAILPOINT", point)]);
        let body = json!({ "layers": layers, "capture": frozen.plan() }).to_string();
        let layer = format!("/v1/layers/{}", uuid(1));
        let spec =
            json!({ "layers": with(&layers, 1), "mode": "memory", "read_only": true }).to_string();
        // Either may be cut off by the death.
        let _ = node.try_call("PUT", &layer, &body);
        let _ = node.try_call("PUT", "/v1/images/successor", &spec);
        node.wait_for_death();
        node.launch(&[]);
        let (status, answer) = node.try_call("PUT", &layer, &body).unwrap();
        assert_eq!(status, 200, "{point}: {answer}");
        let successor = path_in(&node.ok(
            "PUT",
            "/v1/images/successor",
            serde_json::from_str(&spec).unwrap(),
        ));
        assert!(fs::read(&successor).unwrap() == frozen.memory, "{point}");
        assert_eq!(wait(&node, 1, "sealed")["state"], "sealed", "{point}");
        let fresh = node.fixed("fresh", "memory", &with(&layers, 1));
        assert!(fs::read(&fresh).unwrap() == frozen.memory, "{point}");
    }
}

#[test]
fn a_process_that_ends_while_the_daemon_is_down_fails_only_its_own_images() {
    let mut node = Node::new();
    let hold = node.dir.path().join("hold");
    fs::write(&hold, "").unwrap();
    let held = format!("drain:{}", hold.display());
    node.launch(&[("AENV_HOLD", &held)]);
    let data = patterned(7, 2 * MIB);
    let (path, layers) = template(&node, &data);
    let mut frozen = Frozen::new(Some(&path), data.len(), scribble);
    assert_eq!(capture(&node, 1, &layers, &frozen.plan()).0, 200);
    let image = open_rw(&node.fixed("image", "memory", &with(&layers, 1)));
    // Another daemon finds the process again and goes on ...
    node.kill();
    node.launch(&[("AENV_HOLD", &held)]);
    assert!(read_at(&image, 0, 2 * MIB) == frozen.memory);
    // ... but not if it has ended meanwhile.
    node.kill();
    frozen.kill();
    node.launch(&[]);
    let view = node.ok("GET", "/v1/images/image", Value::Null);
    assert_eq!(view["state"], "failed", "{view}");
    assert!(
        view["cause"].as_str().unwrap().contains("does not exist"),
        "{view}"
    );
    drop_cache(&node.mount().join("image"));
    assert_eq!(errno(image.read_at(&mut [0; PAGE], 0)), libc::EIO);
    assert_eq!(wait(&node, 1, "sealed")["state"], "failed");
    assert!(fs::read(&path).unwrap() == data);
}

#[test]
fn captures_that_make_no_sense_are_refused() {
    let node = Node::start();
    let frozen = Frozen::new(None, MIB, |memory| memory.fill(1));
    let good = frozen.plan();
    let with_range = |range: Value| {
        let mut plan = good.clone();
        plan["ranges"] = json!([range]);
        plan
    };
    let set = |key: &str, value: Value| {
        let mut plan = good.clone();
        plan[key] = value;
        plan
    };
    let at = frozen.address;
    let cases = [
        (set("pid", json!(0)), 404),
        (set("pid", json!(u32::MAX)), 404),
        (set("pid", json!(-1)), 400),
        (set("start_time", json!(1)), 404),
        (set("ranges", json!([])), 400),
        (set("virtual_size", json!(0)), 400),
        (set("virtual_size", json!(PAGE)), 400),
        (set("virtual_size", json!(u64::MAX)), 400),
        (
            with_range(json!({ "address": at + 1, "size": PAGE, "offset": 0 })),
            400,
        ),
        (
            with_range(json!({ "address": at, "size": 100, "offset": 0 })),
            400,
        ),
        (
            with_range(json!({ "address": at, "size": 0, "offset": 0 })),
            400,
        ),
        (
            with_range(json!({ "address": at, "size": PAGE, "offset": 512 })),
            400,
        ),
        (
            with_range(json!({ "address": at, "size": PAGE, "offset": MIB })),
            400,
        ),
        (
            with_range(json!({ "address": at, "size": PAGE, "offset": u64::MAX - 4095 })),
            400,
        ),
        (
            with_range(json!({ "address": u64::MAX - 4095, "size": PAGE, "offset": 0 })),
            400,
        ),
        (
            with_range(json!({ "address": PAGE, "size": PAGE, "offset": 0 })),
            400,
        ),
        (
            set(
                "ranges",
                json!([{ "address": at, "size": 2 * PAGE, "offset": 0 },
                              { "address": at, "size": PAGE, "offset": PAGE }]),
            ),
            400,
        ),
    ];
    for (plan, wanted) in cases {
        let (status, answer) = capture(&node, 1, &json!([]), &plan);
        assert_eq!(status, wanted, "{plan}: {answer}");
        assert!(answer["message"].as_str().is_some_and(|m| m.len() > 10));
    }
    let (status, answer) = node.call(
        "PUT",
        "/v1/layers/x",
        json!({ "layers": [], "capture": good }),
    );
    assert_eq!(status, 400, "{answer}");
    assert_eq!(capture(&node, 1, &json!([{ "id": uuid(9) }]), &good).0, 404);
    assert_eq!(
        node.ok("GET", "/v1/layers", Value::Null)["layers"],
        json!([])
    );
    assert_eq!(capture(&node, 1, &json!([]), &good).0, 200);
}

#[test]
fn shared_memory_is_refused() {
    let node = Node::start();
    let file = tempfile::tempfile().unwrap();
    file.set_len(PAGE as u64).unwrap();
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    // SAFETY: a new mapping at an address of the kernel's choice; it stays until the process ends.
    let base = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            PAGE,
            protection,
            flags,
            file.as_raw_fd(),
            0,
        )
    };
    let plan = json!({ "pid": std::process::id(), "virtual_size": PAGE,
                       "ranges": [{ "address": base as u64, "size": PAGE, "offset": 0 }] });
    let (status, answer) = capture(&node, 1, &json!([]), &plan);
    assert_eq!(status, 400);
    assert!(
        answer["message"]
            .as_str()
            .unwrap()
            .contains("shared mapping"),
        "{answer}"
    );
}

#[test]
fn a_capture_that_finds_the_disk_full_is_still_readable_and_can_be_tried_again() {
    let node = Node::on_small_disk(24);
    let frozen = Frozen::new(None, 32 * MIB, |memory| {
        memory.copy_from_slice(&patterned(8, 32 * MIB))
    });
    let ballast = node.state().join("ballast");
    assert_eq!(capture(&node, 1, &json!([]), &frozen.plan()).0, 200);
    let failed = wait(&node, 1, "sealed");
    assert_eq!(failed["state"], "failed");
    assert!(
        failed["cause"]
            .as_str()
            .unwrap()
            .contains("free some space"),
        "{failed}"
    );
    let image = node.fixed("image", "memory", &with(&json!([]), 1));
    assert!(fs::read(&image).unwrap() == frozen.memory);
    let _ = fs::remove_file(ballast);
    node.enlarge_disk(96);
    assert_eq!(
        capture(&node, 1, &json!([]), &frozen.plan()).1["state"],
        "writing"
    );
    eventually("the layer is sealed", || {
        wait(&node, 1, "sealed")["state"] == "sealed"
    });
    let again = node.fixed("again", "memory", &with(&json!([]), 1));
    assert!(fs::read(&again).unwrap() == frozen.memory);
}
