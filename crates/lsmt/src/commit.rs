//! Writing dense layers: commit of an upper, merge of layers, flattening of a whole stack.
//!
//! All three are the same thing, an index with its sources going in and a committed file coming out:
//!
//! ```text
//! header | data, densely packed | index, padded to a page | trailer
//! ```
//! The output is only ever appended to, so it can be a file, a zfile builder, a tar archive or an upload. Wrap the output
//! to limit the rate or to cancel: an error of the output ends the commit.

use std::io::Write;
use std::ops::Range;
use std::sync::Arc;

use uuid::Uuid;

use crate::entry::{Entry, FIRST_SECTOR, MAX_LEN, MAX_REAL_ENTRIES};
use crate::error::{Error, Result};
use crate::extents::{Extent, ExtentMap};
use crate::header::{flags, Header, Identity, BLOCK, SECTOR};
use crate::index::{Gluer, Index, Origin};
use crate::source::ReadAt;
use crate::stack::Stack;
use crate::tail::{self, Padding};

/// Sectors in the pieces the reference implementation copies; joined again afterwards.
const PIECE: u64 = 64;
/// Sectors read and written at once.
const BATCH: u64 = 2048;
/// Sectors in the unit that is compared when data is left out.
const GRANULE: u64 = 8;

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

/// How many leading entries fit one layer when nothing is left out.
fn fitting(entries: &[Entry], layout: Layout, limit: usize) -> usize {
    if entries.len() <= limit {
        return entries.len();
    }
    let mut plan = Plan::new(layout);
    for (i, entry) in entries.iter().enumerate() {
        plan.emit(*entry);
        if plan.gluer.len() > limit {
            return i;
        }
    }
    entries.len()
}

/// Entries that end at sector `end`.
fn clip(entries: &[Entry], end: u64) -> Vec<Entry> {
    let count = entries.partition_point(|e| e.offset() < end);
    let mut kept = entries[..count].to_vec();
    if let Some(last) = kept.last_mut() {
        *last = last.clip(&(0..end));
    }
    kept
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
    let mut writer = Writer {
        sources,
        elide: options.elide,
        plan: Plan::new(options.layout),
        batch: Vec::new(),
        batch_sectors: 0,
        unplanned: entries.len(),
        elided: 0,
        buf: Vec::new(),
        below: Vec::new(),
        out,
    };
    for entry in entries {
        writer.add(*entry)?;
    }
    writer.flush()?;
    let Writer { plan, elided, .. } = writer;
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

/// The same content, cut and arranged so that `order` comes first.
fn in_order(entries: &[Entry], order: &[Range<u64>]) -> Vec<Entry> {
    let index = Index::from_sorted(entries.to_vec());
    let end = index.end();
    let mut taken = ExtentMap::new(true, u32::MAX);
    let mut out = Vec::with_capacity(entries.len() + 2 * order.len());
    for range in order.iter().cloned().chain(std::iter::once(0..end)) {
        // Virtual sizes are limited so that sectors have 32 bits.
        let range = range.start.min(end) as u32..range.end.min(end) as u32;
        let free: Vec<_> = taken
            .pieces(range.start..range.end.max(range.start))
            .filter_map(Result::err)
            .collect();
        for hole in free {
            for piece in index.pieces(hole.start.into()..hole.end.into()) {
                match piece.origin {
                    Origin::Hole => {}
                    Origin::Zero => {
                        out.push(Entry::zeroed(piece.start, piece.len, FIRST_SECTOR, 0))
                    }
                    Origin::Data { slot, sector } => {
                        out.push(Entry::data(piece.start, piece.len, sector, slot))
                    }
                }
            }
            mark(&mut taken, hole.start, hole.end);
        }
    }
    out
}

/// Marks a range as taken, in extents of legal length: half of the address space is too long for one.
fn mark(taken: &mut ExtentMap, mut start: u32, end: u32) {
    while start < end {
        let len = (end - start).min(1 << 30);
        taken.insert(
            Extent {
                start,
                len,
                source: 0,
                zero: true,
            },
            &mut |_, _| {},
        );
        start += len;
    }
}

/// Lays out the output: where each piece goes and which entries describe it.
struct Plan {
    layout: Layout,
    gluer: Gluer,
    /// Next free sector of the output.
    output: u64,
}

impl Plan {
    fn new(layout: Layout) -> Plan {
        // The reference implementation joins only what stays below the limit.
        let max = if layout == Layout::Reference {
            MAX_LEN - 1
        } else {
            MAX_LEN / GRANULE * GRANULE
        };
        Plan {
            layout,
            gluer: Gluer::new(max),
            output: FIRST_SECTOR,
        }
    }

    /// Adds the entry or entries for a run of the source whose data goes to the end of the output.
    fn emit(&mut self, entry: Entry) {
        // Joining across sources is legal, as the output is one file; the reference implementation does not do it.
        let slot = if self.layout == Layout::Reference {
            entry.slot()
        } else {
            0
        };
        if entry.is_zeroed() {
            self.gluer.push(Entry::zeroed(
                entry.offset(),
                entry.len(),
                self.output,
                slot,
            ));
            return;
        }
        let mut at = entry.offset();
        while at < entry.end() {
            let len = PIECE.min(entry.end() - at);
            self.gluer.push(Entry::data(at, len, self.output, slot));
            self.output += len;
            at += len;
        }
    }
}

/// Copies data in batches.
struct Writer<'a, W> {
    sources: &'a [Arc<dyn ReadAt>],
    elide: Elide<'a>,
    plan: Plan,
    /// Entries to emit next; those with data are together not longer than a batch.
    batch: Vec<Entry>,
    batch_sectors: u64,
    /// Source entries not yet emitted; leaves room for them in the index.
    unplanned: usize,
    elided: u64,
    buf: Vec<u8>,
    below: Vec<u8>,
    out: &'a mut W,
}

