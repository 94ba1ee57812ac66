//! Servers on loopback, reached at another address of the machine.

mod common;

use common::*;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;

/// Stands for the outside address of a guest; all of 127.0.0.0/8 is local.
const OUTSIDE: [u8; 4] = [127, 0, 0, 77];

fn agent() -> Agent {
    let command = Command::new(env!("CARGO_BIN_EXE_aenv-envd"));
    Agent::launch(
        command,
        &["--address", "127.0.0.77"],
        tempfile::tempdir().unwrap(),
    )
}

/// Answers each connection with its own name.
fn serve(listener: TcpListener, name: &'static str) {
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut seen = [0; 4];
            if stream.read_exact(&mut seen).is_ok()
                && stream.write_all(name.as_bytes()).is_ok()
                && &seen == b"last"
            {
                return;
            }
        }
    });
}

fn ask(port: u16, what: &[u8; 4]) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(SocketAddr::from((OUTSIDE, port)))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(what)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

#[test]
fn loopback_servers_are_reachable_while_they_run() {
    let _agent = agent();
    let inside = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = inside.local_addr().unwrap().port();
    serve(inside, "one");
    eventually("the second attempt is answered", || {
        ask(port, b"more").ok().filter(|a| a == "one")
    });
    assert_eq!(ask(port, b"last").unwrap(), "one");
    // Its successor may listen everywhere, soon after.
    let everywhere = eventually("the port is free again", || {
        TcpListener::bind(("0.0.0.0", port)).ok()
    });
    serve(everywhere, "two");
    assert_eq!(ask(port, b"last").unwrap(), "two");
    eventually("nobody is left", || match ask(port, b"more") {
        Err(e)
            if [ErrorKind::ConnectionRefused, ErrorKind::ConnectionReset].contains(&e.kind()) =>
        {
            Some(())
        }
        _ => None,
    });
}

#[test]
fn large_answers_pass_in_both_directions() {
    let _agent = agent();
    let inside = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = inside.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in inside.incoming() {
            let mut stream = stream.unwrap();
            let mut data = Vec::new();
            stream.read_to_end(&mut data).unwrap();
            let _ = stream.write_all(&data);
        }
    });
    let mut stream = eventually("connected", || {
        TcpStream::connect(SocketAddr::from((OUTSIDE, port))).ok()
    });
    let data = noise(8 << 20, 1);
    stream.write_all(&data).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut back = Vec::new();
    stream.read_to_end(&mut back).unwrap();
    assert!(back == data);
}

#[test]
fn servers_that_listen_outside_are_left_alone() {
    let _agent = agent();
    let inside = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = inside.local_addr().unwrap().port();
    let outside = TcpListener::bind((std::net::Ipv4Addr::from(OUTSIDE), port)).unwrap();
    serve(inside, "inside");
    serve(outside, "outside");
    for _ in 0..20 {
        assert_eq!(ask(port, b"more").unwrap(), "outside");
    }
}
