//! Watching directories.

mod common;

use common::*;
use serde_json::{json, Value};
use std::process::Command;

const CREATE: &str = "/filesystem.Filesystem/CreateWatcher";
const EVENTS: &str = "/filesystem.Filesystem/GetWatcherEvents";
const REMOVE: &str = "/filesystem.Filesystem/RemoveWatcher";
const WATCH: &str = "/filesystem.Filesystem/WatchDir";

fn watcher(agent: &Agent, request: Value) -> Value {
    json!({ "watcherId": agent.ok(CREATE, request)["watcherId"] })
}

/// Name and type of each event that is there now.
fn events(agent: &Agent, watcher: &Value) -> Vec<(String, String)> {
    let answer = agent.ok(EVENTS, watcher.clone());
    answer["events"]
        .as_array()
        .unwrap()
        .iter()
        .map(brief)
        .collect()
}

fn brief(event: &Value) -> (String, String) {
    let kind = event["type"]
        .as_str()
        .unwrap()
        .strip_prefix("EVENT_TYPE_")
        .unwrap();
    (event["name"].as_str().unwrap().to_owned(), kind.to_owned())
}

fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
    list.iter()
        .map(|(name, kind)| ((*name).to_owned(), (*kind).to_owned()))
        .collect()
}

fn upload(agent: &Agent, path: &str) {
    let target = format!("/files?path={path}");
    assert_eq!(
        agent
            .request(
                "POST",
                &target,
                &[("content-type", "application/octet-stream")],
                b"hello"
            )
            .status,
        200
    );
}

#[test]
fn an_upload_is_exactly_three_events_and_they_are_there_at_once() {
    let agent = Agent::start();
    let watcher = watcher(&agent, json!({"path": agent.dir.path()}));
    for name in ["first", "second"] {
        upload(&agent, &agent.path(name));
        assert_eq!(
            events(&agent, &watcher),
            pairs(&[(name, "CREATE"), (name, "CHMOD"), (name, "WRITE")])
        );
    }
    assert_eq!(events(&agent, &watcher), []);
}

#[test]
fn every_kind_of_change_is_told() {
    let agent = Agent::start();
    let watcher = watcher(
        &agent,
        json!({"path": agent.dir.path(), "includeEntry": true}),
    );
    let script =
        "cd $0 && : > a && chmod 600 a && echo x >> a && mv a b && rm b && mkdir d && rmdir d";
    assert!(Command::new("sh")
        .args(["-c", script])
        .arg(agent.dir.path())
        .status()
        .unwrap()
        .success());
    let answer = agent.ok(EVENTS, watcher.clone());
    let list: Vec<_> = answer["events"]
        .as_array()
        .unwrap()
        .iter()
        .map(brief)
        .collect();
    let expected = [
        ("a", "CREATE"),
        ("a", "CHMOD"),
        ("a", "WRITE"),
        ("a", "RENAME"),
        ("b", "CREATE"),
        ("b", "REMOVE"),
        ("d", "CREATE"),
        ("d", "REMOVE"),
    ];
    assert_eq!(list, pairs(&expected));
    upload(&agent, &agent.path("c"));
    let answer = agent.ok(EVENTS, watcher);
    let entry = &answer["events"][2]["entry"];
    assert_eq!(
        (&entry["path"], &entry["size"]),
        (&json!(agent.path("c")), &json!("5"))
    );
}

#[test]
fn without_recursion_only_the_directory_itself_is_watched() {
    let agent = Agent::start();
    std::fs::create_dir(agent.path("old")).unwrap();
    let watcher = watcher(
        &agent,
        json!({"path": agent.dir.path(), "recursive": false}),
    );
    std::fs::write(agent.path("old/x"), "").unwrap();
    std::fs::create_dir(agent.path("new")).unwrap();
    std::fs::write(agent.path("new/x"), "").unwrap();
    assert_eq!(events(&agent, &watcher), pairs(&[("new", "CREATE")]));
}

#[test]
fn recursion_follows_directories_that_come_and_go() {
    let agent = Agent::start();
    std::fs::create_dir_all(agent.path("w/old/deep")).unwrap();
    let watcher = watcher(&agent, json!({"path": agent.path("w"), "recursive": true}));
    std::fs::write(agent.path("w/old/deep/f"), "").unwrap();
    assert_eq!(events(&agent, &watcher), pairs(&[("old/deep/f", "CREATE")]));
    // Faster than any watch can be set: still each thing is told, and once.
    for n in 0..50 {
        std::fs::create_dir_all(agent.path(&format!("w/n{n}/a/b"))).unwrap();
        std::fs::File::create(agent.path(&format!("w/n{n}/a/b/f"))).unwrap();
        let mut seen = events(&agent, &watcher);
        seen.sort();
        let names = [
            format!("n{n}"),
            format!("n{n}/a"),
            format!("n{n}/a/b"),
            format!("n{n}/a/b/f"),
        ];
        let expected: Vec<_> = names
            .into_iter()
            .map(|name| (name, "CREATE".to_owned()))
            .collect();
        assert_eq!(seen, expected);
    }
    std::fs::write(agent.path("w/n7/a/late"), "").unwrap();
    assert_eq!(events(&agent, &watcher), pairs(&[("n7/a/late", "CREATE")]));
    std::fs::rename(agent.path("w/n7"), agent.path("away")).unwrap();
    std::fs::write(agent.path("away/a/unseen"), "").unwrap();
    assert_eq!(events(&agent, &watcher), pairs(&[("n7", "RENAME")]));
    std::fs::rename(agent.path("away"), agent.path("w/back")).unwrap();
    let mut seen = events(&agent, &watcher);
    seen.sort();
    let names = [
        "back",
        "back/a",
        "back/a/b",
        "back/a/b/f",
        "back/a/late",
        "back/a/unseen",
    ];
    assert_eq!(
        seen,
        names.map(|name| (name.to_owned(), "CREATE".to_owned()))
    );
    std::fs::write(agent.path("w/back/a/b/g"), "").unwrap();
    assert_eq!(events(&agent, &watcher), pairs(&[("back/a/b/g", "CREATE")]));
}

