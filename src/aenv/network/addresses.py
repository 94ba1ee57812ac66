"""Which addresses and names belong to slot number N. Pure arithmetic, the same in every process.

A slot has two links. Towards its guest every slot is alike (``GUEST``, ``GATEWAY`` and both MAC addresses never change,
so a snapshot taken behind one slot runs behind any other, ARP cache included). Towards the host each slot owns one
``/31`` (RFC 3021) of the node's subnet: the even address is the host's end, the odd one the namespace's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network

import msgspec

from aenv.errors import SetupError

GUEST = "169.254.0.21"
GATEWAY = "169.254.0.22"
PREFIX = 30
GUEST_MAC = "02:ae:00:00:00:15"
GATEWAY_MAC = "02:ae:00:00:00:16"
TAP = "tap0"
UPLINK = "uplink"

MAX_SLOTS = 1 << 15
"""Slots of one machine, whatever the size of the subnet; a link's name and MAC address have room for more."""

_USABLE = tuple(map(IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")))
_LINK = re.compile(r"aenv(0|[1-9][0-9]{0,5})")
_TAG = re.compile(r"[0-9a-f]{8}")


class Subnet(msgspec.Struct, frozen=True):
    """The range that links between namespaces and host are numbered from."""

    network: IPv4Network

    @classmethod
    def parse(cls, text: str) -> Subnet:
        """Raises SetupError for anything that is not an IPv4 network with room for at least one slot."""
        try:
            network = IPv4Network(text)
        except ValueError as error:
            raise SetupError(
                f"[network] subnet {text!r} is not an IPv4 network: {error}", remedy="write it as 10.11.0.0/16"
            ) from error
        if network.prefixlen > 31 or not any(map(network.subnet_of, _USABLE)):
            raise SetupError(
                f"[network] subnet {text!r} must be a private range of at least two addresses",
                remedy=f"take an unused part of {', '.join(map(str, _USABLE))}",
            )
        return cls(network)

    @property
    def capacity(self) -> int:
        return min(self.network.num_addresses // 2, MAX_SLOTS)

    def host(self, index: int) -> str:
        """Address of the host's end of slot ``index``."""
        return str(self._pair(index)[0])

    def peer(self, index: int) -> str:
        """Address of the namespace's end of slot ``index``."""
        return str(self._pair(index)[1])

    def _pair(self, index: int) -> IPv4Network:
        if not 0 <= index < self.capacity:
            raise ValueError(f"slot {index} is outside of {self.network}, which has {self.capacity} slots")
        return IPv4Network((int(self.network.network_address) + 2 * index, 31))

    def __contains__(self, address: str) -> bool:
        return IPv4Address(address) in self.network


def resolvers(addresses: Iterable[str]) -> tuple[str, ...]:
    """The guests' name servers, checked. Raises SetupError for anything that is not an IPv4 address."""
    for address in addresses:
        try:
            IPv4Address(address)
        except ValueError as error:
            raise SetupError(
                f"[network] dns {address!r} is not an IPv4 address: {error}", remedy='write it as dns = ["1.1.1.1"]'
            ) from error
    return tuple(addresses)


def link_name(index: int) -> str:
    """Name of the host's end. It is the machine-wide claim of the number: the kernel lets a name exist once."""
    return f"aenv{index}"


def link_index(name: str) -> int | None:
    """The slot a link belongs to by its name, None for every link that is not ours."""
    match = _LINK.fullmatch(name)
    index = int(match[1]) if match else MAX_SLOTS
    return index if index < MAX_SLOTS else None


def link_macs(index: int) -> tuple[str, str]:
    """MAC addresses of the host's and of the namespace's end."""
    middle = f"02:ae:01:{index >> 8:02x}:{index & 0xFF:02x}"
    return f"{middle}:01", f"{middle}:02"


def link_group(tag: str) -> int:
    """Owner of a link, as a number the kernel stores in the same step that creates the link (an alias cannot be).

    The high bit keeps clear of the small numbers that people use, and tools show a group as a signed number.
    """
    if not _TAG.fullmatch(tag):
        raise ValueError(f"{tag!r} is not eight hex digits")
    return 0x4000_0000 | int(tag, 16) & 0x3FFF_FFFF


def link_alias(tag: str) -> str:
    """Owner of a link for people who read ``ip link``, and to tell two tags of one group apart."""
    return f"aenv:{tag}"
