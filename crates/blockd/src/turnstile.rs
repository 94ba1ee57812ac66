//! A limit on how many threads do something at the same time.

use std::sync::{Condvar, Mutex, PoisonError};

/// Lets a number of threads in; the others wait.
pub struct Turnstile {
    free: Mutex<usize>,
    freed: Condvar,
}

/// A place inside, given back when dropped.
pub struct Place<'a>(&'a Turnstile);

impl Turnstile {
    /// With room for `places` threads.
    pub fn new(places: usize) -> Turnstile {
        Turnstile {
            free: Mutex::new(places),
            freed: Condvar::new(),
        }
    }

    /// Waits for a place.
    pub fn enter(&self) -> Place<'_> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let mut free = self
            .freed
            .wait_while(free, |free| *free == 0)
            .unwrap_or_else(PoisonError::into_inner);
        *free -= 1;
        Place(self)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        *self.0.free.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.freed.notify_one();
    }
}
