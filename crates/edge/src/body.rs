//! Bodies on their way through the edge. Each piece is passed on as it comes; nothing is collected.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::Arc;
use std::task::{ready, Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode};
use hyper::body::{Body as _, Frame, Incoming, SizeHint};
use tokio::time::Sleep;

use crate::client::Client;
use crate::proxy::Exchange;
use crate::upstream::Upstream;

/// The body of a response to a client.
pub enum Body {
    Full(Option<Bytes>),
    Relay(Box<Relay>),
}

impl Body {
    pub fn empty() -> Body {
        Body::Full(None)
    }

    pub fn full(bytes: Bytes) -> Body {
        Body::Full(Some(bytes).filter(|bytes| !bytes.is_empty()))
    }
}

type Error = Box<dyn std::error::Error + Send + Sync>;

impl hyper::body::Body for Body {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match self.get_mut() {
            Body::Full(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Body::Relay(relay) => relay.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Body::Full(bytes) => bytes.is_none(),
            Body::Relay(relay) => relay.incoming.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Body::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Body::Relay(relay) => relay.incoming.size_hint(),
        }
    }
}

/// The body of a guest's response. It drives the connection it comes from and gives it back when it is complete.
pub struct Relay {
    incoming: Incoming,
    live: Option<(Upstream, Exchange)>,
}

impl Relay {
    /// A body without content ends at once, and the exchange with it.
    pub fn start(incoming: Incoming, upstream: Upstream, exchange: Exchange) -> Body {
        if incoming.is_end_stream() {
            let mut cx = Context::from_waker(std::task::Waker::noop());
            finish(upstream, exchange, &mut cx);
            return Body::empty();
        }
        Body::Relay(Box::new(Relay {
            incoming,
            live: Some((upstream, exchange)),
        }))
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        loop {
            // Asking the body first tells the connection that there is room for another piece.
            let mut polled = Pin::new(&mut self.incoming).poll_frame(cx);
            if let (Poll::Pending, Some((upstream, _))) = (&polled, &mut self.live) {
                upstream.poll(cx);
                polled = Pin::new(&mut self.incoming).poll_frame(cx);
                if polled.is_pending() && upstream.ended {
                    return Poll::Ready(Some(Err(
                        self.broken("the connection ended inside the response")
                    )));
                }
            }
            match ready!(polled) {
                Some(Ok(frame)) if frame.is_trailers() => continue,
                Some(Ok(frame)) => {
                    if self.incoming.is_end_stream() {
                        self.finish(cx);
                    }
                    return Poll::Ready(Some(Ok(frame)));
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(self.broken(error)))),
                None => {
                    self.finish(cx);
                    return Poll::Ready(None);
                }
            }
        }
    }

    /// The client must not take a broken body for a complete one, whatever its framing.
    fn broken(&mut self, error: impl Into<Error>) -> Error {
        if let Some((_, exchange)) = self.live.take() {
            exchange.client().abort();
        }
        error.into()
    }

    fn finish(&mut self, cx: &mut Context<'_>) {
        if let Some((upstream, exchange)) = self.live.take() {
            finish(upstream, exchange, cx);
        }
    }
}

/// Lets the connection see the end of the exchange, then parks it for the next one.
fn finish(mut upstream: Upstream, exchange: Exchange, cx: &mut Context<'_>) {
    upstream.poll(cx);
    exchange.park(upstream);
}

/// How long the body of a request with `Expect: 100-continue` is held back for a server that ignores the header.
const CONTINUE_TIMEOUT: Duration = Duration::from_secs(1);

/// The body of a request on its way to a guest or the control API.
pub struct RequestBody {
    upload: Option<Upload>,
}

struct Upload {
    incoming: Incoming,
    client: Arc<Client>,
    hold: Option<Hold>,
}

/// Until the upstream asks for the body, it is not read from the client either: the first read is what makes the HTTP
/// library tell the client to continue.
struct Hold {
    asked: Arc<AtomicBool>,
    timeout: Pin<Box<Sleep>>,
}

impl RequestBody {
    pub fn empty() -> RequestBody {
        RequestBody { upload: None }
    }

    pub fn new(incoming: Incoming, client: &Arc<Client>) -> RequestBody {
        if incoming.is_end_stream() {
            return RequestBody::empty();
        }
        client.upload_started();
        RequestBody {
            upload: Some(Upload {
                incoming,
                client: client.clone(),
                hold: None,
            }),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.upload.is_none()
    }
}

/// Holds the body of a request back until the upstream answers 100, or for a moment.
pub fn hold_until_asked(request: &mut Request<RequestBody>) {
    let Some(upload) = &mut request.body_mut().upload else {
        return;
    };
    let asked = Arc::new(AtomicBool::new(false));
    upload.hold = Some(Hold {
        asked: asked.clone(),
        timeout: Box::pin(tokio::time::sleep(CONTINUE_TIMEOUT)),
    });
    // Called while the connection is polled, which polls the body next; no wake-up is needed.
    hyper::ext::on_informational(request, move |response| {
        if response.status() == StatusCode::CONTINUE {
            asked.store(true, Relaxed);
        }
    });
}

impl hyper::body::Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        let Some(upload) = &mut self.get_mut().upload else {
            return Poll::Ready(None);
        };
        if let Some(hold) = &mut upload.hold {
            if !hold.asked.load(Relaxed) {
                ready!(hold.timeout.as_mut().poll(cx));
            }
            upload.hold = None;
        }
        loop {
            match ready!(Pin::new(&mut upload.incoming).poll_frame(cx)) {
                Some(Ok(frame)) if frame.is_trailers() => continue,
                Some(Ok(frame)) => {
                    if upload.incoming.is_end_stream() {
                        upload.client.upload_ended();
                    }
                    return Poll::Ready(Some(Ok(frame)));
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => {
                    upload.client.upload_ended();
                    return Poll::Ready(None);
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.upload {
            Some(upload) => upload.incoming.is_end_stream(),
            None => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.upload {
            Some(upload) => upload.incoming.size_hint(),
            None => SizeHint::with_exact(0),
        }
    }
}
