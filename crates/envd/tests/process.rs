//! Processes, from their start to every way they end.

mod common;

use base64::engine::general_purpose::STANDARD;
use base64::Engine;
use common::*;
use serde_json::{json, Value};
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

const START: &str = "/process.Process/Start";

fn alive(pid: u64) -> bool {
    std::path::Path::new(&format!("/proc/{pid}")).exists()
}

#[test]
fn output_and_status_are_those_of_the_program() {
    let agent = Agent::start();
    let mut stream = agent.start_shell("echo out; echo err >&2; echo $$; exit 3");
    let pid = stream.pid();
    let outcome = stream.outcome();
    assert_eq!(outcome.text(), format!("out\n{pid}\n"));
    assert_eq!(outcome.stderr, b"err\n");
    let expected =
        json!({"exitCode": 3, "exited": true, "status": "exit status 3", "error": "exit status 3"});
    assert_eq!(outcome.end, expected);
    let good = agent.run("exit 0").end;
    assert_eq!(
        good,
        json!({"exitCode": 0, "exited": true, "status": "exit status 0"})
    );
}

#[test]
fn bytes_pass_unchanged() {
    let agent = Agent::start();
    assert_eq!(
        agent.run(r"printf '\377\376\000\303'").stdout,
        b"\xff\xfe\0\xc3"
    );
}

#[test]
fn the_environment_has_its_layers_and_does_not_leak() {
    let agent = Agent::start();
    let init = json!({"envVars": {"A": "sandbox", "B": "sandbox"}, "sandboxId": "sb1", "templateId": "t1"});
    let headers = [("x-aenv-control", "c")];
    assert_eq!(
        agent
            .request("POST", "/init", &headers, init.to_string().as_bytes())
            .status,
        204
    );
    let mut start = shell("env");
    start["process"]["envs"] = json!({"B": "call", "C": "call"});
    let authorization = basic(Some("root")).unwrap();
    let outcome = agent
        .stream(START, &[("authorization", &authorization)], &start)
        .outcome()
        .text();
    for line in [
        "A=sandbox",
        "B=call",
        "C=call",
        "HOME=/root",
        "USER=root",
        "LOGNAME=root",
        "E2B_SANDBOX=true",
        "E2B_SANDBOX_ID=sb1",
        "E2B_TEMPLATE_ID=t1",
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    ] {
        assert!(
            outcome.lines().any(|l| l == line),
            "{line} is missing in {outcome}"
        );
    }
    let later = agent.run("env").text();
    assert!(
        later.contains("B=sandbox") && !later.contains("C="),
        "{later}"
    );
    for name in ["", "A=B", "A\0"] {
        start["process"]["envs"] = json!({ name: "x" });
        assert_eq!(
            agent.stream(START, &[], &start).error()["code"],
            "invalid_argument"
        );
    }
}

#[test]
fn users_are_switched_completely() {
    let agent = Agent::start();
    let authorization = basic(Some("nobody")).unwrap();
    let script = "id -u; id -g; id -G; cat /proc/self/status | grep -E '^(CapEff|NoNewPrivs)'; ulimit -n; umask; ls /proc/self/fd";
    let text = agent
        .stream(START, &[("authorization", &authorization)], &shell(script))
        .outcome()
        .text();
    let lines: Vec<_> = text.lines().collect();
    let passwd = std::fs::read_to_string("/etc/passwd").unwrap();
    let nobody: Vec<_> = passwd
        .lines()
        .find(|l| l.starts_with("nobody:"))
        .unwrap()
        .split(':')
        .collect();
    assert_eq!(lines[..3], [nobody[2], nobody[3], nobody[3]]);
    assert_eq!(lines[3..5], ["CapEff:\t0000000000000000", "NoNewPrivs:\t0"]);
    assert_eq!(lines[6], "0022");
    // Standard descriptors and the one of ls: nothing of the agent is inherited.
    assert_eq!(lines[7..], ["0", "1", "2", "3"]);
    for (name, code) in [("nobody-knows", "unauthenticated"), ("", "")] {
        let value = basic(Some(name)).unwrap();
        let mut stream = agent.stream(START, &[("authorization", &value)], &shell("true"));
        match code {
            "" => assert!(stream.pid() > 0),
            _ => {
                let error = stream.error();
                assert_eq!(
                    (error["code"].as_str(), error["message"].as_str()),
                    (Some(code), Some("invalid username: 'nobody-knows'"))
                );
            }
        }
    }
    let mut stream = agent.stream(START, &[("authorization", "Bearer x")], &shell("true"));
    assert_eq!(stream.error()["code"], "unauthenticated");
}

