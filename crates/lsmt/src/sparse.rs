//! Sparse uppers: a file with a hole wherever nothing was written. Reading only.
//!
//! Byte v of the disk is byte 4096 + v of the file, and the holes of the file are the index. A hole is at least a page
//! of the host, so a smaller write hides its whole page, and a discard cannot be told from "never written". Such a
//! file is therefore only right at the bottom of a stack.

use std::fs::File;
use std::io;
use std::sync::Arc;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use crate::entry::{Entry, MAX_LEN};
use crate::error::{Error, Result};
use crate::header::{flags, Header, BLOCK, SECTOR};
use crate::index::Index;
use crate::layer::Layer;
use crate::source::{FileSource, ReadAt};

/// Opens an unsealed sparse upper as the bottom layer of a stack.
pub fn open_bottom(file: Arc<File>) -> Result<Layer> {
    let size = file
        .metadata()
        .map_err(Error::io("find the size of a sparse upper"))?
        .len();
    let source = FileSource::with_size(file.clone(), size);
    let mut block = [0; BLOCK];
    source
        .read_exact_at(&mut block, 0)
        .map_err(Error::io("read the header of a sparse upper"))?;
    let header = Header::decode(&block, "the header of the sparse upper")?;
    if !header.has(flags::HEADER | flags::DATA | flags::SPARSE) {
        return Err(Error::format(
            "the sparse upper",
            format!("flags {:#x} are not those of one", header.flags),
        ));
    }
    let end = size.min(BLOCK as u64 + header.virtual_size);
    let mut entries = Vec::new();
    let mut at = BLOCK as u64;
    while let Some(start) = seek(&file, SeekFrom::Data(at))?.filter(|start| *start < end) {
        let stop = seek(&file, SeekFrom::Hole(start))?.unwrap_or(end).min(end);
        let (from, to) = (start.max(at) / SECTOR, stop.div_ceil(SECTOR));
        for source in (from..to).step_by(MAX_LEN as usize) {
            entries.push(Entry::data(
                source - BLOCK as u64 / SECTOR,
                MAX_LEN.min(to - source),
                source,
                0,
            ));
        }
        at = to * SECTOR;
    }
    // The last sector may be cut short by the end of the file.
    let source: Arc<dyn ReadAt> = Arc::new(ZeroExtended(source));
    Layer::new(
        header.identity,
        header.virtual_size,
        Index::new(entries)?,
        vec![source],
    )
}

fn seek(file: &File, to: SeekFrom) -> Result<Option<u64>> {
    match rustix::fs::seek(file, to) {
        Ok(at) => Ok(Some(at)),
        Err(Errno::NXIO) => Ok(None),
        Err(e) => Err(Error::io("find the holes of a sparse upper")(e.into())),
    }
}

/// A file that reads as zeros behind its end.
struct ZeroExtended(FileSource);

impl ReadAt for ZeroExtended {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let got = self.0.read_at(buf, offset)?;
        buf[got..].fill(0);
        Ok(buf.len())
    }
    fn size(&self) -> u64 {
        u64::MAX
    }
}
