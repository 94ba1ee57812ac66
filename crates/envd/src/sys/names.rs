//! The name of the guest: kernel host name, `/etc/hostname` and `/etc/hosts`.

use rustix::fs::{openat, unlinkat, AtFlags, Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::path::Path;

use super::read;

const HOSTS_LIMIT: u64 = 1 << 20;
/// The address Debian gives to a host without a fixed one.
const OWN_ADDRESS: &str = "127.0.1.1";

/// Gives the running machine its name.
pub fn set(name: &str) -> Result<(), String> {
    rustix::system::sethostname(name.as_bytes())
        .map_err(|e| format!("cannot set the host name {name:?}: {e}"))
}

/// Writes the name to the files in `etc`.
pub fn write(etc: BorrowedFd<'_>, name: &str) -> Result<(), String> {
    let old = read::bounded_at(etc, Path::new("hosts"), HOSTS_LIMIT).unwrap_or_default();
    let hosts = hosts(&String::from_utf8_lossy(&old), name);
    replace(etc, "hosts", hosts.as_bytes())
        .and_then(|()| replace(etc, "hostname", format!("{name}\n").as_bytes()))
        .map_err(|e| format!("cannot write the name of the host to /etc: {e}"))
}

/// Replaces a file, or a link, by a plain file with `content`.
pub fn replace(dir: BorrowedFd<'_>, name: &str, content: &[u8]) -> io::Result<()> {
    match unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(e) => return Err(e.into()),
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    File::from(openat(dir, name, flags, Mode::from_raw_mode(0o644))?).write_all(content)
}

/// `/etc/hosts` with the lines this machine needs; lines of the user stay.
fn hosts(old: &str, name: &str) -> String {
    let mut lines: Vec<&str> = old
        .lines()
        .filter(|l| l.split_ascii_whitespace().next() != Some(OWN_ADDRESS))
        .collect();
    let has = |lines: &[&str], address: &str| {
        lines.iter().any(|l| {
            let mut words = l.split_ascii_whitespace();
            words.next() == Some(address) && words.any(|w| w == "localhost")
        })
    };
    if !has(&lines, "127.0.0.1") {
        lines.insert(0, "127.0.0.1 localhost");
    }
    if !has(&lines, "::1") {
        lines.push("::1 localhost ip6-localhost ip6-loopback");
    }
    let own = format!("{OWN_ADDRESS} {name}");
    lines.push(&own);
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_keeps_lines_of_the_user_and_renames_itself() {
        let first = hosts("", "a");
        assert_eq!(
            first,
            "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n127.0.1.1 a\n"
        );
        let second = hosts(&format!("{first}10.0.0.1 db\n"), "b");
        assert!(
            second.contains("10.0.0.1 db\n")
                && second.ends_with("127.0.1.1 b\n")
                && !second.contains(" a\n")
        );
        assert_eq!(hosts(&second, "b"), second);
    }
}
