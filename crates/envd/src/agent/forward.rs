//! Servers that listen on loopback only, reachable from outside.
//!
//! Many development servers bind `127.0.0.1`. Connections to the guest's address would be refused by
//! the kernel; while such a server is there, the agent listens on the guest's address in its stead.
//!
//! Nothing is polled to find them: a packet socket with a filter wakes the agent for each connection
//! attempt from outside. The first attempt is still refused, the second one, a moment later, is not;
//! proxies try again anyway, because servers need time to start. Only while something is forwarded,
//! its server is looked for at short intervals, so that the port is free again for the next one.

use rustix::net::{recv, RecvFlags};
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::unix::AsyncFd;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::{interval, Instant, MissedTickBehavior};

use super::Agent;
use crate::sys::read;

/// Connections forwarded at once.
const CONNECTION_LIMIT: usize = 512;
/// Ports forwarded at once.
const PORT_LIMIT: usize = 256;
/// How often the server behind a forwarded port is looked for.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// A port is looked up at most this often, however many connections are made.
const LOOKUP_INTERVAL: Duration = Duration::from_millis(50);
/// Bytes of a list of sockets.
const SOCKETS_LIMIT: u64 = 16 << 20;

/// Forwards connections to `address` for as long as the agent runs.
pub async fn run(agent: Arc<Agent>, address: Ipv4Addr, own_port: u16) {
    match attempts(address, own_port) {
        Ok(attempts) => {
            Forwarder {
                agent,
                address,
                ports: HashMap::new(),
            }
            .run(attempts)
            .await
        }
        // Servers on all addresses work without this.
        Err(e) => eprintln!("aenv-envd: loopback servers are not reachable from outside: {e}"),
    }
}

struct Forwarder {
    agent: Arc<Agent>,
    address: Ipv4Addr,
    ports: HashMap<u16, Port>,
}

enum Port {
    /// Looked up lately: there was nothing to forward.
    Seen(Instant),
    Forwarded {
        loopback: SocketAddr,
        task: JoinHandle<()>,
    },
}

impl Forwarder {
    async fn run(&mut self, attempts: AsyncFd<OwnedFd>) {
        let connections = Arc::new(Semaphore::new(CONNECTION_LIMIT));
        let mut check = interval(CHECK_INTERVAL);
        check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                port = next_attempt(&attempts) => match port {
                    Some(port) => self.attempted(port, &connections).await,
                    None => return,
                },
                _ = check.tick(), if !self.ports.is_empty() => self.check(),
            }
        }
    }

    /// Somebody tries to connect to `port`.
    async fn attempted(&mut self, port: u16, connections: &Arc<Semaphore>) {
        match self.ports.get(&port) {
            Some(Port::Forwarded { .. }) => return,
            Some(Port::Seen(when)) if when.elapsed() < LOOKUP_INTERVAL => return,
            None if self.ports.len() >= PORT_LIMIT => return,
            _ => {}
        }
        let listeners = listeners(self.agent.kernel.proc());
        let state = match loopback_only(&listeners, self.address, port) {
            Some(loopback) => match TcpListener::bind((self.address, port)).await {
                Ok(listener) => {
                    let task = tokio::spawn(accept(listener, loopback, connections.clone()));
                    Port::Forwarded { loopback, task }
                }
                // Somebody took the port just now; then they serve it.
                Err(_) => Port::Seen(Instant::now()),
            },
            None => Port::Seen(Instant::now()),
        };
        self.ports.insert(port, state);
    }

    /// Gives up the ports whose servers are gone.
    fn check(&mut self) {
        let mut found = None;
        let proc = self.agent.kernel.proc();
        self.ports.retain(|port, state| match state {
            Port::Seen(when) => when.elapsed() < LOOKUP_INTERVAL,
            Port::Forwarded { loopback, task } => {
                let listeners = found.get_or_insert_with(|| listeners(proc));
                let alive = listeners.contains(&SocketAddr::new(loopback.ip(), *port));
                if !alive {
                    // Drops the listener; connections that are made go on.
                    task.abort();
                }
                alive
            }
        });
    }
}

