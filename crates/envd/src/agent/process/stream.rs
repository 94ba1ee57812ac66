//! Event streams: how output reaches its subscribers without holding the process up.
//!
//! Each subscriber has a queue of at most [`QUEUE_LIMIT`] bytes. While a queue is full the process
//! is slowed down, as a pipe would do; a subscriber that makes no room for [`STALL_LIMIT`] is cut
//! off with an error. So memory is bounded, nobody loses bytes unnoticed, and no client stops a process.

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::task::{ready, Context, Poll};
use std::time::Duration;
use tokio::sync::{mpsc, Semaphore};
use tokio::time::{sleep, timeout, Instant, Sleep};

use crate::agent::connect::{end, Code, Error};

/// Output queued for one subscriber, in bytes of its JSON form.
pub const QUEUE_LIMIT: usize = 1 << 20;
/// How long a response waits for the end of its request.
const LINGER: Duration = Duration::from_millis(500);
/// How long a full queue may stay full.
pub const STALL_LIMIT: Duration = Duration::from_secs(5);

enum Item {
    /// A message that took credit from the queue.
    Data(Bytes),
    /// A message that did not: start and end events are small and never wait.
    Event(Bytes),
    /// The last envelope.
    End(Bytes),
}

/// The sending side of a stream. All clones feed the same stream.
#[derive(Clone)]
pub struct Subscriber {
    queue: mpsc::UnboundedSender<Item>,
    credit: Arc<Semaphore>,
    /// Set when the stream was ended from here, which its reader may not know for long.
    finished: Arc<AtomicBool>,
}

impl Subscriber {
    /// Queues output; waits while the queue is full. False: this subscriber is gone or was cut off.
    pub async fn data(&self, envelope: Bytes) -> bool {
        let size = envelope.len().min(QUEUE_LIMIT) as u32;
        if self.is_gone() {
            return false;
        }
        let permit = match self.credit.try_acquire_many(size) {
            Ok(permit) => permit,
            Err(_) => tokio::select! {
                permit = timeout(STALL_LIMIT, self.credit.acquire_many(size)) => match permit {
                    Ok(Ok(permit)) => permit,
                    _ => {
                        let message = format!(
                            "the client took nothing for {} s while output was waiting; use Connect to attach again",
                            STALL_LIMIT.as_secs()
                        );
                        self.finish(Err(&Error::new(Code::ResourceExhausted, message)));
                        return false;
                    }
                },
                () = self.queue.closed() => return false,
            },
        };
        permit.forget();
        self.queue.send(Item::Data(envelope)).is_ok()
    }

    /// Queues a small message at once.
    pub fn event(&self, envelope: Bytes) -> bool {
        self.queue.send(Item::Event(envelope)).is_ok()
    }

    /// Ends the stream; what is queued is still delivered.
    pub fn finish(&self, result: Result<(), &Error>) {
        self.finished.store(true, Ordering::Relaxed);
        // A stream whose client is gone needs no end.
        let _ = self.queue.send(Item::End(end(result)));
    }

    /// Waits until the client is gone or has its last message.
    pub async fn closed(&self) {
        self.queue.closed().await;
    }

    /// Whether nothing can reach the client any more.
    pub fn is_gone(&self) -> bool {
        self.finished.load(Ordering::Relaxed) || self.queue.is_closed()
    }
}

/// The body of a streaming response.
pub struct EventStream {
    queue: mpsc::UnboundedReceiver<Item>,
    credit: Arc<Semaphore>,
    /// Rest of the request, read to its end so that the connection can be used again.
    request: Option<Incoming>,
    idle: Duration,
    keepalive: Bytes,
    timer: Pin<Box<Sleep>>,
    deadline: Option<Pin<Box<Sleep>>>,
    done: bool,
}

/// Creates a stream. `idle` is the silence after which `keepalive` is sent; `deadline` bounds the stream.
pub fn channel(
    request: Option<Incoming>,
    idle: Duration,
    keepalive: Bytes,
    deadline: Option<Duration>,
) -> (Subscriber, EventStream) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let credit = Arc::new(Semaphore::new(QUEUE_LIMIT));
    let stream = EventStream {
        queue: receiver,
        credit: credit.clone(),
        request,
        idle,
        keepalive,
        timer: Box::pin(sleep(idle)),
        deadline: deadline.map(|d| Box::pin(sleep(d))),
        done: false,
    };
    let subscriber = Subscriber {
        queue: sender,
        credit,
        finished: Arc::default(),
    };
    (subscriber, stream)
}

impl EventStream {
    /// Nothing more is to be sent. A request that is not over gets a moment to end, because otherwise
    /// its connection could not be used for another one.
    fn close(&mut self) {
        self.done = true;
        self.queue.close();
        self.timer.as_mut().reset(Instant::now() + LINGER);
    }

    fn discard_request(&mut self, cx: &mut Context<'_>) {
        while let Some(body) = &mut self.request {
            match Pin::new(body).poll_frame(cx) {
                Poll::Ready(Some(Ok(_))) => {}
                Poll::Ready(_) => self.request = None,
                Poll::Pending => break,
            }
        }
    }
}

impl Body for EventStream {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let this = self.get_mut();
        this.discard_request(cx);
        if this.done {
            if this.request.is_some() {
                ready!(this.timer.as_mut().poll(cx));
            }
            return Poll::Ready(None);
        }
        if let Some(deadline) = &mut this.deadline {
            if deadline.as_mut().poll(cx).is_ready() {
                this.close();
                let error = Error::new(
                    Code::DeadlineExceeded,
                    "the time the client allowed for this stream is over",
                );
                return Poll::Ready(Some(Ok(Frame::data(end(Err(&error))))));
            }
        }
        let bytes = match this.queue.poll_recv(cx) {
            Poll::Ready(Some(Item::Data(bytes))) => {
                this.credit.add_permits(bytes.len().min(QUEUE_LIMIT));
                bytes
            }
            Poll::Ready(Some(Item::Event(bytes))) => bytes,
            Poll::Ready(Some(Item::End(bytes))) => {
                this.close();
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
            Poll::Ready(None) => {
                this.close();
                let bytes = end(Err(&Error::internal("the source of this stream is gone")));
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
            Poll::Pending => {
                ready!(this.timer.as_mut().poll(cx));
                this.keepalive.clone()
            }
        };
        this.timer.as_mut().reset(Instant::now() + this.idle);
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.done && self.request.is_none()
    }
}
