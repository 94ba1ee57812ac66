//! Servers on loopback, reached at another address of the machine.

mod common;

use common::*;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;

/// An agent, and an address of its own that stands for the outside one of a guest: all of 127.0.0.0/8
/// is local, and agents must not serve each other's ports.
fn agent(last: u8) -> (Agent, Ipv4Addr) {
    let outside = Ipv4Addr::new(127, 0, 0, last);
    let command = Command::new(env!("CARGO_BIN_EXE_aenv-envd"));
    (
        Agent::launch(
            command,
            &["--address", &outside.to_string()],
            tempfile::tempdir().unwrap(),
        ),
        outside,
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

fn ask(outside: Ipv4Addr, port: u16, what: &[u8; 4]) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(SocketAddr::from((outside, port)))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(what)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

#[test]
fn loopback_servers_are_reachable_while_they_run() {
    let (_agent, outside) = agent(77);
    let inside = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = inside.local_addr().unwrap().port();
    serve(inside, "one");
    eventually("the second attempt is answered", || {
        ask(outside, port, b"more").ok().filter(|a| a == "one")
    });
    assert_eq!(ask(outside, port, b"last").unwrap(), "one");
    // Its successor may listen everywhere, soon after.
    let everywhere = eventually("the port is free again", || {
        TcpListener::bind(("0.0.0.0", port)).ok()
    });
    serve(everywhere, "two");
    assert_eq!(ask(outside, port, b"last").unwrap(), "two");
    eventually("nobody is left", || match ask(outside, port, b"more") {
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
    let (_agent, outside) = agent(78);
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
        TcpStream::connect(SocketAddr::from((outside, port))).ok()
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
    let (_agent, outside) = agent(79);
    let inside = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = inside.local_addr().unwrap().port();
    serve(inside, "inside");
    serve(TcpListener::bind((outside, port)).unwrap(), "outside");
    for _ in 0..20 {
        assert_eq!(ask(outside, port, b"more").unwrap(), "outside");
    }
}
