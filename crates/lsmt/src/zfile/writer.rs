//! Streaming builder.

use std::collections::VecDeque;
use std::io::{self, Seek, SeekFrom, Write};
use std::sync::mpsc::{sync_channel, Receiver, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::codec::Encoder;
use super::format::{flags, Info, HEADER};
use super::{raw_crc32c, Algorithm};
use crate::error::{Error, Result};

/// Plaintext bytes handed to a worker at once.
const BATCH: usize = 256 << 10;
/// A stored block that is longer cannot be read by the reference implementation.
const MAX_STORED: u32 = 65536;

/// How a zfile is built.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Compression of the blocks.
    pub algorithm: Algorithm,
    /// Plaintext bytes per block: a power of two from 4096 to 32768. 64 KiB blocks that do not compress would be
    /// unreadable for the reference implementation, so they are not written.
    pub block_size: u32,
    /// Whether each block carries a checksum.
    pub verify: bool,
    /// Compressing threads. 0 compresses in the calling thread. The output does not depend on it.
    pub workers: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            algorithm: Algorithm::Lz4,
            block_size: 4096,
            verify: true,
            workers: 0,
        }
    }
}

/// Writes plaintext through a compressor into `out`.
///
/// Feed it through [`Write`], then call [`ZWriter::finish`], or [`ZWriter::finish_seekable`] to put the final numbers
/// into the header too, which saves readers one access. A writer that is dropped before leaves an unusable file.
pub struct ZWriter<W> {
    out: W,
    options: Options,
    /// Plaintext not yet handed on, less than a batch.
    buffer: Vec<u8>,
    plain_size: u64,
    /// Stored length of each finished block.
    lengths: Vec<u32>,
    stored: u64,
    encoder: Encoder,
    pool: Option<Pool>,
}

impl<W> std::fmt::Debug for ZWriter<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ZWriter")
            .field("options", &self.options)
            .field("plain_size", &self.plain_size)
            .finish_non_exhaustive()
    }
}

impl<W: Write> ZWriter<W> {
    /// Starts a zfile at the current position of `out`.
    pub fn new(mut out: W, options: Options) -> Result<ZWriter<W>> {
        if !options.block_size.is_power_of_two() || !(4096..=32768).contains(&options.block_size) {
            return Err(Error::Argument(format!(
                "a zfile block has 4096, 8192, 16384 or 32768 bytes, not {}",
                options.block_size
            )));
        }
        let encoder = Encoder::new(options.algorithm, options.verify)?;
        let pool = if options.workers > 0 {
            Some(Pool::start(&options)?)
        } else {
            None
        };
        let header = info(&options, flags::HEADER | flags::DATA | flags::DIGESTS);
        out.write_all(&header.encode())
            .map_err(Error::io("write a zfile"))?;
        Ok(ZWriter {
            out,
            options,
            buffer: Vec::with_capacity(BATCH),
            plain_size: 0,
            lengths: Vec::new(),
            stored: HEADER as u64,
            encoder,
            pool,
        })
    }

    /// Completes the file and returns the output and the number of bytes written to it. Needs no seeking.
    pub fn finish(mut self) -> Result<(W, u64)> {
        self.complete()?;
        Ok((self.out, self.stored))
    }

    /// Compresses what is left, writes jump table and trailer.
    fn complete(&mut self) -> Result<Info> {
        self.hand_on()?;
        while self
            .pool
            .as_ref()
            .is_some_and(|pool| !pool.pending.is_empty())
        {
            self.collect()?;
        }
        let mut trailer = info(&self.options, flags::DATA | flags::SEALED | flags::DIGESTS);
        trailer.index_offset = self.stored;
        trailer.blocks = self.lengths.len() as u64;
        trailer.plain_size = self.plain_size;
        for chunk in self.lengths.chunks(16 << 10) {
            let bytes: Vec<u8> = chunk
                .iter()
                .flat_map(|length| length.to_le_bytes())
                .collect();
            trailer.index_crc = raw_crc32c(trailer.index_crc, &bytes);
            self.out
                .write_all(&bytes)
                .map_err(Error::io("write a zfile"))?;
        }
        self.out
            .write_all(&trailer.encode())
            .and_then(|()| self.out.flush())
            .map_err(Error::io("write a zfile"))?;
        self.stored += 4 * trailer.blocks + HEADER as u64;
        Ok(trailer)
    }

