//! Writing dense layers: commit of an upper, merge of layers, flattening of a whole stack.
//!
//! All three are the same thing, an index with its sources going in and a committed file coming out:
//!
//! ```text
//! header | data, densely packed | index, padded to a page | trailer
//! ```
//! The output is only ever appended to, so it can be a file, a zfile builder, a tar archive or an upload. Wrap the output
//! to limit the rate or to cancel: an error of the output ends the commit.

mod copy;
mod plan;

use std::io::Write;
use std::ops::Range;
use std::sync::Arc;

use uuid::Uuid;

use crate::entry::{Entry, MAX_REAL_ENTRIES};
use crate::error::{Error, Result};
use crate::header::{flags, Header, Identity, BLOCK, SECTOR};
use crate::index::Index;
use crate::source::ReadAt;
use crate::stack::Stack;
use crate::tail::{self, Padding};
use copy::Writer;
use plan::{clip, fitting, in_order};

/// How the index of the output is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Layout {
    /// As few entries as possible.
    #[default]
    Dense,
    /// Byte for byte what the reference implementation writes.
    Reference,
}

/// Which data is left out.
#[derive(Clone, Copy, Default)]
pub enum Elide<'a> {
    /// None: everything the index maps is copied.
    #[default]
    Nothing,
    /// 4 KiB blocks of zeros become zeroed entries.
    Zeros,
    /// The layer will be at the bottom: what reads as zeros is not mapped at all.
    ZerosAtBottom,
    /// 4 KiB blocks that equal the disk below are not mapped, other blocks of zeros become zeroed entries.
    Unchanged(&'a dyn ReadAt),
}

impl std::fmt::Debug for Elide<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Elide::Nothing => "Nothing",
            Elide::Zeros => "Zeros",
            Elide::ZerosAtBottom => "ZerosAtBottom",
            Elide::Unchanged(_) => "Unchanged",
        })
    }
}

/// What to write.
#[derive(Debug, Clone, Default)]
pub struct Options<'a> {
    /// Ids and tag of the new layer.
    pub identity: Identity,
    /// Size of the disk in bytes; what is mapped beyond is dropped.
    pub virtual_size: u64,
    /// How the index is cut.
    pub layout: Layout,
    /// Which data is left out.
    pub elide: Elide<'a>,
    /// Ranges of sectors whose data comes first in the file, in this order: recorded order of first use, so that a cold
    /// start reads the file front to back. The rest follows in order of address.
    pub order: &'a [Range<u64>],
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    /// Index entries without padding.
    pub entries: u64,
    /// Bytes of data.
    pub data: u64,
    /// Bytes of data that were left out.
    pub elided: u64,
    /// Length of the file in bytes.
    pub file: u64,
}

/// Writes one layer with the content of `index`, whose slots are positions in `sources`.
///
/// Fails with [`Error::Limit`] when the layer would have too many entries; see [`commit_split`].
pub fn commit(
    index: &Index,
    sources: &[Arc<dyn ReadAt>],
    options: &Options<'_>,
    out: &mut impl Write,
) -> Result<Report> {
    let clipped = clip(index.entries(), options.virtual_size.div_ceil(SECTOR));
    write_layer(&clipped, sources, options, out)
}

/// Writes a whole stack as one layer.
pub fn flatten(stack: &Stack, options: &Options<'_>, out: &mut impl Write) -> Result<Report> {
    commit(&*stack.merged_index()?, stack.sources(), options, out)
}

/// Writes the content of `index` as as many layers as the entry limit demands, usually one.
///
/// `next` makes the output of each layer. The layers cover disjoint ranges. The last one carries the ids given in the
/// options; earlier ones get random ids and each is the parent of its successor, so what named the layer as its parent
/// still does. Returns outputs and reports, bottom first.
pub fn commit_split<W: Write>(
    index: &Index,
    sources: &[Arc<dyn ReadAt>],
    options: &Options<'_>,
    mut next: impl FnMut(usize) -> Result<W>,
) -> Result<Vec<(W, Report)>> {
    split_at(
        index,
        sources,
        options,
        &mut next,
        MAX_REAL_ENTRIES as usize,
    )
}

fn split_at<W: Write>(
    index: &Index,
    sources: &[Arc<dyn ReadAt>],
    options: &Options<'_>,
    next: &mut impl FnMut(usize) -> Result<W>,
    limit: usize,
) -> Result<Vec<(W, Report)>> {
    // Each range of a trace cuts at most two entries.
    let cuts = 2 * options.order.len();
    if cuts > limit / 2 {
        return Err(Error::Argument(format!(
            "{} ranges are too many for an order",
            options.order.len()
        )));
    }
    let clipped = clip(index.entries(), options.virtual_size.div_ceil(SECTOR));
    let mut rest = &clipped[..];
    let mut written = Vec::new();
    let mut parent = options.identity.parent;
    loop {
        let count = fitting(rest, options.layout, limit - cuts);
        let (part, after) = rest.split_at(count);
        rest = after;
        let uuid = if rest.is_empty() {
            options.identity.uuid
        } else {
            Uuid::new_v4()
        };
        let identity = Identity {
            uuid,
            parent,
            ..options.identity.clone()
        };
        let mut out = next(written.len())?;
        let report = write_layer(
            part,
            sources,
            &Options {
                identity,
                ..options.clone()
            },
            &mut out,
        )?;
        written.push((out, report));
        parent = uuid;
        if rest.is_empty() {
            return Ok(written);
        }
    }
}

