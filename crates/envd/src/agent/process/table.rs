//! The processes of the agent and the life of each.
//!
//! A child stays a zombie until its `end` event is built: its pid, which is also the id of its
//! process group, therefore cannot be given to a stranger while somebody may still signal it.

use bytes::Bytes;
use rustix::io::Errno;
use rustix::process::{
    kill_process_group, waitid, waitpid, Pid, Signal, WaitId, WaitIdOptions, WaitOptions,
};
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::messages::{data_event, end_event, start_event, Config, End, Output, Selector};
use super::spawn::Child;
use super::stream::Subscriber;
use crate::agent::connect::{Code, Error};

/// Processes that may run at once.
pub const LIVE_LIMIT: usize = 4096;
/// How long, and how many, ended processes still answer `Connect` with their end.
const ENDED_AGE: Duration = Duration::from_secs(30);
const ENDED_LIMIT: usize = 1024;
/// Output per event, in bytes.
const PIPE_CHUNK: usize = 32 << 10;
const PTY_CHUNK: usize = 16 << 10;

/// Standard input of a process, or its terminal.
pub type InputFd = AsyncFd<OwnedFd>;

pub struct Process {
    pub pid: u32,
    pub config: Config,
    pub tag: Option<String>,
    /// The master side of the terminal, if it has one.
    pub terminal: Option<Arc<InputFd>>,
    /// The pipe to standard input; taken away to close it. Held while writing, which keeps order.
    pub stdin: tokio::sync::Mutex<Option<InputFd>>,
    /// Becomes true when a client signalled the process: then its end waits for nobody's pipes.
    signaled: watch::Sender<bool>,
    /// Becomes true with the end event.
    pub ended: watch::Sender<bool>,
    audience: Mutex<Audience>,
}

/// One piece of output: its size, who gets it, and its event.
type Chunk = (usize, Vec<Subscriber>, Bytes);

#[derive(Default)]
struct Audience {
    subscribers: Vec<Subscriber>,
    /// Set once, when everything was said.
    end: Option<Bytes>,
}

impl Process {
    fn audience(&self) -> MutexGuard<'_, Audience> {
        self.audience.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a subscriber: it gets a start event now and all output from now on.
    pub fn subscribe(&self, subscriber: Subscriber) {
        subscriber.event(start_event(self.pid));
        let mut audience = self.audience();
        match &audience.end {
            Some(end) => {
                subscriber.event(end.clone());
                subscriber.finish(Ok(()));
            }
            None => {
                audience.subscribers.retain(|s| !s.is_gone());
                audience.subscribers.push(subscriber);
            }
        }
    }

    /// Reads once: the number of bytes, and the event for whom it concerns. `None` at the end.
    fn read(
        &self,
        output: Output,
        fd: &AsyncFd<OwnedFd>,
        chunk: usize,
    ) -> Result<Option<Chunk>, Errno> {
        SCRATCH.with_borrow_mut(|buffer| {
            let size = rustix::io::read(fd, &mut buffer[..chunk])?;
            if size == 0 {
                return Ok(None);
            }
            let subscribers = self.audience().subscribers.clone();
            let envelope = match subscribers.is_empty() {
                true => Bytes::new(),
                false => data_event(output, &buffer[..size]),
            };
            Ok(Some((size, subscribers, envelope)))
        })
    }

    async fn publish(&self, subscribers: Vec<Subscriber>, envelope: Bytes) {
        let mut lost = false;
        for subscriber in &subscribers {
            lost |= !subscriber.data(envelope.clone()).await;
        }
        if lost {
            self.audience().subscribers.retain(|s| !s.is_gone());
        }
    }

    /// Reaps the child and tells everybody. The lock keeps signals away from a pid that is free again.
    fn conclude(&self) -> Bytes {
        let mut audience = self.audience();
        let event = end_event(&reap(self.pid()));
        for subscriber in audience.subscribers.drain(..) {
            subscriber.event(event.clone());
            subscriber.finish(Ok(()));
        }
        audience.end = Some(event.clone());
        self.ended.send_replace(true);
        event
    }

    fn pid(&self) -> Pid {
        // The kernel never gives out pid 0 or a negative one.
        Pid::from_raw(self.pid as i32).unwrap_or(Pid::INIT)
    }

    /// Signals the process group the process leads. False: it has ended.
    pub fn signal(&self, signal: Signal) -> Result<bool, Error> {
        let audience = self.audience();
        if audience.end.is_some() {
            return Ok(false);
        }
        match kill_process_group(self.pid(), signal) {
            Ok(()) => {
                self.signaled.send_replace(true);
                Ok(true)
            }
            Err(Errno::SRCH) => Ok(false),
            Err(e) => Err(Error::internal(format!(
                "cannot signal process {}: {e}",
                self.pid
            ))),
        }
    }
}

