//! How far the making of a layer is, for those who wait for it.

use tokio::sync::watch;

/// State of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// Readable, not yet a file.
    Writing,
    /// A complete file, not yet on stable storage. Memory that was captured is not needed any more where it came from.
    Copied,
    /// A file on stable storage.
    Sealed,
    /// It could not be finished; the text says why.
    Failed(String),
}

/// The progress of one layer. Clones of a receiver wait for its changes.
pub struct Progress(watch::Sender<Phase>);

impl Progress {
    /// A layer being written.
    pub fn new() -> Progress {
        Progress(watch::channel(Phase::Writing).0)
    }

    /// Sets the phase and wakes who waits.
    pub fn set(&self, phase: Phase) {
        self.0.send_replace(phase);
    }

    /// The phase now.
    pub fn phase(&self) -> Phase {
        self.0.borrow().clone()
    }

    /// A way to wait.
    pub fn watch(&self) -> watch::Receiver<Phase> {
        self.0.subscribe()
    }
}

impl Default for Progress {
    fn default() -> Progress {
        Progress::new()
    }
}
