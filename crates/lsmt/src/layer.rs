//! Sealed layers: the strict reader, and what a layer is once its index is in memory.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use crate::entry::{Entry, FIRST_SECTOR, MAX_ENTRIES};
use crate::error::{Error, Result};
use crate::header::{flags, Header, Identity, BLOCK, SECTOR};
use crate::index::Index;
use crate::source::ReadAt;

const OBJECT: &str = "the layer";

/// What makes a layer the same layer, in caches. 32 bytes: the digest of its content, or a number unique in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LayerKey([u8; 32]);

impl LayerKey {
    /// The key of content that is identified by a digest.
    pub fn from_digest(digest: [u8; 32]) -> LayerKey {
        LayerKey(digest)
    }

    /// A key no other layer of this process has.
    pub fn unique() -> LayerKey {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut key = [0; 32];
        key[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        LayerKey(key)
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// An immutable layer: an index in memory and the sources its entries point into.
///
/// An ordinary layer has one source, its own file. A turboOCI layer has two. Cheap to share through `Arc`.
pub struct Layer {
    key: LayerKey,
    identity: Identity,
    virtual_size: u64,
    index: Arc<Index>,
    sources: Vec<Arc<dyn ReadAt>>,
}

impl std::fmt::Debug for Layer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Layer")
            .field("uuid", &self.identity.uuid)
            .field("virtual_size", &self.virtual_size)
            .field("entries", &self.index.len())
            .field("sources", &self.sources.len())
            .finish_non_exhaustive()
    }
}

impl Layer {
    /// Opens a committed layer or an upper that was sealed in place. `source` is the plain layer file; for blobs
    /// that may be compressed or wrapped see [`crate::blob::open_layer`].
    ///
    /// Three reads: header, trailer, index. Everything the file says about itself is checked before it is used; a
    /// layer that passes can be read without further checks. At most 16 MiB are allocated.
    pub fn open(source: Arc<dyn ReadAt>, key: LayerKey) -> Result<Layer> {
        let trailer = read_trailer(&*source)?;
        let entries = read_entries(&*source, &trailer)?;
        let limits = Limits {
            end: trailer.virtual_size.div_ceil(SECTOR),
            first: FIRST_SECTOR,
            last: trailer.index_offset / SECTOR,
        };
        let mut kept = Vec::with_capacity(entries.len());
        for entry in entries {
            limits.check(entry, kept.last().copied())?;
            kept.push(entry.with_slot(0));
        }
        Ok(Layer::from_parts(
            key,
            trailer.identity,
            trailer.virtual_size,
            Arc::new(Index::from_sorted(kept)),
            vec![source],
        ))
    }

    /// A layer whose index was built in memory. Slots in `index` are positions in `sources`; source sectors are
    /// positions in the source, whatever it is: a file, or the memory of a process.
    pub fn new(
        identity: Identity,
        virtual_size: u64,
        index: Index,
        sources: Vec<Arc<dyn ReadAt>>,
    ) -> Result<Layer> {
        if let Some(entry) = index
            .entries()
            .iter()
            .find(|e| usize::from(e.slot()) >= sources.len())
        {
            return Err(Error::Argument(format!(
                "{entry:?} names a source the layer does not have"
            )));
        }
        if index.end() > virtual_size.div_ceil(SECTOR) {
            return Err(Error::Argument(format!(
                "the index ends at sector {}, the image has {virtual_size} bytes",
                index.end()
            )));
        }
        Ok(Layer::from_parts(
            LayerKey::unique(),
            identity,
            virtual_size,
            Arc::new(index),
            sources,
        ))
    }

    pub(crate) fn from_parts(
        key: LayerKey,
        identity: Identity,
        virtual_size: u64,
        index: Arc<Index>,
        sources: Vec<Arc<dyn ReadAt>>,
    ) -> Layer {
        Layer {
            key,
            identity,
            virtual_size,
            index,
            sources,
        }
    }

    /// Cache key.
    pub fn key(&self) -> LayerKey {
        self.key
    }

    /// Ids and tag.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Size of the image in bytes; 0 in layers that leave it to the others.
    pub fn virtual_size(&self) -> u64 {
        self.virtual_size
    }

