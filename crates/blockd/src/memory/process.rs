//! Another process, and its memory.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{poll, PollFd, PollFlags};
use rustix::process::{pidfd_open, Pid, PidfdFlags};

/// Most pieces the kernel takes in one call.
const MAX_PIECES: usize = 1024;

/// A process that cannot be mistaken for a later one with the same number.
#[derive(Debug)]
pub struct Process {
    pid: Pid,
    handle: OwnedFd,
    /// When it started, in clock ticks since boot; identifies it across restarts of the daemon.
    start_time: u64,
}

impl Process {
    /// Opens a process. With `start_time`, only if it is the one that started then.
    pub fn open(pid: u32, start_time: Option<u64>) -> io::Result<Process> {
        let gone = || {
            io::Error::new(
                io::ErrorKind::NotFound,
                format!("process {pid} does not exist"),
            )
        };
        let number = i32::try_from(pid)
            .ok()
            .and_then(Pid::from_raw)
            .ok_or_else(gone)?;
        let handle = pidfd_open(number, PidfdFlags::empty()).map_err(|_| gone())?;
        let found = read_start_time(pid).map_err(|_| gone())?;
        let process = Process {
            pid: number,
            handle,
            start_time: found,
        };
        // Alive after the time was read: the time is that of the process the handle stands for.
        if !process.is_alive() || start_time.is_some_and(|wanted| wanted != found) {
            return Err(gone());
        }
        Ok(process)
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get() as u32
    }

    /// When it started, in clock ticks since boot.
    pub fn start_time(&self) -> u64 {
        self.start_time
    }

    /// Whether it has not ended.
    pub fn is_alive(&self) -> bool {
        let mut handles = [PollFd::new(&self.handle, PollFlags::IN)];
        let now = Duration::ZERO.try_into().expect("zero fits");
        matches!(poll(&mut handles, Some(&now)), Ok(0))
    }

    /// Fills `buf` with the memory at the addresses of `pieces`, one after another; their lengths add up to that of
    /// `buf`.
    pub fn read(&self, buf: &mut [u8], pieces: &[(u64, usize)]) -> io::Result<()> {
        debug_assert_eq!(pieces.iter().map(|(_, len)| len).sum::<usize>(), buf.len());
        let mut rest = buf;
        for group in pieces.chunks(MAX_PIECES) {
            let len = group.iter().map(|(_, len)| len).sum();
            let (part, after) = rest.split_at_mut(len);
            rest = after;
            self.read_group(part, group)?;
        }
        // Only now is it certain that the number was not that of another process meanwhile.
        if !self.is_alive() {
            return Err(self.ended());
        }
        Ok(())
    }

    fn read_group(&self, buf: &mut [u8], group: &[(u64, usize)]) -> io::Result<()> {
        let remote: Vec<libc::iovec> = group
            .iter()
            .map(|(address, len)| libc::iovec {
                iov_base: *address as usize as *mut libc::c_void,
                iov_len: *len,
            })
            .collect();
        let local = libc::iovec {
            iov_base: buf.as_mut_ptr().cast(),
            iov_len: buf.len(),
        };
        // SAFETY: the local vector describes exactly `buf`, which is borrowed mutably; the remote one is only
        // interpreted in the address space of the other process.
        let got = unsafe {
            libc::process_vm_readv(
                self.pid.as_raw_nonzero().get(),
                &local,
                1,
                remote.as_ptr(),
                remote.len() as libc::c_ulong,
                0,
            )
        };
        if usize::try_from(got) == Ok(buf.len()) {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if got < 0 && error.raw_os_error() == Some(libc::ESRCH) || !self.is_alive() {
            return Err(self.ended());
        }
        let cause = if got < 0 {
            error.to_string()
        } else {
            "part of it is no longer mapped".into()
        };
        Err(io::Error::other(format!(
            "cannot read the memory of process {}: {cause}",
            self.pid()
        )))
    }

    /// The error of everything that needs the process once it has ended.
    pub fn ended(&self) -> io::Error {
        io::Error::new(
            io::ErrorKind::NotFound,
            format!(
                "process {} ended before its memory was copied; the layer is lost, go back to an earlier snapshot",
                self.pid()
            ),
        )
    }
}

fn read_start_time(pid: u32) -> io::Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name in parentheses may contain anything; the 22nd field is the 20th after it.
    stat.rsplit_once(')')
        .and_then(|(_, fields)| fields.split_whitespace().nth(19))
        .and_then(|field| field.parse().ok())
        .ok_or_else(|| io::Error::other("its stat file has no start time"))
}

/// A mapping of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    pub start: u64,
    pub end: u64,
    /// Changes stay in the process.
    pub private: bool,
    /// Pages without content of their own come from a file, not from nothing.
    pub has_file: bool,
}

/// The mappings of a process in order of their address.
pub fn mappings(pid: u32) -> io::Result<Vec<Mapping>> {
    let text = fs::read(format!("/proc/{pid}/maps"))?;
    Ok(text
        .split(|b| *b == b'\n')
        .filter_map(|line| parse_mapping(&String::from_utf8_lossy(line)))
        .collect())
}

/// `start-end perms offset major:minor inode path`
fn parse_mapping(line: &str) -> Option<Mapping> {
    let mut fields = line.split_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let flags = fields.next()?;
    let inode: u64 = fields.nth(2)?.parse().ok()?;
    Some(Mapping {
        start: u64::from_str_radix(start, 16).ok()?,
        end: u64::from_str_radix(end, 16).ok()?,
        private: flags.ends_with('p'),
        has_file: inode != 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_are_told_apart() {
        let file =
            parse_mapping("7f0000000000-7f0000002000 rw-p 00001000 00:2f 12   /mnt/with space");
        let wanted = Mapping {
            start: 0x7f00_0000_0000,
            end: 0x7f00_0000_2000,
            private: true,
            has_file: true,
        };
        assert_eq!(file, Some(wanted));
        let anonymous = parse_mapping("1000-2000 rw-s 00000000 00:00 0").unwrap();
        assert!(!anonymous.private && !anonymous.has_file);
        assert_eq!(parse_mapping(""), None);
        assert_eq!(parse_mapping("x-y z"), None);
    }

    #[test]
    fn a_process_is_not_mistaken_for_another() {
        let own = std::process::id();
        let process = Process::open(own, None).unwrap();
        assert!(Process::open(own, Some(process.start_time())).is_ok());
        assert!(Process::open(own, Some(process.start_time() + 1)).is_err());
        assert!(Process::open(0, None).is_err() && Process::open(u32::MAX, None).is_err());
        let here = [1u8, 2, 3, 4];
        let mut buf = [0; 4];
        let address = here.as_ptr() as u64;
        process
            .read(&mut buf, &[(address + 2, 2), (address, 2)])
            .unwrap();
        assert_eq!(buf, [3, 4, 1, 2]);
        assert!(process.read(&mut buf, &[(8, 4)]).is_err());

        let mut child = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let other = Process::open(child.id(), None).unwrap();
        assert!(other.is_alive());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!other.is_alive());
        let error = other.read(&mut buf, &[(8, 4)]).unwrap_err();
        assert!(error.to_string().contains("ended"), "{error}");
    }
}
