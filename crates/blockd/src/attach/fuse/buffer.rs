//! Memory for messages.

use std::io;
use std::ptr::NonNull;

use rustix::mm::{mlock, mmap_anonymous, munmap, MapFlags, ProtFlags};

const PAGE: usize = 4096;

/// Room for one message whose payload starts on a page boundary: the kernel then copies whole pages.
///
/// All pages are present from the start and locked. That is not only for speed: a process killed while the kernel is
/// copying a request into a page that is not there would fail that request instead of leaving it to its successor.
pub struct Buffer {
    base: NonNull<u8>,
    len: usize,
    header: usize,
}

// SAFETY: a Buffer owns its mapping, which is ordinary memory; nothing in it is tied to a thread.
unsafe impl Send for Buffer {}

impl Buffer {
    /// Room for `header` bytes (at most 4096) and `payload` bytes.
    pub fn new(header: usize, payload: usize) -> io::Result<Buffer> {
        assert!(header <= PAGE);
        let len = PAGE + payload.next_multiple_of(PAGE);
        let flags = MapFlags::PRIVATE | MapFlags::POPULATE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
            )?
        };
        // Fails where the limit of locked memory is low. Then the pages are only likely to stay.
        // SAFETY: the range is the mapping just made; locking does not change its content.
        let _ = unsafe { mlock(base, len) };
        Ok(Buffer {
            base: NonNull::new(base.cast()).expect("mmap does not return null"),
            len,
            header,
        })
    }

    /// Header and payload together.
    pub fn message(&mut self) -> &mut [u8] {
        let start = PAGE - self.header;
        &mut self.all()[start..]
    }

    /// The payload alone.
    pub fn payload(&mut self) -> &mut [u8] {
        &mut self.all()[PAGE..]
    }

    fn all(&mut self) -> &mut [u8] {
        // SAFETY: base and len describe a readable and writable mapping owned by self and initialised to zeros by the
        // kernel; the slice borrows self mutably, so it is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the mapping is owned by self, and no slice of it outlives self.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}
