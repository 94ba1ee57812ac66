//! Worker threads of which some are always free.
//!
//! Workers serve requests one after another, which is fastest while nothing waits: no queue, no hand-over between
//! threads. Few of them keep caches warm. So that one slow image never delays the others,
//!
//! - a worker about to do something slow (ask an origin, wait for a disk) says so with [`blocking`], and another takes its
//!   place;
//! - a watch notices when all workers are stuck in what nobody said was slow, and adds one.
//!
//! Surplus workers leave when they find themselves unneeded.

use std::cell::RefCell;
use std::sync::atomic::{
    AtomicBool, AtomicU64, AtomicUsize,
    Ordering::{Relaxed, SeqCst},
};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

/// How often the watch looks while requests come in, and while none do.
const WATCH: Duration = Duration::from_millis(5);
const WATCH_IDLE: Duration = Duration::from_millis(50);

thread_local! {
    static MEMBER: RefCell<Option<Arc<Crew>>> = const { RefCell::new(None) };
}

/// Body of a worker: serves until its work ends or [`Worker::idle`] tells it to leave.
type Body = dyn Fn(&Worker) + Send + Sync;

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
    posts: Mutex<Vec<Arc<Post>>>,
}

/// What a worker is doing, for the watch. Written by the worker only.
#[derive(Default)]
struct Post {
    busy: AtomicBool,
    served: AtomicU64,
}

/// One worker, as its body sees it.
pub struct Worker {
    /// Counted from 0.
    pub number: usize,
    crew: Arc<Crew>,
    post: Arc<Post>,
}

impl Worker {
    /// A request came in.
    pub fn busy(&self) {
        self.post.busy.store(true, Relaxed);
    }

    /// The request is done. True if the worker must leave, because enough others are free.
    pub fn idle(&self) -> bool {
        self.post.busy.store(false, Relaxed);
        let served = self.post.served.load(Relaxed);
        self.post.served.store(served + 1, Relaxed);
        // Twice the base leaves room for bursts, so that threads are not started and ended all the time.
        let limit = 2 * self.crew.base;
        self.crew.free.load(Relaxed) > limit
            && self
                .crew
                .free
                .fetch_update(SeqCst, SeqCst, |free| (free > limit).then(|| free - 1))
                .is_ok()
    }
}

impl Crew {
    /// Starts `base` workers; there are never more than `max`.
    pub fn start(
        name: &'static str,
        base: usize,
        max: usize,
        body: impl Fn(&Worker) + Send + Sync + 'static,
    ) -> std::io::Result<Arc<Crew>> {
        let crew = Arc::new(Crew {
            name,
            body: Box::new(body),
            base,
            max: max.max(base),
            total: AtomicUsize::new(0),
            free: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            posts: Mutex::default(),
        });
        for _ in 0..base {
            crew.add()?;
        }
        let watched = Arc::downgrade(&crew);
        std::thread::Builder::new()
            .name(format!("{name}-watch"))
            .stack_size(64 << 10)
            .spawn(move || watch(&watched))?;
        Ok(crew)
    }

    /// Workers alive, free and blocked.
    pub fn total(&self) -> usize {
        self.total.load(SeqCst)
    }

    fn add(self: &Arc<Self>) -> std::io::Result<()> {
        self.total.fetch_add(1, SeqCst);
        self.free.fetch_add(1, SeqCst);
        let worker = Worker {
            number: self.next.fetch_add(1, SeqCst),
            crew: self.clone(),
            post: Arc::default(),
        };
        self.posts().push(worker.post.clone());
        let started = std::thread::Builder::new()
            .name(format!("{}-{}", self.name, worker.number))
            .stack_size(256 << 10)
            .spawn(move || {
                MEMBER.set(Some(worker.crew.clone()));
                (worker.crew.body)(&worker);
                worker
                    .crew
                    .posts()
                    .retain(|post| !Arc::ptr_eq(post, &worker.post));
                worker.crew.total.fetch_sub(1, SeqCst);
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
        if left < self.base {
            self.reinforce();
        }
    }

    fn reinforce(self: &Arc<Self>) {
        if self.total() < self.max {
            // Without a new thread the request still succeeds, others just wait longer.
            let _ = self.add();
        }
    }

    fn posts(&self) -> std::sync::MutexGuard<'_, Vec<Arc<Post>>> {
        self.posts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Adds a worker whenever all have been busy with the same request since the last look.
fn watch(crew: &Weak<Crew>) {
    let mut before: Vec<u64> = Vec::new();
    let mut pause = WATCH;
    loop {
        std::thread::sleep(pause);
        let Some(crew) = crew.upgrade().filter(|crew| crew.total() > 0) else {
            return;
        };
        let posts = crew.posts();
        let now: Vec<u64> = posts.iter().map(|post| post.served.load(Relaxed)).collect();
        let all_busy = posts.iter().all(|post| post.busy.load(Relaxed));
        drop(posts);
        if all_busy && now == before {
            crew.reinforce();
        }
        pause = if all_busy || now != before {
            WATCH
        } else {
            WATCH_IDLE
        };
        before = now;
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
    use std::time::Instant;

    /// Jobs that wait until the test lets them go.
    fn crew_of_one(announce: bool) -> (Sender<Sender<()>>, Arc<Crew>) {
        let (jobs, queue) = channel::<Sender<()>>();
        let queue: Arc<Mutex<Receiver<Sender<()>>>> = Arc::new(Mutex::new(queue));
        let crew = Crew::start("test", 1, 8, move |worker| loop {
            let Ok(job) = queue.lock().unwrap().recv() else {
                break;
            };
            worker.busy();
            // Until the other end of the job is dropped.
            let wait = || {
                while job.send(()).is_ok() {
                    std::thread::yield_now();
                }
            };
            if announce {
                blocking(wait);
            } else {
                wait();
            }
            if worker.idle() {
                return;
            }
        });
        (jobs, crew.unwrap())
    }

    #[test]
    fn stuck_workers_are_replaced_whether_they_say_so_or_not() {
        for announce in [true, false] {
            let (jobs, crew) = crew_of_one(announce);
            let mut held = Vec::new();
            for _ in 0..5 {
                let (job, answer) = channel();
                jobs.send(job).unwrap();
                // Arrives although all earlier jobs still wait.
                answer.recv_timeout(Duration::from_secs(10)).unwrap();
                held.push(answer);
            }
            assert!((5..=8).contains(&crew.total()));
            drop(held);
            drop(jobs);
            let deadline = Instant::now() + Duration::from_secs(10);
            while crew.total() > 0 {
                assert!(Instant::now() < deadline, "workers did not end");
                std::thread::yield_now();
            }
        }
    }
}