async fn accept(listener: TcpListener, loopback: SocketAddr, connections: Arc<Semaphore>) {
    loop {
        let Ok(slot) = connections.clone().acquire_owned().await else {
            return;
        };
        let Ok((mut outside, _)) = listener.accept().await else {
            // No descriptors left for a moment, or a client that gave up.
            tokio::time::sleep(LOOKUP_INTERVAL).await;
            continue;
        };
        tokio::spawn(async move {
            let _slot = slot;
            match TcpStream::connect(loopback).await {
                Ok(mut inside) => {
                    let _ = outside.set_nodelay(true);
                    let _ = inside.set_nodelay(true);
                    // An error is the end of one side, which ends the other.
                    let _ = tokio::io::copy_bidirectional(&mut outside, &mut inside).await;
                }
                // Refused, as the kernel would: a reset instead of an end.
                Err(_) => drop(outside.set_zero_linger()),
            }
        });
    }
}

/// Where to forward `port` to: a listener on loopback, unless somebody listens outside.
fn loopback_only(listeners: &[SocketAddr], address: Ipv4Addr, port: u16) -> Option<SocketAddr> {
    let mut on_port = listeners.iter().filter(|l| l.port() == port);
    let reachable = |ip: IpAddr| ip.is_unspecified() || ip == IpAddr::V4(address);
    if on_port.clone().any(|l| reachable(l.ip().to_canonical())) {
        return None;
    }
    on_port
        .find(|l| l.ip().to_canonical().is_loopback())
        .copied()
}

/// The TCP sockets that listen. Lists that cannot be read are empty.
fn listeners(proc: BorrowedFd<'_>) -> Vec<SocketAddr> {
    let table =
        |name: &str| read::bounded_at(proc, Path::new(name), SOCKETS_LIMIT).unwrap_or_default();
    let tables = [table("self/net/tcp"), table("self/net/tcp6")];
    tables
        .iter()
        .flat_map(|t| t.split(|b| *b == b'\n'))
        .filter_map(listener)
        .collect()
}

/// Reads a line of /proc/net/tcp or tcp6: `  0: 0100007F:1F90 00000000:0000 0A ...`.
fn listener(line: &[u8]) -> Option<SocketAddr> {
    const LISTEN: &str = "0A";
    let mut words = std::str::from_utf8(line)
        .ok()?
        .split_ascii_whitespace()
        .skip(1);
    let (ip, port) = words.next()?.split_once(':')?;
    if words.nth(1)? != LISTEN || !ip.is_ascii() {
        return None;
    }
    // 32-bit words in the byte order of the machine, each holding bytes in network order.
    let word = |at: usize| {
        ip.get(at..at + 8)
            .and_then(|w| u32::from_str_radix(w, 16).ok())
            .map(u32::to_ne_bytes)
    };
    let ip = match ip.len() {
        8 => IpAddr::from(word(0)?),
        32 => {
            let mut bytes = [0; 16];
            for part in 0..4 {
                bytes[part * 4..part * 4 + 4].copy_from_slice(&word(part * 8)?);
            }
            IpAddr::V6(Ipv6Addr::from(bytes))
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?))
}

