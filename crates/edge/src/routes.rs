//! The route table: which sandboxes exist, where their guests are, and which clients they serve right now.

use std::collections::hash_map::Entry;
use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use http::HeaderValue;
use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;
use tokio::sync::{Notify, Semaphore};

use crate::client::Client;
use crate::netns::Namespaces;
use crate::target::{is_id, AGENT_PORT, MAX_ID};
use crate::upstream::Pool;

/// Idle connections kept for one port of a guest, and for one guest.
const IDLE_PER_PORT: usize = 64;
const IDLE_PER_GUEST: usize = 128;
/// How long an idle connection is kept. Common HTTP servers close theirs after 5 s; closing first avoids that a request
/// meets a connection in the very moment its guest closes it. The agent never closes first.
const IDLE_GUEST: Duration = Duration::from_secs(4);
const IDLE_AGENT: Duration = Duration::from_secs(120);
/// How long a removed route is waited for until its clients are gone.
const DRAIN: Duration = Duration::from_secs(2);

/// A route as the control plane writes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    pub sandbox_id: String,
    pub generation: u64,
    pub address: Ipv4Addr,
    /// Mandatory, though it may be null: a forgotten namespace must not turn into our own.
    #[serde(deserialize_with = "Option::deserialize")]
    pub netns: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic_token: Option<String>,
    /// The `Host` the guest sees on every port but the agent's; `${PORT}` stands for the port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mask_request_host: Option<String>,
}

impl Spec {
    /// What serde cannot check. The error is the message of a 400.
    pub fn check(&self) -> Result<(), String> {
        let Spec { sandbox_id, .. } = self;
        if !is_id(sandbox_id) {
            return Err(format!(
                "sandbox_id {sandbox_id:?} is not 1 to {MAX_ID} characters of a-z and 0-9"
            ));
        }
        if self
            .netns
            .as_ref()
            .is_some_and(|path| !path.starts_with('/'))
        {
            return Err(format!("route {sandbox_id}: netns is not an absolute path"));
        }
        if self.traffic_token.as_ref().is_some_and(String::is_empty) {
            return Err(format!(
                "route {sandbox_id}: traffic_token is empty; leave it out to allow all traffic"
            ));
        }
        if self
            .mask_request_host
            .as_ref()
            .is_some_and(|mask| mask.is_empty() || HeaderValue::from_str(mask).is_err())
        {
            return Err(format!(
                "route {sandbox_id}: mask_request_host cannot be sent as a Host header"
            ));
        }
        Ok(())
    }
}

/// An entry of the table.
pub struct Route {
    pub spec: Spec,
    pub guest: Arc<Guest>,
}

/// One generation of a sandbox. Its connections hang on this object, so a newer generation cannot meet them.
pub struct Guest {
    pub namespace: Option<Arc<OwnedFd>>,
    pub pool: Pool,
    inode: Option<(u64, u64)>,
    serving: Mutex<Serving>,
    drained: Notify,
}

#[derive(Default)]
struct Serving {
    closed: bool,
    next: u64,
    clients: HashMap<u64, Arc<Client>>,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Refused {
    /// The sandbox is gone, or was replaced since it was looked up.
    Gone,
    /// It serves as many requests as it may.
    Full,
}

impl Route {
    /// Opens the namespace of a checked spec. `idle_places` bounds the idle connections of all guests together.
    pub async fn open(
        spec: Spec,
        namespaces: &Namespaces,
        idle_places: &Arc<Semaphore>,
    ) -> Result<Route, String> {
        let mut namespace = None;
        let mut inode = None;
        if let Some(path) = &spec.netns {
            let failed = |cause: std::io::Error| {
                format!(
                    "route {}: cannot use the network namespace {path}: {cause}",
                    spec.sandbox_id
                )
            };
            let fd = namespaces.open(path.as_ref()).await.map_err(failed)?;
            let stat = rustix::fs::fstat(&fd).map_err(|e| failed(e.into()))?;
            inode = Some((stat.st_dev, stat.st_ino));
            namespace = Some(fd);
        }
        let guest = Arc::new(Guest {
            namespace,
            inode,
            pool: Pool::new(idle_places.clone(), IDLE_PER_PORT, IDLE_PER_GUEST),
            serving: Mutex::default(),
            drained: Notify::new(),
        });
        Ok(Route { spec, guest })
    }

    /// Takes over the guest of `old` when it is the same one, and its connections with it. The path of a namespace may
    /// name another namespace by now, hence the inode.
    fn adopt(&mut self, old: &Route) -> bool {
        let key = |route: &Route| (route.spec.generation, route.spec.address, route.guest.inode);
        let same = key(self) == key(old);
        if same {
            self.guest = old.guest.clone();
        }
        same
    }

