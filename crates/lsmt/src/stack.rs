//! A stack of layers with one searchable index.
//!
//! The index of a stack is a short list of immutable *runs*, newest first. A new layer becomes a run of its own, in
//! constant time. [`Stack::levelled`] merges runs so that each is at least four times as long as all those above it
//! together: a lookup then probes a handful of runs, and each entry is copied a logarithmic number of times over the
//! life of a chain. Runs are shared between all stacks that contain them; no data moves.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::header::SECTOR;
use crate::index::{Index, Origin, Piece};
use crate::layer::{Layer, LayerKey};
use crate::merge::merge_all;
use crate::source::ReadAt;

/// Most layers in a stack.
pub const MAX_LAYERS: usize = 255;
/// How many times longer a run has to be than all runs above it.
const GROWTH: usize = 4;

/// Identity of a chain of layers: a hash over the keys of all of them, bottom to top.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ChainId([u8; 32]);

impl ChainId {
    /// The chain without layers.
    pub const EMPTY: ChainId = ChainId([0; 32]);

    /// This chain with one more layer on top.
    pub fn child(&self, layer: LayerKey) -> ChainId {
        let hash = Sha256::new()
            .chain_update(self.0)
            .chain_update(layer.as_bytes())
            .finalize();
        ChainId(hash.into())
    }
}

#[derive(Debug, Clone)]
struct Run {
    index: Arc<Index>,
    /// Added to the slots in `index`.
    base: u8,
}

/// Immutable stack of layers, readable as one disk. Reads past the end of a layer's own size fall through to zeros.
#[derive(Clone)]
pub struct Stack {
    id: ChainId,
    layers: Vec<Arc<Layer>>,
    sources: Vec<Arc<dyn ReadAt>>,
    /// Top first.
    runs: Vec<Run>,
    virtual_size: u64,
}

impl std::fmt::Debug for Stack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stack")
            .field("layers", &self.layers)
            .field("runs", &self.run_lengths())
            .field("virtual_size", &self.virtual_size)
            .finish_non_exhaustive()
    }
}

impl Default for Stack {
    fn default() -> Stack {
        Stack {
            id: ChainId::EMPTY,
            layers: Vec::new(),
            sources: Vec::new(),
            runs: Vec::new(),
            virtual_size: 0,
        }
    }
}

impl Stack {
    /// Stacks `layers`, bottom first, and merges their indexes.
    pub fn build(layers: impl IntoIterator<Item = Arc<Layer>>) -> Result<Stack> {
        let mut stack = Stack::default();
        for layer in layers {
            stack = stack.push(layer)?;
        }
        stack.levelled()
    }

    /// This stack with one more layer on top. Copies pointers only.
    pub fn push(&self, layer: Arc<Layer>) -> Result<Stack> {
        let slots = self.sources.len() + layer.sources().len();
        if self.layers.len() == MAX_LAYERS || slots > 256 {
            return Err(Error::Limit {
                what: "the number of layers in a stack",
                value: self.layers.len() as u64 + 1,
                max: MAX_LAYERS as u64,
                remedy: "merge some of the layers into one first",
            });
        }
        let mut stack = Stack {
            id: self.id.child(layer.key()),
            ..self.clone()
        };
        if !layer.index().is_empty() {
            stack.runs.insert(
                0,
                Run {
                    index: layer.index().clone(),
                    base: self.sources.len() as u8,
                },
            );
        }
        if layer.virtual_size() != 0 {
            stack.virtual_size = layer.virtual_size();
        }
        stack.sources.extend(layer.sources().iter().cloned());
        stack.layers.push(layer);
        Ok(stack)
    }

    /// The same stack with its runs merged until each is long enough compared to those above it.
    pub fn levelled(&self) -> Result<Stack> {
        let mut above = 0;
        let mut count = 0;
        for (i, run) in self.runs.iter().enumerate() {
            if run.index.len() < GROWTH * above {
                count = i + 1;
            }
            above += run.index.len();
        }
        let mut stack = self.clone();
        if count > 1 {
            let base = self.runs[count - 1].base;
            let parts: Vec<_> = self.runs[..count]
                .iter()
                .map(|r| (&*r.index, r.base - base))
                .collect();
            let index = Arc::new(merge_all(&parts)?);
            stack.runs.splice(..count, [Run { index, base }]);
        }
        Ok(stack)
    }

    /// The same stack with exactly one index; slots in it are those of [`Stack::sources`].
    pub fn merged_index(&self) -> Result<Arc<Index>> {
        match self.runs.as_slice() {
            [Run { index, base: 0 }] => Ok(index.clone()),
            runs => {
                let parts: Vec<_> = runs.iter().map(|r| (&*r.index, r.base)).collect();
                merge_all(&parts).map(Arc::new)
            }
        }
    }

    /// Identity of the chain.
    pub fn id(&self) -> ChainId {
        self.id
    }

