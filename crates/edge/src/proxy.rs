//! From the head of a request to the head of its response.

use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;
use std::time::Duration;

use http::header::EXPECT;
use http::{HeaderValue, Method, Request, Response, StatusCode, Uri, Version};
use http_body_util::BodyExt;
use hyper::body::{Body as _, Incoming};

use crate::answer;
use crate::body::{self, Body, Relay, RequestBody};
use crate::client::{Busy, Client};
use crate::edge::Edge;
use crate::headers;
use crate::log::Level;
use crate::path;
use crate::routes::{Lease, Refused};
use crate::target::{self, Target, AGENT_PORT};
use crate::tunnel::Tunnel;
use crate::upstream::{self, Pool, SendError, Upstream};

/// Waits between attempts to connect to a port nobody listens on. A server needs a moment to bind, also the agent when
/// it is restarted.
const RETRY_AFTER: [Duration; 4] = [
    Duration::from_millis(100),
    Duration::from_millis(200),
    Duration::from_millis(300),
    Duration::from_millis(400),
];
/// How much of the body of a refused request is read, and for how long, so that its connection can be used again.
const DRAIN_BYTES: usize = 256 * 1024;
const DRAIN_TIME: Duration = Duration::from_millis(200);

/// A request being served, from the moment its destination is known until its response is complete.
pub struct Exchange {
    edge: Arc<Edge>,
    to: Destination,
    busy: Busy,
}

enum Destination {
    Api,
    Guest(Lease, u16),
}

impl Exchange {
    pub fn client(&self) -> &Arc<Client> {
        &self.busy.0
    }

    /// Where connections to the destination are kept, and under which port.
    fn pool(&self) -> (&Pool, u16) {
        match &self.to {
            Destination::Api => (&self.edge.api_pool, 0),
            Destination::Guest(lease, port) => (&lease.route.guest.pool, *port),
        }
    }

    /// Ends the exchange and keeps its connection for the next one.
    pub fn park(self, upstream: Upstream) {
        let (pool, port) = self.pool();
        pool.put(port, upstream);
    }

    /// A new connection. The error is the answer for the client.
    async fn connect(&self) -> Result<Upstream, Response<Body>> {
        let socket = match &self.to {
            Destination::Api => {
                let limit = self.edge.limits.connect_timeout;
                let connected = upstream::connect_unix(&self.edge.api, limit).await;
                connected.map_err(|error| {
                    self.note("cannot reach the control API", &error);
                    answer::api_down()
                })?
            }
            Destination::Guest(lease, port) => self.connect_guest(lease, *port).await?,
        };
        Upstream::new(socket)
            .await
            .map_err(|error| self.failed(&error))
    }

    async fn connect_guest(
        &self,
        lease: &Lease,
        port: u16,
    ) -> Result<upstream::Socket, Response<Body>> {
        let (spec, guest) = (&lease.route.spec, &lease.route.guest);
        let limit = self.edge.limits.connect_timeout;
        let mut waits = RETRY_AFTER.iter();
        loop {
            let attempt = async {
                let socket = self
                    .edge
                    .namespaces
                    .socket(guest.namespace.as_ref())
                    .await?;
                upstream::connect_tcp(socket, spec.address, port, limit).await
            };
            let error = match attempt.await {
                Ok(socket) => return Ok(socket),
                Err(error) => error,
            };
            if error.kind() == io::ErrorKind::ConnectionRefused {
                if let Some(wait) = waits.next() {
                    tokio::time::sleep(*wait).await;
                    continue;
                }
            }
            self.note("cannot connect to a guest", &error);
            return Err(match error.kind() {
                io::ErrorKind::ConnectionRefused => answer::port_closed(&spec.sandbox_id, port),
                io::ErrorKind::TimedOut => answer::guest_timeout(&spec.sandbox_id, port),
                _ if upstream::is_exhaustion(&error) => {
                    answer::node_exhausted(&spec.sandbox_id, &error.to_string())
                }
                _ => answer::guest_failed(&spec.sandbox_id, port, &error.to_string()),
            });
        }
    }

    /// The answer for a request whose connection failed before its response.
    fn failed(&self, error: &hyper::Error) -> Response<Body> {
        self.note("no response", error);
        let cause = if error.is_parse_too_large() || upstream::is_endless(error) {
            "the head of its response is too large"
        } else if error.is_parse() {
            "its response is not valid HTTP/1.1"
        } else {
            "it closed the connection before it answered"
        };
        self.failure(cause)
    }

    fn failure(&self, cause: &str) -> Response<Body> {
        match &self.to {
            Destination::Api => answer::api_failed(cause),
            Destination::Guest(lease, port) => {
                answer::guest_failed(&lease.route.spec.sandbox_id, *port, cause)
            }
        }
    }

