use std::io::Write;
use std::process::ExitCode;

use aenv_blockd::options::{self, Command};
use aenv_blockd::{holder, serve};

fn main() -> ExitCode {
    let done = match options::parse(std::env::args_os().skip(1)) {
        Ok(Command::Serve(options)) => serve::run(&options),
        Ok(Command::Holder(path)) => {
            holder::run(&path).map_err(|error| format!("holder at {}: {error}", path.display()))
        }
        Ok(Command::Print(text)) => {
            let _ = std::io::stdout().write_all(text.as_bytes());
            Ok(())
        }
        Err(message) => Err(message),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            let _ = writeln!(std::io::stderr(), "aenv-blockd: {message}");
            ExitCode::from(2)
        }
    }
}
