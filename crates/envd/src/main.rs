//! `aenv-envd`: the first process of a sandbox and the agent inside it.
//!
//! One static binary with two roles. As PID 1 ([`init`]) it prepares the guest, starts the agent and
//! supervises it until power-off. As the agent ([`agent`]) it serves processes and files over HTTP.

mod agent;
mod init;
mod sys;

use std::process::ExitCode;

const USAGE: &str = "usage: aenv-envd agent --listen ADDR:PORT [--root DIR] [--address IPV4]
       aenv-envd init                (as PID 1 of a guest)
       aenv-envd --version | --help";

fn main() -> ExitCode {
    let args: Vec<_> = std::env::args_os().collect();
    let name = args
        .first()
        .map(|a| a.as_encoded_bytes())
        .unwrap_or_default();
    if name.ends_with(b"modprobe") {
        return init::modprobe(&args[1..]);
    }
    match args.get(1).and_then(|a| a.to_str()) {
        Some("agent") => agent::main(&args[2..]),
        Some("init") => init::main(),
        // The kernel appends words of its command line that it does not know to our arguments.
        _ if std::process::id() == 1 => init::main(),
        Some("--version") => {
            println!("aenv-envd {}", env!("CARGO_PKG_VERSION"));
            ExitCode::SUCCESS
        }
        Some("--help") => {
            println!("{USAGE}");
            ExitCode::SUCCESS
        }
        _ => {
            eprintln!("{USAGE}");
            ExitCode::from(2)
        }
    }
}
