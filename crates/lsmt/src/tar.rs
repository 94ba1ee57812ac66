//! The tar wrap: a layer as the only member of a tar archive, so that OCI tools accept it as a layer.
//!
//! Two forms are read. The *pax* form starts with an extended header that holds the size, so the content starts at
//! byte 1536; the *plain* form has one header and content at 512. Only the pax form is written.

use std::io::{self, Write};
use std::ops::Range;

use crate::error::{Error, Result};
use crate::source::ReadAt;

/// Byte at which the content starts in the archives [`head`] begins.
pub const CONTENT: u64 = 3 * BLOCK as u64;
const BLOCK: usize = 512;
const OBJECT: &str = "the tar archive";
/// Name of the member that is the layer.
const MEMBER: &[u8] = b"overlaybd.commit";
const PAX: &[u8] = b"overlaybd.pax";

/// The range of `source` that is the wrapped layer, or `None` when `source` is not a tar archive.
///
/// The size an archive declares is cut to what is there.
pub fn locate(source: &dyn ReadAt) -> Result<Option<Range<u64>>> {
    let Some(header) = read_block(source, 0)?.filter(is_header) else {
        return Ok(None);
    };
    let length = octal(&header[124..136])?;
    if header[156] != b'x' {
        return Ok(Some(within(source, BLOCK as u64, length)));
    }
    let record = read_block(source, BLOCK as u64)?.filter(|_| length <= BLOCK as u64);
    let record = record
        .ok_or_else(|| Error::format(OBJECT, format!("an extended header of {length} bytes")))?;
    let size = pax_size(&record[..length as usize])?;
    if !read_block(source, 2 * BLOCK as u64)?.is_some_and(|block| is_header(&block)) {
        return Err(Error::format(
            OBJECT,
            "no member follows the extended header",
        ));
    }
    Ok(Some(within(source, CONTENT, size)))
}

fn within(source: &dyn ReadAt, start: u64, size: u64) -> Range<u64> {
    start..start.saturating_add(size).min(source.size())
}

fn read_block(source: &dyn ReadAt, offset: u64) -> Result<Option<[u8; BLOCK]>> {
    if source.size() < offset + BLOCK as u64 {
        return Ok(None);
    }
    let mut block = [0; BLOCK];
    source
        .read_exact_at(&mut block, offset)
        .map_err(Error::io("read a tar header"))?;
    Ok(Some(block))
}

/// The 1536 bytes before a layer of `size` bytes.
pub fn head(size: u64) -> [u8; CONTENT as usize] {
    // The decimal length of a pax record counts itself.
    let rest = format!(" size={size}\n");
    let mut length = rest.len() + 1;
    while length != rest.len() + length.to_string().len() {
        length += 1;
    }
    let record = format!("{length}{rest}");
    let mut out = [0; CONTENT as usize];
    out[..PAX.len()].copy_from_slice(PAX);
    out[124..136].copy_from_slice(format!("{:>11o} ", record.len()).as_bytes());
    out[156] = b'x';
    magic(&mut out[..BLOCK]);
    out[BLOCK..BLOCK + record.len()].copy_from_slice(record.as_bytes());
    let member = &mut out[2 * BLOCK..];
    member[..MEMBER.len()].copy_from_slice(MEMBER);
    member[100..108].copy_from_slice(b"100644 \0");
    member[108..116].copy_from_slice(b"     0 \0");
    member[116..124].copy_from_slice(b"     0 \0");
    member[124..136].copy_from_slice(b"          0 ");
    member[136..148].copy_from_slice(b"          0 ");
    member[156] = b'0';
    member[265..269].copy_from_slice(b"root");
    member[297..301].copy_from_slice(b"root");
    magic(member);
    out
}

/// Writes what follows a layer of `size` bytes: padding to a full block and the two empty blocks that end an archive.
pub fn write_tail(size: u64, out: &mut impl Write) -> io::Result<()> {
    let padding = (size.next_multiple_of(BLOCK as u64) - size) as usize;
    out.write_all(&[0; 3 * BLOCK][..padding + 2 * BLOCK])
}

