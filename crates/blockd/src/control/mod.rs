//! The control socket: HTTP/1.1 with JSON bodies, see section 3 of `docs/protocols.md`.

mod calls;
mod socket;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use serde::Serialize;
use serde_json::json;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{watch, Semaphore};
use tokio::task::JoinSet;

use crate::daemon::Daemon;
use crate::failure::{Failure, Result};
use crate::log;

pub use socket::bind;

/// Largest body of a call in bytes.
const MAX_BODY: usize = 4 << 20;
/// Most connections at once; more wait to be accepted.
const MAX_CONNECTIONS: usize = 256;
/// Time for calls in progress to be answered at the end.
const FAREWELL: Duration = Duration::from_secs(1);

/// How the daemon is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Leave mount and holder for a successor.
    Leave,
    /// Remove the mount and end the holder.
    Unmount,
    /// There is nothing left to serve.
    Lost,
}

/// What every call works with.
pub struct Control {
    daemon: Arc<Daemon>,
    end: watch::Sender<Option<End>>,
}

impl Control {
    /// For `daemon`; `end` is told when a call ends it.
    pub fn new(daemon: Arc<Daemon>, end: watch::Sender<Option<End>>) -> Arc<Control> {
        Arc::new(Control { daemon, end })
    }

    /// Serves until the daemon is told to end.
    pub async fn serve(self: Arc<Self>, listener: UnixListener) {
        let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let mut end = self.end.subscribe();
        let mut connections = JoinSet::new();
        loop {
            let Ok(place) = room.clone().acquire_owned().await else {
                break;
            };
            tokio::select! {
                () = told(&mut end) => break,
                accepted = listener.accept() => match accepted {
                    Ok((socket, _)) => {
                        let control = self.clone();
                        connections.spawn(async move {
                            control.connection(socket).await;
                            drop(place);
                        });
                    }
                    Err(error) => {
                        log::error("cannot accept on the control socket", json!({ "cause": error.to_string() }));
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                },
            }
            while connections.try_join_next().is_some() {}
        }
        let rest = async { while connections.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(FAREWELL, rest).await;
    }

    async fn connection(self: Arc<Self>, socket: UnixStream) {
        let mut end = self.end.subscribe();
        let service = service_fn(move |request| {
            let control = self.clone();
            async move { Ok::<_, Infallible>(control.call(request).await) }
        });
        let connection = http1::Builder::new().serve_connection(TokioIo::new(socket), service);
        let mut connection = std::pin::pin!(connection);
        tokio::select! {
            _ = connection.as_mut() => return,
            () = told(&mut end) => connection.as_mut().graceful_shutdown(),
        }
        let _ = connection.await;
    }

    async fn call(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let answer = self.route(request).await;
        answer.unwrap_or_else(|failure| {
            let status =
                StatusCode::from_u16(failure.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            let body = json!({ "code": status.as_u16(), "message": failure.message });
            with_body(status, &body)
        })
    }

    async fn route(&self, request: Request<Incoming>) -> Result<Response<Full<Bytes>>> {
        let method = request.method().clone();
        let path = request.uri().path().to_owned();
        let parts: Vec<&str> = path.split('/').skip(1).collect();
        match (&method, parts.as_slice()) {
            (&Method::GET, ["v1", "status"]) => self.run(|daemon| Ok(daemon.status())).await,
            (&Method::GET, ["v1", "images"]) => self.list_images().await,
            (&Method::GET, ["v1", "images", id]) => self.get_image(id).await,
            (&Method::PUT, ["v1", "images", id]) => self.put_image(id, request).await,
            (&Method::DELETE, ["v1", "images", id]) => self.delete_image(id).await,
            (&Method::POST, ["v1", "images", id, "seal"]) => self.seal(id, request).await,
            (&Method::POST, ["v1", "images", id, "resize"]) => self.resize(id, request).await,
            (&Method::POST, ["v1", "images", id, "replace"]) => self.replace(id, request).await,
            (&Method::POST, ["v1", "images", id, "trace"]) => self.trace(id, request).await,
            (&Method::POST, ["v1", "images", id, "prefetch"]) => self.prefetch(id, request).await,
            (&Method::GET, ["v1", "layers"]) => self.list_layers().await,
            (&Method::GET, ["v1", "layers", id]) => self.get_layer(id, request.uri().query()).await,
            (&Method::PUT, ["v1", "layers", id]) => self.make_layer(id, request).await,
            (&Method::DELETE, ["v1", "layers", id]) => self.delete_layer(id).await,
            (&Method::POST, ["v1", "shutdown"]) => self.shutdown(request).await,
            (_, ["v1", "status" | "images" | "layers" | "shutdown"])
            | (_, ["v1", "images" | "layers", _])
            | (_, ["v1", "images", _, "seal" | "resize" | "replace" | "trace" | "prefetch"]) => {
                Err(Failure::new(405, format!("{path} does not know {method}")))
            }
            _ => Err(Failure::not_found(format!(
                "there is no {path} on this socket"
            ))),
        }
    }

    /// Runs an operation on a thread where it may block, and answers with what it returns.
    async fn run<T: Serialize + Send + 'static>(
        &self,
        work: impl FnOnce(&Arc<Daemon>) -> Result<T> + Send + 'static,
    ) -> Result<Response<Full<Bytes>>> {
        let daemon = self.daemon.clone();
        match tokio::task::spawn_blocking(move || work(&daemon)).await {
            Ok(done) => Ok(with_body(StatusCode::OK, &done?)),
            // The thread has already written where it failed.
            Err(_) => Err(Failure::new(
                500,
                "the call failed in an unforeseen way; see the log",
            )),
        }
    }
}

/// Returns when the daemon is to end.
async fn told(end: &mut watch::Receiver<Option<End>>) {
    let _ = end.wait_for(Option::is_some).await;
}

fn with_body(status: StatusCode, body: &impl Serialize) -> Response<Full<Bytes>> {
    let bytes = serde_json::to_vec(body).unwrap_or_default();
    let mut response = Response::new(Full::new(Bytes::from(bytes)));
    *response.status_mut() = status;
    response.headers_mut().insert(
        http::header::CONTENT_TYPE,
        http::HeaderValue::from_static("application/json"),
    );
    response
}

fn no_content() -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::default());
    *response.status_mut() = StatusCode::NO_CONTENT;
    response
}

/// The body of a call; an empty one counts as `{}`.
async fn body<T: DeserializeOwned>(request: Request<Incoming>) -> Result<T> {
    let bytes = Limited::new(request.into_body(), MAX_BODY)
        .collect()
        .await
        .map_err(|error| Failure::bad_request(format!("cannot read the body: {error}")))?
        .to_bytes();
    let text: &[u8] = if bytes.is_empty() { b"{}" } else { &bytes };
    serde_json::from_slice(text)
        .map_err(|error| Failure::bad_request(format!("the body is not valid: {error}")))
}