    /// Layers, bottom first.
    pub fn layers(&self) -> &[Arc<Layer>] {
        &self.layers
    }

    /// Sources of all layers, bottom first, by slot.
    pub fn sources(&self) -> &[Arc<dyn ReadAt>] {
        &self.sources
    }

    /// Size of the image in bytes: that of the topmost layer which has one.
    pub fn virtual_size(&self) -> u64 {
        self.virtual_size
    }

    /// Entries in each run, top first.
    pub fn run_lengths(&self) -> Vec<usize> {
        self.runs.iter().map(|r| r.index.len()).collect()
    }

    /// Checks that each layer names the one below it as its parent. Layers without ids are not checked.
    pub fn check_parents(&self) -> Result<()> {
        for pair in self.layers.windows(2) {
            let (below, above) = (pair[0].identity().uuid, pair[1].identity().parent);
            if !below.is_nil() && !above.is_nil() && below != above {
                return Err(Error::format(
                    "the stack of layers",
                    format!(
                        "layer {} belongs on {above}, not on {below}",
                        pair[1].identity().uuid
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Calls `visit` with the pieces that make up `range` (sectors), in order and without gaps. Slots are those of
    /// [`Stack::sources`]. Stops at the first error.
    pub fn pieces<E>(
        &self,
        range: Range<u64>,
        visit: &mut impl FnMut(Piece) -> Result<(), E>,
    ) -> Result<(), E> {
        walk(&self.runs, range, visit)
    }
}

fn walk<E>(
    runs: &[Run],
    range: Range<u64>,
    visit: &mut impl FnMut(Piece) -> Result<(), E>,
) -> Result<(), E> {
    let Some((run, lower)) = runs.split_first() else {
        return if range.is_empty() {
            Ok(())
        } else {
            visit(Piece {
                start: range.start,
                len: range.end - range.start,
                origin: Origin::Hole,
            })
        };
    };
    for mut piece in run.index.pieces(range) {
        match &mut piece.origin {
            Origin::Hole => walk(lower, piece.start..piece.end(), visit)?,
            Origin::Zero => visit(piece)?,
            Origin::Data { slot, .. } => {
                *slot += run.base;
                visit(piece)?;
            }
        }
    }
    Ok(())
}

impl ReadAt for Stack {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let len = (buf.len() as u64).min(self.virtual_size.saturating_sub(offset)) as usize;
        if len == 0 {
            return Ok(0);
        }
        let mut gather = Gather::new(&self.sources, &mut buf[..len], offset);
        self.pieces(gather.sectors(), &mut |piece| gather.piece(piece))?;
        gather.finish()?;
        Ok(len)
    }

    fn size(&self) -> u64 {
        self.virtual_size
    }
}

/// Fills a buffer from pieces in order, joining reads that continue each other in the same source.
pub(crate) struct Gather<'a> {
    sources: &'a [Arc<dyn ReadAt>],
    buf: &'a mut [u8],
    /// Byte of the image that `buf` starts with.
    offset: u64,
    /// A read not done yet: slot, byte in the source, range of `buf`.
    pending: Option<(u8, u64, Range<usize>)>,
}

impl<'a> Gather<'a> {
    pub(crate) fn new(
        sources: &'a [Arc<dyn ReadAt>],
        buf: &'a mut [u8],
        offset: u64,
    ) -> Gather<'a> {
        Gather {
            sources,
            buf,
            offset,
            pending: None,
        }
    }

    /// Sectors the buffer touches.
    pub(crate) fn sectors(&self) -> Range<u64> {
        self.offset / SECTOR..(self.offset + self.buf.len() as u64).div_ceil(SECTOR)
    }

    pub(crate) fn piece(&mut self, piece: Piece) -> io::Result<()> {
        let end = self.offset + self.buf.len() as u64;
        let start = (piece.start * SECTOR).max(self.offset);
        let target = (start - self.offset) as usize
            ..((piece.end() * SECTOR).min(end) - self.offset) as usize;
        match piece.origin {
            Origin::Hole | Origin::Zero => {
                self.buf[target].fill(0);
                Ok(())
            }
            Origin::Data { slot, sector } => {
                let byte = sector * SECTOR + (start - piece.start * SECTOR);
                if let Some((pending_slot, pending_byte, range)) = &mut self.pending {
                    if *pending_slot == slot
                        && range.end == target.start
                        && *pending_byte + range.len() as u64 == byte
                    {
                        range.end = target.end;
                        return Ok(());
                    }
                }
                self.finish()?;
                self.pending = Some((slot, byte, target));
                Ok(())
            }
        }
    }

    pub(crate) fn finish(&mut self) -> io::Result<()> {
        match self.pending.take() {
            Some((slot, byte, range)) => {
                self.sources[usize::from(slot)].read_exact_at(&mut self.buf[range], byte)
            }
            None => Ok(()),
        }
    }
}