/// All processes of the agent.
#[derive(Default)]
pub struct Processes {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    live: HashMap<u32, Arc<Process>>,
    starting: usize,
    ended: VecDeque<Ended>,
}

/// What is remembered of a process that ended.
#[derive(Clone)]
pub struct Ended {
    when: Instant,
    pid: u32,
    tag: Option<String>,
    event: Bytes,
}

impl Ended {
    /// Tells a subscriber the whole rest of the story.
    pub fn subscribe(&self, subscriber: &Subscriber) {
        subscriber.event(start_event(self.pid));
        subscriber.event(self.event.clone());
        subscriber.finish(Ok(()));
    }
}

/// A place in the table for a process that is being started.
pub struct Reservation<'a>(&'a Processes);

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.0.table().starting -= 1;
    }
}

impl Processes {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn reserve(&self) -> Result<Reservation<'_>, Error> {
        let mut table = self.table();
        if table.live.len() + table.starting >= LIVE_LIMIT {
            let message = format!("{LIVE_LIMIT} processes are running; end some first");
            return Err(Error::new(Code::ResourceExhausted, message));
        }
        table.starting += 1;
        Ok(Reservation(self))
    }

    /// Kills everything, for the end of an agent that is not in a guest.
    pub fn kill_all(&self) {
        for process in self.list() {
            // Whoever has just ended needs no kill.
            let _ = process.signal(Signal::KILL);
        }
    }

    /// Live processes, by pid.
    pub fn list(&self) -> Vec<Arc<Process>> {
        let mut all: Vec<_> = self.table().live.values().cloned().collect();
        all.sort_by_key(|p| p.pid);
        all
    }

    pub fn live(&self, selector: &Selector) -> Result<Arc<Process>, Error> {
        let table = self.table();
        match (selector.pid, &selector.tag) {
            (Some(pid), None) => table.live.get(&pid).cloned(),
            (None, Some(tag)) => table
                .live
                .values()
                .find(|p| p.tag.as_ref() == Some(tag))
                .cloned(),
            _ => return Err(Error::invalid("select a process by pid or by tag")),
        }
        .ok_or_else(|| unknown(selector))
    }

    /// A process that ended a moment ago.
    pub fn ended(&self, selector: &Selector) -> Option<Ended> {
        let mut table = self.table();
        table.expire();
        let matches = |ended: &&Ended| match (selector.pid, &selector.tag) {
            (Some(pid), None) => ended.pid == pid,
            (None, Some(tag)) => ended.tag.as_ref() == Some(tag),
            _ => false,
        };
        table.ended.iter().rev().find(matches).cloned()
    }

    /// Takes over a started child and sees it through to its end. `owner` is the stream of the
    /// client that started it; after `limit` the process is killed and that stream gets the error.
    pub fn adopt(
        self: &Arc<Self>,
        child: Child,
        config: Config,
        tag: Option<String>,
        owner: Subscriber,
        limit: Option<Duration>,
    ) -> Result<Arc<Process>, Error> {
        let started = Instant::now();
        let pid = child.pid.as_raw_nonzero().get() as u32;
        let watched = |fd: OwnedFd| {
            // SAFETY: the AsyncFd owns the descriptor, and nothing takes it out or replaces it.
            unsafe { AsyncFd::register(fd) }
                .map_err(|e| Error::internal(format!("cannot watch process {pid}: {e}")))
        };
        let on_terminal = child
            .outputs
            .iter()
            .any(|(output, _)| *output == Output::Pty);
        let register = || {
            let outputs: Result<Vec<_>, _> = child
                .outputs
                .into_iter()
                .map(|(output, fd)| Ok((output, watched(fd)?)))
                .collect();
            Ok((
                watched(child.pidfd)?,
                child.input.map(watched).transpose()?,
                outputs?,
            ))
        };
        let (pidfd, input, outputs) = register().inspect_err(|_| {
            let _ = kill_process_group(child.pid, Signal::KILL);
            let _ = waitpid(Some(child.pid), WaitOptions::empty());
        })?;
        let (terminal, stdin) = if on_terminal {
            (input.map(Arc::new), None)
        } else {
            (None, input)
        };
        let process = Arc::new(Process {
            pid,
            config,
            tag,
            terminal,
            stdin: tokio::sync::Mutex::new(stdin),
            signaled: watch::Sender::new(false),
            ended: watch::Sender::new(false),
            audience: Mutex::default(),
        });
        process.subscribe(owner.clone());
        self.table().live.insert(pid, process.clone());
        let deadline = limit.map(|l| (started + l, l));
        tokio::spawn(supervise(
            self.clone(),
            process.clone(),
            pidfd,
            outputs,
            owner,
            deadline,
        ));
        Ok(process)
    }

    fn retire(&self, process: &Process) {
        let event = process.conclude();
        let mut table = self.table();
        table.live.remove(&process.pid);
        let ended = Ended {
            when: Instant::now(),
            pid: process.pid,
            tag: process.tag.clone(),
            event,
        };
        table.ended.push_back(ended);
        table.expire();
    }
}

