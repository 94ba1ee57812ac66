//! The procedures that watch directories: a stream of events, or a watcher to be polled.

use hyper::body::Incoming;
use hyper::{Request, Response};
use serde::Deserialize;
use serde_json::{json, Value};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;

use super::rpc::{io_error, Caller};
use super::watch::{Refusal, Scope, Watch};
use crate::agent::call;
use crate::agent::connect::{self, check, envelope, Code, Error, Kind, Messages};
use crate::agent::http::{self, Body};
use crate::agent::process::stream::{channel, Subscriber};
use crate::agent::{blocking, wire, Agent};

/// Watchers waiting to be polled. The kernel allows 128 inotify instances per user by default.
const WATCHER_LIMIT: usize = 64;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct WatchRequest {
    #[serde(deserialize_with = "wire::nullable")]
    path: String,
    #[serde(deserialize_with = "wire::nullable")]
    recursive: bool,
    #[serde(
        deserialize_with = "wire::nullable",
        rename = "includeEntry",
        alias = "include_entry"
    )]
    include_entry: bool,
    #[serde(
        deserialize_with = "wire::nullable",
        rename = "allowNetworkMounts",
        alias = "allow_network_mounts"
    )]
    allow_network: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct WatcherRequest {
    #[serde(
        deserialize_with = "wire::nullable",
        rename = "watcherId",
        alias = "watcher_id"
    )]
    id: String,
}

/// A watch that somebody polls.
struct Watcher {
    watch: Arc<Watch>,
    /// Becomes true when it is removed.
    removed: watch::Sender<bool>,
}

/// All watchers of the agent.
#[derive(Default)]
pub struct Watchers {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    watchers: HashMap<String, Watcher>,
    created: u64,
}

impl Watchers {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, id: &str) -> Result<Arc<Watch>, Error> {
        self.table()
            .watchers
            .get(id)
            .map(|w| w.watch.clone())
            .ok_or_else(|| unknown(id))
    }
}

fn unknown(id: &str) -> Error {
    Error::not_found(format!("watcher with id {id} not found"))
}

fn lost() -> Error {
    let message = "more happened than could be kept, events were lost; list the directory anew";
    Error::new(Code::ResourceExhausted, message)
}

/// Serves one call, or `None` if it is not one of these procedures.
pub async fn serve(
    agent: Arc<Agent>,
    method: &str,
    request: Request<Incoming>,
) -> Option<Response<Body>> {
    let kind = match method {
        "WatchDir" => Kind::Stream,
        "CreateWatcher" | "GetWatcherEvents" | "RemoveWatcher" => Kind::Unary,
        _ => return None,
    };
    if let Err(response) = check(request.headers(), kind) {
        return Some(*response);
    }
    Some(match method {
        "WatchDir" => watch_dir(agent, request)
            .await
            .unwrap_or_else(|e| connect::stream_error(&e)),
        "CreateWatcher" => connect::unary(create(agent, request).await),
        "GetWatcherEvents" => connect::unary(events(agent, request).await),
        _ => connect::unary(remove(agent, request).await),
    })
}

async fn open(caller: Caller, message: WatchRequest) -> Result<Arc<Watch>, Error> {
    let path = caller.resolve(&message.path)?;
    let scope = Scope {
        user: caller.user,
        path: path.clone(),
        recursive: message.recursive,
        include_entry: message.include_entry,
        allow_network: message.allow_network,
    };
    blocking(move || {
        let shown = path.display();
        Watch::new(scope)
            .map(Arc::new)
            .map_err(|refusal| match refusal {
                Refusal::Io(e) => io_error(&path, &e),
                Refusal::NotADirectory => {
                    Error::invalid(format!("path '{shown}' is not a directory"))
                }
                Refusal::Network => Error::invalid(format!(
                "path '{shown}' is on a network file system, which reports only changes made here; \
                 set allowNetworkMounts to watch it all the same"
            )),
            })
    })
    .await
}