#[test]
fn signals_have_their_default_effect_whatever_started_the_agent() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_aenv-envd"));
    // SAFETY: the closure runs between fork and exec and only makes system calls.
    unsafe {
        command.pre_exec(|| {
            let mut all = std::mem::zeroed();
            libc::sigfillset(&mut all);
            libc::sigprocmask(libc::SIG_BLOCK, &all, std::ptr::null_mut());
            libc::signal(libc::SIGHUP, libc::SIG_IGN);
            libc::signal(libc::SIGINT, libc::SIG_IGN);
            Ok(())
        });
    }
    let agent = Agent::launch(command, &[], tempfile::tempdir().unwrap());
    let start =
        json!({"process": {"cmd": "grep", "args": ["-E", "^Sig(Blk|Ign)", "/proc/self/status"]}});
    let text = agent.stream(START, &[], &start).outcome().text();
    assert_eq!(
        text,
        "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n"
    );
}

#[test]
fn working_directories_are_checked_with_the_rights_of_the_user() {
    let agent = Agent::start();
    let in_dir = |user: &str, cwd: &str| {
        let mut start = shell("pwd");
        start["process"]["cwd"] = json!(cwd);
        agent
            .stream(
                START,
                &[("authorization", &basic(Some(user)).unwrap())],
                &start,
            )
            .outcome()
    };
    assert_eq!(in_dir("root", "/usr/../usr/bin").text(), "/usr/bin\n");
    assert_eq!(in_dir("root", "~").text(), "/root\n");
    let missing = in_dir("root", "/no/such").error;
    assert_eq!(
        missing,
        json!({"code": "invalid_argument", "message": "cwd '/no/such' does not exist"})
    );
    assert_eq!(
        in_dir("root", "/etc/passwd").error["message"],
        "cwd '/etc/passwd' does not exist"
    );
    std::fs::set_permissions(
        agent.dir.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o700),
    )
    .unwrap();
    let private = in_dir("nobody", agent.dir.path().to_str().unwrap()).error;
    assert_eq!(private["code"], "invalid_argument");
}

#[test]
fn what_cannot_be_executed_is_an_invalid_argument() {
    let agent = Agent::start();
    for cmd in [
        "/no/such/program",
        "no-such-program-in-path",
        "/etc/passwd",
        "/",
        "",
        "a\0b",
    ] {
        let error = agent
            .stream(START, &[], &json!({"process": {"cmd": cmd}}))
            .error();
        assert_eq!(error["code"], "invalid_argument", "{cmd:?}: {error}");
    }
    assert_eq!(
        agent.stream(START, &[], &json!({})).error()["code"],
        "invalid_argument"
    );
    let huge = vec!["x".repeat(100_000); 30];
    let error = agent
        .stream(
            START,
            &[],
            &json!({"process": {"cmd": "/bin/true", "args": huge}}),
        )
        .error();
    assert_eq!(error["code"], "invalid_argument");
    assert_eq!(
        agent.ok("/process.Process/List", json!({}))["processes"],
        json!([])
    );
}

