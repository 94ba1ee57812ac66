//! Cutting a disk in time: a new upper first, layers made of the old one afterwards.

use std::sync::{Arc, MutexGuard, PoisonError};

use uuid::Uuid;

use super::files::{create_upper, discard_upper};
use super::{locked, Below, Image, View};
use crate::error::{Error, Result};
use crate::layer::Layer;
use crate::manifest::{Event, LayerRef};
use crate::stack::Stack;

/// A point in time of an image, as an immutable disk.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Id of the layer the snapshot added.
    pub uuid: Uuid,
    /// All layers up to and with that one. Forks start from here.
    pub stack: Arc<Stack>,
}

impl Image {
    /// Cuts the disk at this moment: what is acknowledged now is below, everything later above. Takes the time of creating
    /// a file; readers and writers are held up for microseconds. Follow with [`Image::settle`].
    pub fn freeze(&self) -> Result<Uuid> {
        let swap = locked(&self.swap);
        self.exchange(&swap)
    }

    pub(super) fn exchange(&self, _swap: &MutexGuard<'_, ()>) -> Result<Uuid> {
        let old = self.view().upper.clone();
        let uuid = old.identity().uuid;
        let fresh = create_upper(&self.dir, uuid, old.virtual_size(), self.durability)?;
        locked(&self.manifest)
            .record(&Event::Upper(fresh.identity().uuid))
            .inspect_err(|_| discard_upper(&fresh))?;
        locked(&self.unsealed).push(old.clone());
        let mut view = self.view.write().unwrap_or_else(PoisonError::into_inner);
        old.freeze();
        let mut frozen = vec![old];
        frozen.extend(view.below.frozen.iter().cloned());
        *view = Arc::new(View {
            upper: fresh,
            below: Below {
                frozen,
                stack: view.below.stack.clone(),
            },
        });
        Ok(uuid)
    }

    /// Makes layers of all frozen uppers: in memory, and with `durable` on stable storage as well, by sealing them and
    /// recording that. What fails can be tried again; nothing is lost meanwhile.
    pub fn settle(&self, durable: bool) -> Result<()> {
        let settling = locked(&self.settling);
        if !durable {
            return self.absorb(&settling);
        }
        let waiting = {
            // An exchange is either complete or not begun.
            let _swap = locked(&self.swap);
            locked(&self.unsealed).clone()
        };
        self.absorb(&settling)?;
        for upper in waiting {
            // A seal must not be on record before the layer is on stable storage, or a crash makes the image unreadable.
            upper.seal(true)?;
            let mut manifest = locked(&self.manifest);
            manifest.record(&Event::Sealed(upper.identity().uuid))?;
            locked(&self.unsealed).retain(|other| !Arc::ptr_eq(other, &upper));
            // Nor may the journal go before the seal is on record.
            manifest.sync()?;
            drop(manifest);
            upper.remove_journal()?;
        }
        Ok(())
    }

    /// Moves frozen uppers into the stack, in memory.
    pub(super) fn absorb(&self, _settling: &MutexGuard<'_, ()>) -> Result<()> {
        loop {
            let view = self.view();
            let Some(oldest) = view.below.frozen.last() else {
                return Ok(());
            };
            let stack = view
                .below
                .stack
                .push(Arc::new(oldest.layer()?))?
                .levelled()?;
            let stack = self.cache.insert(stack);
            let mut current = self.view.write().unwrap_or_else(PoisonError::into_inner);
            // Only this function removes from the list, so the oldest is still the same.
            let mut frozen = current.below.frozen.clone();
            frozen.pop();
            *current = Arc::new(View {
                upper: current.upper.clone(),
                below: Below { frozen, stack },
            });
        }
    }

    /// Cuts the disk and returns the state at that moment, to fork from at once. It is not durable before
    /// [`Image::settle`].
    pub fn cut(&self) -> Result<Snapshot> {
        let settling = locked(&self.settling);
        let uuid = self.freeze()?;
        self.absorb(&settling)?;
        // Another cut may already be on top.
        let stack = self.stack();
        let layers = stack.layers();
        let Some(position) = layers.iter().rposition(|l| l.identity().uuid == uuid) else {
            return Err(Error::Argument(format!(
                "layer {uuid} was removed while it was made"
            )));
        };
        let keys: Vec<_> = layers[..=position].iter().map(|l| l.key()).collect();
        let stack = self.cache.stack(&keys, |i| Ok(layers[i].clone()))?;
        Ok(Snapshot { uuid, stack })
    }

    /// Cuts the disk and returns the state at that moment, durably.
    pub fn snapshot(&self) -> Result<Snapshot> {
        let snapshot = self.cut()?;
        self.settle(true)?;
        Ok(snapshot)
    }

    /// Replaces layers `first..first + count` by others with the same content, under the names by which they will be
    /// asked for: what compaction does. Files of replaced layers are left to the caller.
    pub fn replace_layers(
        &self,
        first: usize,
        count: usize,
        with: &[(String, Arc<Layer>)],
    ) -> Result<()> {
        let _settling = locked(&self.settling);
        let _swap = locked(&self.swap);
        let view = self.view();
        let mut layers = view.below.stack.layers().to_vec();
        if first
            .checked_add(count)
            .is_none_or(|end| end > layers.len())
        {
            return Err(Error::Argument(format!(
                "there are {} layers, not {first} + {count}",
                layers.len()
            )));
        }
        layers.splice(
            first..first + count,
            with.iter().map(|(_, layer)| layer.clone()),
        );
        let stack = self.cache.insert(Stack::build(layers)?);
        let event = Event::Replaced {
            first: first as u32,
            count: count as u32,
            with: with
                .iter()
                .map(|(name, _)| LayerRef::Lower(name.clone()))
                .collect(),
        };
        let mut manifest = locked(&self.manifest);
        manifest.record(&event)?;
        manifest.sync()?;
        let below = Below {
            frozen: view.below.frozen.clone(),
            stack,
        };
        let mut current = self.view.write().unwrap_or_else(PoisonError::into_inner);
        *current = Arc::new(View {
            upper: current.upper.clone(),
            below,
        });
        Ok(())
    }
}
