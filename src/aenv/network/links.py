"""Network devices of a slot, through netlink and the tun driver. Blocking; the callers are threads of their own."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from typing import Any

import msgspec
from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from aenv.network import addresses
from aenv.network.addresses import GATEWAY, GATEWAY_MAC, GUEST, GUEST_MAC, PREFIX, TAP, UPLINK

_TUN = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_TUNSETPERSIST = 0x400454CB
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_IFF_VNET_HDR = 0x4000
_SIOCGIFINDEX = 0x8933
_NUD_PERMANENT = 0x80


class HostLink(msgspec.Struct, frozen=True):
    """The host's end of a slot, of whatever home. ``alias`` is missing for an instant after it was made."""

    index: int
    ifindex: int
    group: int
    alias: str | None
    mtu: int


class Host:
    """A netlink connection to the namespace of the calling thread. Use it as ``with Host() as host``, on one thread."""

    def __init__(self) -> None:
        self._route = IPRoute()

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *exception: object) -> None:
        self._route.close()

    def claim(self, index: int, group: int, mtu: int, namespace: int) -> bool:
        """Make the link pair of a slot, its far end in ``namespace`` (a file descriptor). False if the number is taken
        by anybody on this machine. Name, owner and far end come to be in one step of the kernel."""
        host_mac, peer_mac = addresses.link_macs(index)
        # One queue each: the default is one a CPU, and on a large machine their sysfs entries dominate the time.
        queues = {"num_tx_queues": 1, "num_rx_queues": 1}
        try:
            self._route.link(
                "add",
                kind="veth",
                ifname=addresses.link_name(index),
                address=host_mac,
                group=group,
                mtu=mtu,
                peer={"ifname": UPLINK, "address": peer_mac, "mtu": mtu, "net_ns_fd": namespace, **queues},
                **queues,
            )
        except NetlinkError as error:
            if error.code == errno.EEXIST:
                return False
            raise
        return True

    def configure(self, index: int, alias: str, address: str) -> None:
        """Number the host's end of a slot just claimed and bring it up."""
        ifindex = self._lookup(addresses.link_name(index))
        self._route.addr("add", index=ifindex, address=address, prefixlen=31)
        self._route.link("set", index=ifindex, ifalias=alias, state="up")

    def links(self) -> list[HostLink]:
        """Every slot link of the machine, of all homes."""
        return [link for message in self._route.get_links() if (link := _host_link(message))]

    def link(self, index: int) -> HostLink | None:
        """The host's end of slot ``index``, of whatever home."""
        try:
            message = self._route.link("get", ifname=addresses.link_name(index))[0]
        except NetlinkError as error:
            if error.code == errno.ENODEV:
                return None
            raise
        return _host_link(message)

    def delete(self, link: HostLink) -> None:
        """Remove a link pair by the number the kernel gave it, which is never used twice. Idempotent."""
        try:
            self._route.link("del", index=link.ifindex)
        except NetlinkError as error:
            if error.code != errno.ENODEV:
                raise

    def addresses(self) -> dict[int, list[str]]:
        """IPv4 addresses of this namespace by the number of their device."""
        found: dict[int, list[str]] = {}
        for message in self._route.get_addr(family=socket.AF_INET):
            found.setdefault(message["index"], []).append(message.get_attr("IFA_LOCAL"))
        return found

    def routes(self) -> list[tuple[str, int | None]]:
        """Destinations (``10.0.0.0/8``; ``0.0.0.0/0`` is the default route) of the main table, and their devices."""
        return [
            (f"{message.get_attr('RTA_DST') or '0.0.0.0'}/{message['dst_len']}", message.get_attr("RTA_OIF"))
            for message in self._route.get_routes(family=socket.AF_INET, table=254)
        ]

    def mtu(self, ifindex: int) -> int:
        """MTU of a device in bytes."""
        return int(self._route.link("get", index=ifindex)[0].get_attr("IFLA_MTU"))

    def names(self) -> set[str]:
        """Names of all devices of this namespace."""
        return {message.get_attr("IFLA_IFNAME") for message in self._route.get_links()}

    def furnish(self, address: str, gateway: str, mtu: int) -> None:
        """Inside a new namespace: number the far end of the link, route through it, and set up the tap."""
        self._route.link("set", index=self._lookup("lo"), state="up")
        uplink = self._lookup(UPLINK)
        self._route.addr("add", index=uplink, address=address, prefixlen=31)
        self._route.link("set", index=uplink, state="up")
        self._route.route("add", dst="default", gateway=gateway, oif=uplink)
        tap = self._lookup(TAP)
        self._route.link("set", index=tap, address=GATEWAY_MAC, mtu=mtu, state="up")
        self._route.addr("add", index=tap, address=GATEWAY, prefixlen=PREFIX)
        # The guest's address never changes, so nobody asks for it, and no failed question delays its first answer.
        self._route.neigh("add", dst=GUEST, lladdr=GUEST_MAC, ifindex=tap, state=_NUD_PERMANENT)

    def _lookup(self, name: str) -> int:
        return int(self._route.link("get", ifname=name)[0]["index"])


def _host_link(message: Any) -> HostLink | None:
    index = addresses.link_index(message.get_attr("IFLA_IFNAME") or "")
    if index is None:
        return None
    return HostLink(
        index=index,
        ifindex=message["index"],
        group=message.get_attr("IFLA_GROUP") or 0,
        alias=message.get_attr("IFLA_IFALIAS"),
        mtu=message.get_attr("IFLA_MTU"),
    )


def make_tap() -> None:
    """Make the persistent tap in the namespace of the calling thread."""
    fd = attach_tap()
    try:
        fcntl.ioctl(fd, _TUNSETPERSIST, 1)
    finally:
        os.close(fd)


def attach_tap() -> int:
    """A file descriptor of the tap in the namespace of the calling thread, close-on-exec, blocking.

    OSError EBUSY while another process has it."""
    fd = os.open(_TUN, os.O_RDWR | os.O_CLOEXEC)
    try:
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", TAP.encode(), flags))
    except OSError:
        os.close(fd)
        raise
    return fd


def exists(probe: socket.socket, name: str) -> bool:
    """Whether a device exists in the namespace that ``probe`` (any IP socket) was made in; takes microseconds."""
    try:
        fcntl.ioctl(probe, _SIOCGIFINDEX, struct.pack("16s24x", name.encode()))
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise
        return False
    return True
