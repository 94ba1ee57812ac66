"""Network slots: one namespace with a tap for each sandbox.

The life of a slot::

    new namespace ─► link pair (claims the number) ─► addresses, tap, rule set ─► pinned to a file ══► in use
    └──────── a crash here leaves nothing: the namespace ends with its thread ───────┘

    unpinned ─► the kernel takes namespace, tap and links apart ─► the number is free again

The number is claimed by the name of the host's link (``aenv7``), which the kernel lets exist once on the machine, so
servers of several homes need no other agreement. The link carries its owner, so whatever a crash leaves is either a
link of ours or a file in our own directory; ``Network.reap`` looks at both.
"""

from __future__ import annotations

import asyncio
import errno
import random
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from aenv.config import Settings
from aenv.errors import AenvError, Conflict, OperationFailed, SetupError, Unavailable
from aenv.network import addresses, host, links, namespace, rules
from aenv.network.addresses import Subnet
from aenv.network.links import HostLink
from aenv.network.namespace import Threads
from aenv.network.nft import Nftables
from aenv.network.rtnetlink import Rtnetlink

_THREADS = 4
_POLL = 0.005
_PATIENCE = 1.0
"""Seconds until a link whose namespace does not end by itself, because a process lives in it, is removed by hand."""

T = TypeVar("T")


class Slot(msgspec.Struct, frozen=True):
    """What a sandbox needs to know of its network. ``index`` alone names it; the rest follows from the settings.

    ``netns`` is the pinned namespace, ``tap`` the device in it, ``host_link`` the device of the host. ``guest_address``
    (with ``prefix``), ``gateway`` and ``mac`` are for the guest and the same in every slot. ``mtu`` is in bytes.
    """

    index: int
    netns: Path
    tap: str
    guest_address: str
    prefix: int
    gateway: str
    mac: str
    mtu: int
    host_link: str


class _Opened(NamedTuple):
    """What an open network holds. ``mtu``: of new slots, in bytes."""

    presence: host.Presence
    nftables: Nftables
    probe: Rtnetlink
    mtu: int

    def close(self) -> None:
        self.presence.close()
        self.probe.close()