    fn note(&self, message: &str, error: &dyn std::error::Error) {
        let Edge {
            upstream_errors,
            log,
            ..
        } = &*self.edge;
        upstream_errors.fetch_add(1, Relaxed);
        if !log.enabled(Level::Debug) {
            return;
        }
        let (sandbox, port) = match &self.to {
            Destination::Api => (None, None),
            Destination::Guest(lease, port) => (Some(&lease.route.spec.sandbox_id), Some(port)),
        };
        let mut cause = error.to_string();
        let mut source = error.source();
        while let Some(error) = source {
            cause = format!("{cause}: {error}");
            source = error.source();
        }
        log.write(
            Level::Debug,
            message,
            serde_json::json!({ "sandbox_id": sandbox, "port": port, "cause": cause }),
        );
    }
}

/// Serves one request of a client.
pub async fn serve(
    edge: Arc<Edge>,
    client: Arc<Client>,
    request: Request<Incoming>,
) -> Response<Body> {
    edge.requests.fetch_add(1, Relaxed);
    let busy = client.begin();
    let (head, body) = request.into_parts();
    match destination(&edge, &client, &head) {
        Ok(to) => relay(Exchange { edge, to, busy }, head, body).await,
        Err(refusal) => {
            drain(&head, RequestBody::new(body, &client)).await;
            *refusal
        }
    }
}

/// Decides where a request goes, or how it is refused.
fn destination(
    edge: &Edge,
    client: &Arc<Client>,
    head: &http::request::Parts,
) -> Result<Destination, Box<Response<Body>>> {
    let bad_request = |message: &str| Box::new(answer::error(StatusCode::BAD_REQUEST, message));
    let target = target::of_request(head).map_err(|message| bad_request(&message))?;
    if !headers::transfer_coding_is_plain(&head.headers) {
        return Err(bad_request("the only supported transfer coding is chunked"));
    }
    let Target::Sandbox { id, port } = target else {
        return Ok(Destination::Api);
    };
    loop {
        // A paused sandbox that may be woken up would be waited for here.
        let Some(route) = edge.routes.find(&id) else {
            return Err(Box::new(answer::not_found(&id)));
        };
        if port == AGENT_PORT {
            if path::is_internal(head.uri.path()) {
                return Err(Box::new(answer::internal_route(&id)));
            }
        } else {
            let token = head.headers.get(&headers::TRAFFIC_TOKEN);
            if !route.token_matches(token.map(HeaderValue::as_bytes)) {
                return Err(Box::new(answer::token_refused(&id)));
            }
        }
        match route.lease(client, edge.limits.max_per_sandbox) {
            Ok(lease) => return Ok(Destination::Guest(lease, port)),
            Err(Refused::Full) => return Err(Box::new(answer::sandbox_full(&id))),
            // Replaced or removed since it was found; a route that is gone is never in the table.
            Err(Refused::Gone) => continue,
        }
    }
}

async fn relay(
    exchange: Exchange,
    mut head: http::request::Parts,
    body: Incoming,
) -> Response<Body> {
    let client = exchange.client().clone();
    let upgrade = headers::upgrade(&head.headers).filter(|_| match &exchange.to {
        // The agent speaks no other protocol, and a tunnel would lead past the check of its internal routes.
        Destination::Guest(_, AGENT_PORT) => false,
        _ => body.is_end_stream() && head.version == Version::HTTP_11,
    });
    let host = match &exchange.to {
        Destination::Guest(lease, port) => {
            HeaderValue::try_from(format!("{}:{port}", lease.route.spec.address))
        }
        Destination::Api => HeaderValue::try_from("localhost"),
    };
    let fallback = host.unwrap_or_else(|_| HeaderValue::from_static("localhost"));
    // An absolute target agrees with `Host`, or stands in for it.
    let host = match head.uri.authority() {
        Some(authority) => HeaderValue::try_from(authority.as_str()).unwrap_or(fallback),
        None => fallback,
    };
    let expects = head.headers.contains_key(EXPECT);
    headers::prepare_request(&mut head.headers, client.peer.ip(), &host);
    if let Destination::Guest(lease, port) = &exchange.to {
        head.headers.remove(&headers::TRAFFIC_TOKEN);
        if let Some(mask) = lease.route.host_mask(*port) {
            headers::mask_host(&mut head.headers, mask);
        }
    }
    if let Some(protocol) = &upgrade {
        headers::announce_upgrade(&mut head.headers, protocol.clone());
    }
    head.version = Version::HTTP_11;
    head.uri = origin_form(head.uri);
    head.extensions.clear();

    let mut request = Request::from_parts(head, RequestBody::new(body, &client));
    if expects {
        body::hold_until_asked(&mut request);
    }
    match send(&exchange, request).await {
        Ok((response, upstream)) => respond(exchange, response, upstream, upgrade).await,
        Err((refusal, unsent)) => {
            if let Some(body) = unsent.filter(|_| !expects) {
                drain_body(body).await;
            }
            refusal
        }
    }
}

