"""Network devices of a slot: the link pair to the host, and the tap. Blocking, so for threads of their own."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from pathlib import Path

import msgspec

from aenv.network import addresses, rtnetlink
from aenv.network.addresses import GATEWAY, GATEWAY_MAC, GUEST, GUEST_MAC, PREFIX, TAP, UPLINK
from aenv.network.rtnetlink import End, Link, Rtnetlink

_TUN = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_TUNSETPERSIST = 0x400454CB
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_IFF_VNET_HDR = 0x4000


class HostLink(msgspec.Struct, frozen=True):
    """The host's end of slot ``index``, of whatever home. ``alias`` is empty for an instant after it was made."""

    index: int
    ifindex: int
    mtu: int
    group: int
    alias: str


def claim(host: Rtnetlink, index: int, group: int, mtu: int, namespace: int) -> bool:
    """Make the link pair of a slot, its far end in ``namespace`` (a file descriptor). False if the number is taken by
    anybody on this machine. Name, owner and far end come to be in one step."""
    mac, peer_mac = addresses.link_macs(index)
    near, far = End(addresses.link_name(index), mac, mtu), End(UPLINK, peer_mac, mtu)
    try:
        host.run(rtnetlink.add_pair(near, group, far, namespace))
    except OSError as error:
        if error.errno == errno.EEXIST:
            return False
        raise
    return True


def configure(host: Rtnetlink, index: int, alias: str, address: str) -> None:
    """Number the host's end of a slot just claimed, and bring it up."""
    ifindex = _required(host, addresses.link_name(index))
    ipv6 = [rtnetlink.set_no_ipv6_address(ifindex)] if Path("/proc/sys/net/ipv6").exists() else []
    host.run(
        rtnetlink.set_alias(ifindex, alias),
        *ipv6,
        rtnetlink.add_address(ifindex, address, 31),
        rtnetlink.set_up(ifindex),
    )


def furnish(inner: Rtnetlink, address: str, gateway: str, mtu: int) -> None:
    """Inside a new namespace: number the far end of the link, route through it, and set up the tap."""
    uplink, tap = _required(inner, UPLINK), _required(inner, TAP)
    inner.run(
        rtnetlink.set_up(),
        rtnetlink.add_address(uplink, address, 31),
        rtnetlink.set_up(uplink),
        rtnetlink.add_default_route(uplink, gateway),
        rtnetlink.set_hardware(tap, GATEWAY_MAC, mtu),
        rtnetlink.add_address(tap, GATEWAY, PREFIX),
        rtnetlink.set_up(tap),
        # The guest's address never changes, so nobody asks for it, and no failed question delays its first answer.
        rtnetlink.add_neighbour(tap, GUEST, GUEST_MAC),
    )


def host_links(host: Rtnetlink) -> list[HostLink]:
    """The host's ends of all slots of the machine, of all homes."""
    return [found for link in host.links() if (found := _host_link(link))]


def host_link(host: Rtnetlink, index: int) -> HostLink | None:
    """The host's end of slot ``index``, of whatever home."""
    ifindex = host.ifindex(addresses.link_name(index))
    link = host.link(ifindex) if ifindex is not None else None
    return _host_link(link) if link else None


def delete(host: Rtnetlink, link: HostLink) -> None:
    """Remove a link pair by its device number, which the kernel does not use twice. Idempotent."""
    try:
        host.run(rtnetlink.delete_link(link.ifindex))
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise


def make_tap() -> None:
    """Make the persistent tap in the namespace of the calling thread."""
    fd = attach_tap()
    try:
        fcntl.ioctl(fd, _TUNSETPERSIST, 1)
    finally:
        os.close(fd)


def attach_tap() -> int:
    """A file descriptor of the tap in the namespace of the calling thread, close-on-exec.

    OSError EBUSY while another process has it."""
    fd = os.open(_TUN, os.O_RDWR | os.O_CLOEXEC)
    try:
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", TAP.encode(), flags))
    except OSError:
        os.close(fd)
        raise
    return fd


def _host_link(link: Link) -> HostLink | None:
    index = addresses.link_index(link.name)
    return None if index is None else HostLink(index, link.ifindex, link.mtu, link.group, link.alias)


def _required(connection: Rtnetlink, name: str) -> int:
    ifindex = connection.ifindex(name)
    if ifindex is None:
        raise OSError(errno.ENODEV, f"the device {name} disappeared")
    return ifindex