impl<W: Write> Writer<'_, W> {
    fn add(&mut self, entry: Entry) -> Result<()> {
        if entry.is_zeroed() {
            self.batch.push(entry);
            return Ok(());
        }
        let mut rest = entry;
        loop {
            // Cut only at whole pieces counted from the start of the entry, so that batches leave no trace.
            let room = (BATCH - self.batch_sectors) / PIECE * PIECE;
            if rest.len() <= BATCH - self.batch_sectors {
                self.batch_sectors += rest.len();
                self.batch.push(rest);
                return Ok(());
            }
            if room > 0 {
                let cut = rest.offset() + room;
                self.batch.push(rest.clip(&(rest.offset()..cut)));
                rest = rest.clip(&(cut..rest.end()));
                self.unplanned += 1;
            }
            self.flush()?;
        }
    }

    /// Reads, filters and writes the batch.
    fn flush(&mut self) -> Result<()> {
        let batch = std::mem::take(&mut self.batch);
        self.batch_sectors = 0;
        self.read(&batch)?;
        let mut at = 0;
        let mut keep_from = 0;
        for entry in &batch {
            self.unplanned -= 1;
            tail::check_count(self.plan.gluer.len() as u64)?;
            if entry.is_zeroed() {
                if !matches!(self.elide, Elide::ZerosAtBottom) {
                    self.plan.emit(*entry);
                }
                continue;
            }
            let most =
                self.plan.gluer.len() + self.unplanned + (entry.len() / GRANULE + 2) as usize;
            let room = tail::check_count(most as u64).is_ok();
            if room && !matches!(self.elide, Elide::Nothing) {
                self.below(*entry)?;
                for (range, verdict) in self.judge(*entry, at) {
                    let part = entry.clip(&range);
                    let bytes = part.len() as usize * SECTOR as usize;
                    match verdict {
                        Verdict::Keep => self.plan.emit(part),
                        Verdict::Zero => self.plan.emit(Entry::zeroed(
                            part.offset(),
                            part.len(),
                            FIRST_SECTOR,
                            part.slot(),
                        )),
                        Verdict::Drop => {}
                    }
                    if verdict != Verdict::Keep {
                        self.write(keep_from..at)?;
                        keep_from = at + bytes;
                        self.elided += part.len();
                    }
                    at += bytes;
                }
            } else {
                self.plan.emit(*entry);
                at += entry.len() as usize * SECTOR as usize;
            }
        }
        self.write(keep_from..at)?;
        self.batch = batch;
        self.batch.clear();
        Ok(())
    }

    /// Fills the buffer with the data of the batch; neighbours in a source are read at once.
    fn read(&mut self, batch: &[Entry]) -> Result<()> {
        let data = || batch.iter().filter(|e| !e.is_zeroed());
        let sectors: u64 = data().map(|e| e.len()).sum();
        self.buf.resize((sectors * SECTOR) as usize, 0);
        let mut rest = self.buf.as_mut_slice();
        let mut batch = data().peekable();
        while let Some(first) = batch.next() {
            let (slot, source) = (first.slot(), first.source());
            let mut len = first.len();
            while let Some(next) = batch.next_if(|n| n.slot() == slot && n.source() == source + len)
            {
                len += next.len();
            }
            let (target, after) = rest.split_at_mut((len * SECTOR) as usize);
            rest = after;
            self.sources[usize::from(slot)]
                .read_exact_at(target, source * SECTOR)
                .map_err(Error::io("read the data of a layer"))?;
        }
        Ok(())
    }

    fn write(&mut self, range: Range<usize>) -> Result<()> {
        self.out
            .write_all(&self.buf[range])
            .map_err(Error::io("write a layer"))
    }

    /// Fetches what the disk below has in the place of `entry`.
    fn below(&mut self, entry: Entry) -> Result<()> {
        if let Elide::Unchanged(disk) = self.elide {
            self.below.resize((entry.len() * SECTOR) as usize, 0);
            let got = disk
                .read_at(&mut self.below, entry.offset() * SECTOR)
                .map_err(Error::io("read the disk below a layer"))?;
            self.below[got..].fill(0);
        }
        Ok(())
    }

    /// Decides for each granule of an entry, whose data is at `at` in the buffer. Equal verdicts are joined.
    fn judge(&self, entry: Entry, at: usize) -> Vec<(Range<u64>, Verdict)> {
        let mut verdicts: Vec<(Range<u64>, Verdict)> = Vec::new();
        let mut sector = entry.offset();
        while sector < entry.end() {
            let end = ((sector / GRANULE + 1) * GRANULE).min(entry.end());
            let bytes = ((sector - entry.offset()) * SECTOR) as usize
                ..((end - entry.offset()) * SECTOR) as usize;
            let data = &self.buf[at + bytes.start..at + bytes.end];
            let verdict = match self.elide {
                Elide::Unchanged(_) if data == &self.below[bytes] => Verdict::Drop,
                _ if !is_zero(data) => Verdict::Keep,
                Elide::ZerosAtBottom => Verdict::Drop,
                _ => Verdict::Zero,
            };
            match verdicts.last_mut() {
                Some((range, last)) if *last == verdict => range.end = end,
                _ => verdicts.push((sector..end, verdict)),
            }
            sector = end;
        }
        verdicts
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Keep,
    Zero,
    Drop,
}

/// Whether all bytes are zero. The compiler vectorises the inner loop.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    bytes
        .chunks(256)
        .all(|chunk| chunk.iter().fold(0, |all, byte| all | byte) == 0)
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