/// A packet socket that receives the first packet of each TCP connection to `address`, but for `own_port`.
fn attempts(address: Ipv4Addr, own_port: u16) -> io::Result<AsyncFd<OwnedFd>> {
    let flags = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // Protocol 0: nothing is received before the filter is in place and the socket is bound.
    // SAFETY: a plain system call.
    let fd = unsafe { libc::socket(libc::AF_PACKET, flags, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and nobody else's.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut filter = first_packets(address, own_port);
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: the kernel copies the program, which points to `len` instructions that are still alive.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            std::ptr::from_ref(&program).cast(),
            size_of::<libc::sock_fprog>() as u32,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: all-zero is a valid sockaddr_ll: every interface.
    let mut link: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    link.sll_family = libc::AF_PACKET as u16;
    link.sll_protocol = (libc::ETH_P_IP as u16).to_be();
    // SAFETY: the address is a sockaddr_ll of the given size.
    let result = unsafe {
        libc::bind(
            socket.as_raw_fd(),
            std::ptr::from_ref(&link).cast(),
            size_of::<libc::sockaddr_ll>() as u32,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the AsyncFd owns the descriptor, and nothing takes it out or replaces it.
    Ok(unsafe { AsyncFd::register(socket) }?)
}

/// A socket filter (classic BPF) that starts at the IP header: TCP to `address`, not fragmented, SYN
/// without ACK, any port but `own_port`. It passes the header and the ports.
fn first_packets(address: Ipv4Addr, own_port: u16) -> [libc::sock_filter; 14] {
    const LD_W: u16 = 0x20;
    const LD_H: u16 = 0x28;
    const LD_B: u16 = 0x30;
    const LD_H_IND: u16 = 0x48;
    const LD_B_IND: u16 = 0x50;
    const LDX_IHL: u16 = 0xb1;
    const AND: u16 = 0x54;
    const JEQ: u16 = 0x15;
    const JSET: u16 = 0x45;
    const RET: u16 = 0x06;
    let op = |code, k| libc::sock_filter {
        code,
        jt: 0,
        jf: 0,
        k,
    };
    /// The instruction that drops the packet. Jumps are counted from the instruction after them.
    const DROP: u8 = 13;
    let unless = |at: u8, code, k| libc::sock_filter {
        code,
        jt: 0,
        jf: DROP - at - 1,
        k,
    };
    let when = |at: u8, code, k| libc::sock_filter {
        code,
        jt: DROP - at - 1,
        jf: 0,
        k,
    };
    [
        op(LD_B, 9),
        unless(1, JEQ, libc::IPPROTO_TCP as u32),
        op(LD_W, 16),
        unless(3, JEQ, u32::from(address)),
        op(LD_H, 6),
        when(5, JSET, 0x1fff),
        op(LDX_IHL, 0),
        op(LD_B_IND, 13),
        op(AND, 0x12),
        unless(9, JEQ, 0x02),
        op(LD_H_IND, 2),
        when(11, JEQ, u32::from(own_port)),
        op(RET, 64),
        op(RET, 0),
    ]
}

/// The port of the next connection attempt. `None`: the socket is broken.
async fn next_attempt(attempts: &AsyncFd<OwnedFd>) -> Option<u16> {
    let mut packet = [0; 64];
    loop {
        let mut guard = attempts.readable().await.ok()?;
        match recv(attempts.get_ref().as_fd(), &mut packet, RecvFlags::empty()) {
            Ok((_, size)) => {
                if let Some(port) = destination(&packet[..size.min(packet.len())]) {
                    return Some(port);
                }
            }
            Err(rustix::io::Errno::AGAIN) => guard.clear_ready(),
            // Such as "network is down", which is told once.
            Err(rustix::io::Errno::INTR | rustix::io::Errno::NETDOWN) => {}
            Err(_) => return None,
        }
    }
}

/// The destination port of an IPv4 packet with TCP.
fn destination(packet: &[u8]) -> Option<u16> {
    let header = usize::from(packet.first()? & 0xf) * 4;
    let port = packet.get(header + 2..header + 4)?;
    Some(u16::from_be_bytes([port[0], port[1]]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn listeners_are_read_from_the_tables_of_the_kernel() {
        let four = b"   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000";
        assert_eq!(listener(four), Some("127.0.0.1:8080".parse().unwrap()));
        let established =
            b"   1: 0100007F:1F90 0100007F:8888 01 00000000:00000000 00:00000000 00000000";
        assert_eq!(listener(established), None);
        let six = b"   0: 00000000000000000000000001000000:0050 00000000000000000000000000000000:0000 0A 0";
        assert_eq!(listener(six), Some("[::1]:80".parse().unwrap()));
        assert_eq!(
            listener(b"  sl  local_address rem_address   st tx_queue"),
            None
        );
    }

    #[test]
    fn only_ports_without_an_outside_listener_are_forwarded() {
        let address = Ipv4Addr::new(10, 0, 0, 1);
        let parse = |list: &[&str]| {
            list.iter()
                .map(|a| a.parse().unwrap())
                .collect::<Vec<SocketAddr>>()
        };
        for (listening, expected) in [
            (&["127.0.0.1:80"][..], Some("127.0.0.1:80")),
            (&["[::1]:80"], Some("[::1]:80")),
            (&["127.0.0.1:81"], None),
            (&["127.0.0.1:80", "0.0.0.0:80"], None),
            (&["127.0.0.1:80", "[::]:80"], None),
            (&["127.0.0.1:80", "10.0.0.1:80"], None),
            (&["10.0.0.2:80"], None),
        ] {
            let found = loopback_only(&parse(listening), address, 80);
            assert_eq!(found, expected.map(|e| e.parse().unwrap()), "{listening:?}");
        }
    }

    proptest! {
        #[test]
        fn hostile_lines_do_not_panic(line in prop::collection::vec(any::<u8>(), 0..80), text in "[ 0-9A-F:]{0,80}") {
            listener(&line);
            listener(text.as_bytes());
            destination(&line);
        }
    }
}
