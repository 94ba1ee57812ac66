//! Sockets inside the network namespaces of sandboxes.
//!
//! A socket belongs for life to the namespace of the thread that made it. One thread does nothing but enter a namespace,
//! make a socket and go home, so no other thread of the process ever leaves the namespace it started in. Sockets are
//! handed back unconnected: connecting waits, and nothing may wait on this thread.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::mpsc::{channel, Sender};
use std::sync::Arc;

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::thread::{move_into_link_name_space, LinkNameSpaceType};
use tokio::sync::oneshot;

struct Job {
    namespace: Arc<OwnedFd>,
    reply: oneshot::Sender<io::Result<OwnedFd>>,
}

/// The thread; it ends when the last clone is dropped.
#[derive(Clone)]
pub struct Namespaces {
    jobs: Sender<Job>,
}

impl Namespaces {
    pub fn start() -> io::Result<Namespaces> {
        let home = File::open("/proc/thread-self/ns/net")?;
        let (jobs, queue) = channel::<Job>();
        std::thread::Builder::new()
            .name("netns".into())
            .spawn(move || {
                for Job { namespace, reply } in queue {
                    let socket = enter(namespace.as_fd()).and_then(|()| tcp_socket());
                    // The thread would keep the namespace alive if it stayed there.
                    drop(namespace);
                    let socket = enter(home.as_fd()).and(socket);
                    let _ = reply.send(socket);
                }
            })?;
        Ok(Namespaces { jobs })
    }

    /// A new TCP socket inside `namespace`, or inside our own.
    pub async fn socket(&self, namespace: Option<&Arc<OwnedFd>>) -> io::Result<OwnedFd> {
        let Some(namespace) = namespace else {
            return tcp_socket();
        };
        let (reply, socket) = oneshot::channel();
        let job = Job {
            namespace: namespace.clone(),
            reply,
        };
        let stopped = || io::Error::other("the network namespace thread has stopped");
        self.jobs.send(job).map_err(|_| stopped())?;
        socket.await.map_err(|_| stopped())?
    }

    /// Opens the namespace at `path` and proves that sockets can be made in it.
    pub async fn open(&self, path: &Path) -> io::Result<Arc<OwnedFd>> {
        use rustix::fs::{Mode, OFlags};
        // Non-blocking, so that a pipe put at the path cannot hold us.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let namespace = Arc::new(rustix::fs::open(path, flags, Mode::empty())?);
        self.socket(Some(&namespace)).await?;
        Ok(namespace)
    }
}

fn enter(namespace: std::os::fd::BorrowedFd<'_>) -> io::Result<()> {
    Ok(move_into_link_name_space(
        namespace,
        Some(LinkNameSpaceType::Network),
    )?)
}

fn tcp_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(
        AddressFamily::INET,
        SocketType::STREAM,
        flags,
        None,
    )?)
}
