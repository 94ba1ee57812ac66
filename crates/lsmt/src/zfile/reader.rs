//! Random-access reader.

use std::io;

use super::codec::Decoder;
use super::format::{flags, Info, HEADER};
use super::jump::JumpTable;
use super::{raw_crc32c, Algorithm, BLOCK_CRC_INIT};
use crate::error::{Error, Result};
use crate::header::u32_at;
use crate::source::ReadAt;

const OBJECT: &str = "the zfile";
/// Stored bytes fetched by one read of the source, unless a single block is longer.
const FETCH: u64 = 256 << 10;
/// How often a block with a wrong checksum is fetched again. A cache between us and the truth may be what is damaged.
const RETRIES: usize = 3;
/// Bytes of a block's checksum.
const CRC: usize = 4;

/// The plaintext of a zfile. Holds the jump table in memory and nothing else; every read decompresses.
pub struct ZFile<S> {
    source: S,
    info: Info,
    jump: JumpTable,
    decoder: Decoder,
}

impl<S> std::fmt::Debug for ZFile<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ZFile")
            .field("info", &self.info)
            .finish_non_exhaustive()
    }
}

/// Whether `source` starts like a zfile.
pub(crate) fn is_zfile(source: &dyn ReadAt) -> Result<bool> {
    if source.size() < 2 * HEADER as u64 {
        return Ok(false);
    }
    Ok(Info::has_magic(&read_block(source, 0)?))
}

fn read_block(source: &dyn ReadAt, offset: u64) -> Result<[u8; HEADER]> {
    let mut block = [0; HEADER];
    source
        .read_exact_at(&mut block, offset)
        .map_err(Error::io("read the header of a zfile"))?;
    Ok(block)
}

impl<S: ReadAt> ZFile<S> {
    /// Opens a zfile: reads header (or trailer) and jump table and checks them. Memory grows with what was really read,
    /// about 2¼ bytes per block.
    pub fn open(source: S) -> Result<ZFile<S>> {
        let size = source.size();
        if size < 2 * HEADER as u64 {
            return Err(Error::format(
                OBJECT,
                format!("{size} bytes are too few for header and trailer"),
            ));
        }
        let mut block = read_block(&source, 0)?;
        if !Info::has_magic(&block) {
            return Err(Error::format(OBJECT, "the magic number is missing"));
        }
        if Info::raw_flags(&block) & flags::FINAL == 0 {
            block = read_block(&source, size - HEADER as u64)?;
        }
        let info = Info::decode(&block, size)?;
        let jump = read_jump_table(&source, &info)?;
        let decoder = Decoder::new(info.algorithm);
        Ok(ZFile {
            source,
            info,
            jump,
            decoder,
        })
    }

    /// Plaintext bytes per block.
    pub fn block_size(&self) -> u32 {
        self.info.block_size
    }

    /// How blocks are compressed.
    pub fn algorithm(&self) -> Algorithm {
        self.info.algorithm
    }

    /// Whether blocks carry checksums.
    pub fn has_checksums(&self) -> bool {
        self.info.verify
    }

    /// Heap bytes held.
    pub fn memory(&self) -> usize {
        self.jump.memory()
    }

    /// Where the block that holds plaintext byte `offset` is stored: first byte and length. For prefetching.
    pub fn stored_range(&self, offset: u64) -> Option<(u64, usize)> {
        let block = usize::try_from(offset / u64::from(self.info.block_size)).ok()?;
        (block < self.jump.len()).then(|| (self.jump.start(block), self.jump.length(block)))
    }

    fn plain_len(&self, block: usize) -> usize {
        let start = block as u64 * u64::from(self.info.block_size);
        (self.info.plain_size - start).min(u64::from(self.info.block_size)) as usize
    }

    /// Checks and decompresses one stored block, fetching it again when it is damaged.
    fn decode(&self, block: usize, stored: &[u8], plain: &mut [u8]) -> io::Result<()> {
        let mut fault = match self.try_decode(stored, plain) {
            Ok(()) => return Ok(()),
            Err(fault) => fault,
        };
        let (start, mut again) = (self.jump.start(block), vec![0; stored.len()]);
        for _ in 0..RETRIES {
            self.source.forget(start, again.len() as u64);
            self.source.read_exact_at(&mut again, start)?;
            match self.try_decode(&again, plain) {
                Ok(()) => return Ok(()),
                Err(e) => fault = e,
            }
        }
        Err(Error::format(
            OBJECT,
            format!("block {block} ({} bytes at {start}): {fault}", stored.len()),
        )
        .into())
    }

