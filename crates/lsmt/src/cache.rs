//! Stacks that are open in this process, found by the chain of their layers.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::error::Result;
use crate::layer::{Layer, LayerKey};
use crate::stack::{ChainId, Stack};

/// Finds the merged index of a chain of layers if anything in the process still uses it, so that opening the
/// hundredth fork of an image reads nothing and copies nothing.
///
/// Shared by reference or `Arc`; all methods may be called from any thread.
#[derive(Debug)]
pub struct ChainCache {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    stacks: HashMap<ChainId, Weak<Stack>>,
    /// Stacks kept alive although nobody uses them, oldest first.
    recent: VecDeque<Arc<Stack>>,
    keep: usize,
    /// Size of `stacks` at which dead entries are dropped.
    sweep_at: usize,
}

impl ChainCache {
    /// A cache that keeps the `keep` most recently inserted stacks alive and finds all others while they are in use.
    pub fn new(keep: usize) -> ChainCache {
        ChainCache {
            inner: Mutex::new(Inner {
                stacks: HashMap::new(),
                recent: VecDeque::new(),
                keep,
                sweep_at: 64,
            }),
        }
    }

    /// The open stack with this identity.
    pub fn get(&self, id: ChainId) -> Option<Arc<Stack>> {
        self.lock().stacks.get(&id).and_then(Weak::upgrade)
    }

    /// Adds a stack and returns the one to use: if another thread was faster, that one.
    pub fn insert(&self, stack: Stack) -> Arc<Stack> {
        let mut inner = self.lock();
        if let Some(present) = inner.stacks.get(&stack.id()).and_then(Weak::upgrade) {
            return present;
        }
        let stack = Arc::new(stack);
        inner.stacks.insert(stack.id(), Arc::downgrade(&stack));
        if inner.stacks.len() >= inner.sweep_at {
            inner.stacks.retain(|_, weak| weak.strong_count() > 0);
            inner.sweep_at = (2 * inner.stacks.len()).max(64);
        }
        if inner.keep > 0 {
            inner.recent.push_back(stack.clone());
            if inner.recent.len() > inner.keep {
                inner.recent.pop_front();
            }
        }
        stack
    }

    /// The stack of the layers `keys`, bottom first. The longest known prefix is reused; `open` is called with the
    /// position of each layer that is missing above it. Runs outside the cache's lock.
    pub fn stack(
        &self,
        keys: &[LayerKey],
        mut open: impl FnMut(usize) -> Result<Arc<Layer>>,
    ) -> Result<Arc<Stack>> {
        let mut ids = vec![ChainId::EMPTY];
        for key in keys {
            ids.push(ids[ids.len() - 1].child(*key));
        }
        let known = (1..ids.len())
            .rev()
            .find_map(|n| Some((n, self.get(ids[n])?)));
        let (count, prefix) = known.unwrap_or_else(|| (0, Arc::new(Stack::default())));
        if count == keys.len() {
            return Ok(prefix);
        }
        let mut stack = (*prefix).clone();
        for (position, key) in keys.iter().enumerate().skip(count) {
            let layer = open(position)?;
            if layer.key() != *key {
                return Err(crate::Error::Argument(format!(
                    "layer {position} was opened under another key"
                )));
            }
            stack = stack.push(layer)?;
        }
        Ok(self.insert(stack.levelled()?))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        // Every update leaves the maps consistent at each step, so a panic elsewhere does no harm here.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