impl Table {
    fn expire(&mut self) {
        while let Some(oldest) = self.ended.front() {
            if self.ended.len() <= ENDED_LIMIT && oldest.when.elapsed() < ENDED_AGE {
                break;
            }
            self.ended.pop_front();
        }
    }
}

fn unknown(selector: &Selector) -> Error {
    Error::not_found(match (selector.pid, &selector.tag) {
        (Some(pid), _) => format!("process with pid {pid} not found"),
        (_, Some(tag)) => format!("process with tag {tag} not found"),
        _ => "process not found".into(),
    })
}

async fn supervise(
    processes: Arc<Processes>,
    process: Arc<Process>,
    pidfd: AsyncFd<OwnedFd>,
    outputs: Vec<(Output, AsyncFd<OwnedFd>)>,
    owner: Subscriber,
    deadline: Option<(Instant, Duration)>,
) {
    let cut = watch::Sender::new(false);
    let mut pumps = JoinSet::new();
    for (output, fd) in outputs {
        pumps.spawn(pump(process.clone(), output, fd, cut.subscribe()));
    }
    let mut signaled = process.signaled.subscribe();
    let course = async {
        while !has_exited(&pidfd).await {}
        tokio::select! {
            () = async { while pumps.join_next().await.is_some() {} } => return,
            _ = signaled.wait_for(|signaled| *signaled) => {}
        }
        cut.send_replace(true);
        while pumps.join_next().await.is_some() {}
    };
    tokio::pin!(course);
    let expiry = async {
        match deadline {
            Some((when, _)) => tokio::time::sleep_until(when).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = &mut course => {}
        () = expiry => {
            let allowed = deadline.map(|(_, limit)| limit.as_millis()).unwrap_or_default();
            let message = format!("the process did not end within {allowed} ms and was killed");
            // First the error, then the kill: the client must not take this for an ordinary end.
            owner.finish(Err(&Error::new(Code::DeadlineExceeded, message)));
            // An error here means it has just ended by itself.
            let _ = process.signal(Signal::KILL);
            course.await;
        }
    }
    processes.retire(&process);
}

/// Waits for the exit without reaping. False if it was woken for nothing.
async fn has_exited(pidfd: &AsyncFd<OwnedFd>) -> bool {
    let Ok(mut guard) = pidfd.readable().await else {
        return true;
    };
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    let exited = !matches!(
        waitid(WaitId::PidFd(pidfd.get_ref().as_fd()), options),
        Ok(None)
    );
    if !exited {
        guard.clear_ready();
    }
    exited
}

/// Collects the exit status of a child that has exited.
fn reap(pid: Pid) -> End {
    match waitid(
        WaitId::Pid(pid),
        WaitIdOptions::EXITED | WaitIdOptions::NOHANG,
    ) {
        Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => End::exited(code),
            (None, Some(signal)) => End::signaled(signal, status.dumped()),
            (None, None) => End::lost(),
        },
        // Only possible if something else in this process waits for children, which nothing does.
        Ok(None) | Err(_) => End::lost(),
    }
}

thread_local! {
    /// Output is read and encoded in one go, so that one buffer serves all processes.
    static SCRATCH: RefCell<Vec<u8>> = RefCell::new(vec![0; PIPE_CHUNK]);
}

/// Carries output to the subscribers until the end of file. After `cut` only what already is in the
/// pipe is taken, because a grandchild may hold it open for ever.
async fn pump(
    process: Arc<Process>,
    output: Output,
    fd: AsyncFd<OwnedFd>,
    mut cut: watch::Receiver<bool>,
) {
    let chunk = if output == Output::Pty {
        PTY_CHUNK
    } else {
        PIPE_CHUNK
    };
    loop {
        let ready = tokio::select! {
            biased;
            _ = cut.wait_for(|cut| *cut) => break,
            ready = fd.readable() => ready,
        };
        let Ok(mut guard) = ready else { return };
        match process.read(output, &fd, chunk) {
            Ok(Some((_, subscribers, envelope))) => process.publish(subscribers, envelope).await,
            Ok(None) => return,
            Err(Errno::AGAIN) => guard.clear_ready(),
            Err(Errno::INTR) => {}
            // EIO: the last program has left the terminal.
            Err(_) => return,
        }
    }
    let mut left = rustix::io::ioctl_fionread(&fd).unwrap_or(0) as usize;
    while left > 0 {
        let Ok(Some((size, subscribers, envelope))) = process.read(output, &fd, chunk.min(left))
        else {
            return;
        };
        process.publish(subscribers, envelope).await;
        left = left.saturating_sub(size);
    }
}
