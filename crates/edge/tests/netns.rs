//! Guests in network namespaces of their own, with the same address and ports.

mod common;

use std::fs::File;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::*;
use rustix::thread::{move_into_link_name_space, LinkNameSpaceType};
use serde_json::json;

const ADDRESS: &str = "169.254.0.21";
const PORT: u16 = 8080;

/// A named network namespace with the address of a guest on its loopback device.
struct Namespace(String);

impl Namespace {
    fn new() -> Namespace {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!(
            "aenv-edge-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let namespace = Namespace(name);
        ip(&["netns", "add", &namespace.0]);
        namespace.ip(&["link", "set", "lo", "up"]);
        namespace.ip(&["address", "add", &format!("{ADDRESS}/30"), "dev", "lo"]);
        namespace
    }

    fn path(&self) -> PathBuf {
        Path::new("/run/netns").join(&self.0)
    }

    fn ip(&self, args: &[&str]) {
        ip(&[&["-n", &self.0], args].concat());
    }

    fn route(&self, id: &str, generation: u64) -> serde_json::Value {
        json!({ "sandbox_id": id, "generation": generation, "address": ADDRESS, "netns": self.path() })
    }

    /// A server inside; only its listening socket was made there.
    fn serve(&self, handle: impl Fn(Conn) + Send + Sync + 'static) -> Server {
        let file = File::open(self.path()).unwrap();
        let listener = std::thread::spawn(move || {
            move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            TcpListener::bind((ADDRESS, PORT)).unwrap()
        });
        Server::on(listener.join().unwrap(), handle)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip")
            .args(["netns", "delete", &self.0])
            .status();
    }
}

fn ip(args: &[&str]) {
    let output = Command::new("ip").args(args).output().unwrap();
    assert!(
        output.status.success(),
        "ip {args:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn equal_addresses_in_different_namespaces_are_different_guests() {
    let edge = Edge::start();
    let namespaces: Vec<Namespace> = (0..5).map(|_| Namespace::new()).collect();
    let servers: Vec<Server> = namespaces
        .iter()
        .enumerate()
        .map(|(n, namespace)| {
            edge.put(namespace.route(&format!("s{n}"), 1));
            namespace.serve(keep_alive(move |_, _| format!("guest {n}").into_bytes()))
        })
        .collect();
    let edge = &edge;
    std::thread::scope(|scope| {
        for worker in 0..4 {
            scope.spawn(move || {
                let mut conn = edge.connect();
                for k in 0..200 {
                    let n = (worker + k * 7) % 5;
                    assert_eq!(
                        conn.get(&format!("s{n}"), PORT, "/").text(),
                        format!("guest {n}")
                    );
                }
            });
        }
    });
    for server in &servers {
        assert!(
            server.accepted() <= 4,
            "connections were not kept: {}",
            server.accepted()
        );
    }
    // The address leads nowhere outside.
    let mut outside = route("outside");
    outside["address"] = json!("127.0.0.1");
    edge.put(outside);
    assert_eq!(edge.get("outside", PORT, "/").status, 502);
}

#[test]
fn a_new_namespace_at_an_old_path_is_another_guest() {
    let edge = Edge::start();
    let namespace = Namespace::new();
    let old = namespace.serve(keep_alive(|_, _| b"old".to_vec()));
    edge.put(namespace.route("abc", 1));
    let mut conn = edge.connect();
    assert_eq!(conn.get("abc", PORT, "/").text(), "old");
    ip(&["netns", "delete", &namespace.0]);
    ip(&["netns", "add", &namespace.0]);
    namespace.ip(&["link", "set", "lo", "up"]);
    namespace.ip(&["address", "add", &format!("{ADDRESS}/30"), "dev", "lo"]);
    let _new = namespace.serve(keep_alive(|_, _| b"new".to_vec()));
    // The edge holds the old one until it is told; then the inode makes the difference, not the path.
    assert_eq!(conn.get("abc", PORT, "/").text(), "old");
    edge.put(namespace.route("abc", 1));
    assert_eq!(conn.get("abc", PORT, "/").text(), "new");
    assert_eq!(old.accepted(), 1);
}

#[test]
fn a_removed_route_lets_go_of_its_namespace() {
    let edge = Edge::start();
    let namespace = Namespace::new();
    let _guest = namespace.serve(keep_alive(|_, _| b"hi".to_vec()));
    edge.put(namespace.route("abc", 1));
    assert_eq!(edge.get("abc", PORT, "/").text(), "hi");
    let pid = edge.child.id();
    let links = |what: &str| -> Vec<PathBuf> {
        let mut found = Vec::new();
        for task in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
            let task = task.unwrap().path();
            found.extend(std::fs::read_link(task.join("ns/net")));
            for fd in std::fs::read_dir(task.join("fd")).unwrap() {
                found.extend(std::fs::read_link(fd.unwrap().path()));
            }
        }
        found.retain(|link| link.to_string_lossy().starts_with(what));
        found.sort();
        found.dedup();
        found
    };
    assert_eq!(
        links("net:[").len() + links("/run/netns").len(),
        2,
        "home and the sandbox"
    );
    edge.delete("abc");
    eventually("the namespace to be free", || {
        (links("net:[").len() + links("/run/netns").len() == 1).then_some(())
    });
}

#[test]
fn a_guest_that_swallows_packets_is_a_timeout() {
    let edge = Edge::with(&["--connect-timeout-ms", "300"]);
    let namespace = Namespace::new();
    // A neighbour that exists on paper only: packets to it vanish.
    namespace.ip(&["link", "add", "near", "type", "veth", "peer", "name", "far"]);
    namespace.ip(&["address", "add", "10.9.8.1/24", "dev", "near"]);
    namespace.ip(&["link", "set", "near", "up"]);
    namespace.ip(&["link", "set", "far", "up"]);
    namespace.ip(&[
        "neighbour",
        "add",
        "10.9.8.7",
        "lladdr",
        "02:00:00:00:00:07",
        "dev",
        "near",
    ]);
    let mut spec = namespace.route("abc", 1);
    spec["address"] = json!("10.9.8.7");
    edge.put(spec);
    let started = Instant::now();
    let reply = edge.get("abc", PORT, "/");
    assert_eq!(
        (reply.status, reply.json()["code"].as_u64()),
        (504, Some(504))
    );
    assert!(
        started.elapsed() > Duration::from_millis(300)
            && started.elapsed() < Duration::from_secs(3)
    );
    // One that cannot be reached at all is a 502, and not "not found".
    let mut spec = namespace.route("def", 1);
    spec["address"] = json!("10.1.1.1");
    edge.put(spec);
    let reply = edge.get("def", PORT, "/");
    assert_eq!(reply.status, 502);
    assert!(!reply.text().contains("was not found"), "{}", reply.text());
    // A delete does not wait for the connect.
    let mut conn = edge.connect();
    conn.send(request("GET", "abc", PORT, "/", ""));
    assert!(conn.is_quiet_for(Duration::from_millis(50)));
    edge.delete("abc");
    assert!(conn.ends_with_reset());
}