#[test]
fn streams_tell_events_as_they_happen() {
    let agent = Agent::start();
    let mut stream = agent.stream(
        WATCH,
        &[],
        &json!({"path": agent.dir.path(), "recursive": true}),
    );
    assert_eq!(stream.next().unwrap(), (0, json!({"start": {}})));
    std::fs::create_dir(agent.path("d")).unwrap();
    let expected = json!({"filesystem": {"name": "d", "type": "EVENT_TYPE_CREATE"}});
    assert_eq!(stream.next().unwrap(), (0, expected));
    std::fs::write(agent.path("d/f"), "").unwrap();
    let expected = json!({"filesystem": {"name": "d/f", "type": "EVENT_TYPE_CREATE"}});
    assert_eq!(stream.next().unwrap(), (0, expected));
    let bounded = [
        ("connect-timeout-ms", "300"),
        ("keepalive-ping-interval", "1"),
    ];
    let mut stream = agent.stream(WATCH, &bounded, &json!({"path": agent.dir.path()}));
    stream.next().unwrap();
    assert_eq!(stream.error()["code"], "deadline_exceeded");
    let mut stream = agent.stream(WATCH, &bounded[1..], &json!({"path": agent.dir.path()}));
    stream.next().unwrap();
    assert_eq!(stream.next().unwrap(), (0, json!({"keepalive": {}})));
}

#[test]
fn watches_end_with_their_clients() {
    let agent = Agent::start();
    let descriptors = || {
        std::fs::read_dir(format!("/proc/{}/fd", agent.pid()))
            .unwrap()
            .count()
    };
    agent.get("/health");
    let before = eventually("the first connection is closed", || {
        Some(descriptors()).filter(|n| *n < 20)
    });
    for _ in 0..30 {
        let mut stream = agent.stream(WATCH, &[], &json!({"path": agent.dir.path()}));
        stream.next().unwrap();
    }
    let watchers: Vec<_> = (0..30)
        .map(|_| watcher(&agent, json!({"path": agent.dir.path()})))
        .collect();
    for watcher in watchers {
        assert_eq!(agent.ok(REMOVE, watcher.clone()), json!({}));
        assert_eq!(agent.fails(REMOVE, watcher.clone()), "not_found");
        assert_eq!(agent.fails(EVENTS, watcher), "not_found");
    }
    eventually("descriptors are back", || {
        (descriptors() <= before).then_some(())
    });
}

#[test]
fn what_cannot_be_watched_is_refused() {
    let agent = Agent::in_root();
    for (path, code) in [
        ("/ghost", "not_found"),
        ("/etc/passwd", "invalid_argument"),
        ("~x/y", "invalid_argument"),
    ] {
        let request = json!({ "path": path });
        assert_eq!(agent.fails(CREATE, request.clone()), code);
        assert_eq!(agent.stream(WATCH, &[], &request).error()["code"], code);
    }
    for _ in 0..64 {
        agent.ok(CREATE, json!({"path": "/tmp"}));
    }
    assert_eq!(
        agent.fails(CREATE, json!({"path": "/tmp"})),
        "resource_exhausted"
    );
}

#[test]
fn lost_events_are_admitted() {
    let agent = Agent::start();
    let watcher = watcher(&agent, json!({"path": agent.dir.path()}));
    for n in 0..17_000 {
        std::fs::File::create(agent.path(&format!("f{n}"))).unwrap();
    }
    assert_eq!(agent.fails(EVENTS, watcher.clone()), "resource_exhausted");
    std::fs::File::create(agent.path("after")).unwrap();
    let seen = events(&agent, &watcher);
    assert_eq!(
        seen.last(),
        Some(&("after".to_owned(), "CREATE".to_owned()))
    );
}

#[test]
fn a_watched_directory_may_vanish() {
    let agent = Agent::start();
    std::fs::create_dir(agent.path("w")).unwrap();
    let watcher = watcher(&agent, json!({"path": agent.path("w"), "recursive": true}));
    std::fs::remove_dir(agent.path("w")).unwrap();
    assert_eq!(events(&agent, &watcher), pairs(&[(".", "REMOVE")]));
    assert_eq!(events(&agent, &watcher), []);
    agent.ok(REMOVE, watcher);
}
