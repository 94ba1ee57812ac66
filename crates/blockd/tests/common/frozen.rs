//! A process that stands for a frozen VMM.

use std::os::fd::AsRawFd;
use std::path::Path;

use serde_json::{json, Value};

use super::open_rw;

/// A private mapping with some changes, and nothing that runs.
pub struct Frozen {
    pub pid: i32,
    pub address: u64,
    /// What the process sees.
    pub memory: Vec<u8>,
}

impl Frozen {
    /// Maps `len` bytes of `path`, or of nothing, lets `change` edit them, and freezes.
    pub fn new(path: Option<&Path>, len: usize, change: impl FnOnce(&mut [u8])) -> Frozen {
        let file = path.map(open_rw);
        let (descriptor, extra) = match &file {
            Some(file) => (file.as_raw_fd(), 0),
            None => (-1, libc::MAP_ANONYMOUS),
        };
        let (protection, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | extra,
        );
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base =
            unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, descriptor, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        // SAFETY: the mapping is writable and `len` long, and nobody else knows it.
        let bytes = unsafe { std::slice::from_raw_parts_mut(base.cast::<u8>(), len) };
        change(bytes);
        // SAFETY: the child only waits; it touches nothing that another thread of this process could hold.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            loop {
                // SAFETY: no arguments.
                unsafe { libc::pause() };
            }
        }
        assert!(pid > 0);
        let memory = bytes.to_vec();
        // SAFETY: mapped above with this length; the slice is not used any more.
        unsafe { libc::munmap(base, len) };
        Frozen {
            pid,
            address: base as u64,
            memory,
        }
    }

    pub fn plan(&self) -> Value {
        json!({ "pid": self.pid, "virtual_size": self.memory.len(),
                "ranges": [{ "address": self.address, "size": self.memory.len(), "offset": 0 }] })
    }

    pub fn kill(&mut self) {
        if self.pid != 0 {
            // SAFETY: the child is ours and was not waited for yet.
            unsafe {
                libc::kill(self.pid, libc::SIGKILL);
                libc::waitpid(self.pid, std::ptr::null_mut(), 0);
            }
            self.pid = 0;
        }
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.kill();
    }
}