class Network:
    """All slots of one home. Belongs to the thread of one event loop, and to the network namespace it was made in.

    Operations on different slots run at the same time. Cancelling one never leaves half of a slot: a cancelled
    ``create`` is undone, a cancelled ``destroy`` goes on in the background.
    """

    def __init__(self, settings: Settings) -> None:
        self._subnet = Subnet.parse(settings.network.subnet)
        resolvers = addresses.resolvers(settings.network.dns)
        self._rules = rules.sandbox_table(self._subnet.network, resolvers)
        self._tag = settings.tag
        self._group = addresses.link_group(settings.tag)
        self._directory = settings.run / "netns"
        self._next = random.randrange(self._subnet.capacity)  # noqa: S311 - spreads homes, protects nothing
        self._held: set[int] = set()
        self._picking = threading.Lock()
        self._background: set[asyncio.Task[None]] = set()
        self._opened: _Opened | None = None
        self._builders = Threads(_THREADS, "aenv-network")
        # Its work takes microseconds and must not queue behind that of the builders.
        self._opener = Threads(1, "aenv-network-open")

    async def open(self) -> None:
        """Prepare the host: forwarding, its packet filter, the directory of namespaces. Idempotent.

        Raises SetupError, with a remedy, for whatever this machine lacks.
        """
        if self._opened is not None:
            return

        def prepare() -> _Opened:
            host.check()
            nftables = Nftables()
            with ExitStack() as stack:
                probe = stack.enter_context(Rtnetlink())
                host.check_subnet(probe, self._subnet)
                presence = stack.enter_context(host.Presence())
                host.prepare(nftables)
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                namespace.make_private(self._directory)
                opened = _Opened(presence, nftables, probe, host.uplink_mtu(probe))
                stack.pop_all()
            return opened

        with _explained("prepare the network of this machine", SetupError):
            self._opened = await self._run(prepare, undo=_Opened.close)

    async def create(self) -> Slot:
        """Make a slot. Raises Unavailable when every number is taken, OperationFailed for anything else; nothing of it
        is left then."""
        with _explained("create a network slot"):
            return await self._run(self._build, undo=self._discard)

    async def adopt(self, index: int) -> Slot | None:
        """Take over a slot that an earlier process of this home made. None if it is gone or incomplete; ``reap`` or
        ``destroy`` then removes what is left."""

        def inspect() -> Slot | None:
            if not 0 <= index < self._subnet.capacity:
                return None
            path = self._path(index)
            with Rtnetlink() as connection:
                link = links.host_link(connection, index)
            if link is None or not self._owns(link) or not namespace.is_pinned(path):
                return None
            with namespace.inside(path):
                with Rtnetlink() as connection:
                    devices = {link.name for link in connection.links()}
                tables = self._open.nftables.list("list tables")
            table = {"family": "inet", "name": rules.TABLE}
            complete = {addresses.TAP, addresses.UPLINK} <= devices and any(
                table.items() <= entry.get("table", {}).items() for entry in tables
            )
            return self._slot(index, link.mtu) if complete else None

        with _explained(f"adopt network slot {index}"):
            slot = await self._run(inspect)
        if slot is not None:
            self._held.add(index)
        return slot

    async def destroy(self, slot: Slot) -> None:
        """Remove a slot and return when nothing of it is left and its number is free. Idempotent, but only until
        ``create`` hands the number out again.

        A process that still lives in the namespace is cut off and keeps the bare namespace until it ends.
        """
        task = asyncio.create_task(self._destroy(slot.index))
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        await asyncio.shield(task)

    async def reap(self, keep: Collection[int]) -> list[int]:
        """Destroy the slots of this home that are neither in ``keep`` nor were created or adopted through this object.
        Returns their numbers, also those of which only a part was left."""

        def survey() -> set[int]:
            with Rtnetlink() as connection:
                found = {link.index for link in links.host_links(connection) if self._owns(link)}
            if not self._directory.is_dir():
                return found
            return found | {index for path in self._directory.iterdir() if (index := _number(path)) is not None}

        with _explained("look for network slots left behind"):
            found = await self._run(survey)
        doomed = sorted(found - set(keep) - self._held)
        results = await asyncio.gather(*map(self._destroy, doomed), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return doomed

    def open_tap(self, slot: Slot) -> int:
        """The slot's tap (``IFF_TAP | IFF_NO_PI | IFF_VNET_HDR``), a close-on-exec file descriptor the caller owns.

        Raises Conflict while another process has it, OperationFailed if the slot is gone. Takes 0.3 ms, but has to wait
        for whatever else changes a link of this machine, 40 ms at worst seen. May be called from any thread.
        """
        with _explained(f"open the tap of network slot {slot.index}"):
            try:
                return self._opener.call(lambda: self._inside(slot, links.attach_tap))
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                raise Conflict(f"the tap of network slot {slot.index} is in use by another process") from error

    def socket(self, slot: Slot) -> socket.socket:
        """A new non-blocking TCP socket that lives inside the slot's namespace. Takes 0.05 ms. May be called from any
        thread.

        The guest's hardware address is fixed, so a connection to a guest that is not up yet is not refused; its packets
        are lost, and TCP repeats them after 1 s, 3 s and so on. Poll with short timeouts and new sockets.
        """

        def make() -> socket.socket:
            return socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)

        with _explained(f"open a socket in network slot {slot.index}"):
            return self._opener.call(lambda: self._inside(slot, make))

    async def close(self) -> None:
        """Let go. Slots live on and can be adopted; what is shared on the host goes with the last slot of the last
        home. Idempotent."""
        while self._background:
            await asyncio.gather(*self._background, return_exceptions=True)
        opened, self._opened = self._opened, None
        if opened is not None:
            try:
                with _explained("put back the network of this machine"):
                    await self._run(lambda: self._dismantle(opened))
            finally:
                opened.close()
        await asyncio.to_thread(self._builders.close)
        await asyncio.to_thread(self._opener.close)

    # What follows runs on threads.

    def _build(self) -> Slot:
        opened, index = self._open, None
        with Rtnetlink() as outer:
            try:
                with namespace.fresh() as descriptor:
                    host.inner_settings()
                    index = self._claim(outer, descriptor)
                    # Left by a reboot or by a crash. The number is ours now, and so is the file of that name.
                    namespace.unpin(self._path(index))
                    links.configure(outer, index, addresses.link_alias(self._tag), self._subnet.host(index))
                    links.make_tap()
                    with Rtnetlink() as inner:
                        links.furnish(inner, self._subnet.peer(index), self._subnet.host(index), opened.mtu)
                    opened.nftables.run(self._rules)
                    # Last, so that whatever is pinned is complete.
                    namespace.pin(self._path(index))
            except BaseException:
                if index is not None:
                    self._demolish(outer, index)
                raise
        return self._slot(index, opened.mtu)

    def _claim(self, outer: Rtnetlink, descriptor: int) -> int:
        taken: set[int] = set()
        for attempt in range(16):
            if attempt:
                taken = {link.index for link in links.host_links(outer)}
            index = self._pick(taken)
            if index is None:
                break
            claimed = False
            try:
                claimed = links.claim(outer, index, self._group, self._open.mtu, descriptor)
            finally:
                if not claimed:
                    self._held.discard(index)
            if claimed:
                return index
        raise Unavailable(
            f"no network slot is free: {self._subnet.network} has {self._subnet.capacity} on this machine",
            remedy="end some sandboxes, or give [network] subnet a larger range",
        )

    def _pick(self, taken: set[int]) -> int | None:
        """Hold a number that is in neither ``taken`` nor use here. Numbers come round as late as possible."""
        capacity = self._subnet.capacity
        with self._picking:
            for step in range(capacity):
                index = (self._next + step) % capacity
                if index not in self._held and index not in taken:
                    self._next = (index + 1) % capacity
                    self._held.add(index)
                    return index
        return None

    def _discard(self, slot: Slot) -> None:
        with Rtnetlink() as outer:
            self._demolish(outer, slot.index)

    def _demolish(self, outer: Rtnetlink, index: int) -> None:
        namespace.unpin(self._path(index))
        self._cut(outer, index)
        self._held.discard(index)

    async def _destroy(self, index: int) -> None:
        def release() -> HostLink | None:
            with Rtnetlink() as connection:
                link = links.host_link(connection, index)
            namespace.unpin(self._path(index))
            return link if link is not None and self._owns(link) else None

        def cut() -> None:
            with Rtnetlink() as connection:
                self._cut(connection, index)

        with _explained(f"destroy network slot {index}"):
            link = await self._run(release)
            # The kernel takes dead namespaces apart in batches. Deleting each link by hand costs as much for every
            # single one, and holds up all other work on links meanwhile.
            loop = asyncio.get_running_loop()
            deadline = loop.time() + _PATIENCE
            while link is not None and self._open.probe.ifindex(addresses.link_name(index)) == link.ifindex:
                if loop.time() > deadline:
                    await self._run(cut)
                    break
                await asyncio.sleep(_POLL)
        self._held.discard(index)

    def _cut(self, connection: Rtnetlink, index: int) -> None:
        link = links.host_link(connection, index)
        if link is not None and self._owns(link):
            links.delete(connection, link)

    def _dismantle(self, opened: _Opened) -> None:
        alone = opened.presence.leave()
        remaining = links.host_links(opened.probe)
        if self._directory.is_dir() and not any(self._directory.iterdir()):
            namespace.umount(self._directory)
            self._directory.rmdir()
        if alone and not remaining:
            host.dismantle(opened.nftables)

    def _inside(self, slot: Slot, function: Callable[[], T]) -> T:
        with namespace.inside(self._path(slot.index)):
            return function()

    # Plain helpers.

    def _owns(self, link: HostLink) -> bool:
        return link.group == self._group and link.alias in ("", addresses.link_alias(self._tag))

    def _path(self, index: int) -> Path:
        return self._directory / str(index)

    def _slot(self, index: int, mtu: int) -> Slot:
        return Slot(
            index=index,
            netns=self._path(index),
            tap=addresses.TAP,
            guest_address=addresses.GUEST,
            prefix=addresses.PREFIX,
            gateway=addresses.GATEWAY,
            mac=addresses.GUEST_MAC,
            mtu=mtu,
            host_link=addresses.link_name(index),
        )

    @property
    def _open(self) -> _Opened:
        if self._opened is None:
            raise RuntimeError("the network is not open")
        return self._opened

    async def _run(self, function: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
        """Run ``function`` on a builder thread to its end, whatever happens to the caller."""
        future = asyncio.wrap_future(self._builders.submit(function))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if undo is not None:
                task = asyncio.create_task(self._undo(future, undo))
                self._background.add(task)
                task.add_done_callback(self._background.discard)
            raise

    async def _undo(self, future: asyncio.Future[T], undo: Callable[[T], None]) -> None:
        try:
            result = await future
        except (AenvError, OSError):
            return
        await self._run(lambda: undo(result))


def _number(path: Path) -> int | None:
    """The slot a file of the directory of namespaces belongs to."""
    return addresses.link_index(f"aenv{path.name}")


@contextmanager
def _explained(operation: str, kind: type[AenvError] = OperationFailed) -> Iterator[None]:
    """Turn what the kernel says into an error of ours that names the operation."""
    try:
        yield
    except OSError as error:
        raise kind(f"cannot {operation}: {error}") from error
