//! Bodies on their way through the edge. Each piece is passed on as it comes; nothing is collected.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Frame, Incoming, SizeHint};

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

impl hyper::body::Body for Body {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
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
        use hyper::body::Body as _;
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

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        use hyper::body::Body as _;
        loop {
            // Asking the body first tells the connection that there is room for another piece.
            let mut polled = Pin::new(&mut self.incoming).poll_frame(cx);
            if polled.is_pending() {
                if let Some((upstream, _)) = &mut self.live {
                    upstream.poll(cx);
                    polled = Pin::new(&mut self.incoming).poll_frame(cx);
                }
            }
            match std::task::ready!(polled) {
                Some(Ok(frame)) if frame.is_trailers() => continue,
                Some(Ok(frame)) => {
                    if self.incoming.is_end_stream() {
                        self.finish(cx);
                    }
                    return Poll::Ready(Some(Ok(frame)));
                }
                Some(Err(error)) => {
                    // The client must not take a broken body for a complete one, whatever its framing.
                    if let Some((_, exchange)) = self.live.take() {
                        exchange.client().abort();
                    }
                    return Poll::Ready(Some(Err(error)));
                }
                None => {
                    self.finish(cx);
                    return Poll::Ready(None);
                }
            }
        }
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

/// The body of a request on its way to a guest or the control API.
pub struct RequestBody {
    incoming: Option<(Incoming, Arc<Client>)>,
}

impl RequestBody {
    pub fn empty() -> RequestBody {
        RequestBody { incoming: None }
    }

    pub fn new(incoming: Incoming, client: &Arc<Client>) -> RequestBody {
        use hyper::body::Body as _;
        if incoming.is_end_stream() {
            return RequestBody::empty();
        }
        client.upload_started();
        RequestBody {
            incoming: Some((incoming, client.clone())),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.incoming.is_none()
    }
}

impl hyper::body::Body for RequestBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<hyper::Result<Frame<Bytes>>>> {
        let Some((incoming, client)) = &mut self.get_mut().incoming else {
            return Poll::Ready(None);
        };
        loop {
            match std::task::ready!(Pin::new(&mut *incoming).poll_frame(cx)) {
                Some(Ok(frame)) if frame.is_trailers() => continue,
                Some(Ok(frame)) => {
                    if incoming.is_end_stream() {
                        client.upload_ended();
                    }
                    return Poll::Ready(Some(Ok(frame)));
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => {
                    client.upload_ended();
                    return Poll::Ready(None);
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.incoming {
            Some((incoming, _)) => incoming.is_end_stream(),
            None => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.incoming {
            Some((incoming, _)) => incoming.size_hint(),
            None => SizeHint::with_exact(0),
        }
    }
}
