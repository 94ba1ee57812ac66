//! Header and trailer of a zfile.

use super::{raw_crc32c, Algorithm};
use crate::error::{Error, Result};
use crate::header::{u32_at, u64_at};

pub(super) const HEADER: usize = 512;
const MAGIC: &[u8; 24] = b"ZFile\0\x01\0tuji.yyf@Alibaba";
const USED: u32 = 96;
const OBJECT: &str = "the zfile";
/// Most blocks a reader accepts.
const MAX_BLOCKS: u64 = 1_000_000_000;

pub(super) mod flags {
    pub const HEADER: u64 = 1;
    pub const DATA: u64 = 1 << 1;
    pub const SEALED: u64 = 1 << 2;
    /// The header has the same content as the trailer.
    pub const FINAL: u64 = 1 << 3;
    /// Digest and index checksum are filled in.
    pub const DIGESTS: u64 = 1 << 4;
    /// The jump table is compressed; nobody writes that.
    pub const PACKED_INDEX: u64 = 1 << 5;
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Info {
    pub flags: u64,
    /// Byte at which the jump table starts.
    pub index_offset: u64,
    pub blocks: u64,
    pub plain_size: u64,
    pub index_crc: u32,
    pub block_size: u32,
    pub algorithm: Algorithm,
    pub verify: bool,
}

impl Info {
    pub fn has_magic(block: &[u8; HEADER]) -> bool {
        block[..24] == *MAGIC
    }

    pub fn raw_flags(block: &[u8; HEADER]) -> u64 {
        u64_at(block, 32)
    }

    pub fn encode(&self) -> [u8; HEADER] {
        let mut block = [0; HEADER];
        block[..24].copy_from_slice(MAGIC);
        block[24..28].copy_from_slice(&USED.to_le_bytes());
        block[32..40].copy_from_slice(&self.flags.to_le_bytes());
        block[40..48].copy_from_slice(&self.index_offset.to_le_bytes());
        block[48..56].copy_from_slice(&self.blocks.to_le_bytes());
        block[56..64].copy_from_slice(&self.plain_size.to_le_bytes());
        block[64..68].copy_from_slice(&self.index_crc.to_le_bytes());
        block[72..76].copy_from_slice(&self.block_size.to_le_bytes());
        block[76] = self.algorithm.number();
        block[88] = u8::from(self.verify);
        let digest = raw_crc32c(0, &block);
        block[28..32].copy_from_slice(&digest.to_le_bytes());
        block
    }

    /// Decodes a header or trailer of a file of `file_size` bytes and checks every number in it. Bits of the flags
    /// that have no meaning are ignored: old files have garbage there.
    pub fn decode(block: &[u8; HEADER], file_size: u64) -> Result<Info> {
        let wrong = |reason: String| Err(Error::format(OBJECT, reason));
        if !Info::has_magic(block) {
            return wrong("the magic number is missing".into());
        }
        let flags = Info::raw_flags(block);
        if flags & flags::DIGESTS != 0 {
            let mut blank = *block;
            blank[28..32].fill(0);
            let (stored, computed) = (u32_at(block, 28), raw_crc32c(0, &blank));
            if stored != computed {
                return wrong(format!(
                    "its header has checksum {computed:#x} instead of {stored:#x}"
                ));
            }
        }
        if flags & flags::PACKED_INDEX != 0 && flags & flags::DIGESTS != 0 {
            return Err(Error::unsupported(OBJECT, "its jump table is compressed"));
        }
        if block[78] != 0 || u32_at(block, 84) != 0 {
            return Err(Error::unsupported(
                OBJECT,
                "it was compressed with a dictionary",
            ));
        }
        let Some(algorithm) = Algorithm::from_number(block[76]) else {
            return Err(Error::unsupported(
                OBJECT,
                format!("compression algorithm {} is unknown", block[76]),
            ));
        };
        let info = Info {
            flags,
            index_offset: u64_at(block, 40),
            blocks: u64_at(block, 48),
            plain_size: u64_at(block, 56),
            index_crc: u32_at(block, 64),
            block_size: u32_at(block, 72),
            algorithm,
            verify: block[88] != 0,
        };
        if !info.block_size.is_power_of_two() || !(4096..=65536).contains(&info.block_size) {
            return wrong(format!("its block size is {} bytes", info.block_size));
        }
        if info.blocks > MAX_BLOCKS
            || info.blocks != info.plain_size.div_ceil(u64::from(info.block_size))
        {
            return wrong(format!(
                "{} blocks of {} bytes cannot hold {} bytes",
                info.blocks, info.block_size, info.plain_size
            ));
        }
        let end = info
            .index_offset
            .checked_add(4 * info.blocks + HEADER as u64);
        if info.index_offset < HEADER as u64 || end.is_none_or(|end| end > file_size) {
            return wrong(format!(
                "a jump table of {} blocks at byte {} does not fit a file of {file_size} bytes",
                info.blocks, info.index_offset
            ));
        }
        Ok(info)
    }
}
