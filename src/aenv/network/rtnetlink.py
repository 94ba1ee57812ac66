"""The part of rtnetlink that slots need: links, addresses, routes and neighbours of IPv4.

Requests are packed by hand and sent many in one system call. A slot takes about 15 of them; through a general netlink
library those held the interpreter for 6 ms of each create, here for a fraction of one. Numbers and layouts are those of
``linux/netlink.h``, ``linux/rtnetlink.h``, ``linux/if_link.h``, ``linux/if_addr.h`` and ``linux/neighbour.h``.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterator

import msgspec

_NETLINK_ROUTE = 0
_SOL_NETLINK = 270
_NETLINK_CAP_ACK, _NETLINK_EXT_ACK, _NETLINK_GET_STRICT_CHK = 10, 11, 12
_ERROR, _DONE = 2, 3
_REQUEST, _ACK, _DUMP_INTR, _DUMP, _EXCLUSIVE, _CREATE = 0x1, 0x4, 0x10, 0x300, 0x200, 0x400
_ACK_TLVS = 0x200
_NEWLINK, _DELLINK, _GETLINK, _NEWADDR, _GETADDR, _NEWROUTE, _GETROUTE, _NEWNEIGH = 16, 17, 18, 20, 22, 24, 26, 28
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MTU, _IFLA_LINKINFO, _IFLA_IFALIAS, _IFLA_AF_SPEC = 1, 3, 4, 18, 20, 26
_IFLA_GROUP, _IFLA_NET_NS_FD, _IFLA_EXT_MASK, _IFLA_TX_QUEUES, _IFLA_RX_QUEUES = 27, 28, 29, 31, 32
_INFO_KIND, _INFO_DATA, _VETH_PEER, _INET6_ADDR_GEN_MODE, _NO_ADDRESS = 1, 2, 1, 8, 1
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_TABLE = 1, 4, 5, 15
_NDA_DST, _NDA_LLADDR, _NUD_PERMANENT = 1, 2, 0x80
_IFF_UP = 1
_SKIP_STATS = 1 << 3
_TABLE_MAIN, _PROTOCOL_STATIC, _UNICAST = 254, 4, 1
_SIOCGIFINDEX = 0x8933
_LOOPBACK = 1

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_LINK = struct.Struct("=BxHiII")  # family, hardware type, index, flags, mask of flags
_ADDR = struct.Struct("=BBBBi")  # family, prefix, flags, scope, index
_ROUTE = struct.Struct("=BBBBBBBBI")  # family, prefix, source prefix, tos, table, protocol, scope, type, flags
_NEIGH = struct.Struct("=BxxxiHBB")  # family, index, state, flags, type
_ATTRIBUTE = struct.Struct("=HH")  # length, type

Attributes = dict[int, bytes]


class Request(msgspec.Struct, frozen=True):
    """One message. ``what`` names it in errors."""

    what: str
    type: int
    flags: int
    body: bytes


class Link(msgspec.Struct, frozen=True):
    """A device: number and name, ``mtu`` in bytes, the group and the alias its maker gave it."""

    ifindex: int
    name: str
    mtu: int
    group: int
    alias: str


class End(msgspec.Struct, frozen=True):
    """One end of a link pair to be."""

    name: str
    mac: str
    mtu: int

    def attributes(self) -> bytes:
        return (
            _attribute(_IFLA_IFNAME, self.name)
            + _attribute(_IFLA_ADDRESS, _mac(self.mac))
            + _attribute(_IFLA_MTU, self.mtu)
            # One queue: the default is one a CPU, and on a large machine making their sysfs entries takes longest.
            + _attribute(_IFLA_TX_QUEUES, 1)
            + _attribute(_IFLA_RX_QUEUES, 1)
        )


def add_pair(near: End, group: int, far: End, namespace: int) -> Request:
    """A veth pair, down: ``near`` here in ``group``, ``far`` in ``namespace`` (a file descriptor). One step: either all
    of this exists or nothing; EEXIST if there is a device of the near name."""
    peer = _LINK.pack(0, 0, 0, 0, 0) + far.attributes() + _attribute(_IFLA_NET_NS_FD, namespace)
    info = _attribute(_INFO_KIND, "veth") + _attribute(_INFO_DATA, _attribute(_VETH_PEER, peer))
    body = _LINK.pack(0, 0, 0, 0, 0) + near.attributes() + _attribute(_IFLA_GROUP, group)
    return Request(f"add link {near.name}", _NEWLINK, _CREATE | _EXCLUSIVE, body + _attribute(_IFLA_LINKINFO, info))


def set_alias(ifindex: int, alias: str) -> Request:
    body = _LINK.pack(0, 0, ifindex, 0, 0) + _attribute(_IFLA_IFALIAS, alias)
    return Request("set alias", _NEWLINK, 0, body)


def set_no_ipv6_address(ifindex: int) -> Request:
    """No link-local IPv6 address when the device comes up, hence none of the chatter that goes with one."""
    mode = _attribute(socket.AF_INET6, _attribute(_INET6_ADDR_GEN_MODE, bytes([_NO_ADDRESS])))
    body = _LINK.pack(0, 0, ifindex, 0, 0) + _attribute(_IFLA_AF_SPEC, mode)
    return Request("set IPv6 address mode", _NEWLINK, 0, body)


def set_up(ifindex: int = _LOOPBACK) -> Request:
    return Request("set link up", _NEWLINK, 0, _LINK.pack(0, 0, ifindex, _IFF_UP, _IFF_UP))


def set_hardware(ifindex: int, mac: str, mtu: int) -> Request:
    body = _LINK.pack(0, 0, ifindex, 0, 0) + _attribute(_IFLA_ADDRESS, _mac(mac)) + _attribute(_IFLA_MTU, mtu)
    return Request("set link address", _NEWLINK, 0, body)


def delete_link(ifindex: int) -> Request:
    return Request("delete link", _DELLINK, 0, _LINK.pack(0, 0, ifindex, 0, 0))


def add_address(ifindex: int, address: str, prefix: int) -> Request:
    packed = socket.inet_aton(address)
    body = _ADDR.pack(socket.AF_INET, prefix, 0, 0, ifindex)
    body += _attribute(_IFA_LOCAL, packed) + _attribute(_IFA_ADDRESS, packed)
    return Request(f"add address {address}", _NEWADDR, _CREATE | _EXCLUSIVE, body)


def add_default_route(ifindex: int, gateway: str) -> Request:
    body = _ROUTE.pack(socket.AF_INET, 0, 0, 0, _TABLE_MAIN, _PROTOCOL_STATIC, 0, _UNICAST, 0)
    body += _attribute(_RTA_GATEWAY, socket.inet_aton(gateway)) + _attribute(_RTA_OIF, ifindex)
    return Request(f"add route through {gateway}", _NEWROUTE, _CREATE | _EXCLUSIVE, body)


def add_neighbour(ifindex: int, address: str, mac: str) -> Request:
    body = _NEIGH.pack(socket.AF_INET, ifindex, _NUD_PERMANENT, 0, 0)
    body += _attribute(_NDA_DST, socket.inet_aton(address)) + _attribute(_NDA_LLADDR, _mac(mac))
    return Request(f"add neighbour {address}", _NEWNEIGH, _CREATE | _EXCLUSIVE, body)


class Rtnetlink:
    """A connection to the network namespace that the calling thread is in now. For one thread at a time; blocking."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_ROUTE)
        for option in (_NETLINK_CAP_ACK, _NETLINK_EXT_ACK, _NETLINK_GET_STRICT_CHK):
            self._socket.setsockopt(_SOL_NETLINK, option, 1)
        self._sequence = 0

    def __enter__(self) -> Rtnetlink:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def run(self, *requests: Request) -> None:
        """Carry out all of ``requests`` in their order; a failed one does not stop those after it. Raises the OSError
        of the first that failed, with the kernel's explanation."""
        first = self._sequence + 1
        self._socket.send(b"".join(self._packed(request, _REQUEST | _ACK) for request in requests))
        failure: OSError | None = None
        answered = 0
        while answered < len(requests):
            for kind, flags, sequence, body in self._receive():
                if kind != _ERROR or not first <= sequence < first + len(requests):
                    continue
                answered += 1
                failure = failure or _failure(requests[sequence - first].what, flags, body)
        if failure:
            raise failure

    def ifindex(self, name: str) -> int | None:
        """Number of a device by its name; takes microseconds."""
        try:
            answer = fcntl.ioctl(self._socket, _SIOCGIFINDEX, struct.pack("16s24x", name.encode()))
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise
            return None
        return int(struct.unpack_from("16xi", answer)[0])

    def links(self) -> list[Link]:
        """Every device of the namespace."""
        body = _LINK.pack(0, 0, 0, 0, 0) + _attribute(_IFLA_EXT_MASK, _SKIP_STATS)
        return [_link(answer) for answer in self._dump("list links", _GETLINK, body)]

    def link(self, ifindex: int) -> Link | None:
        """One device by its number."""
        body = _LINK.pack(0, 0, ifindex, 0, 0) + _attribute(_IFLA_EXT_MASK, _SKIP_STATS)
        request = Request(f"get link {ifindex}", _GETLINK, 0, body)
        self._socket.send(self._packed(request, _REQUEST))
        for kind, flags, _, answer in self._receive():
            if kind == _NEWLINK:
                return _link(answer)
            if kind == _ERROR and (failure := _failure(request.what, flags, answer)) and failure.errno != errno.ENODEV:
                raise failure
        return None

    def addresses(self) -> list[tuple[int, str]]:
        """IPv4 addresses, each with the number of its device."""
        bodies = self._dump("list addresses", _GETADDR, _ADDR.pack(socket.AF_INET, 0, 0, 0, 0))
        return [(_ADDR.unpack_from(body)[4], _ip(_attributes(body, _ADDR.size)[_IFA_LOCAL])) for body in bodies]

    def routes(self) -> list[tuple[str, int | None]]:
        """Destinations in the main IPv4 table (``10.0.0.0/8``; the default route is ``0.0.0.0/0``), and devices."""
        found: list[tuple[str, int | None]] = []
        for body in self._dump("list routes", _GETROUTE, _ROUTE.pack(socket.AF_INET, 0, 0, 0, 0, 0, 0, 0, 0)):
            header, attributes = _ROUTE.unpack_from(body), _attributes(body, _ROUTE.size)
            if _u32(attributes, _RTA_TABLE, header[4]) == _TABLE_MAIN:
                device = _u32(attributes, _RTA_OIF, 0) or None
                found.append((f"{_ip(attributes.get(_RTA_DST, bytes(4)))}/{header[1]}", device))
        return found

    def _dump(self, what: str, kind: int, body: bytes) -> list[bytes]:
        for _ in range(10):
            self._socket.send(self._packed(Request(what, kind, _DUMP, body), _REQUEST))
            bodies, consistent, done = [], True, False
            while not done:
                for answer, flags, sequence, content in self._receive():
                    if sequence != self._sequence:
                        continue
                    consistent = consistent and not flags & _DUMP_INTR
                    if answer in (_ERROR, _DONE):
                        done = True
                        if failure := _failure(what, flags, content):
                            raise failure
                    else:
                        bodies.append(content)
            if consistent:
                return bodies
        raise OSError(errno.EAGAIN, f"{what}: it changed all the time")

    def _packed(self, request: Request, flags: int) -> bytes:
        self._sequence += 1
        size = _HEADER.size + len(request.body)
        return _HEADER.pack(size, request.type, flags | request.flags, self._sequence, 0) + request.body

    def _receive(self) -> Iterator[tuple[int, int, int, bytes]]:
        data = self._socket.recv(1 << 17)
        offset = 0
        while offset + _HEADER.size <= len(data):
            size, kind, flags, sequence, _ = _HEADER.unpack_from(data, offset)
            if size < _HEADER.size:
                break
            yield kind, flags, sequence, data[offset + _HEADER.size : offset + size]
            offset += size + 3 & ~3


