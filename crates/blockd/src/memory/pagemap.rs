//! Which pages of a private mapping have content of their own.
//!
//! A page is private when it is present or swapped out and belongs neither to a file nor to the shared page of zeros.
//! `PAGEMAP_SCAN` (Linux 6.7) lists ranges of such pages; before, `/proc/PID/pagemap` has eight bytes for each page: bit 63
//! present, bit 62 swapped, bit 61 file or shared.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use super::PAGE;

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;
const FILE: u64 = 1 << 2;
const PRESENT: u64 = 1 << 3;
const SWAPPED: u64 = 1 << 4;
const ZERO_PAGE: u64 = 1 << 5;
/// Ranges fetched by one call.
const BATCH: usize = 4096;

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vector: u64,
    vector_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// The page map of a process.
pub struct Pagemap {
    file: File,
}

impl Pagemap {
    /// Opens that of process `pid`. Needs the right to trace it.
    pub fn open(pid: u32) -> io::Result<Pagemap> {
        let file = File::open(format!("/proc/{pid}/pagemap"))?;
        Ok(Pagemap { file })
    }

    /// Calls `found` with every range of private pages inside `addresses`, in order. Addresses are bytes in whole pages.
    pub fn private(
        &self,
        addresses: Range<u64>,
        found: &mut impl FnMut(Range<u64>),
    ) -> io::Result<()> {
        match self.scan(&addresses, found) {
            // Refused before anything was found.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL)) => {
                self.read(addresses, found)
            }
            other => other,
        }
    }

    fn scan(&self, addresses: &Range<u64>, found: &mut impl FnMut(Range<u64>)) -> io::Result<()> {
        let mut regions = vec![Region::default(); BATCH];
        let mut start = addresses.start;
        while start < addresses.end {
            let mut argument = ScanArgument {
                size: size_of::<ScanArgument>() as u64,
                start,
                end: addresses.end,
                vector: regions.as_mut_ptr() as u64,
                vector_len: regions.len() as u64,
                category_inverted: FILE | ZERO_PAGE,
                category_mask: FILE | ZERO_PAGE,
                category_anyof_mask: PRESENT | SWAPPED,
                return_mask: PRESENT,
                ..ScanArgument::default()
            };
            // SAFETY: the argument has the layout the kernel expects and lives across the call; `vector` points to
            // `vector_len` regions that nobody else uses.
            let count = unsafe { libc::ioctl(self.file.as_raw_fd(), PAGEMAP_SCAN, &mut argument) };
            if count < 0 {
                return Err(io::Error::last_os_error());
            }
            let regions = &regions[..count as usize];
            for region in regions {
                found(region.start..region.end);
            }
            match regions.last() {
                // `walk_end` can lag behind what was returned (seen on Linux 6.18), which would list pages twice.
                Some(last) if regions.len() == BATCH => start = last.end,
                _ => break,
            }
        }
        Ok(())
    }

    /// Looks at `count` pages from an address on, and sets `private` to what they are.
    pub fn is_private(
        &self,
        address: u64,
        count: usize,
        private: &mut Vec<bool>,
    ) -> io::Result<()> {
        let mut words = [0; 8 * 256];
        private.clear();
        while private.len() < count {
            let pages = (count - private.len()).min(256);
            let bytes = &mut words[..pages * 8];
            self.file
                .read_exact_at(bytes, (address / PAGE + private.len() as u64) * 8)?;
            private.extend(bytes.chunks_exact(8).map(is_private));
        }
        Ok(())
    }

    /// The slow way.
    fn read(&self, addresses: Range<u64>, found: &mut impl FnMut(Range<u64>)) -> io::Result<()> {
        let mut bytes = vec![0; 8 * 32768];
        let mut open: Option<Range<u64>> = None;
        let mut at = addresses.start;
        while at < addresses.end {
            let pages = ((addresses.end - at) / PAGE).min(bytes.len() as u64 / 8) as usize;
            self.file
                .read_exact_at(&mut bytes[..pages * 8], at / PAGE * 8)?;
            for word in bytes[..pages * 8].chunks_exact(8) {
                if is_private(word) {
                    match &mut open {
                        Some(range) => range.end = at + PAGE,
                        None => open = Some(at..at + PAGE),
                    }
                } else if let Some(range) = open.take() {
                    found(range);
                }
                at += PAGE;
            }
        }
        if let Some(range) = open {
            found(range);
        }
        Ok(())
    }
}

/// Present or swapped, and neither file nor shared.
fn is_private(word: &[u8]) -> bool {
    let word = u64::from_ne_bytes(word.try_into().expect("eight bytes"));
    word >> 62 != 0 && word >> 61 & 1 == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_find_the_pages_that_were_written() {
        let file = tempfile::tempfile().unwrap();
        let pages = 20_000usize;
        file.set_len(pages as u64 * PAGE).unwrap();
        let len = pages * PAGE as usize;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE);
        // SAFETY: a new private mapping at an address of the kernel's choice, unmapped below.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                protection,
                flags,
                file.as_raw_fd(),
                0,
            )
        };
        assert_ne!(base, libc::MAP_FAILED);
        let touch = |page: usize, write: bool| {
            // SAFETY: inside the mapping.
            unsafe {
                let at = base.cast::<u8>().add(page * PAGE as usize);
                if write {
                    at.write_volatile(1)
                } else {
                    let _ = at.read_volatile();
                }
            }
        };
        (0..pages).for_each(|page| touch(page, false));
        // More ranges than one call of the kernel returns.
        let mut written = vec![0, 1, 2, 77, 300, 301, 19_999];
        written.extend((400..19_000).step_by(2));
        written.sort_unstable();
        written.iter().for_each(|page| touch(*page, true));
        let map = Pagemap::open(std::process::id()).unwrap();
        let (start, end) = (base as u64, base as u64 + len as u64);
        type Way = fn(&Pagemap, Range<u64>, &mut dyn FnMut(Range<u64>)) -> io::Result<()>;
        let ways: [Way; 2] = [
            |map, range, mut found| map.private(range, &mut found),
            |map, range, mut found| map.read(range, &mut found),
        ];
        for way in ways {
            let mut pages = Vec::new();
            way(&map, start..end, &mut |range: Range<u64>| {
                pages.extend(
                    (range.start..range.end)
                        .step_by(4096)
                        .map(|a| ((a - start) / PAGE) as usize),
                );
            })
            .unwrap();
            assert_eq!(pages, written);
        }
        // SAFETY: mapped above with this length; nothing refers to it any more.
        unsafe { libc::munmap(base, len) };
    }
}
