//! Memory that holds captured pages until they are in a file.

use std::io;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use rustix::mm::{madvise, mmap_anonymous, munmap, Advice, MapFlags, ProtFlags};

use super::guest::Guest;
use super::PAGE;

/// Unit in which memory is got and kept. Fits large pages.
const CHUNK: usize = 32 << 20;
/// Memory kept for the next capture, in chunks. Getting memory from the kernel costs several times what copying
/// into it costs.
const KEPT: usize = 8;

static POOL: Mutex<Vec<Chunk>> = Mutex::new(Vec::new());

/// One piece of memory, all pages present.
struct Chunk(NonNull<u8>);

// SAFETY: a Chunk owns its mapping, which is ordinary memory.
unsafe impl Send for Chunk {}
// SAFETY: a shared Chunk is only read.
unsafe impl Sync for Chunk {}

impl Chunk {
    fn get() -> io::Result<Chunk> {
        if let Some(chunk) = POOL.lock().unwrap_or_else(PoisonError::into_inner).pop() {
            return Ok(chunk);
        }
        // SAFETY: a new anonymous mapping at an address of the kernel's choice.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                CHUNK,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )?
        };
        // Both are matters of speed only.
        // SAFETY: the range was just mapped and holds nothing.
        unsafe {
            let _ = madvise(base, CHUNK, Advice::LinuxHugepage);
            let _ = madvise(base, CHUNK, Advice::LinuxPopulateWrite);
        }
        Ok(Chunk(
            NonNull::new(base.cast()).expect("mmap does not return null"),
        ))
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is CHUNK bytes long, initialised to zeros by the kernel, and lives as long as self.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr(), CHUNK) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_ptr(), CHUNK) }
    }

    /// Back to the pool, or to the kernel.
    fn put(self) {
        let mut pool = POOL.lock().unwrap_or_else(PoisonError::into_inner);
        if pool.len() < KEPT {
            pool.push(self);
        }
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // SAFETY: the mapping is owned by self, and no slice of it outlives self.
        let _ = unsafe { munmap(self.0.as_ptr().cast(), CHUNK) };
    }
}

/// Copies of ranges of an image.
pub struct Staging {
    /// Position in the image, length, and position in the chunks as if they were one; sorted.
    runs: Vec<(u64, u64, u64)>,
    chunks: Vec<Chunk>,
}

impl Staging {
    /// Copies `runs` (position and length in the image, sorted, whole pages) out of a process.
    pub fn copy(guest: &Guest, runs: &[(u64, u64)]) -> io::Result<Staging> {
        let mut staging = Staging {
            runs: Vec::with_capacity(runs.len()),
            chunks: Vec::new(),
        };
        let mut total = 0;
        for (offset, len) in runs {
            staging.runs.push((*offset, *len, total));
            total += len;
        }
        // One call of the kernel takes many short runs.
        let mut pieces = Vec::new();
        for from in (0..total).step_by(CHUNK) {
            let to = (from + CHUNK as u64).min(total);
            pieces.clear();
            let first = staging
                .runs
                .partition_point(|(_, len, at)| at + len <= from);
            for (offset, len, at) in staging.runs[first..]
                .iter()
                .take_while(|(_, _, at)| *at < to)
            {
                let (start, stop) = (from.max(*at), to.min(at + len));
                guest.addresses(offset + (start - at)..offset + (stop - at), &mut pieces)?;
            }
            let mut chunk = Chunk::get()?;
            guest
                .process()
                .read(&mut chunk.bytes_mut()[..(to - from) as usize], &pieces)?;
            staging.chunks.push(chunk);
        }
        Ok(staging)
    }

    /// Fills `buf` with the content at `offset`, which must have been copied.
    pub fn read(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            let run = self
                .runs
                .partition_point(|(start, len, _)| start + len <= at);
            let Some((start, len, place)) = self.runs.get(run).filter(|(start, _, _)| *start <= at)
            else {
                return Err(io::Error::other(format!("position {at} was not captured")));
            };
            let place = place + (at - start);
            let inside = place as usize % CHUNK;
            let count = (buf.len() - done)
                .min((start + len - at) as usize)
                .min(CHUNK - inside);
            let chunk = self.chunks[place as usize / CHUNK].bytes();
            buf[done..done + count].copy_from_slice(&chunk[inside..inside + count]);
            done += count;
        }
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        self.chunks.drain(..).for_each(Chunk::put);
    }
}

const _: () = assert!(CHUNK as u64 % PAGE == 0);
