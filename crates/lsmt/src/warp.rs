//! turboOCI layers: filesystem metadata in a small layer file, file contents in the original OCI layer tar.

use std::sync::Arc;

use crate::entry::FIRST_SECTOR;
use crate::error::{Error, Result};
use crate::header::SECTOR;
use crate::index::Index;
use crate::layer::{read_entries, read_trailer, Layer, LayerKey, Limits};
use crate::source::ReadAt;

/// Opens a turboOCI layer. `meta` is the plain layer file, `target` the uncompressed tar of the original layer.
///
/// Nothing in the file tells it from an ordinary layer whose writer left source numbers in the index; the image
/// configuration has to. The lowest source number in the file means `meta`, the next one `target`.
pub fn open(meta: Arc<dyn ReadAt>, target: Arc<dyn ReadAt>, key: LayerKey) -> Result<Layer> {
    let trailer = read_trailer(&*meta)?;
    let entries = read_entries(&*meta, &trailer)?;
    let end = trailer.virtual_size.div_ceil(SECTOR);
    let limits = [
        Limits {
            end,
            first: FIRST_SECTOR,
            last: trailer.index_offset / SECTOR,
        },
        // The last sector of a tar may be cut short by its end; `Layer` reads would then fail, so it does not count.
        Limits {
            end,
            first: 0,
            last: target.size() / SECTOR,
        },
    ];
    let lowest = entries.iter().map(|e| e.slot()).min().unwrap_or(0);
    let mut kept = Vec::with_capacity(entries.len());
    for entry in entries {
        let entry = entry.with_slot(entry.slot() - lowest);
        let Some(limits) = limits.get(usize::from(entry.slot())) else {
            return Err(Error::format(
                "the turboOCI layer",
                format!("{entry:?} names a third source"),
            ));
        };
        limits.check(entry, kept.last().copied())?;
        kept.push(entry);
    }
    let index = Arc::new(Index::from_sorted(kept));
    Ok(Layer::from_parts(
        key,
        trailer.identity,
        trailer.virtual_size,
        index,
        vec![meta, target],
    ))
}
