//! Addresses and routes of the guest, set with the classic socket ioctls.

use rustix::net::{socket, AddressFamily, SocketType};
use std::ffi::c_ulong;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use super::cmdline::{Address, Parameters};
use super::devices::wait_for;

const ETHERNET: &str = "eth0";

/// `struct ifreq` of <linux/if.h> with the two members of its union that are used here.
#[repr(C)]
struct Request {
    name: [u8; 16],
    value: Value,
}

#[repr(C)]
union Value {
    address: libc::sockaddr_in,
    number: i32,
    flags: i16,
    size: [u8; 24],
}

/// `struct rtentry` of <linux/route.h> for x86-64 and other 64-bit machines.
#[repr(C)]
struct Route {
    pad1: c_ulong,
    dst: libc::sockaddr_in,
    gateway: libc::sockaddr_in,
    genmask: libc::sockaddr_in,
    flags: u16,
    pad2: i16,
    pad3: c_ulong,
    pad4: *const u8,
    metric: i16,
    dev: *const u8,
    mtu: c_ulong,
    window: c_ulong,
    irtt: u16,
}

const _: () = assert!(size_of::<Request>() == 40);
const _: () = assert!(size_of::<Route>() == 120);

fn inet(ip: Ipv4Addr) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::AF_INET as u16,
        sin_port: 0,
        sin_addr: libc::in_addr {
            s_addr: u32::from(ip).to_be(),
        },
        sin_zero: [0; 8],
    }
}

struct Interface {
    socket: OwnedFd,
    name: &'static str,
}

impl Interface {
    fn open(name: &'static str) -> Result<Interface, String> {
        let socket = socket(AddressFamily::INET, SocketType::DGRAM, None);
        let socket =
            socket.map_err(|e| format!("cannot open a socket to configure {name}: {e}"))?;
        Ok(Interface { socket, name })
    }

    fn set(&self, what: &str, request: c_ulong, value: Value) -> Result<(), String> {
        let mut message = Request {
            name: [0; 16],
            value,
        };
        message.name[..self.name.len()].copy_from_slice(self.name.as_bytes());
        // SAFETY: the socket is open and `message` is a struct ifreq, which these requests only read.
        let result = unsafe { libc::ioctl(self.socket.as_raw_fd(), request as _, &message) };
        check(result).map_err(|e| format!("cannot set the {what} of {}: {e}", self.name))
    }

    fn up(&self) -> Result<(), String> {
        let flags = (libc::IFF_UP | libc::IFF_RUNNING) as i16;
        self.set("flags", libc::SIOCSIFFLAGS as _, Value { flags })
    }

    fn address(&self, address: Address) -> Result<(), String> {
        self.set(
            "address",
            libc::SIOCSIFADDR as _,
            Value {
                address: inet(address.ip),
            },
        )?;
        self.set(
            "netmask",
            libc::SIOCSIFNETMASK as _,
            Value {
                address: inet(address.netmask()),
            },
        )
    }

    fn default_route(&self, gateway: Ipv4Addr) -> Result<(), String> {
        let any = inet(Ipv4Addr::UNSPECIFIED);
        let route = Route {
            pad1: 0,
            dst: any,
            gateway: inet(gateway),
            genmask: any,
            flags: libc::RTF_UP | libc::RTF_GATEWAY,
            pad2: 0,
            pad3: 0,
            pad4: std::ptr::null(),
            metric: 0,
            dev: std::ptr::null(),
            mtu: 0,
            window: 0,
            irtt: 0,
        };
        // SAFETY: the socket is open and `route` is a struct rtentry without a device name.
        let result = unsafe { libc::ioctl(self.socket.as_raw_fd(), libc::SIOCADDRT as _, &route) };
        check(result).map_err(|e| format!("cannot set the default route to {gateway}: {e}"))
    }
}

fn check(result: i32) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Brings up loopback and, if it has an address, the network card.
pub fn configure(parameters: &Parameters) -> Result<(), String> {
    Interface::open("lo")?.up()?;
    let Some(address) = parameters.address else {
        return Ok(());
    };
    wait_for(Path::new("/sys/class/net").join(ETHERNET).as_path())?;
    let card = Interface::open(ETHERNET)?;
    if let Some(mtu) = parameters.mtu {
        card.set(
            "MTU",
            libc::SIOCSIFMTU as _,
            Value {
                number: i32::from(mtu),
            },
        )?;
    }
    card.address(address)?;
    card.up()?;
    parameters
        .gateway
        .map_or(Ok(()), |gateway| card.default_route(gateway))
}
