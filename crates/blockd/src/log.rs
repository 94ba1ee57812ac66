//! JSON lines on stderr, written by a thread of their own.
//!
//! Whoever reads our stderr may stop reading; that must not stop a disk. Lines go through a bounded queue and are
//! counted and dropped when it is full.

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{sync_channel, SyncSender};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{json, Value};

const QUEUED_LINES: usize = 1024;

enum Line {
    Text(String),
    Flush(SyncSender<()>),
}

static LINES: OnceLock<SyncSender<Line>> = OnceLock::new();
static DROPPED: AtomicU64 = AtomicU64::new(0);

fn lines() -> &'static SyncSender<Line> {
    LINES.get_or_init(|| {
        let (lines, queue) = sync_channel::<Line>(QUEUED_LINES);
        let writer = std::thread::Builder::new().name("log".into());
        // Without the thread every line is dropped and counted; serving goes on.
        let _ = writer.spawn(move || {
            for line in queue {
                match line {
                    Line::Text(text) => {
                        let _ = std::io::stderr().write_all(text.as_bytes());
                    }
                    Line::Flush(done) => {
                        let _ = done.try_send(());
                    }
                }
            }
        });
        lines
    })
}

fn write(level: &str, event: &str, fields: Value) {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or(Duration::ZERO);
    let mut line = json!({ "time": now.as_secs_f64(), "level": level, "event": event });
    if let (Some(line), Value::Object(fields)) = (line.as_object_mut(), fields) {
        line.extend(fields);
    }
    let dropped = DROPPED.swap(0, Relaxed);
    if dropped > 0 {
        line["dropped_lines"] = dropped.into();
    }
    if lines().try_send(Line::Text(format!("{line}\n"))).is_err() {
        DROPPED.fetch_add(dropped + 1, Relaxed);
    }
}

/// Something failed and somebody is hurt.
pub fn error(event: &str, fields: Value) {
    write("error", event, fields);
}

/// Something is not as it should be, and was survived.
pub fn warn(event: &str, fields: Value) {
    write("warn", event, fields);
}

/// A turn in the life of the daemon.
pub fn info(event: &str, fields: Value) {
    write("info", event, fields);
}

/// Waits a moment for the lines so far to be written.
pub fn flush() {
    let (done, wait) = sync_channel(1);
    if lines().try_send(Line::Flush(done)).is_ok() {
        let _ = wait.recv_timeout(Duration::from_millis(500));
    }
}
