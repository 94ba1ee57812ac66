//! Uploads and downloads over `/files`.

mod common;

use common::*;
use flate2::write::GzEncoder;
use serde_json::json;
use std::io::{Read, Write};
use std::os::unix::fs::{symlink, MetadataExt, PermissionsExt};
use std::process::Command;

const OCTETS: (&str, &str) = ("content-type", "application/octet-stream");

fn upload(agent: &Agent, query: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
    let mut all = vec![OCTETS];
    all.extend_from_slice(headers);
    agent.request("POST", &format!("/files?{query}"), &all, body)
}

/// A multipart body of parts `(name, filename, content)`.
fn form(parts: &[(&str, Option<&str>, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, filename, content) in parts {
        let filename = filename
            .map(|f| format!("; filename=\"{f}\""))
            .unwrap_or_default();
        write!(
            body,
            "--B0\r\nContent-Disposition: form-data; name=\"{name}\"{filename}\r\n\r\n"
        )
        .unwrap();
        body.extend_from_slice(content);
        body.extend(b"\r\n");
    }
    body.extend(b"--B0--\r\n");
    body
}

fn upload_form(agent: &Agent, query: &str, parts: &[(&str, Option<&str>, &[u8])]) -> Response {
    let headers = [("content-type", "multipart/form-data; boundary=B0")];
    agent.request("POST", &format!("/files?{query}"), &headers, &form(parts))
}

fn gzip(data: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn large_files_come_back_as_they_were() {
    let agent = Agent::start();
    let data = noise(40 << 20, 3);
    let path = agent.path("deep/er/data.bin");
    let answer = upload(&agent, &format!("path={path}"), &[], &data);
    assert_eq!(
        (answer.status, answer.json()),
        (
            200,
            json!([{"path": path, "name": "data.bin", "type": "file"}])
        )
    );
    assert_eq!(std::fs::read(&path).unwrap(), data);
    let back = agent.get(&format!("/files?path={path}"));
    assert_eq!(
        (back.status, back.header("content-length")),
        (200, Some("41943040"))
    );
    assert_eq!(
        back.header("content-disposition"),
        Some("inline; filename=data.bin")
    );
    assert_eq!(
        back.header("content-type"),
        Some("application/octet-stream")
    );
    assert!(back.body == data);
    // The same as a form, and shorter: what was there before is gone.
    let answer = upload_form(
        &agent,
        &format!("path={path}"),
        &[("file", None, &data[..1 << 20])],
    );
    assert_eq!(answer.status, 200, "{}", answer.json());
    assert_eq!(std::fs::read(&path).unwrap(), &data[..1 << 20]);
}

#[test]
fn a_large_upload_needs_little_memory() {
    let agent = Agent::start();
    let data = noise(64 << 20, 4);
    let query = format!("path={}", agent.path("big"));
    assert_eq!(
        upload_form(&agent, &query, &[("file", None, &data)]).status,
        200
    );
    let back = agent.get(&format!("/files?path={}", agent.path("big")));
    assert!(back.body == data);
    let status = std::fs::read_to_string(format!("/proc/{}/status", agent.pid())).unwrap();
    let peak = status
        .lines()
        .find_map(|l| l.strip_prefix("VmHWM:"))
        .unwrap();
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak < 24 << 10, "{peak} KiB at the peak");
}

#[test]
fn forms_write_many_files_by_their_names() {
    let agent = Agent::in_root();
    let parts: [(&str, Option<&str>, &[u8]); 5] = [
        ("file", Some("/home/user/a.txt"), b"a"),
        ("note", None, b"ignored"),
        ("file", Some("rel/\u{e4} %22q%22.txt"), b""),
        ("file", Some("~/c;d.txt"), b"c\r\n--B"),
        ("other", Some("/etc/evil"), b"ignored"),
    ];
    let answer = upload_form(&agent, "", &parts);
    let expected = json!([
        {"path": "/home/user/a.txt", "name": "a.txt", "type": "file"},
        {"path": "/home/user/rel/\u{e4} \"q\".txt", "name": "\u{e4} \"q\".txt", "type": "file"},
        {"path": "/home/user/c;d.txt", "name": "c;d.txt", "type": "file"},
    ]);
    assert_eq!((answer.status, answer.json()), (200, expected));
    assert_eq!(
        std::fs::read(agent.path("home/user/c;d.txt")).unwrap(),
        b"c\r\n--B"
    );
    assert!(!agent.dir.path().join("etc/evil").exists());
    // Everything that was made is the user's, with the usual rights.
    for (path, mode) in [("home/user/a.txt", 0o100_644), ("home/user/rel", 0o040_755)] {
        let metadata = std::fs::metadata(agent.path(path)).unwrap();
        assert_eq!(
            (metadata.uid(), metadata.gid(), metadata.mode()),
            (1000, 1000, mode),
            "{path}"
        );
    }
    let empty = agent.get("/files?path=rel/%C3%A4+%22q%22.txt");
    assert_eq!(
        (empty.status, empty.header("content-length")),
        (200, Some("0"))
    );
    let none: Vec<serde_json::Value> = Vec::new();
    assert_eq!(
        upload_form(&agent, "", &[("note", None, b"x")]).json(),
        json!(none)
    );
}

#[test]
fn owners_follow_the_user_of_the_call_wherever_the_file_is() {
    let agent = Agent::in_root();
    for (query, path, uid) in [
        ("path=/opt/new/x&username=user", "opt/new/x", 1000),
        ("path=/srv/y&username=root", "srv/y", 0),
        ("path=/etc/passwd&username=user", "etc/passwd", 1000),
        ("path=z&username=root", "root/z", 0),
    ] {
        let passwd = std::fs::read(agent.path("etc/passwd")).unwrap();
        assert_eq!(upload(&agent, query, &[], &passwd).status, 200);
        assert_eq!(
            std::fs::metadata(agent.path(path)).unwrap().uid(),
            uid,
            "{path}"
        );
    }
    assert_eq!(
        std::fs::metadata(agent.path("opt/new")).unwrap().uid(),
        1000
    );
    let unknown = upload(&agent, "path=x&username=nobody", &[], b"");
    assert_eq!(
        (unknown.status, unknown.json()),
        (
            401,
            json!({"code": 401, "message": "invalid username: 'nobody'"})
        )
    );
}

#[test]
fn links_of_a_user_carry_only_the_rights_of_the_user() {
    let agent = Agent::in_root();
    let home = agent.dir.path().join("home/user");
    std::fs::write(agent.path("root/secret"), "secret").unwrap();
    std::fs::set_permissions(agent.path("root"), std::fs::Permissions::from_mode(0o700)).unwrap();
    let as_user = |name: &str, target: &str| {
        symlink(target, home.join(name)).unwrap();
        std::os::unix::fs::lchown(home.join(name), Some(1000), Some(1000)).unwrap();
    };
    as_user("etc", "/etc");
    as_user("root", "../../root");
    as_user("secret", "/root/secret");
    as_user("own", "/home/user/real");
    for path in ["etc/passwd", "etc/new/file", "root/file", "secret"] {
        let answer = upload(&agent, &format!("path={path}&username=user"), &[], b"evil");
        assert_eq!(answer.status, 403, "{path}: {}", answer.json());
    }
    assert_eq!(agent.get("/files?path=secret&username=user").status, 403);
    assert_eq!(std::fs::metadata(agent.path("etc")).unwrap().uid(), 0);
    assert!(!agent.dir.path().join("etc/new").exists());
    assert_eq!(
        upload(&agent, "path=own&username=user", &[], b"mine").status,
        200
    );
    assert_eq!(std::fs::metadata(home.join("real")).unwrap().uid(), 1000);
    // Links of root are root's will, and root may follow any link.
    symlink("/root", agent.path("opt")).unwrap();
    assert_eq!(
        upload(&agent, "path=/opt/x&username=user", &[], b"1").status,
        200
    );
    assert_eq!(
        agent
            .get("/files?path=/home/user/secret&username=root")
            .body,
        b"secret"
    );
    // The rights of the thread are back afterwards.
    assert_eq!(
        upload(&agent, "path=/root/again&username=user", &[], b"1").status,
        200
    );
    for path in ["/home/user/loop", "/home/user/loop/x"] {
        let _ = symlink("loop", home.join("loop"));
        assert_eq!(agent.get(&format!("/files?path={path}")).status, 400);
    }
}

#[test]
fn what_is_no_regular_file_is_refused_at_once() {
    let agent = Agent::start();
    Command::new("mkfifo")
        .arg(agent.path("fifo"))
        .status()
        .unwrap();
    for path in [
        agent.path("fifo"),
        agent.path(""),
        "/dev/null".into(),
        "/dev/tty".into(),
    ] {
        let down = agent.get(&format!("/files?path={path}"));
        assert_eq!(down.status, 400, "{path}: {}", down.json());
        let up = upload(&agent, &format!("path={path}"), &[], b"x");
        assert_eq!(up.status, 400, "{path}: {}", up.json());
    }
    let missing = agent.get("/files?path=/no/such/file");
    assert_eq!(
        (missing.status, missing.json()),
        (
            404,
            json!({"code": 404, "message": "path '/no/such/file' does not exist"})
        )
    );
    for path in ["~other/x", "a%00b", "%ff", "%zz"] {
        assert_eq!(
            agent.get(&format!("/files?path={path}")).status,
            400,
            "{path}"
        );
    }
    let long = "x".repeat(300);
    assert_eq!(agent.get(&format!("/files?path=/tmp/{long}")).status, 400);
    assert!(agent
        .get("/files?path=/proc/version")
        .body
        .starts_with(b"Linux"));
}

#[test]
fn requests_without_a_target_or_sense_are_refused() {
    let agent = Agent::start();
    let (a, b) = (agent.path("a"), agent.path("b"));
    let plain = |body: &[u8], kind: &str| {
        agent
            .request("POST", "/files", &[("content-type", kind)], body)
            .status
    };
    assert_eq!(plain(b"x", "application/octet-stream"), 400);
    assert_eq!(plain(b"x", "text/plain"), 400);
    assert_eq!(plain(b"x", "multipart/form-data"), 400);
    assert_eq!(
        plain(b"no boundary at all", "multipart/form-data; boundary=B0"),
        400
    );
    assert_eq!(
        plain(
            &form(&[("file", None, b"x")]),
            "multipart/form-data; boundary=B0"
        ),
        400
    );
    let twice = [
        ("file", Some(a.as_str()), &b"1"[..]),
        ("file", Some(&a), b"2"),
    ];
    assert_eq!(upload_form(&agent, "", &twice).status, 400);
    let to_one = [
        ("file", Some(a.as_str()), &b"1"[..]),
        ("file", Some(&b), b"2"),
    ];
    assert_eq!(
        upload_form(&agent, &format!("path={a}"), &to_one).status,
        400
    );
    let cut = form(&[("file", Some(&a), b"data")]);
    assert_eq!(
        plain(&cut[..cut.len() - 6], "multipart/form-data; boundary=B0"),
        400
    );
    let other = agent.request("PUT", "/files?path=x", &[], b"");
    assert_eq!(
        (other.status, other.header("allow")),
        (405, Some("GET, HEAD, POST"))
    );
}

#[test]
fn compressed_uploads_are_decoded() {
    let agent = Agent::start();
    let path = agent.path("z");
    let data = vec![b'z'; 30 << 20];
    let query = format!("path={path}");
    assert_eq!(
        upload(
            &agent,
            &query,
            &[("content-encoding", "gzip")],
            &gzip(&data)
        )
        .status,
        200
    );
    assert!(std::fs::read(&path).unwrap() == data);
    let headers = [
        ("content-type", "multipart/form-data; boundary=B0"),
        ("content-encoding", "gzip"),
    ];
    let body = gzip(&form(&[("file", Some(&path), b"small")]));
    assert_eq!(agent.request("POST", "/files", &headers, &body).status, 200);
    assert_eq!(std::fs::read(&path).unwrap(), b"small");
    assert_eq!(
        upload(&agent, &query, &[("content-encoding", "gzip")], b"not gzip").status,
        400
    );
    assert_eq!(
        upload(
            &agent,
            &query,
            &[("content-encoding", "gzip")],
            &gzip(&data)[..5000]
        )
        .status,
        400
    );
    assert_eq!(
        upload(&agent, &query, &[("content-encoding", "br")], b"x").status,
        400
    );
    assert_eq!(
        upload(&agent, &query, &[("content-encoding", "identity")], b"x").status,
        200
    );
}

#[test]
fn downloads_are_compressed_for_those_who_take_nothing_else() {
    let agent = Agent::start();
    let path = agent.path("t.txt");
    let data = noise(100_000, 9).repeat(30);
    std::fs::write(&path, &data).unwrap();
    let get = |headers: &[(&str, &str)]| {
        agent.request("GET", &format!("/files?path={path}"), headers, b"")
    };
    let packed = get(&[("accept-encoding", "gzip")]);
    assert_eq!(
        (packed.status, packed.header("content-encoding")),
        (200, Some("gzip"))
    );
    let mut plain = Vec::new();
    flate2::read::GzDecoder::new(&packed.body[..])
        .read_to_end(&mut plain)
        .unwrap();
    assert!(plain == data);
    assert_eq!(get(&[("accept-encoding", "br, identity;q=0")]).status, 406);
    assert_eq!(get(&[("accept-encoding", "br, *;q=0")]).status, 406);
    let forced = get(&[("accept-encoding", "br, gzip, identity;q=0")]);
    assert_eq!(forced.header("content-encoding"), Some("gzip"));
    for headers in [
        &[("accept-encoding", "gzip, deflate")][..],
        &[("accept-encoding", "identity")],
        &[("accept-encoding", "gzip"), ("range", "bytes=0-")],
        &[],
    ] {
        let response = get(headers);
        assert_eq!(response.header("content-encoding"), None);
        assert_eq!(response.header("vary"), Some("accept-encoding"));
        assert!(response.body == data);
    }
}

#[test]
fn ranges_and_dates_are_honoured() {
    let agent = Agent::start();
    let path = agent.path("r.txt");
    std::fs::write(&path, "0123456789").unwrap();
    let get = |headers: &[(&str, &str)]| {
        agent.request("GET", &format!("/files?path={path}"), headers, b"")
    };
    let whole = get(&[]);
    let date = whole.header("last-modified").unwrap().to_owned();
    for (range, status, body, described) in [
        ("bytes=2-4", 206, "234", "bytes 2-4/10"),
        ("bytes=7-", 206, "789", "bytes 7-9/10"),
        ("bytes=-3", 206, "789", "bytes 7-9/10"),
        ("bytes=-30", 206, "0123456789", "bytes 0-9/10"),
        ("bytes=5-100", 206, "56789", "bytes 5-9/10"),
        ("bytes=0-1,3-4", 200, "0123456789", ""),
        ("bytes=4-2", 200, "0123456789", ""),
        ("lines=1-2", 200, "0123456789", ""),
    ] {
        let response = get(&[("range", range)]);
        assert_eq!(
            (response.status, std::str::from_utf8(&response.body)),
            (status, Ok(body)),
            "{range}"
        );
        assert_eq!(
            response.header("content-range").unwrap_or(""),
            described,
            "{range}"
        );
    }
    for range in ["bytes=10-", "bytes=-0", "bytes=18446744073709551615-"] {
        let response = get(&[("range", range)]);
        assert_eq!(
            (response.status, response.header("content-range")),
            (416, Some("bytes */10")),
            "{range}"
        );
    }
    assert_eq!(
        get(&[("range", "bytes=1-2"), ("if-range", &date)]).status,
        206
    );
    assert_eq!(
        get(&[
            ("range", "bytes=1-2"),
            ("if-range", "Thu, 01 Jan 1970 00:00:00 GMT")
        ])
        .status,
        200
    );
    assert_eq!(get(&[("if-modified-since", &date)]).status, 304);
    assert_eq!(
        get(&[("if-modified-since", "Thu, 01 Jan 1970 00:00:00 GMT")]).status,
        200
    );
    let head = agent.request("HEAD", &format!("/files?path={path}"), &[], b"");
    assert_eq!(
        (head.status, head.header("content-length")),
        (200, Some("10"))
    );
}

#[test]
fn metadata_is_stored_and_replaced() {
    let agent = Agent::start();
    let path = agent.path("m.txt");
    let query = format!("path={path}");
    let stat = || {
        agent.ok("/filesystem.Filesystem/Stat", json!({"path": path}))["entry"]["metadata"].clone()
    };
    let answer = upload(
        &agent,
        &query,
        &[("x-metadata-Author", "me"), ("X-Metadata-tag", "1 2")],
        b"x",
    );
    let expected = json!({"author": "me", "tag": "1 2"});
    assert_eq!(answer.json()[0]["metadata"], expected);
    assert_eq!(stat(), expected);
    assert_eq!(
        upload(&agent, &query, &[("x-metadata-new", "v")], b"x").json()[0]["metadata"],
        json!({"new": "v"})
    );
    assert_eq!(stat(), json!({"new": "v"}));
    assert!(upload(&agent, &query, &[], b"x").json()[0]
        .get("metadata")
        .is_none());
    assert!(stat().is_null());
    let long = "v".repeat(5000);
    let key = format!("x-metadata-{}", "k".repeat(247));
    for (name, value) in [
        ("x-metadata-big", long.as_str()),
        (&key, "v"),
        ("x-metadata-bin", "\u{e4}"),
        ("x-metadata-", "v"),
    ] {
        assert_eq!(
            upload(&agent, &query, &[(name, value)], b"x").status,
            400,
            "{name}"
        );
    }
}

#[test]
fn tokens_and_signatures_open_files() {
    let agent = Agent::start();
    let path = agent.path("s");
    std::fs::write(&path, "signed").unwrap();
    let init = json!({"accessToken": "top secret"}).to_string();
    assert_eq!(
        agent
            .request("POST", "/init", &[("x-aenv-control", "c")], init.as_bytes())
            .status,
        204
    );
    let message = |response: Response| {
        (
            response.status,
            response.json()["message"].as_str().unwrap().to_owned(),
        )
    };
    let get = |more: &str, headers: &[(&str, &str)]| {
        agent.request("GET", &format!("/files?path={path}{more}"), headers, b"")
    };
    assert_eq!(get("", &[("x-access-token", "top secret")]).body, b"signed");
    let wrong = (
        401,
        "access token present in header but does not match".to_owned(),
    );
    assert_eq!(message(get("", &[("x-access-token", "wrong")])), wrong);
    assert_eq!(
        message(get("", &[])),
        (401, "missing signature query parameter".to_owned())
    );
    assert_eq!(
        message(get("&signature=v1_x", &[])),
        (401, "invalid signature".to_owned())
    );
    let sign = |operation: &str, expiration: &str| {
        let raw = format!("{path}:{operation}::top secret{expiration}");
        let command =
            format!("printf %s '{raw}' | openssl dgst -sha256 -binary | base64 | tr -d '=\\n'");
        let output = Command::new("sh").args(["-c", &command]).output().unwrap();
        let digest = String::from_utf8(output.stdout).unwrap();
        format!(
            "&signature=v1_{}",
            digest.replace('+', "%2B").replace('/', "%2F")
        )
    };
    assert_eq!(get(&sign("read", ""), &[]).body, b"signed");
    let valid = format!(
        "{}&signature_expiration=99999999999",
        sign("read", ":99999999999")
    );
    assert_eq!(get(&valid, &[]).status, 200);
    let expired = get(
        &format!("{}&signature_expiration=1000", sign("read", ":1000")),
        &[],
    );
    assert_eq!(
        expired.json(),
        json!({"code": 401, "message": "signature is already expired"})
    );
    assert_eq!(
        message(get(&sign("write", ""), &[])),
        (401, "invalid signature".to_owned())
    );
    let answer = upload_form(
        &agent,
        &format!("path={path}{}", sign("write", "")),
        &[("file", None, b"new")],
    );
    assert_eq!(answer.status, 200);
    assert_eq!(std::fs::read(&path).unwrap(), b"new");
}

#[test]
fn a_full_disk_is_reported_to_a_client_that_is_still_sending() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = Command::new("unshare");
    let script = r#"mount -t tmpfs -o size=1m tmpfs "$0" && exec "$@""#;
    command
        .args(["--mount", "sh", "-c", script])
        .arg(dir.path())
        .arg(env!("CARGO_BIN_EXE_aenv-envd"));
    let agent = Agent::launch(command, &[], dir);
    let query = format!("path={}", agent.path("big"));
    let answer = upload(&agent, &query, &[], &noise(20 << 20, 5));
    assert_eq!(
        (answer.status, answer.json()["code"].as_i64()),
        (507, Some(507))
    );
    let query = format!("path={}", agent.path("small"));
    assert_eq!(
        upload_form(&agent, &query, &[("file", None, &noise(3 << 20, 5))]).status,
        507
    );
}

