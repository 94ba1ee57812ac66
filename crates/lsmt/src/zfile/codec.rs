//! Compression of single blocks.

use std::sync::{Mutex, PoisonError};

use zstd::bulk::{Compressor, Decompressor};

use super::{raw_crc32c, BLOCK_CRC_INIT};
use crate::error::{Error, Result};

/// Compression level of zstd; the reference implementation's.
const ZSTD_LEVEL: i32 = 3;

/// How the blocks of a zfile are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// LZ4 block format: fastest to read.
    Lz4,
    /// One zstd frame per block: smaller.
    Zstd,
}

impl Algorithm {
    pub(super) fn number(self) -> u8 {
        match self {
            Algorithm::Lz4 => 1,
            Algorithm::Zstd => 2,
        }
    }

    pub(super) fn from_number(number: u8) -> Option<Algorithm> {
        match number {
            1 => Some(Algorithm::Lz4),
            2 => Some(Algorithm::Zstd),
            _ => None,
        }
    }

    /// No compressed block of `block_size` plaintext bytes is longer, checksum not counted.
    pub(super) fn bound(self, block_size: usize) -> usize {
        match self {
            // The bounds of both libraries, whoever wrote the file.
            Algorithm::Lz4 => block_size + block_size / 255 + 32,
            Algorithm::Zstd => block_size + (block_size >> 8) + 64 + 512,
        }
    }
}

/// Compresses one block after the other; one per thread.
pub(super) struct Encoder {
    lz4: lz4_flex::block::CompressTable,
    zstd: Option<Compressor<'static>>,
    verify: bool,
}

impl Encoder {
    pub(super) fn new(algorithm: Algorithm, verify: bool) -> Result<Encoder> {
        let zstd = match algorithm {
            Algorithm::Lz4 => None,
            Algorithm::Zstd => Some(Compressor::new(ZSTD_LEVEL).map_err(Error::io("set up zstd"))?),
        };
        Ok(Encoder {
            lz4: lz4_flex::block::CompressTable::default(),
            zstd,
            verify,
        })
    }

    /// Appends the stored form of `plain` to `out` and returns its length.
    pub(super) fn append(&mut self, plain: &[u8], out: &mut Vec<u8>) -> Result<u32> {
        let start = out.len();
        let algorithm = if self.zstd.is_some() {
            Algorithm::Zstd
        } else {
            Algorithm::Lz4
        };
        // The compressor wants more room than any block needs.
        let room =
            lz4_flex::block::get_maximum_output_size(plain.len()).max(algorithm.bound(plain.len()));
        out.resize(start + room, 0);
        let length = match &mut self.zstd {
            Some(zstd) => zstd
                .compress_to_buffer(plain, &mut out[start..])
                .map_err(Error::io("compress a block with zstd"))?,
            None => {
                lz4_flex::block::compress_into_with_table(plain, &mut out[start..], &mut self.lz4)
                    .map_err(|e| Error::io("compress a block with lz4")(std::io::Error::other(e)))?
            }
        };
        out.truncate(start + length);
        if self.verify {
            let crc = raw_crc32c(BLOCK_CRC_INIT, &out[start..]);
            out.extend_from_slice(&crc.to_le_bytes());
        }
        Ok((out.len() - start) as u32)
    }
}

/// Decompresses blocks on any number of threads.
pub(super) struct Decoder {
    algorithm: Algorithm,
    /// Idle zstd contexts; making one costs more than a block.
    zstd: Mutex<Vec<Decompressor<'static>>>,
}

impl Decoder {
    pub(super) fn new(algorithm: Algorithm) -> Decoder {
        Decoder {
            algorithm,
            zstd: Mutex::new(Vec::new()),
        }
    }

    /// Decompresses `stored` (without checksum) into exactly `plain`. The error text is for the log.
    pub(super) fn decode(&self, stored: &[u8], plain: &mut [u8]) -> Result<(), String> {
        let length = match self.algorithm {
            Algorithm::Lz4 => {
                lz4_flex::block::decompress_into(stored, plain).map_err(|e| e.to_string())?
            }
            Algorithm::Zstd => {
                let idle = self
                    .zstd
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .pop();
                let mut context = match idle {
                    Some(context) => context,
                    None => Decompressor::new().map_err(|e| e.to_string())?,
                };
                let length = context
                    .decompress_to_buffer(stored, plain)
                    .map_err(|e| e.to_string());
                self.zstd
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(context);
                length?
            }
        };
        if length != plain.len() {
            return Err(format!(
                "it holds {length} bytes instead of {}",
                plain.len()
            ));
        }
        Ok(())
    }
}
