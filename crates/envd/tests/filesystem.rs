//! The file system service.

mod common;

use common::*;
use rustix::fs::{mkdirat, openat, renameat_with, Mode, OFlags, RenameFlags, CWD};
use serde_json::{json, Value};
use std::os::unix::fs::{symlink, MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

const STAT: &str = "/filesystem.Filesystem/Stat";
const MAKE: &str = "/filesystem.Filesystem/MakeDir";
const MOVE: &str = "/filesystem.Filesystem/Move";
const LIST: &str = "/filesystem.Filesystem/ListDir";
const REMOVE: &str = "/filesystem.Filesystem/Remove";

fn path(path: &str) -> Value {
    json!({ "path": path })
}

/// The names of a listing, below `root`.
fn listing(agent: &Agent, root: &str, depth: u32) -> Vec<String> {
    let answer = agent.ok(LIST, json!({"path": root, "depth": depth}));
    let entries = answer["entries"].as_array().unwrap();
    let below = |e: &Value| {
        e["path"]
            .as_str()
            .unwrap()
            .strip_prefix(root)
            .unwrap()
            .trim_start_matches('/')
            .to_owned()
    };
    entries.iter().map(below).collect()
}

#[test]
fn entries_tell_what_is_there() {
    let agent = Agent::in_root();
    std::fs::write(agent.path("home/user/f.txt"), "hello").unwrap();
    std::fs::set_permissions(
        agent.path("home/user/f.txt"),
        std::fs::Permissions::from_mode(0o4640),
    )
    .unwrap();
    std::os::unix::fs::chown(agent.path("home/user/f.txt"), Some(1000), Some(2000)).unwrap();
    let file = std::fs::File::options()
        .write(true)
        .open(agent.path("home/user/f.txt"))
        .unwrap();
    file.set_modified(std::time::UNIX_EPOCH + std::time::Duration::from_millis(1_500_000_000_250))
        .unwrap();
    let expected = json!({
        "name": "f.txt", "type": "FILE_TYPE_FILE", "path": "/home/user/f.txt", "size": "5", "mode": 0o640,
        "permissions": "-rw-r-----", "owner": "user", "group": "team", "modifiedTime": "2017-07-14T02:40:00.25Z",
    });
    assert_eq!(agent.ok(STAT, path("f.txt"))["entry"], expected);
    let dir = agent.ok(STAT, path(""))["entry"].clone();
    assert_eq!(
        (&dir["type"], &dir["path"], &dir["permissions"]),
        (
            &json!("FILE_TYPE_DIRECTORY"),
            &json!("/home/user"),
            &json!("drwxr-xr-x")
        )
    );
    let root = agent.ok(STAT, path("/"))["entry"].clone();
    assert_eq!((&root["name"], &root["path"]), (&json!("/"), &json!("/")));
    std::os::unix::fs::chown(agent.path("tmp"), Some(4242), Some(4243)).unwrap();
    let numeric = agent.ok(STAT, path("/tmp"))["entry"].clone();
    assert_eq!(
        (&numeric["owner"], &numeric["group"]),
        (&json!("4242"), &json!("4243"))
    );
    for missing in ["/no", "f.txt/below", "no/such"] {
        assert_eq!(agent.fails(STAT, path(missing)), "not_found", "{missing}");
    }
    assert_eq!(agent.fails(STAT, path("~root/x")), "invalid_argument");
    let (status, answer) = agent.unary_as(Some("ghost"), STAT, path("/"));
    assert_eq!(
        (status, answer),
        (
            401,
            json!({"code": "unauthenticated", "message": "invalid username: 'ghost'"})
        )
    );
}

#[test]
fn links_have_the_type_of_their_target() {
    let agent = Agent::in_root();
    std::fs::create_dir(agent.path("home/user/dir")).unwrap();
    std::fs::write(agent.path("home/user/dir/f"), "12345").unwrap();
    for (target, name) in [
        ("dir", "d"),
        ("d/f", "f"),
        ("nowhere", "n"),
        ("f", "chain"),
        ("self", "self"),
        ("/home", "abs"),
    ] {
        symlink(target, agent.path(&format!("home/user/{name}"))).unwrap();
    }
    for (name, kind, target) in [
        ("d", "FILE_TYPE_DIRECTORY", json!("/home/user/dir")),
        ("f", "FILE_TYPE_FILE", json!("/home/user/dir/f")),
        ("chain", "FILE_TYPE_FILE", json!("/home/user/dir/f")),
        ("abs", "FILE_TYPE_DIRECTORY", json!("/home")),
        ("n", "FILE_TYPE_UNSPECIFIED", json!(null)),
        ("self", "FILE_TYPE_UNSPECIFIED", json!(null)),
    ] {
        let entry = agent.ok(STAT, path(name))["entry"].clone();
        assert_eq!(
            (&entry["type"], &entry["symlinkTarget"]),
            (&json!(kind), &target),
            "{name}"
        );
        assert_eq!(
            (&entry["path"], &entry["permissions"]),
            (&json!(format!("/home/user/{name}")), &json!("Lrwxrwxrwx"))
        );
    }
    assert_eq!(agent.ok(STAT, path("f"))["entry"]["mode"], 0o644);
    assert_eq!(agent.ok(STAT, path("f"))["entry"]["size"], "3");
}

#[test]
fn directories_are_made_with_their_parents_and_owners() {
    let agent = Agent::in_root();
    let entry = agent.ok(MAKE, path("/srv/a/b"))["entry"].clone();
    assert_eq!(
        (&entry["path"], &entry["owner"], &entry["type"]),
        (
            &json!("/srv/a/b"),
            &json!("user"),
            &json!("FILE_TYPE_DIRECTORY")
        )
    );
    for made in ["srv", "srv/a", "srv/a/b"] {
        let metadata = std::fs::metadata(agent.path(made)).unwrap();
        assert_eq!(
            (metadata.uid(), metadata.gid(), metadata.mode()),
            (1000, 1000, 0o040_755),
            "{made}"
        );
    }
    assert_eq!(agent.fails(MAKE, path("/srv/a/b")), "already_exists");
    assert_eq!(agent.fails(MAKE, path("/")), "already_exists");
    std::fs::write(agent.path("srv/file"), "").unwrap();
    assert_eq!(agent.fails(MAKE, path("/srv/file")), "invalid_argument");
    assert_eq!(agent.fails(MAKE, path("/srv/file/x")), "invalid_argument");
    let (status, _) = agent.unary_as(Some("root"), MAKE, path("~/mine"));
    assert_eq!(
        (
            status,
            std::fs::metadata(agent.path("root/mine")).unwrap().uid()
        ),
        (200, 0)
    );
}

#[test]
fn moving_renames_and_makes_room() {
    let agent = Agent::in_root();
    std::fs::write(agent.path("home/user/a"), "a").unwrap();
    std::fs::write(agent.path("home/user/b"), "b").unwrap();
    let go = |from: &str, to: &str| json!({"source": from, "destination": to});
    assert_eq!(
        agent.ok(MOVE, go("a", "new/dir/c"))["entry"]["path"],
        "/home/user/new/dir/c"
    );
    assert_eq!(
        std::fs::metadata(agent.path("home/user/new"))
            .unwrap()
            .uid(),
        1000
    );
    agent.ok(MOVE, go("new/dir/c", "b"));
    assert_eq!(std::fs::read(agent.path("home/user/b")).unwrap(), b"a");
    assert_eq!(agent.fails(MOVE, go("ghost", "deep/x")), "not_found");
    assert!(!Path::new(&agent.path("home/user/deep")).exists());
    symlink("/etc/passwd", agent.path("home/user/link")).unwrap();
    agent.ok(MOVE, go("link", "moved"));
    assert!(std::fs::symlink_metadata(agent.path("home/user/moved"))
        .unwrap()
        .is_symlink());
    assert_eq!(agent.fails(MOVE, go("/", "x")), "invalid_argument");
    assert_eq!(
        agent.fails(MOVE, go("new", "new/dir/inside")),
        "invalid_argument"
    );
    std::fs::create_dir_all(agent.path("home/user/full/x")).unwrap();
    assert_eq!(agent.fails(MOVE, go("new", "full")), "failed_precondition");
}

#[test]
fn listings_are_ordered_and_as_deep_as_asked() {
    let agent = Agent::in_root();
    for file in ["b/x", "b/y/z", "a.txt", "b.txt", "c/.hidden"] {
        let file = agent.path(&format!("home/user/{file}"));
        std::fs::create_dir_all(Path::new(&file).parent().unwrap()).unwrap();
        std::fs::write(file, "").unwrap();
    }
    symlink("b", agent.path("home/user/link")).unwrap();
    let top = ["a.txt", "b", "b.txt", "c", "link"];
    assert_eq!(listing(&agent, "/home/user", 0), top);
    assert_eq!(listing(&agent, "/home/user", 1), top);
    assert_eq!(
        listing(&agent, "/home/user", 2),
        [
            "a.txt",
            "b",
            "b/x",
            "b/y",
            "b.txt",
            "c",
            "c/.hidden",
            "link"
        ]
    );
    assert_eq!(listing(&agent, "/home/user", 9).len(), 9);
    // The root of a listing may be a link; its paths are those asked for.
    assert_eq!(listing(&agent, "/home/user/link", 2), ["x", "y", "y/z"]);
    assert_eq!(agent.fails(LIST, path("/ghost")), "not_found");
    assert_eq!(agent.fails(LIST, path("a.txt")), "invalid_argument");
    symlink("loop", agent.path("home/user/loop")).unwrap();
    assert_eq!(agent.fails(LIST, path("loop")), "failed_precondition");
    assert_eq!(
        agent.fails(LIST, json!({"path": "/", "depth": -1})),
        "invalid_argument"
    );
    assert_eq!(
        agent.ok(LIST, json!({"path": "c", "depth": "1"}))["entries"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
}

#[test]
fn endless_listings_are_refused() {
    let agent = Agent::in_root();
    let many = agent.path("home/user/many");
    std::fs::create_dir(&many).unwrap();
    for n in 0..50_001 {
        std::fs::hard_link(agent.path("etc/passwd"), format!("{many}/{n}"))
            .or_else(|_| std::fs::write(format!("{many}/{n}"), ""))
            .unwrap();
    }
    assert_eq!(agent.fails(LIST, path("many")), "resource_exhausted");
    std::fs::remove_file(format!("{many}/0")).unwrap();
    assert_eq!(listing(&agent, "/home/user/many", 1).len(), 50_000);
    assert_eq!(agent.ok(REMOVE, path("many")), json!({}));
    assert!(!Path::new(&many).exists());
}

#[test]
fn removal_takes_trees_but_not_what_links_point_to() {
    let agent = Agent::in_root();
    std::fs::create_dir_all(agent.path("home/user/t/a/b")).unwrap();
    std::fs::write(agent.path("home/user/t/a/f"), "").unwrap();
    symlink("/etc", agent.path("home/user/t/etc")).unwrap();
    symlink("/etc", agent.path("home/user/etc")).unwrap();
    agent.ok(REMOVE, path("t"));
    agent.ok(REMOVE, path("etc"));
    assert!(Path::new(&agent.path("etc/passwd")).exists());
    assert!(std::fs::symlink_metadata(agent.path("home/user/etc")).is_err());
    for missing in ["t", "no/such", "/ghost"] {
        assert_eq!(agent.ok(REMOVE, path(missing)), json!({}));
    }
    assert_eq!(agent.fails(REMOVE, path("/")), "invalid_argument");
}

#[test]
fn very_deep_trees_are_removed() {
    let agent = Agent::in_root();
    // Deeper than descriptors are held, and longer than a path can be.
    let flags = OFlags::PATH | OFlags::DIRECTORY;
    let mut dir = openat(CWD, agent.path("home/user"), flags, Mode::empty()).unwrap();
    for _ in 0..3000 {
        mkdirat(&dir, "dddd", Mode::RWXU).unwrap();
        dir = openat(&dir, "dddd", flags, Mode::empty()).unwrap();
        openat(&dir, "f", OFlags::CREATE | OFlags::WRONLY, Mode::RUSR).unwrap();
    }
    assert_eq!(listing(&agent, "/home/user", 10).len(), 19);
    agent.ok(REMOVE, path("dddd"));
    assert!(!Path::new(&agent.path("home/user/dddd")).exists());
    assert_eq!(listing(&agent, "/home/user", 1), [""; 0]);
}

#[test]
fn trees_that_change_while_they_are_removed_do_no_harm() {
    let agent = Agent::in_root();
    let keep = agent.path("root/keep");
    std::fs::create_dir(&keep).unwrap();
    std::fs::write(format!("{keep}/file"), "").unwrap();
    let (dir, other) = (agent.path("home/user/race"), agent.path("home/user/other"));
    let done = AtomicBool::new(false);
    let seen = std::thread::scope(|scope| {
        // Somebody swaps a directory for a link to another place, all the time.
        scope.spawn(|| {
            symlink("/root/keep", &other).unwrap();
            while !done.load(Ordering::Relaxed) {
                let _ = std::fs::create_dir_all(format!("{dir}/x/y"));
                let _ = std::fs::rename(&other, format!("{dir}/x/y/l"));
                let _ = std::fs::remove_file(&other);
                let _ = symlink("/root/keep", &other);
                let inside = format!("{dir}/x");
                let _ = renameat_with(CWD, &other, CWD, inside, RenameFlags::EXCHANGE);
            }
        });
        let seen: Vec<_> = (0..300)
            .flat_map(|_| {
                [
                    agent.unary(REMOVE, path("race")),
                    agent.unary(LIST, json!({"path": "race", "depth": 5})),
                ]
            })
            .collect();
        done.store(true, Ordering::Relaxed);
        seen
    });
    // Success, missing, or "not empty" because something new was put there.
    for (status, answer) in seen {
        assert!([200, 400, 404].contains(&status), "{status} {answer}");
    }
    assert!(Path::new(&format!("{keep}/file")).exists());
}