fn write_layer(
    entries: &[Entry],
    sources: &[Arc<dyn ReadAt>],
    options: &Options<'_>,
    out: &mut impl Write,
) -> Result<Report> {
    if let Some(entry) = entries
        .iter()
        .find(|e| usize::from(e.slot()) >= sources.len())
    {
        return Err(Error::Argument(format!(
            "{entry:?} names a source that was not given"
        )));
    }
    let header = Header::new(
        flags::HEADER | flags::DATA | flags::SEALED,
        options.virtual_size,
        options.identity.clone(),
    );
    out.write_all(&header.encode()?)
        .map_err(Error::io("write a layer"))?;
    let ordered;
    let entries = if options.order.is_empty() {
        entries
    } else {
        ordered = in_order(entries, options.order);
        &ordered
    };
    let mut writer = Writer::new(sources, options, entries.len(), out);
    for entry in entries {
        writer.add(*entry)?;
    }
    let (plan, elided) = writer.finish()?;
    let index_offset = plan.output * SECTOR;
    let mut entries = plan.gluer.finish();
    if !options.order.is_empty() {
        entries.sort_unstable_by_key(|e| e.offset());
    }
    entries.iter_mut().for_each(|e| *e = e.with_slot(0));
    let tail = tail::write(&entries, index_offset, &header, Padding::Page, out)?;
    Ok(Report {
        entries: entries.len() as u64,
        data: index_offset - BLOCK as u64,
        elided: elided * SECTOR,
        file: index_offset + tail,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layer::{Layer, LayerKey};

    fn scattered(count: u64) -> (Index, Vec<Arc<dyn ReadAt>>) {
        let entries = (0..count)
            .map(|i| Entry::data(i * 16, 8, 8 + i * 8, 0))
            .collect();
        let data: Vec<u8> = (0..(count + 1) * 4096)
            .map(|i| (i / 512 % 251) as u8 + 1)
            .collect();
        (Index::new(entries).unwrap(), vec![Arc::new(data)])
    }

    #[test]
    fn an_index_that_is_too_long_becomes_several_layers() {
        let (index, sources) = scattered(700);
        let identity = Identity {
            parent: Uuid::from_u128(7),
            ..Identity::random(Uuid::from_u128(7))
        };
        let options = Options {
            identity: identity.clone(),
            virtual_size: 700 * 8192,
            ..Options::default()
        };
        let order = [8000..8100, 16..24];
        for order in [&[][..], &order] {
            let options = Options {
                order,
                ..options.clone()
            };
            let parts = split_at(&index, &sources, &options, &mut |_| Ok(Vec::new()), 256).unwrap();
            assert_eq!(parts.len(), 3);
            assert!(parts.iter().all(|(_, report)| report.entries <= 256));
            let layers: Vec<_> = parts
                .into_iter()
                .map(|(bytes, _)| {
                    Arc::new(Layer::open(Arc::new(bytes), LayerKey::unique()).unwrap())
                })
                .collect();
            assert_eq!(layers[0].identity().parent, identity.parent);
            assert_eq!(layers[2].identity().uuid, identity.uuid);
            let stack = Stack::build(layers).unwrap();
            stack.check_parents().unwrap();
            let whole = Stack::build([Arc::new(
                Layer::new(
                    identity.clone(),
                    700 * 8192,
                    Index::new(index.entries().to_vec()).unwrap(),
                    sources.clone(),
                )
                .unwrap(),
            )])
            .unwrap();
            let read = |stack: &Stack| {
                let mut all = vec![0; 700 * 8192];
                stack.read_exact_at(&mut all, 0).unwrap();
                all
            };
            assert!(read(&stack) == read(&whole));
        }
    }

    #[test]
    fn the_entry_limit_is_that_of_the_format() {
        let count = MAX_REAL_ENTRIES + 1;
        let entries = (0..count).map(|i| Entry::zeroed(i * 16, 8, 8, 0)).collect();
        let index = Index::new(entries).unwrap();
        let options = Options {
            virtual_size: count * 8192,
            ..Options::default()
        };
        let sources: Vec<Arc<dyn ReadAt>> = vec![Arc::new(Vec::new())];
        let error = commit(&index, &sources, &options, &mut std::io::sink()).unwrap_err();
        assert!(
            matches!(error, Error::Limit { max: 999_936, .. }),
            "{error}"
        );
        let parts = commit_split(&index, &sources, &options, |_| Ok(Vec::new())).unwrap();
        assert_eq!(
            parts.iter().map(|(_, r)| r.entries).collect::<Vec<_>>(),
            [999_936, 1]
        );
        for (bytes, _) in parts {
            Layer::open(Arc::new(bytes), LayerKey::unique()).unwrap();
        }
    }
}
