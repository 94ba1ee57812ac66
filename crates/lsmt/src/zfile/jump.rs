//! Where each block is, in about 2¼ bytes a block: a gigabyte in 4 KiB blocks costs 0.6 MiB.

use crate::error::{Error, Result};

/// Blocks per absolute position. Finding a block adds up at most this many lengths.
const GROUP: usize = 32;

#[derive(Debug)]
pub(super) struct JumpTable {
    /// Byte at which block `i * GROUP` starts.
    bases: Vec<u64>,
    lengths: Lengths,
    end: u64,
}

#[derive(Debug)]
enum Lengths {
    Short(Vec<u16>),
    /// Only needed for 64 KiB blocks that did not compress.
    Long(Vec<u32>),
}

impl JumpTable {
    /// A table whose first block starts at byte `start`.
    pub fn new(start: u64) -> JumpTable {
        JumpTable {
            bases: Vec::new(),
            lengths: Lengths::Short(Vec::new()),
            end: start,
        }
    }

    /// Adds the next block, `length` bytes with checksum.
    pub fn push(&mut self, length: u32) -> Result<()> {
        if self.len() % GROUP == 0 {
            self.bases.push(self.end);
        }
        self.end = self
            .end
            .checked_add(u64::from(length))
            .ok_or_else(|| Error::format("the zfile", "its blocks are longer than any file"))?;
        match (&mut self.lengths, u16::try_from(length)) {
            (Lengths::Short(lengths), Ok(length)) => lengths.push(length),
            (Lengths::Long(lengths), _) => lengths.push(length),
            (Lengths::Short(lengths), Err(_)) => {
                let mut long: Vec<u32> = lengths.iter().map(|l| u32::from(*l)).collect();
                long.push(length);
                self.lengths = Lengths::Long(long);
            }
        }
        Ok(())
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        match &self.lengths {
            Lengths::Short(lengths) => lengths.len(),
            Lengths::Long(lengths) => lengths.len(),
        }
    }

    /// Byte after the last block.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Stored length of a block.
    pub fn length(&self, block: usize) -> usize {
        match &self.lengths {
            Lengths::Short(lengths) => usize::from(lengths[block]),
            Lengths::Long(lengths) => lengths[block] as usize,
        }
    }

    /// Byte at which a block starts.
    pub fn start(&self, block: usize) -> u64 {
        let group = block / GROUP;
        self.bases[group]
            + (group * GROUP..block)
                .map(|b| self.length(b) as u64)
                .sum::<u64>()
    }

    /// Heap bytes held.
    pub fn memory(&self) -> usize {
        let lengths = match &self.lengths {
            Lengths::Short(lengths) => 2 * lengths.capacity(),
            Lengths::Long(lengths) => 4 * lengths.capacity(),
        };
        8 * self.bases.capacity() + lengths
    }

    /// Gives back what growing left over.
    pub fn shrink(&mut self) {
        self.bases.shrink_to_fit();
        match &mut self.lengths {
            Lengths::Short(lengths) => lengths.shrink_to_fit(),
            Lengths::Long(lengths) => lengths.shrink_to_fit(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_are_sums_of_lengths() {
        let lengths: Vec<u32> = (0..100)
            .map(|i| 100 + i * 7)
            .chain([70_000, 5, 65_536])
            .collect();
        let mut table = JumpTable::new(512);
        let mut at = 512;
        for (i, length) in lengths.iter().enumerate() {
            table.push(*length).unwrap();
            assert_eq!((table.start(i), table.length(i)), (at, *length as usize));
            at += u64::from(*length);
        }
        assert_eq!((table.len(), table.end()), (lengths.len(), at));
        assert_eq!(
            table.start(40),
            512 + lengths[..40].iter().map(|l| u64::from(*l)).sum::<u64>()
        );
    }
}