def _attribute(kind: int, value: bytes | str | int) -> bytes:
    if isinstance(value, str):
        value = value.encode() + b"\0"
    elif isinstance(value, int):
        value = struct.pack("=I", value)
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value + bytes(-len(value) % 4)


def _attributes(body: bytes, offset: int) -> Attributes:
    found: Attributes = {}
    while offset + _ATTRIBUTE.size <= len(body):
        size, kind = _ATTRIBUTE.unpack_from(body, offset)
        if size < _ATTRIBUTE.size:
            break
        found[kind & 0x3FFF] = body[offset + _ATTRIBUTE.size : offset + size]
        offset += size + 3 & ~3
    return found


def _failure(what: str, flags: int, body: bytes) -> OSError | None:
    """The error that an acknowledgement or the end of a dump carries, None for success."""
    number = -struct.unpack_from("=i", body)[0] if len(body) >= 4 else 0
    if number == 0:
        return None
    # With capped acknowledgements only the header of the request stands before the explanation.
    explanation = _attributes(body, 4 + _HEADER.size).get(1, b"") if flags & _ACK_TLVS else b""
    text = explanation.rstrip(b"\0").decode(errors="replace")
    return OSError(number, f"{what}: {os.strerror(number)}{': ' if text else ''}{text}")


def _link(body: bytes) -> Link:
    attributes = _attributes(body, _LINK.size)
    return Link(
        ifindex=_LINK.unpack_from(body)[2],
        name=attributes.get(_IFLA_IFNAME, b"").rstrip(b"\0").decode(errors="replace"),
        mtu=_u32(attributes, _IFLA_MTU, 0),
        group=_u32(attributes, _IFLA_GROUP, 0),
        alias=attributes.get(_IFLA_IFALIAS, b"").rstrip(b"\0").decode(errors="replace"),
    )


def _u32(attributes: Attributes, kind: int, default: int) -> int:
    return int(struct.unpack_from("=I", attributes[kind])[0]) if kind in attributes else default


def _ip(packed: bytes) -> str:
    return socket.inet_ntoa(packed)


def _mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))
