//! The state that everything shares, and the life of the process.

use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use crate::client::{self, Clients};
use crate::log::Log;
use crate::netns::Namespaces;
use crate::options::Limits;
use crate::routes::Routes;
use crate::upstream::Pool;

/// Shorter than the keep-alive time of Python servers (5 s), for the reason given in `routes.rs`.
const IDLE_API: Duration = Duration::from_secs(4);
const IDLE_API_CONNECTIONS: usize = 256;

pub struct Edge {
    pub started: Instant,
    pub listen: std::net::SocketAddr,
    pub limits: Limits,
    pub log: Log,
    pub clients: Arc<Clients>,
    pub routes: Routes,
    pub namespaces: Namespaces,
    pub api: PathBuf,
    pub api_pool: Pool,
    pub idle_places: Arc<Semaphore>,
    pub requests: AtomicU64,
    pub upstream_errors: AtomicU64,
    pub shutdown: CancellationToken,
}

impl Edge {
    pub fn new(
        listen: std::net::SocketAddr,
        api: PathBuf,
        limits: Limits,
        max_connections: usize,
        log: Log,
        namespaces: Namespaces,
    ) -> Edge {
        // Beside each client's own connection to a guest, see `capacity` in `main.rs`.
        let idle_places = Arc::new(Semaphore::new((max_connections / 2).max(1)));
        Edge {
            started: Instant::now(),
            listen,
            limits,
            log,
            clients: Arc::new(Clients::new(max_connections)),
            routes: Routes::default(),
            namespaces,
            api,
            api_pool: Pool::new(
                idle_places.clone(),
                IDLE_API_CONNECTIONS,
                IDLE_API_CONNECTIONS,
            ),
            idle_places,
            requests: AtomicU64::new(0),
            upstream_errors: AtomicU64::new(0),
            shutdown: CancellationToken::new(),
        }
    }

    /// Serves until [`Edge::shutdown`] is cancelled, then resets what is left.
    pub async fn run(self: Arc<Self>, listener: TcpListener) {
        tokio::select! {
            () = self.shutdown.cancelled() => {}
            () = client::accept(self.clone(), listener) => {}
            () = self.sweep() => {}
        }
        self.clients.abort_all(Duration::from_secs(2)).await;
    }

    /// Ends what has been silent for too long.
    async fn sweep(&self) {
        let shortest = self.limits.header_timeout.min(self.limits.idle_timeout);
        let mut ticks = tokio::time::interval(
            (shortest / 4).clamp(Duration::from_millis(20), Duration::from_secs(1)),
        );
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.clients.expire(&self.limits);
            self.api_pool.expire(|_| IDLE_API);
            for route in self.routes.all() {
                route.guest.expire_idle();
            }
        }
    }
}
