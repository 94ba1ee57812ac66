//! The 4096-byte block at the head and at the tail of a layer file.
//!
//! ```text
//! off  size  field
//!   0     8  magic "LSMT\0\1\2\0"
//!   8    16  second magic (a fixed UUID)
//!  24     4  390, the number of bytes in use
//!  28     4  flags
//!  32     8  index offset, bytes
//!  40     8  index size, entries (padding included)
//!  48     8  virtual size, bytes
//!  56    37  uuid, text and NUL
//!  93    37  uuid of the parent, text and NUL
//! 132     2  version 1.1
//! 134   256  user tag
//! ```
//! All integers are little-endian; the rest of the block is zero.

use uuid::Uuid;

use crate::error::{Error, Result};

/// Size of a header or trailer block in bytes.
pub const BLOCK: usize = 4096;
/// Bytes per sector, the unit of every offset in an index entry.
pub const SECTOR: u64 = 512;
/// Greatest supported size of an image in bytes: sector numbers then fit 32 bits, as in the reference implementation.
pub const MAX_VIRTUAL_SIZE: u64 = (2 << 40) - SECTOR;

const MAGIC0: [u8; 8] = *b"LSMT\0\x01\x02\0";
const MAGIC1: [u8; 16] = [
    0x65, 0x7e, 0x63, 0xd2, 0x94, 0x44, 0x08, 0x4c, 0xa2, 0xd2, 0xc8, 0xec, 0x4f, 0xcf, 0xae, 0x8a,
];
const USED: u32 = 390;
const VERSION: [u8; 2] = [1, 1];
const TAG: std::ops::Range<usize> = 134..390;
const UUID: std::ops::Range<usize> = 56..93;
const PARENT: std::ops::Range<usize> = 93..130;

/// Flag bits of a header or trailer.
pub mod flags {
    /// Set in a header, clear in a trailer.
    pub const HEADER: u32 = 1;
    /// Set in a data file, clear in the index file of an append upper.
    pub const DATA: u32 = 1 << 1;
    /// The file is complete and read-only. Only the bit in the trailer counts.
    pub const SEALED: u32 = 1 << 2;
    /// The file is, or was before it was sealed, a sparse upper.
    pub const SPARSE: u32 = 1 << 4;
}

/// Identity of a layer, as stored in header and trailer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    /// Own id; nil when absent.
    pub uuid: Uuid,
    /// Id of the layer below; nil when absent.
    pub parent: Uuid,
    /// Free text of at most 256 bytes without NUL.
    pub tag: Vec<u8>,
}

impl Identity {
    /// A random id above `parent`, without a tag.
    pub fn random(parent: Uuid) -> Identity {
        Identity {
            uuid: Uuid::new_v4(),
            parent,
            tag: Vec::new(),
        }
    }
}

/// Decoded header or trailer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// See [`flags`].
    pub flags: u32,
    /// Byte offset of the index in the same file; 0 in the header of a layer.
    pub index_offset: u64,
    /// Number of index entries including padding; 0 in a header.
    pub index_size: u64,
    /// Size of the block device in bytes.
    pub virtual_size: u64,
    /// Ids and tag.
    pub identity: Identity,
}

impl Header {
    /// A header or trailer without an index.
    pub fn new(flags: u32, virtual_size: u64, identity: Identity) -> Header {
        Header {
            flags,
            index_offset: 0,
            index_size: 0,
            virtual_size,
            identity,
        }
    }

    /// Whether all bits of `mask` are set.
    pub fn has(&self, mask: u32) -> bool {
        self.flags & mask == mask
    }

    /// Decodes and checks a block. `object` names it in errors.
    pub fn decode(block: &[u8; BLOCK], object: &'static str) -> Result<Header> {
        if block[..8] != MAGIC0 || block[8..24] != MAGIC1 {
            return Err(Error::format(object, "the magic number is missing"));
        }
        let used = u32_at(block, 24);
        if used != USED {
            return Err(Error::format(
                object,
                format!("it declares {used} bytes instead of {USED}"),
            ));
        }
        if block[132..134] != VERSION {
            return Err(Error::unsupported(
                object,
                format!(
                    "its version is {}.{}, only 1.1 is known",
                    block[132], block[133]
                ),
            ));
        }
        let virtual_size = u64_at(block, 48);
        if virtual_size > MAX_VIRTUAL_SIZE {
            return Err(Error::Limit {
                what: "the virtual size of the image in bytes",
                value: virtual_size,
                max: MAX_VIRTUAL_SIZE,
                remedy: "split the disk into several images",
            });
        }
        let tag = &block[TAG];
        let tag_len = tag.iter().position(|b| *b == 0).unwrap_or(tag.len());
        Ok(Header {
            flags: u32_at(block, 28),
            index_offset: u64_at(block, 32),
            index_size: u64_at(block, 40),
            virtual_size,
            identity: Identity {
                uuid: decode_uuid(&block[UUID], object)?,
                parent: decode_uuid(&block[PARENT], object)?,
                tag: tag[..tag_len].to_vec(),
            },
        })
    }