    /// Compresses the buffered batch or gives it to a worker.
    fn hand_on(&mut self) -> Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        match &mut self.pool {
            None => {
                let batch = compress(&mut self.encoder, &self.buffer, self.options.block_size)?;
                self.buffer.clear();
                self.write_batch(batch)
            }
            Some(pool) => {
                let plain = std::mem::replace(&mut self.buffer, Vec::with_capacity(BATCH));
                pool.submit(plain)?;
                let full = pool.pending.len() > 2 * pool.threads.len();
                if full {
                    self.collect()?;
                }
                Ok(())
            }
        }
    }

    /// Waits for the oldest batch and writes it.
    fn collect(&mut self) -> Result<()> {
        let Some(result) = self.pool.as_mut().and_then(|pool| pool.pending.pop_front()) else {
            return Ok(());
        };
        let batch = result.recv().map_err(|_| worker_died())??;
        self.write_batch(batch)
    }

    fn write_batch(&mut self, batch: Batch) -> Result<()> {
        self.out
            .write_all(&batch.stored)
            .map_err(Error::io("write a zfile"))?;
        self.stored += batch.stored.len() as u64;
        self.lengths.extend_from_slice(&batch.lengths);
        Ok(())
    }
}

impl<W: Write + Seek> ZWriter<W> {
    /// Completes the file, goes back to rewrite the header, and leaves `out` at the end.
    pub fn finish_seekable(mut self) -> Result<(W, u64)> {
        let mut header = self.complete()?;
        header.flags = flags::HEADER | flags::DATA | flags::FINAL | flags::DIGESTS;
        let back = self.stored as i64;
        let seek = |out: &mut W, by: i64| out.seek(SeekFrom::Current(by));
        seek(&mut self.out, -back)
            .and_then(|_| self.out.write_all(&header.encode()))
            .and_then(|()| seek(&mut self.out, back - HEADER as i64))
            .map_err(Error::io("rewrite the header of a zfile"))?;
        Ok((self.out, self.stored))
    }
}

impl<W: Write> Write for ZWriter<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let take = data.len().min(BATCH - self.buffer.len());
        self.buffer.extend_from_slice(&data[..take]);
        self.plain_size += take as u64;
        if self.buffer.len() == BATCH {
            self.hand_on()?;
        }
        Ok(take)
    }

    /// Does nothing: an incomplete block cannot be written.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn info(options: &Options, flags: u64) -> Info {
    Info {
        flags,
        index_offset: 0,
        blocks: 0,
        plain_size: 0,
        index_crc: 0,
        block_size: options.block_size,
        algorithm: options.algorithm,
        verify: options.verify,
    }
}

fn worker_died() -> Error {
    Error::io("compress a block")(io::Error::other("a compressing thread died"))
}

struct Batch {
    stored: Vec<u8>,
    lengths: Vec<u32>,
}

fn compress(encoder: &mut Encoder, plain: &[u8], block_size: u32) -> Result<Batch> {
    let mut batch = Batch {
        stored: Vec::with_capacity(plain.len()),
        lengths: Vec::new(),
    };
    for block in plain.chunks(block_size as usize) {
        let length = encoder.append(block, &mut batch.stored)?;
        debug_assert!(length <= MAX_STORED);
        batch.lengths.push(length);
    }
    Ok(batch)
}

/// Worker threads, and the results still expected from them in order of submission.
struct Pool {
    jobs: Option<SyncSender<Job>>,
    pending: VecDeque<Receiver<Result<Batch>>>,
    threads: Vec<JoinHandle<()>>,
}

type Job = (Vec<u8>, SyncSender<Result<Batch>>);

impl Pool {
    fn start(options: &Options) -> Result<Pool> {
        let (jobs, queue) = sync_channel::<Job>(2 * options.workers);
        let queue = Arc::new(Mutex::new(queue));
        let mut pool = Pool {
            jobs: Some(jobs),
            pending: VecDeque::new(),
            threads: Vec::new(),
        };
        for _ in 0..options.workers {
            let mut encoder = Encoder::new(options.algorithm, options.verify)?;
            let (queue, block_size) = (queue.clone(), options.block_size);
            let run = move || loop {
                let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
                let Ok((plain, result)) = job else { return };
                // The receiver is gone when the writer was dropped; then nobody wants the batch.
                let _ = result.send(compress(&mut encoder, &plain, block_size));
            };
            let thread = std::thread::Builder::new().name("zfile".into()).spawn(run);
            pool.threads
                .push(thread.map_err(Error::io("start a compressing thread"))?);
        }
        Ok(pool)
    }

    fn submit(&mut self, plain: Vec<u8>) -> Result<()> {
        let (sender, receiver) = sync_channel(1);
        let jobs = self.jobs.as_ref().ok_or_else(worker_died)?;
        jobs.send((plain, sender)).map_err(|_| worker_died())?;
        self.pending.push_back(receiver);
        Ok(())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            // A panic was reported by its thread, and seen by the writer as a missing result.
            let _ = thread.join();
        }
    }
}