#[test]
fn programs_are_found_in_the_path_of_the_child() {
    let agent = Agent::start();
    let tool = agent.path("my-tool");
    std::fs::write(&tool, "#!/bin/sh\necho tool\n").unwrap();
    std::fs::set_permissions(&tool, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    std::fs::set_permissions(
        agent.dir.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
    let start = json!({"process": {"cmd": "my-tool", "envs": {"PATH": agent.dir.path()}}});
    assert_eq!(agent.stream(START, &[], &start).outcome().text(), "tool\n");
}

#[test]
fn input_reaches_the_program_until_it_is_closed() {
    let agent = Agent::start();
    let mut stream = agent.stream(
        START,
        &[],
        &json!({"process": {"cmd": "cat"}, "tag": "cat"}),
    );
    let pid = stream.pid();
    let by_pid = json!({"pid": pid});
    let input = |process: &Value, text: &str| json!({"process": process, "input": {"stdin": STANDARD.encode(text)}});
    assert_eq!(
        agent.ok("/process.Process/SendInput", input(&by_pid, "one\n")),
        json!({})
    );
    stream.until("one");
    agent.ok(
        "/process.Process/SendInput",
        input(&json!({"tag": "cat"}), "two\n"),
    );
    stream.until("two");
    let pty = json!({"process": by_pid, "input": {"pty": ""}});
    assert_eq!(agent.fails("/process.Process/SendInput", pty), "internal");
    let none = json!({"process": by_pid, "input": {}});
    assert_eq!(
        agent.fails("/process.Process/SendInput", none),
        "invalid_argument"
    );
    // The second close meets an open process in any case: cat ends only after it was reported.
    agent.ok("/process.Process/CloseStdin", json!({"process": by_pid}));
    let outcome = stream.outcome();
    assert_eq!(outcome.end["exitCode"], 0);
    assert_eq!(
        agent.fails("/process.Process/SendInput", input(&by_pid, "late")),
        "not_found"
    );
}

#[test]
fn a_closed_or_absent_input_is_an_error_and_closing_twice_is_none() {
    let agent = Agent::start();
    let mut stream = agent.stream(
        START,
        &[],
        &json!({"process": {"cmd": "/bin/sh", "args": ["-c", "cat; sleep 60"]}}),
    );
    let selector = json!({"pid": stream.pid()});
    for _ in 0..2 {
        agent.ok("/process.Process/CloseStdin", json!({"process": selector}));
    }
    let send = json!({"process": selector, "input": {"stdin": "eA=="}});
    assert_eq!(agent.fails("/process.Process/SendInput", send), "internal");
    let mut stream = agent.start_shell("cat; echo eof; sleep 60");
    let selector = json!({"pid": stream.pid()});
    stream.until("eof");
    let send = json!({"process": selector, "input": {"stdin": "eA=="}});
    assert_eq!(agent.fails("/process.Process/SendInput", send), "internal");
}

#[test]
fn large_input_streams_in_order() {
    let agent = Agent::start();
    let mut output = agent.stream(START, &[], &json!({"process": {"cmd": "sha256sum"}}));
    let pid = output.pid();
    let data = noise(24 << 20, 1);
    let mut stream = agent.connect();
    let headers = [("content-type", "application/connect+json")];
    stream
        .write_all(&head(
            "POST",
            "/process.Process/StreamInput",
            &headers,
            None,
        ))
        .unwrap();
    let message = |value: Value| chunk(&envelope(0, value.to_string().as_bytes()));
    stream
        .write_all(&message(json!({"start": {"process": {"pid": pid}}})))
        .unwrap();
    stream
        .write_all(&message(json!({"keepalive": {}})))
        .unwrap();
    for piece in data.chunks(700_000) {
        stream
            .write_all(&message(
                json!({"data": {"input": {"stdin": STANDARD.encode(piece)}}}),
            ))
            .unwrap();
    }
    stream.write_all(&chunk(b"")).unwrap();
    let mut answer = Stream::read(stream);
    assert_eq!(answer.next(), Some((0, json!({}))));
    assert_eq!(answer.next(), Some((2, json!({}))));
    agent.ok(
        "/process.Process/CloseStdin",
        json!({"process": {"pid": pid}}),
    );
    let file = agent.path("data");
    std::fs::write(&file, &data).unwrap();
    let expected = std::process::Command::new("sha256sum")
        .stdin(std::fs::File::open(file).unwrap())
        .output()
        .unwrap();
    assert_eq!(output.outcome().stdout, expected.stdout);
}

#[test]
fn input_that_nobody_reads_waits_but_ends_with_the_process() {
    let agent = Agent::start();
    let mut stream = agent.stream(
        START,
        &[],
        &json!({"process": {"cmd": "/bin/sh", "args": ["-c", "sleep 60"]}}),
    );
    let pid = stream.pid();
    let big =
        json!({"process": {"pid": pid}, "input": {"stdin": STANDARD.encode(vec![b'x'; 1 << 20])}});
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| agent.unary("/process.Process/SendInput", big));
        // Everything else goes on while that call waits.
        assert_eq!(agent.run("echo other").text(), "other\n");
        assert!(!sender.is_finished());
        agent.ok(
            "/process.Process/SendSignal",
            json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"}),
        );
        let (status, _) = sender.join().unwrap();
        assert!(status == 404 || status == 500, "{status}");
    });
}

