//! zfile: a compressed container with random access.
//!
//! ```text
//! 512 B header | block 0 | block 1 | … | jump table: u32 stored length per block | 512 B trailer
//! ```
//! Each block is an independent LZ4 block or zstd frame of `block_size` plaintext bytes (the last one shorter), followed
//! by a 4-byte checksum when `verify` is set. Header and trailer have the same layout; a file written to an output that
//! cannot seek back has an empty header, and only its trailer counts.
//!
//! All checksums are CRC-32C *without* the final inversion: [`raw_crc32c`].

mod codec;
mod format;
mod jump;
mod reader;
mod writer;

pub use codec::Algorithm;
pub(crate) use reader::is_zfile;
pub use reader::ZFile;
pub use writer::{Options, ZWriter};

/// CRC-32C whose register starts at `init` and is not inverted at the end.
pub fn raw_crc32c(init: u32, data: &[u8]) -> u32 {
    !crc32c::crc32c_append(!init, data)
}

/// Register value at the start of a block's checksum.
pub(crate) const BLOCK_CRC_INIT: u32 = 100_007;