    /// Encodes the block. Ids are written in upper case, as the reference implementation does.
    pub fn encode(&self) -> Result<[u8; BLOCK]> {
        let tag = &self.identity.tag;
        if tag.len() > TAG.len() || tag.contains(&0) {
            return Err(Error::Argument(format!(
                "a user tag holds at most {} bytes and no NUL",
                TAG.len()
            )));
        }
        if self.virtual_size > MAX_VIRTUAL_SIZE {
            return Err(Error::Limit {
                what: "the virtual size of the image in bytes",
                value: self.virtual_size,
                max: MAX_VIRTUAL_SIZE,
                remedy: "split the disk into several images",
            });
        }
        let mut block = [0; BLOCK];
        block[..8].copy_from_slice(&MAGIC0);
        block[8..24].copy_from_slice(&MAGIC1);
        block[24..28].copy_from_slice(&USED.to_le_bytes());
        block[28..32].copy_from_slice(&self.flags.to_le_bytes());
        block[32..40].copy_from_slice(&self.index_offset.to_le_bytes());
        block[40..48].copy_from_slice(&self.index_size.to_le_bytes());
        block[48..56].copy_from_slice(&self.virtual_size.to_le_bytes());
        self.identity
            .uuid
            .hyphenated()
            .encode_upper(&mut block[UUID]);
        self.identity
            .parent
            .hyphenated()
            .encode_upper(&mut block[PARENT]);
        block[132..134].copy_from_slice(&VERSION);
        block[TAG][..tag.len()].copy_from_slice(tag);
        Ok(block)
    }
}

/// 36 characters in any case and a NUL, or nothing but NULs for "no id".
fn decode_uuid(field: &[u8], object: &'static str) -> Result<Uuid> {
    if field.iter().all(|b| *b == 0) {
        return Ok(Uuid::nil());
    }
    std::str::from_utf8(&field[..36])
        .ok()
        .filter(|text| text.as_bytes()[8] == b'-' && field[36] == 0)
        .and_then(|text| Uuid::try_parse(text).ok())
        .ok_or_else(|| {
            Error::format(
                object,
                format!("\"{}\" is not a UUID", field.escape_ascii()),
            )
        })
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Header {
        Header {
            flags: flags::DATA | flags::SEALED,
            index_offset: 8192,
            index_size: 256,
            virtual_size: 1 << 24,
            identity: Identity {
                uuid: Uuid::from_u128(0xabcdef),
                parent: Uuid::from_u128(0x1234_5678_9abc),
                tag: b"hello tag".to_vec(),
            },
        }
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        let header = sample();
        assert_eq!(
            Header::decode(&header.encode().unwrap(), "x").unwrap(),
            header
        );
    }

    #[test]
    fn ids_are_written_in_upper_case_and_read_in_any_case() {
        let mut block = sample().encode().unwrap();
        assert!(block[UUID].starts_with(b"00000000-0000-0000-0000-000000ABCDEF\0"));
        block[UUID].make_ascii_lowercase();
        assert_eq!(Header::decode(&block, "x").unwrap(), sample());
        block[UUID].fill(0);
        assert!(Header::decode(&block, "x").unwrap().identity.uuid.is_nil());
        block[UUID][3] = b'!';
        assert!(matches!(
            Header::decode(&block, "x"),
            Err(Error::Format { .. })
        ));
    }

    #[test]
    fn each_checked_field_is_checked() {
        for at in [0, 7, 8, 23, 24, 27, 55, 60, 92, 100, 132, 133] {
            let mut block = sample().encode().unwrap();
            block[at] ^= 0x80;
            assert!(
                Header::decode(&block, "x").is_err(),
                "a flipped bit in byte {at} went unnoticed"
            );
        }
    }

    #[test]
    fn a_tag_fills_its_field_and_not_more() {
        let mut header = sample();
        header.identity.tag = vec![b'x'; 256];
        assert_eq!(
            Header::decode(&header.encode().unwrap(), "x").unwrap(),
            header
        );
        header.identity.tag.push(b'x');
        assert!(header.encode().is_err());
    }
}