#[test]
fn input_is_given_up_when_its_client_leaves() {
    let agent = Agent::start();
    let mut stream = agent.stream(
        START,
        &[],
        &json!({"process": {"cmd": "/bin/sh", "args": ["-c", "sleep 60"]}}),
    );
    let selector = json!({"pid": stream.pid()});
    let input =
        json!({"process": selector, "input": {"stdin": STANDARD.encode(vec![b'x'; 1 << 20])}})
            .to_string();
    let mut client = agent.connect();
    let headers = [("content-type", "application/json")];
    client
        .write_all(&head(
            "POST",
            "/process.Process/SendInput",
            &headers,
            Some(input.len()),
        ))
        .unwrap();
    client.write_all(input.as_bytes()).unwrap();
    eventually("the pipe is full", || {
        let pipe = std::fs::File::open(format!("/proc/{}/fd/0", selector["pid"])).unwrap();
        (rustix::io::ioctl_fionread(pipe).unwrap() >= 64 << 10).then_some(())
    });
    drop(client);
    agent.ok("/process.Process/CloseStdin", json!({"process": selector}));
}

#[test]
fn processes_are_listed_while_they_live() {
    let agent = Agent::start();
    let mut start = shell("sleep 60");
    start["tag"] = json!("sleeper");
    start["process"]["envs"] = json!({"K": "v"});
    start["process"]["cwd"] = json!("/");
    let mut stream = agent.stream(START, &[], &start);
    let pid = stream.pid();
    let expected =
        json!({"processes": [{"config": start["process"], "pid": pid, "tag": "sleeper"}]});
    assert_eq!(agent.ok("/process.Process/List", json!({})), expected);
    agent.ok(
        "/process.Process/SendSignal",
        json!({"process": {"tag": "sleeper"}, "signal": 15}),
    );
    assert_eq!(stream.outcome().end["status"], "signal: terminated");
    assert_eq!(
        agent.ok("/process.Process/List", json!({}))["processes"],
        json!([])
    );
}

#[test]
fn signals_end_processes_and_their_pids() {
    let agent = Agent::start();
    let mut stream = agent.start_shell("sleep 60");
    let pid = stream.pid();
    let send = |signal: Value| json!({"process": {"pid": pid}, "signal": signal});
    for other in [
        json!("SIGNAL_UNSPECIFIED"),
        json!("SIGNAL_SIGHUP"),
        json!(1),
        json!(null),
    ] {
        assert_eq!(
            agent.fails("/process.Process/SendSignal", send(other)),
            "unimplemented"
        );
    }
    agent.ok("/process.Process/SendSignal", send(json!("SIGNAL_SIGKILL")));
    let outcome = stream.outcome();
    assert!(
        !alive(pid),
        "the process was not reaped before its end was told"
    );
    let expected = json!({"exitCode": -1, "exited": false, "status": "signal: killed", "error": "signal: killed"});
    assert_eq!(outcome.end, expected);
    assert_eq!(
        agent.fails("/process.Process/SendSignal", send(json!("SIGNAL_SIGKILL"))),
        "not_found"
    );
    let (status, answer) = agent.unary(
        "/process.Process/SendSignal",
        json!({"process": {"pid": 1}, "signal": 9}),
    );
    assert_eq!(
        (status, answer["message"].as_str()),
        (404, Some("process with pid 1 not found"))
    );
    for selector in [json!({}), json!({"pid": 1, "tag": "x"})] {
        let call = json!({"process": selector, "signal": 9});
        assert_eq!(
            agent.fails("/process.Process/SendSignal", call),
            "invalid_argument"
        );
    }
}

