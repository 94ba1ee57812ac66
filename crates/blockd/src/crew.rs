//! Worker threads of which some are always free.
//!
//! Workers serve requests one after another, which is fastest while nothing waits: no queue, no hand-over between
//! threads. A worker about to do something slow (ask an origin, wait for a disk) says so with [`blocking`]; the crew
//! then starts another worker if none would be left, so that one slow image never delays the others. Surplus workers
//! leave when they find themselves unneeded.

use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::Arc;

thread_local! {
    static MEMBER: RefCell<Option<Arc<Crew>>> = const { RefCell::new(None) };
}

/// Body of a worker: serves until its work ends or [`Crew::surplus`] tells it to leave.
type Body = dyn Fn(usize, &Crew) + Send + Sync;

/// A group of threads that all run the same body.
pub struct Crew {
    name: &'static str,
    body: Box<Body>,
    /// Free workers the crew keeps.
    base: usize,
    /// Most workers, free and blocked.
    max: usize,
    total: AtomicUsize,
    free: AtomicUsize,
    /// Number of the next worker; never used twice.
    next: AtomicUsize,
}

impl Crew {
    /// Starts `base` workers. `body` gets the number of its worker, counted from 0.
    pub fn start(
        name: &'static str,
        base: usize,
        max: usize,
        body: impl Fn(usize, &Crew) + Send + Sync + 'static,
    ) -> std::io::Result<Arc<Crew>> {
        let crew = Arc::new(Crew {
            name,
            body: Box::new(body),
            base,
            max: max.max(base),
            total: AtomicUsize::new(0),
            free: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
        });
        for _ in 0..base {
            crew.add()?;
        }
        Ok(crew)
    }

    /// Workers alive, free and blocked.
    pub fn total(&self) -> usize {
        self.total.load(SeqCst)
    }

    /// Whether the calling worker should leave because enough others are free. It must leave if told so.
    pub fn surplus(&self) -> bool {
        // Twice the base leaves room for bursts, so that threads are not started and ended all the time.
        self.free
            .fetch_update(SeqCst, SeqCst, |free| {
                (free > 2 * self.base).then(|| free - 1)
            })
            .is_ok()
    }

    fn add(self: &Arc<Self>) -> std::io::Result<()> {
        self.total.fetch_add(1, SeqCst);
        self.free.fetch_add(1, SeqCst);
        let crew = self.clone();
        let number = self.next.fetch_add(1, SeqCst);
        let started = std::thread::Builder::new()
            .name(format!("{}-{number}", self.name))
            .stack_size(256 << 10)
            .spawn(move || {
                MEMBER.set(Some(crew.clone()));
                (crew.body)(number, &crew);
                crew.total.fetch_sub(1, SeqCst);
            });
        if let Err(error) = started {
            self.total.fetch_sub(1, SeqCst);
            self.free.fetch_sub(1, SeqCst);
            return Err(error);
        }
        Ok(())
    }

    fn leave_free(self: &Arc<Self>) {
        let left = self.free.fetch_sub(1, SeqCst) - 1;
        if left < self.base && self.total() < self.max {
            // Without a new thread the request still succeeds, others just wait longer.
            let _ = self.add();
        }
    }
}

/// Runs `work`, which may take long. On a worker of a crew, another worker takes over what comes meanwhile; on any
/// other thread this is a plain call.
pub fn blocking<T>(work: impl FnOnce() -> T) -> T {
    struct Back(Arc<Crew>);
    impl Drop for Back {
        fn drop(&mut self) {
            self.0.free.fetch_add(1, SeqCst);
            MEMBER.set(Some(self.0.clone()));
        }
    }
    // Taken out while the work runs: a nested call must not count the worker twice.
    let _back = MEMBER.take().map(|crew| {
        crew.leave_free();
        Back(crew)
    });
    work()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{channel, Receiver, Sender};
    use std::sync::Mutex;

    #[test]
    fn blocked_workers_are_replaced() {
        let (jobs, queue) = channel::<Sender<Receiver<()>>>();
        let queue = Mutex::new(queue);
        let crew = Crew::start("test", 1, 8, move |_, crew| {
            loop {
                let Ok(job) = queue.lock().unwrap().recv() else {
                    break;
                };
                // The job answers with what we have to wait for.
                let (release, wait) = channel();
                blocking(|| {
                    job.send(wait).unwrap();
                    let _ = release.send(());
                    // Blocks until the test drops its end of the job.
                    while job.send(channel().1).is_ok() {
                        std::thread::yield_now();
                    }
                });
                if crew.surplus() {
                    return;
                }
            }
        })
        .unwrap();
        let mut held = Vec::new();
        for _ in 0..5 {
            let (job, answer) = channel();
            jobs.send(job).unwrap();
            // Arrives although all earlier workers are still blocked.
            answer
                .recv_timeout(std::time::Duration::from_secs(10))
                .unwrap();
            held.push(answer);
        }
        assert!(crew.total() >= 5 && crew.total() <= 8);
        drop(held);
        drop(jobs);
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while crew.total() > 0 {
            assert!(std::time::Instant::now() < deadline, "workers did not end");
            std::thread::yield_now();
        }
    }
}