/// Completes a header block with magic and checksum.
fn magic(block: &mut [u8]) {
    block[257..265].copy_from_slice(b"ustar\x0000");
    let sum = checksum(block);
    block[148..156].copy_from_slice(format!("{sum:>6o} \0").as_bytes());
}

/// Sum of all bytes, those of the checksum field counted as blanks.
fn checksum(block: &[u8]) -> u32 {
    let sum = |part: &[u8]| part.iter().map(|b| u32::from(*b)).sum::<u32>();
    sum(&block[..148]) + 8 * u32::from(b' ') + sum(&block[156..BLOCK])
}

fn is_header(block: &[u8; BLOCK]) -> bool {
    block[257..262] == *b"ustar"
        && block[263..265] == *b"00"
        && octal(&block[148..156]).is_ok_and(|sum| sum == u64::from(checksum(block)))
}

/// An octal number between blanks and NULs; an empty field is 0.
fn octal(field: &[u8]) -> Result<u64> {
    let wrong = || {
        Error::format(
            OBJECT,
            format!("\"{}\" is not an octal number", field.escape_ascii()),
        )
    };
    let text = std::str::from_utf8(field).map_err(|_| wrong())?;
    match text.trim_matches([' ', '\0']) {
        "" => Ok(0),
        digits if digits.bytes().all(|b| b.is_ascii_digit()) => {
            u64::from_str_radix(digits, 8).map_err(|_| wrong())
        }
        _ => Err(wrong()),
    }
}

/// The value of the `size` record.
fn pax_size(mut records: &[u8]) -> Result<u64> {
    let wrong = || Error::format(OBJECT, "its extended header cannot be parsed");
    while !records.is_empty() && records[0] != 0 {
        let blank = records.iter().position(|b| *b == b' ').ok_or_else(wrong)?;
        let length: usize = std::str::from_utf8(&records[..blank])
            .ok()
            .and_then(|t| t.parse().ok())
            .ok_or_else(wrong)?;
        let record = records.get(blank + 1..length).ok_or_else(wrong)?;
        if let Some(value) = record
            .strip_prefix(b"size=")
            .and_then(|v| v.strip_suffix(b"\n"))
        {
            return std::str::from_utf8(value)
                .ok()
                .and_then(|t| t.parse().ok())
                .ok_or_else(wrong);
        }
        records = &records[length..];
    }
    Err(Error::format(OBJECT, "its extended header has no size"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrapped(content: &[u8]) -> Vec<u8> {
        let mut out = head(content.len() as u64).to_vec();
        out.extend_from_slice(content);
        write_tail(content.len() as u64, &mut out).unwrap();
        out
    }

    #[test]
    fn what_is_wrapped_is_unwrapped() {
        for length in [0, 1, 511, 512, 513, 99_999] {
            let content: Vec<u8> = (0..length).map(|i: u32| i as u8).collect();
            let archive = wrapped(&content);
            assert_eq!(archive.len() % BLOCK, 0);
            let range = locate(&archive).unwrap().expect("a tar archive");
            assert_eq!(archive[range.start as usize..range.end as usize], content);
        }
    }

    #[test]
    fn a_declared_size_is_cut_to_what_is_there() {
        let mut archive = head(1 << 60).to_vec();
        archive.extend_from_slice(b"short");
        assert_eq!(locate(&archive).unwrap(), Some(CONTENT..CONTENT + 5));
    }

    #[test]
    fn other_bytes_are_not_a_tar() {
        assert_eq!(locate(&vec![0; 4096]).unwrap(), None);
        assert_eq!(locate(&b"ustar".to_vec()).unwrap(), None);
        let mut archive = wrapped(b"x");
        archive[0] ^= 1;
        assert_eq!(locate(&archive).unwrap(), None, "the checksum is verified");
    }
}