    /// Notes that `client` is served by this sandbox until the lease is dropped.
    pub fn lease(self: &Arc<Self>, client: &Arc<Client>, max: usize) -> Result<Lease, Refused> {
        let mut serving = self.guest.serving();
        if serving.closed {
            return Err(Refused::Gone);
        }
        if serving.clients.len() >= max {
            return Err(Refused::Full);
        }
        let key = serving.next;
        serving.next += 1;
        serving.clients.insert(key, client.clone());
        Ok(Lease {
            route: self.clone(),
            key,
        })
    }

    /// The host name to show to the server on `port` in place of the client's.
    pub fn host_mask(&self, port: u16) -> Option<HeaderValue> {
        let mask = self.spec.mask_request_host.as_ref()?;
        if port == AGENT_PORT {
            return None;
        }
        HeaderValue::try_from(mask.replace("${PORT}", &port.to_string())).ok()
    }

    /// Compares in a time that does not tell where `given` differs. True when no token is wanted.
    pub fn token_matches(&self, given: Option<&[u8]>) -> bool {
        match (&self.spec.traffic_token, given) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(token), Some(given)) => token.as_bytes().ct_eq(given).into(),
        }
    }
}

impl Guest {
    fn serving(&self) -> MutexGuard<'_, Serving> {
        // Consistent between any two statements, so a panic elsewhere does not spoil it.
        self.serving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Resets every client being served and drops the idle connections. No lease is given any more.
    fn close(&self) {
        let mut serving = self.serving();
        serving.closed = true;
        for client in serving.clients.values() {
            client.abort();
        }
        drop(serving);
        self.pool.close();
    }

    /// Waits until the last client of a closed route is gone, within reason.
    async fn drained(&self) {
        let wait = async {
            loop {
                let notified = self.drained.notified();
                if self.serving().clients.is_empty() {
                    return;
                }
                notified.await;
            }
        };
        let _ = tokio::time::timeout(DRAIN, wait).await;
    }

    pub fn expire_idle(&self) {
        self.pool.expire(|port| {
            if port == AGENT_PORT {
                IDLE_AGENT
            } else {
                IDLE_GUEST
            }
        });
    }
}

/// A client being served by a sandbox.
pub struct Lease {
    pub route: Arc<Route>,
    key: u64,
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut serving = self.route.guest.serving();
        serving.clients.remove(&self.key);
        if serving.closed && serving.clients.is_empty() {
            self.route.guest.drained.notify_waiters();
        }
    }
}

/// The table knows a newer generation, which it names; nothing was changed.
#[derive(Debug)]
pub struct Stale(pub u64);

/// All routes. Looking one up takes a shared lock for the length of a hash lookup.
#[derive(Default)]
pub struct Routes {
    table: RwLock<HashMap<String, Arc<Route>>>,
}

impl Routes {
    pub fn find(&self, id: &str) -> Option<Arc<Route>> {
        self.read().get(id).cloned()
    }

    pub fn len(&self) -> usize {
        self.read().len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn all(&self) -> Vec<Arc<Route>> {
        self.read().values().cloned().collect()
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, HashMap<String, Arc<Route>>> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, HashMap<String, Arc<Route>>> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds or replaces one route. Clients of a replaced guest have been reset when this returns.
    pub async fn put(&self, mut route: Route) -> Result<(), Stale> {
        let id = route.spec.sandbox_id.clone();
        let mut gone = Vec::new();
        match self.write().entry(id) {
            Entry::Vacant(slot) => {
                slot.insert(Arc::new(route));
            }
            Entry::Occupied(mut slot) => {
                let old = slot.get();
                if route.spec.generation < old.spec.generation {
                    return Err(Stale(old.spec.generation));
                }
                if !route.adopt(old) {
                    gone.push(old.clone());
                }
                slot.insert(Arc::new(route));
            }
        }
        close_all(gone).await;
        Ok(())
    }

    /// Makes `routes` the whole table. This is the truth of a control plane that has just started, so a lower generation
    /// is not stale here: any other guest replaces.
    pub async fn replace(&self, routes: Vec<Route>) {
        let mut gone = Vec::new();
        {
            let mut table = self.write();
            let mut next = HashMap::with_capacity(routes.len());
            for mut route in routes {
                if let Some(old) = table.remove(&route.spec.sandbox_id) {
                    if !route.adopt(&old) {
                        gone.push(old);
                    }
                }
                next.insert(route.spec.sandbox_id.clone(), Arc::new(route));
            }
            gone.extend(table.drain().map(|(_, route)| route));
            *table = next;
        }
        close_all(gone).await;
    }

    /// Removes a route. When this returns, every client it served has been reset.
    pub async fn delete(&self, id: &str) {
        let removed = self.write().remove(id);
        close_all(removed.into_iter().collect()).await;
    }
}

async fn close_all(routes: Vec<Arc<Route>>) {
    for route in &routes {
        route.guest.close();
    }
    for route in &routes {
        route.guest.drained().await;
    }
}