#[test]
fn the_end_waits_for_output_but_not_after_a_kill() {
    let agent = Agent::start();
    // The grandchild leaves the process group, so that no signal reaches it.
    let mut stream = agent.start_shell("setsid sh -c 'echo $$; sleep 60' & exit 0");
    let pid = stream.pid();
    let grandchild = stream.until("\n").trim().parse::<u64>().unwrap();
    eventually("the shell has exited", || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.contains(") Z ").then_some(())
    });
    agent.ok(
        "/process.Process/SendSignal",
        json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"}),
    );
    let outcome = stream.outcome();
    assert_eq!(outcome.end["exitCode"], 0, "it had exited before the kill");
    assert!(alive(grandchild));
    agent.run(&format!("kill -9 {grandchild}"));

    let outcome = agent.run("(sleep 0.3; echo late) & exit 5");
    assert_eq!(
        (outcome.text().as_str(), outcome.end["exitCode"].as_i64()),
        ("late\n", Some(5))
    );
}

#[test]
fn a_kill_takes_the_children_of_a_shell_along() {
    let agent = Agent::start();
    let mut stream = agent.start_shell("sleep 61 & echo $!; wait");
    let pid = stream.pid();
    let child: u64 = stream.until("\n").trim().parse().unwrap();
    agent.ok(
        "/process.Process/SendSignal",
        json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGTERM"}),
    );
    stream.outcome();
    eventually("the child of the shell is gone", || {
        (!alive(child)).then_some(())
    });
}

#[test]
fn a_timeout_kills_the_process_and_is_no_ordinary_end() {
    let agent = Agent::start();
    let begun = Instant::now();
    let mut owner = agent.stream(
        START,
        &[("connect-timeout-ms", "400")],
        &shell("echo hi; sleep 60"),
    );
    let pid = owner.pid();
    let second = agent.stream(
        "/process.Process/Connect",
        &[],
        &json!({"process": {"pid": pid}}),
    );
    let outcome = owner.outcome();
    assert_eq!(outcome.error["code"], "deadline_exceeded");
    assert_eq!(
        (outcome.stdout, outcome.end),
        (b"hi\n".to_vec(), Value::Null)
    );
    assert!(begun.elapsed() >= Duration::from_millis(400));
    assert_eq!(second.outcome().end["status"], "signal: killed");
    assert!(!alive(pid));
    // The owner's leaving does not lift the limit.
    let mut owner = agent.stream(START, &[("connect-timeout-ms", "300")], &shell("sleep 60"));
    let pid = owner.pid();
    drop(owner);
    eventually("the process is killed", || (!alive(pid)).then_some(()));
    let mut bad = agent.stream(START, &[("connect-timeout-ms", "soon")], &shell("true"));
    assert_eq!(bad.error()["code"], "invalid_argument");
    let zero = agent
        .stream(
            START,
            &[("connect-timeout-ms", "0")],
            &shell("sleep 0.2; echo done"),
        )
        .outcome();
    assert_eq!(zero.text(), "done\n");
}

#[test]
fn connect_attaches_to_what_comes_and_tells_of_what_ended() {
    let agent = Agent::start();
    let gate = agent.path("gate");
    let script = format!("echo early; while [ ! -e {gate} ]; do sleep 0.01; done; echo late");
    let mut owner = agent.start_shell(&script);
    let selector = json!({"process": {"pid": owner.pid()}});
    owner.until("early");
    let mut second = agent.stream("/process.Process/Connect", &[], &selector);
    second.pid();
    let bounded = agent
        .stream(
            "/process.Process/Connect",
            &[("connect-timeout-ms", "100")],
            &selector,
        )
        .outcome();
    assert_eq!(bounded.error["code"], "deadline_exceeded");
    std::fs::write(&gate, "").unwrap();
    assert_eq!(owner.outcome().text(), "late\n");
    assert_eq!(second.outcome().text(), "late\n");
    let after = agent
        .stream("/process.Process/Connect", &[], &selector)
        .outcome();
    assert_eq!(
        (after.end["exitCode"].as_i64(), after.stdout.len()),
        (Some(0), 0)
    );
    let unknown = agent
        .stream(
            "/process.Process/Connect",
            &[],
            &json!({"process": {"pid": 4_000_000}}),
        )
        .error();
    assert_eq!(
        unknown,
        json!({"code": "not_found", "message": "process with pid 4000000 not found"})
    );
}

