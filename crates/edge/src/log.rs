//! JSON lines on stderr, written by a thread of their own.
//!
//! Whoever reads our stderr may die or stop reading. Neither may stop traffic: lines go through a bounded queue, are
//! dropped when it is full, and write errors are ignored.

use std::io::Write;
use std::str::FromStr;
use std::sync::mpsc::{sync_channel, SyncSender};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{json, Value};

const QUEUED_LINES: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    Error,
    Warn,
    Info,
    Debug,
}

impl FromStr for Level {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "error" => Ok(Level::Error),
            "warn" => Ok(Level::Warn),
            "info" => Ok(Level::Info),
            "debug" => Ok(Level::Debug),
            _ => Err(format!(
                "--log-level wants error, warn, info or debug, not {text:?}"
            )),
        }
    }
}

enum Line {
    Text(String),
    Flush(SyncSender<()>),
}

/// A handle to the writing thread; clones share it.
#[derive(Clone)]
pub struct Log {
    level: Level,
    lines: SyncSender<Line>,
}

impl Log {
    pub fn start(level: Level) -> std::io::Result<Log> {
        let (lines, queue) = sync_channel(QUEUED_LINES);
        std::thread::Builder::new()
            .name("log".into())
            .spawn(move || {
                let mut stderr = std::io::stderr();
                for line in queue {
                    match line {
                        Line::Text(text) => {
                            let _ = stderr.write_all(text.as_bytes());
                        }
                        Line::Flush(done) => {
                            let _ = done.try_send(());
                        }
                    }
                }
            })?;
        Ok(Log { level, lines })
    }

    pub fn enabled(&self, level: Level) -> bool {
        level <= self.level
    }

    /// Queues one line; `fields` is a JSON object.
    pub fn write(&self, level: Level, message: &str, fields: Value) {
        if !self.enabled(level) {
            return;
        }
        let since_epoch = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or(Duration::ZERO);
        let mut line = json!({
            "ts": since_epoch.as_millis() as f64 / 1000.0,
            "level": format!("{level:?}").to_lowercase(),
            "message": message,
        });
        if let (Value::Object(line), Value::Object(fields)) = (&mut line, fields) {
            line.extend(fields);
        }
        let _ = self.lines.try_send(Line::Text(format!("{line}\n")));
    }

    /// Waits until the lines queued so far are written, or a moment, whichever is shorter.
    pub fn flush(&self) {
        let (done, written) = sync_channel(1);
        if self.lines.try_send(Line::Flush(done)).is_ok() {
            let _ = written.recv_timeout(Duration::from_millis(500));
        }
    }
}
