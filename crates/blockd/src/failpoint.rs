//! Places where a test can make the daemon die or wait.
//!
//! `AENV_FAILPOINT=name` aborts the process when it reaches the point `name` for the first time, `name:3` at the third
//! time. Aborting is what `kill -9` does, but at a chosen instruction. Without the variable a point costs one load.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::OnceLock;

struct Armed {
    name: String,
    left: AtomicU64,
}

static ARMED: OnceLock<Option<Armed>> = OnceLock::new();

fn armed() -> Option<&'static Armed> {
    ARMED
        .get_or_init(|| {
            let value = std::env::var("AENV_FAILPOINT").ok()?;
            let (name, left) = match value.rsplit_once(':') {
                Some((name, count)) => (name.to_owned(), count.parse().ok()?),
                None => (value, 1),
            };
            Some(Armed {
                name,
                left: AtomicU64::new(left),
            })
        })
        .as_ref()
}

/// Dies here if the environment says so.
pub fn hit(name: &str) {
    if let Some(armed) = armed() {
        if armed.name == name && armed.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            eprintln!("aenv-blockd: dies at failpoint {name}");
            std::process::abort();
        }
    }
}

/// Waits here while the environment says so: with `AENV_HOLD=name:/path`, as long as that file exists.
pub fn hold(name: &str) {
    static HELD: OnceLock<Option<(String, std::path::PathBuf)>> = OnceLock::new();
    let held = HELD.get_or_init(|| {
        let value = std::env::var("AENV_HOLD").ok()?;
        let (name, path) = value.split_once(':')?;
        Some((name.to_owned(), path.into()))
    });
    if let Some((point, path)) = held {
        while point == name && path.exists() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}