#[test]
fn a_client_that_leaves_stops_nothing() {
    let agent = Agent::start();
    let (gate, done) = (agent.path("gate"), agent.path("done"));
    let mut stream = agent.start_shell(&format!(
        "while [ ! -e {gate} ]; do echo tick; sleep 0.01; done; head -c 3000000 /dev/zero; echo > {done}"
    ));
    stream.pid();
    stream.until("tick");
    drop(stream);
    std::fs::write(&gate, "").unwrap();
    eventually("the process finished", || exists(&done));
}

#[test]
fn a_client_that_does_not_read_stops_nothing_and_is_told() {
    let agent = Agent::start();
    let done = agent.path("done");
    let mut stream = agent.start_shell(&format!("head -c 50000000 /dev/zero; echo > {done}"));
    stream.pid();
    let mut attentive = agent.stream("/process.Process/Connect", &[], &json!({"process": {"pid": agent.ok("/process.Process/List", json!({}))["processes"][0]["pid"]}}));
    attentive.pid();
    eventually("the process finished although nobody reads", || {
        while exists(&done).is_none() {
            let (flags, _) = attentive.next().unwrap();
            if flags == 2 {
                break;
            }
        }
        exists(&done)
    });
    let outcome = stream.outcome();
    assert_eq!(outcome.error["code"], "resource_exhausted");
    assert!(outcome.stdout.len() < 50_000_000);
}

#[test]
fn every_reader_gets_every_byte() {
    let agent = Agent::start();
    let gate = agent.path("gate");
    let script = format!(
        "while [ ! -e {gate} ]; do sleep 0.01; done; head -c 20000000 /dev/zero | tr '\\0' x"
    );
    let mut owner = agent.start_shell(&script);
    let selector = json!({"process": {"pid": owner.pid()}});
    let mut others: Vec<_> = (0..3)
        .map(|_| agent.stream("/process.Process/Connect", &[], &selector))
        .collect();
    for stream in &mut others {
        stream.pid();
    }
    std::fs::write(&gate, "").unwrap();
    std::thread::scope(|scope| {
        for stream in others.drain(..).chain([owner]) {
            scope.spawn(move || {
                let outcome = stream.outcome();
                assert_eq!(outcome.end["exitCode"], 0, "{:?}", outcome.error);
                assert_eq!(outcome.stdout.len(), 20_000_000);
                assert!(outcome.stdout.iter().all(|b| *b == b'x'));
            });
        }
    });
}

#[test]
fn silence_is_broken_by_keepalives() {
    let agent = Agent::start();
    let mut stream = agent.stream(
        START,
        &[("keepalive-ping-interval", "1")],
        &shell("sleep 60"),
    );
    stream.pid();
    assert_eq!(
        stream.next().unwrap(),
        (0, json!({"event": {"keepalive": {}}}))
    );
}

#[test]
fn thousands_of_processes_leave_nothing_behind() {
    let agent = Agent::start();
    let count = |what: &str| {
        std::fs::read_dir(format!("/proc/{}/{what}", agent.pid()))
            .unwrap()
            .count()
    };
    agent.run("true");
    let descriptors = eventually("the first connection is closed", || {
        Some(count("fd")).filter(|n| *n < 20)
    });
    std::thread::scope(|scope| {
        for worker in 0..6 {
            let agent = &agent;
            scope.spawn(move || {
                for n in 0..350 {
                    let outcome = agent.run(&format!("echo {worker}-{n}"));
                    assert_eq!(outcome.text(), format!("{worker}-{n}\n"));
                }
            });
        }
    });
    eventually("descriptors are back", || {
        (count("fd") <= descriptors).then_some(())
    });
    let children =
        std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", agent.pid())).unwrap();
    assert_eq!(children.trim(), "");
    assert_eq!(
        agent.ok("/process.Process/List", json!({}))["processes"],
        json!([])
    );
}

