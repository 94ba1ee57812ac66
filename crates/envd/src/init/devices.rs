//! Waiting for devices that drivers are still finding.

use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(5);
const INTERVAL: Duration = Duration::from_millis(2);

/// Waits until `path` exists. There is nothing to wait on: sysfs and devtmpfs send no file events.
pub fn wait_for(path: &Path) -> Result<(), String> {
    let deadline = Instant::now() + LIMIT;
    while !path.exists() {
        if Instant::now() > deadline {
            let seconds = LIMIT.as_secs();
            return Err(format!(
                "{} did not appear within {seconds} s; is its driver in /modules.list?",
                path.display()
            ));
        }
        sleep(INTERVAL);
    }
    Ok(())
}