    fn try_decode(&self, stored: &[u8], plain: &mut [u8]) -> Result<(), String> {
        let mut payload = stored;
        if self.info.verify {
            payload = &stored[..stored.len() - CRC];
            let (expected, found) = (
                u32_at(stored, payload.len()),
                raw_crc32c(BLOCK_CRC_INIT, payload),
            );
            if expected != found {
                return Err(format!("checksum {found:#x} instead of {expected:#x}"));
            }
        }
        self.decoder.decode(payload, plain)
    }

    /// Last block (exclusive) to fetch together with `first` when blocks before `end` are wanted.
    fn batch_end(&self, first: usize, end: usize) -> (usize, usize) {
        let mut last = first + 1;
        let mut bytes = self.jump.length(first);
        while last < end && (bytes + self.jump.length(last)) as u64 <= FETCH {
            bytes += self.jump.length(last);
            last += 1;
        }
        (last, bytes)
    }
}

fn read_jump_table(source: &dyn ReadAt, info: &Info) -> Result<JumpTable> {
    let overhead = if info.verify { CRC } else { 0 };
    let longest = info.algorithm.bound(info.block_size as usize) + overhead;
    let mut jump = JumpTable::new(HEADER as u64);
    let mut crc = 0;
    let mut buf = [0; 64 << 10];
    let mut rest = 4 * info.blocks;
    while rest > 0 {
        let chunk = &mut buf[..rest.min(64 << 10) as usize];
        let at = info.index_offset + 4 * info.blocks - rest;
        source
            .read_exact_at(chunk, at)
            .map_err(Error::io("read the jump table of a zfile"))?;
        crc = raw_crc32c(crc, chunk);
        for length in chunk.chunks_exact(4).map(|bytes| u32_at(bytes, 0)) {
            if length as usize <= overhead || length as usize > longest {
                return Err(Error::format(
                    OBJECT,
                    format!("block {} has a stored length of {length} bytes", jump.len()),
                ));
            }
            jump.push(length)?;
        }
        if jump.end() > info.index_offset {
            break;
        }
        rest -= chunk.len() as u64;
    }
    if jump.end() != info.index_offset {
        return Err(Error::format(
            OBJECT,
            format!(
                "its blocks end at byte {}, the jump table starts at {}",
                jump.end(),
                info.index_offset
            ),
        ));
    }
    if info.flags & flags::DIGESTS != 0 && crc != info.index_crc {
        return Err(Error::format(
            OBJECT,
            format!(
                "its jump table has checksum {crc:#x} instead of {:#x}",
                info.index_crc
            ),
        ));
    }
    jump.shrink();
    Ok(jump)
}

impl<S: ReadAt> ReadAt for ZFile<S> {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let len = (buf.len() as u64).min(self.info.plain_size.saturating_sub(offset)) as usize;
        if len == 0 {
            return Ok(0);
        }
        let size = u64::from(self.info.block_size);
        let (mut block, end) = (
            (offset / size) as usize,
            (offset + len as u64).div_ceil(size) as usize,
        );
        let (mut stored, mut bounce) = (Vec::new(), Vec::new());
        while block < end {
            let (last, bytes) = self.batch_end(block, end);
            stored.resize(bytes, 0);
            self.source
                .read_exact_at(&mut stored, self.jump.start(block))?;
            let mut rest = stored.as_slice();
            for block in block..last {
                let (piece, after) = rest.split_at(self.jump.length(block));
                rest = after;
                let plain_len = self.plain_len(block);
                let start = block as u64 * size;
                if start >= offset && start + plain_len as u64 <= offset + len as u64 {
                    let at = (start - offset) as usize;
                    self.decode(block, piece, &mut buf[at..at + plain_len])?;
                    continue;
                }
                // Only the first and the last block can be needed in part.
                bounce.resize(plain_len, 0);
                self.decode(block, piece, &mut bounce)?;
                let from = start.max(offset);
                let to = (start + plain_len as u64).min(offset + len as u64);
                buf[(from - offset) as usize..(to - offset) as usize]
                    .copy_from_slice(&bounce[(from - start) as usize..(to - start) as usize]);
            }
            block = last;
        }
        Ok(len)
    }

    fn size(&self) -> u64 {
        self.info.plain_size
    }
}