/// Reads the kernel's queue of a watch off the thread of the runtime.
async fn drain(watch: &Arc<Watch>) -> Result<(), Error> {
    let watch = watch.clone();
    blocking(move || {
        watch.drain();
        Ok(())
    })
    .await
}

/// Waits until the kernel has something to tell, and reads it.
async fn next(watch: &Arc<Watch>) -> Result<(), Error> {
    let mut guard = watch
        .fd
        .readable()
        .await
        .map_err(|e| Error::internal(e.to_string()))?;
    // Before reading: an event that comes in between must wake us again.
    guard.clear_ready();
    drain(watch).await
}

async fn watch_dir(agent: Arc<Agent>, request: Request<Incoming>) -> Result<Response<Body>, Error> {
    let limit = connect::timeout(request.headers())?;
    let idle = call::keepalive(request.headers());
    let caller = Caller::of(&agent, request.headers()).await;
    let (message, rest) = Messages::new(request.into_body()).single().await?;
    let watch = open(caller?, message).await?;
    let (subscriber, stream) = channel(
        Some(rest),
        idle,
        envelope(&json!({ "keepalive": {} })),
        limit,
    );
    subscriber.event(envelope(&json!({ "start": {} })));
    tokio::spawn(async move {
        tokio::select! {
            error = tell(&watch, &subscriber) => subscriber.finish(Err(&error)),
            () = subscriber.closed() => {}
        }
    });
    Ok(connect::stream(http::boxed(stream)))
}

/// Sends events until that is not possible any more.
async fn tell(watch: &Arc<Watch>, subscriber: &Subscriber) -> Error {
    loop {
        if let Err(error) = next(watch).await {
            return error;
        }
        let Ok(events) = watch.take() else {
            return lost();
        };
        for event in events {
            if !subscriber
                .data(envelope(&json!({ "filesystem": event })))
                .await
            {
                return lost();
            }
        }
    }
}

async fn create(agent: Arc<Agent>, request: Request<Incoming>) -> Result<Value, Error> {
    let caller = Caller::of(&agent, request.headers()).await;
    let message = connect::read_unary(request).await?;
    let watch = open(caller?, message).await?;
    let mut table = agent.watchers.table();
    if table.watchers.len() >= WATCHER_LIMIT {
        let message = format!("there are {WATCHER_LIMIT} watchers; remove some first");
        return Err(Error::new(Code::ResourceExhausted, message));
    }
    table.created += 1;
    let id = format!("w{}", table.created);
    let removed = watch::Sender::new(false);
    tokio::spawn(keep_up(watch.clone(), removed.subscribe()));
    table
        .watchers
        .insert(id.clone(), Watcher { watch, removed });
    Ok(json!({ "watcherId": id }))
}

/// Follows a watch between polls, so that new directories are watched in time.
async fn keep_up(watch: Arc<Watch>, mut removed: watch::Receiver<bool>) {
    loop {
        tokio::select! {
            result = next(&watch) => if result.is_err() {
                return;
            },
            _ = removed.wait_for(|removed| *removed) => return,
        }
    }
}

async fn events(agent: Arc<Agent>, request: Request<Incoming>) -> Result<Value, Error> {
    let message: WatcherRequest = connect::read_unary(request).await?;
    let watch = agent.watchers.find(&message.id)?;
    // What a call before this one has done must be among the events.
    drain(&watch).await?;
    let events = watch.take().map_err(|()| lost())?;
    Ok(json!({ "events": events }))
}

async fn remove(agent: Arc<Agent>, request: Request<Incoming>) -> Result<Value, Error> {
    let message: WatcherRequest = connect::read_unary(request).await?;
    let watcher = agent
        .watchers
        .table()
        .watchers
        .remove(&message.id)
        .ok_or_else(|| unknown(&message.id))?;
    watcher.removed.send_replace(true);
    Ok(json!({}))
}
