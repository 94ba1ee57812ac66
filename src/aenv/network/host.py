"""What the machine itself needs before the first slot, shared by all homes on it."""

from __future__ import annotations

import errno
import fcntl
import os
from ipaddress import IPv4Network
from pathlib import Path

from aenv.errors import AenvError, SetupError
from aenv.network import links, namespace, rules
from aenv.network.addresses import Subnet
from aenv.network.nft import Nftables
from aenv.network.rtnetlink import Rtnetlink

_MAX_MTU = 1500
"""A guest keeps its MTU when its snapshot moves to another machine, so it gets one that every machine has."""

_MIN_MTU = 576

_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
_IP_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")


class Presence:
    """Says to other homes that this one is open. It is a shared lock on the host's network namespace itself, so it
    leaves no file, and the kernel drops it with the process."""

    def __init__(self) -> None:
        self._fd = namespace.open_own()
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def leave(self) -> bool:
        """Whether no other home is open. If so none can open before ``close``."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Presence:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def check() -> None:
    """Raises SetupError, with a remedy, for what this process lacks."""
    status = Path("/proc/thread-self/status").read_text()
    effective = int(next(line for line in status.splitlines() if line.startswith("CapEff:")).split()[1], 16)
    missing = [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]
    if missing:
        raise SetupError(
            f"network namespaces need {' and '.join(missing)}",
            remedy="run as root; in a container add these capabilities, or use --privileged",
        )
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        raise SetupError(
            f"/dev/net/tun cannot be opened: {error.strerror}",
            remedy="run `modprobe tun`; in a container pass --device /dev/net/tun",
        ) from error


def prepare(nftables: Nftables) -> None:
    """Forwarding and the host's table. Idempotent, and harmless to slots that exist."""
    try:
        if _IP_FORWARD.read_text().strip() != "1":
            _IP_FORWARD.write_text("1\n")
    except OSError as error:
        raise SetupError(
            f"IPv4 forwarding cannot be switched on: {error.strerror}", remedy="sysctl -w net.ipv4.ip_forward=1"
        ) from error
    try:
        nftables.run(rules.host_table())
    except (AenvError, OSError) as error:
        raise SetupError(
            f"the host's packet filter cannot be set up: {error}",
            remedy="the kernel needs nf_tables with nft_masq, nft_fib_inet, nft_ct, nft_connlimit, nft_reject_inet",
        ) from error


def dismantle(nftables: Nftables) -> None:
    """Remove the host's table. Forwarding stays on: others may have come to rely on it."""
    nftables.run(f"table inet {rules.TABLE}\ndelete table inet {rules.TABLE}")


def check_subnet(host: Rtnetlink, subnet: Subnet) -> None:
    """Raises SetupError if the machine uses part of ``subnet`` for something else, or another home numbers its slots
    differently inside it. A route to a wider range is no obstacle: those of slots are more specific."""
    before, routes, numbered, after = links.host_links(host), host.routes(), host.addresses(), links.host_links(host)
    slots = {link.ifindex: link.index for link in (*before, *after)}  # other homes make and destroy slots meanwhile
    remedy = "give [network] subnet a range that this machine does not use"
    for destination, device in routes:
        network = IPv4Network(destination)
        if device not in slots and network.subnet_of(subnet.network):
            raise SetupError(
                f"the subnet {subnet.network} contains the route {destination} of this machine", remedy=remedy
            )
    for device, address in numbered:
        index = slots.get(device)
        expected = subnet.host(index) if index is not None and index < subnet.capacity else None
        if address in subnet and address != expected:
            raise SetupError(
                f"the address {address} of this machine lies in the subnet {subnet.network}", remedy=remedy
            )


def uplink_mtu(host: Rtnetlink) -> int:
    """MTU in bytes for new slots: that of the default route, within reason."""
    devices = [device for destination, device in host.routes() if destination == "0.0.0.0/0" and device is not None]
    return max(_MIN_MTU, min([_MAX_MTU, *(link.mtu for device in devices if (link := host.link(device)))]))


def inner_settings() -> None:
    """Inside a new namespace: forward IPv4, know no IPv6."""
    for name in ("default", "all"):
        try:
            Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1\n")
        except OSError as error:
            if error.errno != errno.ENOENT:  # the host has no IPv6 at all
                raise
    if _IP_FORWARD.read_text().strip() != "1":
        _IP_FORWARD.write_text("1\n")