#[test]
fn clients_that_break_off_leave_the_agent_well() {
    let agent = Agent::start();
    let path = agent.path("part");
    for _ in 0..20 {
        let mut stream = agent.connect();
        stream
            .write_all(&head(
                "POST",
                &format!("/files?path={path}"),
                &[OCTETS],
                Some(1 << 30),
            ))
            .unwrap();
        stream.write_all(&noise(500_000, 6)).unwrap();
        drop(stream);
    }
    std::fs::write(agent.path("big"), noise(30 << 20, 7)).unwrap();
    for _ in 0..20 {
        let mut stream = agent.connect();
        stream
            .write_all(&head(
                "GET",
                &format!("/files?path={}", agent.path("big")),
                &[],
                Some(0),
            ))
            .unwrap();
        stream.read_exact(&mut [0; 1000]).unwrap();
    }
    let descriptors = || {
        std::fs::read_dir(format!("/proc/{}/fd", agent.pid()))
            .unwrap()
            .count()
    };
    eventually("descriptors are closed", || {
        (descriptors() < 20).then_some(())
    });
    assert_eq!(agent.get("/health").status, 204);
}

#[test]
fn many_stalled_downloads_do_not_block_others() {
    let agent = Agent::start();
    let path = agent.path("big");
    std::fs::write(&path, noise(20 << 20, 8)).unwrap();
    let stalled: Vec<_> = (0..200)
        .map(|_| {
            let mut stream = agent.connect();
            stream
                .write_all(&head("GET", &format!("/files?path={path}"), &[], Some(0)))
                .unwrap();
            stream
        })
        .collect();
    assert_eq!(
        agent.get(&format!("/files?path={path}")).body.len(),
        20 << 20
    );
    assert_eq!(agent.run("echo fine").text(), "fine\n");
    drop(stalled);
}
