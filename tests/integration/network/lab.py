"""A small internet inside this machine, so that tests of the network see real packets and disturb nobody.

``Lab`` moves the calling thread into a new network namespace that plays the machine, with one link to a second one that
plays everything else. ``Guest`` is a kernel of its own (a third namespace) on the tap of a slot, the place of a VM.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from aenv.config import Settings
from aenv.network import Network, Slot, links, namespace, rtnetlink
from aenv.network.addresses import TAP
from aenv.network.rtnetlink import End, Rtnetlink

T = TypeVar("T")

HOST = "198.51.100.1"
"""Address of the machine towards the outside."""

OUTSIDE = "203.0.113.7"
"""A public address."""

PRIVATE = ("10.99.0.1", "172.16.9.9", "192.168.77.1", "100.64.5.5", "169.254.169.254")
"""Addresses that the machine routes to the outside, too, and that answer there."""

ECHO = 8080
"""TCP port of the outside: answers with the address it sees, after it has read to the end."""


def within(fd: int, function: Callable[[], T]) -> T:
    """Run ``function`` on a thread that is in the namespace ``fd``."""
    result: list[T] = []
    failure: list[BaseException] = []

    def work() -> None:
        try:
            namespace._setns(fd)
            result.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def new_namespace() -> int:
    with namespace.fresh() as fd:
        return os.dup(fd)


def number(name: str) -> int:
    with Rtnetlink() as connection:
        ifindex = connection.ifindex(name)
    assert ifindex is not None, name
    return ifindex


def command(*words: str, stdin: str | None = None) -> str:
    done = subprocess.run(words, input=stdin, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout


def echo(listener: socket.socket) -> None:
    with suppress(OSError):
        while True:
            connection, (peer, _) = listener.accept()
            with connection, suppress(OSError):
                connection.settimeout(10)
                size = 0
                while data := connection.recv(1 << 16):
                    size += len(data)
                connection.sendall(f"{peer} {size}".encode())


def serve(port: int) -> socket.socket:
    """Answer on ``port`` of the namespace of the calling thread, until the socket is shut down."""
    listener = socket.create_server(("0.0.0.0", port))
    threading.Thread(target=echo, args=(listener,), daemon=True).start()
    return listener


def ask(address: str, port: int, *, payload: bytes = b"", timeout: float = 5) -> str:
    """What an ``echo`` says, asked from the namespace of the calling thread."""
    with socket.create_connection((address, port), timeout=timeout) as connection:
        connection.sendall(payload)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while data := connection.recv(1 << 16):
            answer += data
    return answer.decode()


def wait_for_carrier() -> None:
    """Return when the tap of this namespace passes packets. The kernel notices in the background that somebody opened
    it, and drops packets until then; TCP would repeat them a second later."""
    deadline = time.monotonic() + 10
    while command("ip", "-br", "link", "show", TAP).split()[1] not in ("UP", "UNKNOWN"):
        assert time.monotonic() < deadline, "the tap has no carrier"
    with Rtnetlink() as connection:
        connection.run(rtnetlink.set_up(number(TAP)))  # waits for whoever changes the device now


class Lab:
    """The machine and the outside."""

    def __init__(self) -> None:
        self._home = namespace.open_own()
        self._listeners: list[socket.socket] = []
        namespace._check(namespace._libc.unshare(namespace._CLONE_NEWNET), "unshare")
        self.outside = new_namespace()
        with Rtnetlink() as machine:
            near, far = End("wan0", "02:00:00:00:00:01", 1500), End("eth0", "02:00:00:00:00:02", 1500)
            machine.run(rtnetlink.add_pair(near, 0, far, self.outside), rtnetlink.set_up())
            wan = number("wan0")
            machine.run(rtnetlink.add_address(wan, HOST, 24), rtnetlink.set_up(wan))
            machine.run(rtnetlink.add_default_route(wan, "198.51.100.2"))
        within(self.outside, self._settle_outside)
        self.serve(self.outside, ECHO)

    def serve(self, fd: int, port: int) -> None:
        self._listeners.append(within(fd, lambda: serve(port)))

    def serve_here(self, port: int) -> None:
        self._listeners.append(serve(port))

    @staticmethod
    def _settle_outside() -> None:
        with Rtnetlink() as outside:
            device = number("eth0")
            outside.run(rtnetlink.set_up(), rtnetlink.add_address(device, "198.51.100.2", 24), rtnetlink.set_up(device))
            outside.run(*(rtnetlink.add_address(device, address, 32) for address in (OUTSIDE, *PRIVATE)))

    def close(self) -> None:
        for listener in self._listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        namespace._setns(self._home)
        os.close(self._home)
        os.close(self.outside)


class Guest:
    """Stands where a VM would: a kernel of its own, all of whose frames go through the slot's tap."""

    def __init__(self, network: Network, slot: Slot) -> None:
        self.slot = slot
        self.namespace = new_namespace()
        self._tap = network.open_tap(slot)
        self._device = within(self.namespace, self._settle)
        self._stop = os.eventfd(0)
        self._relay = threading.Thread(target=self._run)
        self._relay.start()
        try:
            slot_namespace = os.open(slot.netns, os.O_RDONLY)
            for fd in (slot_namespace, self.namespace):
                within(fd, wait_for_carrier)
            os.close(slot_namespace)
        except BaseException:
            self.close()
            raise

    def _settle(self) -> int:
        fd = links.attach_tap()
        with Rtnetlink() as guest:
            device = number(TAP)
            guest.run(
                rtnetlink.set_up(),
                rtnetlink.set_hardware(device, self.slot.mac, self.slot.mtu),
                rtnetlink.add_address(device, self.slot.guest_address, self.slot.prefix),
                rtnetlink.set_up(device),
                rtnetlink.add_default_route(device, self.slot.gateway),
            )
        return fd

    def _run(self) -> None:
        poll = select.poll()
        others = {self._tap: self._device, self._device: self._tap}
        for fd in (*others, self._stop):
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._stop:
                    return
                # Both ends speak the same header in front of each frame.
                with suppress(OSError):
                    os.write(others[fd], os.read(fd, 1 << 17))

    def run(self, function: Callable[[], T]) -> T:
        return within(self.namespace, function)

    def ask(self, address: str, port: int = ECHO, *, payload: bytes = b"", timeout: float = 5) -> str:
        return self.run(lambda: ask(address, port, payload=payload, timeout=timeout))

    def close(self) -> None:
        os.eventfd_write(self._stop, 1)
        self._relay.join()
        for fd in (self._tap, self._device, self._stop, self.namespace):
            os.close(fd)