    /// The index.
    pub fn index(&self) -> &Arc<Index> {
        &self.index
    }

    /// Where the data is, by slot.
    pub fn sources(&self) -> &[Arc<dyn ReadAt>] {
        &self.sources
    }
}

/// Reads header and trailer and returns the trailer, which alone says whether the file is complete.
pub(crate) fn read_trailer(source: &dyn ReadAt) -> Result<Header> {
    let size = source.size();
    if size < 2 * BLOCK as u64 {
        return Err(Error::format(
            OBJECT,
            format!("{size} bytes are too few for header and trailer"),
        ));
    }
    let mut block = [0; BLOCK];
    source
        .read_exact_at(&mut block, 0)
        .map_err(Error::io("read the header of a layer"))?;
    let header = Header::decode(&block, "the header of the layer")?;
    if !header.has(flags::HEADER | flags::DATA) {
        return Err(Error::format(
            OBJECT,
            format!(
                "flags {:#x} are not those of a data file's header",
                header.flags
            ),
        ));
    }
    source
        .read_exact_at(&mut block, size - BLOCK as u64)
        .map_err(Error::io("read the trailer of a layer"))?;
    let trailer = Header::decode(&block, "the trailer of the layer")?;
    if trailer.has(flags::HEADER) || !trailer.has(flags::DATA | flags::SEALED) {
        return Err(Error::format(
            OBJECT,
            format!(
                "flags {:#x} are not those of a sealed file's trailer",
                trailer.flags
            ),
        ));
    }
    if trailer.index_size > MAX_ENTRIES {
        return Err(Error::Limit {
            what: "the number of index entries of the layer",
            value: trailer.index_size,
            max: MAX_ENTRIES,
            remedy: "build it again as several layers",
        });
    }
    if trailer.index_offset < BLOCK as u64 || trailer.index_offset % SECTOR != 0 {
        return Err(Error::format(
            OBJECT,
            format!("its index cannot start at byte {}", trailer.index_offset),
        ));
    }
    let end = trailer
        .index_offset
        .checked_add(trailer.index_size * Entry::SIZE as u64);
    if end.is_none_or(|end| end > size - BLOCK as u64) {
        return Err(Error::format(
            OBJECT,
            format!(
                "an index of {} entries at byte {} does not fit a file of {size} bytes",
                trailer.index_size, trailer.index_offset
            ),
        ));
    }
    Ok(trailer)
}

/// Reads the index without its padding. The trailer has been checked.
pub(crate) fn read_entries(source: &dyn ReadAt, trailer: &Header) -> Result<Vec<Entry>> {
    let mut bytes = vec![0; trailer.index_size as usize * Entry::SIZE];
    source
        .read_exact_at(&mut bytes, trailer.index_offset)
        .map_err(Error::io("read the index of a layer"))?;
    Ok(bytes
        .chunks_exact(Entry::SIZE)
        .map(Entry::decode)
        .filter(|e| !e.is_padding())
        .collect())
}

/// What the entries of one source may refer to.
pub(crate) struct Limits {
    /// Sector after the last of the image.
    pub end: u64,
    /// First sector of the source that may hold data.
    pub first: u64,
    /// Sector after the last that may hold data.
    pub last: u64,
}

impl Limits {
    /// Checks an entry against the image, its source and the entry before it.
    pub fn check(&self, entry: Entry, previous: Option<Entry>) -> Result<()> {
        let wrong = |reason: String| Err(Error::format("the index of the layer", reason));
        if entry.is_empty() {
            return wrong(format!(
                "the entry at sector {} has no length",
                entry.offset()
            ));
        }
        if let Some(previous) = previous.filter(|p| p.end() > entry.offset()) {
            return wrong(format!("{entry:?} follows {previous:?}"));
        }
        // No overflow: the fields have 50, 55 and 14 bits.
        if entry.end() > self.end {
            return wrong(format!(
                "{entry:?} lies outside the image of {} sectors",
                self.end
            ));
        }
        let source_end = entry.source() + if entry.is_zeroed() { 0 } else { entry.len() };
        if entry.source() < self.first || source_end > self.last {
            return wrong(format!(
                "{entry:?} points outside the data, which is in sectors {}..{}",
                self.first, self.last
            ));
        }
        Ok(())
    }
}