/// The path and query of a target, byte for byte.
fn origin_form(uri: Uri) -> Uri {
    if uri.authority().is_none() {
        return uri;
    }
    let path = uri.into_parts().path_and_query;
    path.map(Uri::from).unwrap_or_else(|| Uri::from_static("/"))
}

/// Sends a request over an idle connection or a new one. The guest may close an idle connection at any time, so a
/// request that meets the close is sent again if nothing of it was sent, or if sending it twice does no harm.
/// The error is the answer for the client and the body if it is untouched.
async fn send(
    exchange: &Exchange,
    mut request: Request<RequestBody>,
) -> Result<(Response<Incoming>, Upstream), (Response<Body>, Option<RequestBody>)> {
    let (pool, port) = exchange.pool();
    let replayable = is_replayable(&request);
    let mut replayed = false;
    loop {
        let pooled = if replayed {
            None
        } else {
            pool.take(port, !replayable)
        };
        let mut upstream = match pooled {
            Some(upstream) => upstream,
            None => match exchange.connect().await {
                Ok(upstream) => upstream,
                Err(refusal) => return Err((refusal, Some(request.into_body()))),
            },
        };
        let replay = (upstream.reused && replayable).then(|| copy_of(&request));
        let SendError { error, unsent } = match upstream.send(request).await {
            Ok(response) => return Ok((response, upstream)),
            Err(failed) => failed,
        };
        if upstream.reused {
            pool.distrust(port);
        }
        request = match (unsent, replay) {
            (Some(unsent), _) if upstream.reused => *unsent,
            (_, Some(replay)) if !error.is_parse() => {
                replayed = true;
                replay
            }
            _ => return Err((exchange.failed(&error), None)),
        };
    }
}

fn is_replayable(request: &Request<RequestBody>) -> bool {
    let safe = matches!(
        *request.method(),
        Method::GET | Method::HEAD | Method::OPTIONS
    );
    safe && request.body().is_empty()
}

fn copy_of(request: &Request<RequestBody>) -> Request<RequestBody> {
    let mut copy = Request::new(RequestBody::empty());
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.headers_mut() = request.headers().clone();
    copy
}

/// Turns the response of a guest into the one for the client.
async fn respond(
    exchange: Exchange,
    response: Response<Incoming>,
    upstream: Upstream,
    upgrade: Option<HeaderValue>,
) -> Response<Body> {
    let (mut head, body) = response.into_parts();
    let switching = head.status == StatusCode::SWITCHING_PROTOCOLS;
    let protocol = headers::upgrade(&head.headers);
    headers::prepare_response(&mut head.headers);
    head.version = Version::HTTP_11;
    if let Some(reason) = head.extensions.remove::<hyper::ext::ReasonPhrase>() {
        head.extensions.clear();
        head.extensions.insert(reason);
    } else {
        head.extensions.clear();
    }
    if !switching {
        return Response::from_parts(head, Relay::start(body, upstream, exchange));
    }
    let Some(asked) = upgrade else {
        return exchange.failure("it changed the protocol unasked");
    };
    drop(body);
    let (upstream, read) = match upstream.into_tunnel().await {
        Ok(Some(tunnel)) => tunnel,
        Ok(None) => {
            return exchange.failure("it closed the connection when it changed the protocol")
        }
        Err(error) => return exchange.failed(&error),
    };
    headers::announce_upgrade(&mut head.headers, protocol.unwrap_or(asked));
    let client = exchange.client().clone();
    client.set_tunnel(Tunnel {
        upstream,
        read,
        exchange,
    });
    Response::from_parts(head, Body::empty())
}

/// Reads the rest of a small body, so that its connection stays usable after a refusal. A client that waits for a
/// 100 response has sent nothing, and reading would ask it to.
async fn drain(head: &http::request::Parts, body: RequestBody) {
    if !head.headers.contains_key(EXPECT) {
        drain_body(body).await;
    }
}

async fn drain_body(mut body: RequestBody) {
    let mut left = DRAIN_BYTES;
    let read = async {
        while let Some(Ok(frame)) = body.frame().await {
            let size = frame.data_ref().map_or(0, |data| data.len());
            if size > left {
                return;
            }
            left -= size;
        }
    };
    let _ = tokio::time::timeout(DRAIN_TIME, read).await;
}