@contextmanager
def guest(network: Network, slot: Slot) -> Iterator[Guest]:
    it = Guest(network, slot)
    try:
        yield it
    finally:
        it.close()


def traces(run: Path) -> dict[str, object]:
    """Everything a slot may leave on the machine that the calling thread is in, and under ``run``."""
    with Rtnetlink() as machine:
        devices = sorted(link.name for link in machine.links())
        numbers = {link.ifindex: link.name for link in machine.links()}
        addresses = sorted((numbers.get(device), address) for device, address in machine.addresses())
        routes = sorted((destination, numbers.get(device or 0)) for destination, device in machine.routes())
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return {
        "links": devices,
        "addresses": addresses,
        "routes": routes,
        "tables": command("nft", "list", "tables"),
        "mounts": [mount for mount in mounts if mount.startswith(str(run))],
        "files": sorted(map(str, run.rglob("*"))),
    }


def flags_of(fd: int) -> tuple[str, int]:
    """Name and flags of the tap behind ``fd``."""
    answer = fcntl.ioctl(fd, 0x800454D2, bytes(40))  # TUNGETIFF
    name, flags = struct.unpack("16sH22x", answer)
    return name.rstrip(b"\0").decode(), flags


def inner(slot: Slot) -> int:
    return os.open(slot.netns, os.O_RDONLY)


def in_slot(slot: Slot, function: Callable[[], str]) -> str:
    fd = inner(slot)
    try:
        return within(fd, function)
    finally:
        os.close(fd)


async def reap(settings: Settings) -> list[int]:
    """What a new server that owns nothing finds of its home."""
    later = Network(settings)
    await later.open()
    try:
        return await later.reap([])
    finally:
        await later.close()