#[test]
fn a_terminal_is_one() {
    let agent = Agent::start();
    let start = json!({
        "process": {"cmd": "/bin/bash", "args": ["--norc", "-i"], "envs": {"PS1": "$ ", "TERM": "dumb"}},
        "pty": {"size": {"cols": 91, "rows": 31}},
    });
    let mut stream = agent.stream(START, &[], &start);
    let selector = json!({"pid": stream.pid()});
    let kind = json!({"process": selector, "input": {"stdin": "eA=="}});
    assert_eq!(agent.fails("/process.Process/SendInput", kind), "internal");
    let type_in = |text: &str| {
        let input = json!({"process": selector, "input": {"pty": STANDARD.encode(text)}});
        agent.ok("/process.Process/SendInput", input);
    };
    stream.until("$ ");
    type_in("tty; stty size; echo $((6*7)) > /dev/tty\n");
    let text = stream.until("42\r\n");
    assert!(
        text.contains("/dev/pts/") && text.contains("31 91"),
        "{text}"
    );
    agent.ok(
        "/process.Process/Update",
        json!({"process": selector, "pty": {"size": {"cols": 120, "rows": 40}}}),
    );
    type_in("stty size; tput -T xterm cols\n");
    let text = stream.until("120\r\n");
    assert!(text.contains("40 120"), "{text}");
    assert_eq!(
        agent.fails("/process.Process/CloseStdin", json!({"process": selector})),
        "failed_precondition"
    );
    let absurd = json!({"process": selector, "pty": {"size": {"cols": 70_000, "rows": 1}}});
    assert_eq!(
        agent.fails("/process.Process/Update", absurd),
        "invalid_argument"
    );
    // ^C reaches what runs in the foreground, not the shell.
    type_in("sh -c 'echo up$((1+1)); sleep 60'\n");
    stream.until("up2");
    type_in("\x03");
    stream.until("^C");
    type_in("exit 7\n");
    assert_eq!(stream.outcome().end["exitCode"], 7);

    let mut stream = agent.start_shell("sleep 60");
    let plain = json!({"process": {"pid": stream.pid()}, "pty": {"size": {"cols": 1, "rows": 1}}});
    assert_eq!(
        agent.fails("/process.Process/Update", plain),
        "failed_precondition"
    );
    assert_eq!(
        agent.fails(
            "/process.Process/Update",
            json!({"process": {"pid": 4_000_000}})
        ),
        "not_found"
    );
}

#[test]
fn a_killed_terminal_ends() {
    let agent = Agent::start();
    let start = json!({"process": {"cmd": "/bin/sh"}, "pty": {"size": {"cols": 80, "rows": 24}}});
    let mut stream = agent.stream(START, &[], &start);
    let pid = stream.pid();
    agent.ok(
        "/process.Process/SendSignal",
        json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"}),
    );
    assert_eq!(stream.outcome().end["status"], "signal: killed");
}

#[test]
fn a_connection_serves_one_call_after_the_other() {
    let agent = Agent::start();
    let mut stream = agent.connect();
    let body = envelope(0, shell("echo x").to_string().as_bytes());
    for _ in 0..3 {
        // The terminating chunk arrives late; the response must not wait for it.
        stream
            .write_all(&head(
                "POST",
                START,
                &[("content-type", "application/connect+json")],
                None,
            ))
            .unwrap();
        stream.write_all(&chunk(&body)).unwrap();
        let mut seen = Vec::new();
        let mut buffer = [0; 4096];
        while !seen.windows(9).any(|w| w == b"\"start\":{\"") {
            let size = stream.read(&mut buffer).unwrap();
            assert_ne!(size, 0, "closed after {:?}", String::from_utf8_lossy(&seen));
            seen.extend(&buffer[..size]);
            if String::from_utf8_lossy(&seen).contains("start") {
                break;
            }
        }
        stream.write_all(&chunk(b"")).unwrap();
        while !seen.ends_with(b"0\r\n\r\n") {
            let size = stream.read(&mut buffer).unwrap();
            assert_ne!(size, 0, "closed after {:?}", String::from_utf8_lossy(&seen));
            seen.extend(&buffer[..size]);
        }
    }
}
