"""The executor: carries out what the state machine decides, on this machine.

Every sandbox is serial: its events are decided one at a time, synchronously in the event loop, and the record is in the
database before the first effect runs. Sandboxes are independent of each other; nothing here waits for two of them.
Long effects (start, tear-down) are tasks owned by the node, not by the request that caused them, so a client that goes
away cannot cut one in half.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from aenv.config import Settings
from aenv.edge import EdgeClient, Route
from aenv.errors import AenvError, Conflict, NotFound, OperationFailed, Unavailable
from aenv.lifecycle import machine as lifecycle
from aenv.model import Ended, Sandbox
from aenv.network import Network, Slot
from aenv.node.reaper import Reaper
from aenv.node.resources import Resources, Running
from aenv.node.store import Store
from aenv.templates.store import TemplateStore
from aenv.vmm.interface import Driver

log = logging.getLogger(__name__)

TEAR_DOWN_RETRY = 5.0
"""Seconds until a tear-down that failed is tried again."""


class _Entry:
    """A sandbox in memory: its durable record, and what this process holds of it."""

    def __init__(self, record: Sandbox) -> None:
        self.record = record
        self.running: Running | None = None
        self.starting: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.settled = asyncio.Event()  # no longer creating
        self.gone = asyncio.Event()
        self.failure: AenvError | None = None


class Node:
    """All sandboxes of this machine. Create, then ``await open()``; ``await close()`` lets everything run on."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        templates: TemplateStore,
        driver: Driver,
        network: Network,
        edge: EdgeClient,
    ) -> None:
        self.settings = settings
        self.templates = templates
        self._store = store
        self._edge = edge
        self._resources = Resources(settings, templates, driver, network)
        self._reaper = Reaper(settings, network)
        self._entries: dict[str, _Entry] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._start_slots = asyncio.Semaphore(settings.sandbox.concurrent_starts)
        self._routing = asyncio.Lock()  # the edge must hear of changes in the order in which we decide them
        self._closing = False

    # --- life of the node -------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Take over what runs, undo what was half-done, remove what nobody owns."""
        for record in self._store.load():
            self._entries[record.sandbox_id] = _Entry(record)
        alive = await asyncio.gather(*(self._adopt(entry) for entry in self._entries.values()))
        owned = [entry.record for entry in self._entries.values()]
        await self._reaper.reap(owned)
        await self.sync_routes()
        for entry, is_alive in zip(list(self._entries.values()), alive, strict=True):
            self._carry_out(entry, lifecycle.recover(entry.record, alive=is_alive))

    async def sync_routes(self) -> None:
        """Tell a new edge, or one that lived longer than we did, everything it has to know."""
        async with self._routing:
            # One that is being ended may have lost its route a moment ago, and must not get it back.
            entries = [e for e in self._entries.values() if e.running is not None and e.record.state != "killing"]
            await self._edge.replace_routes(map(self._route, entries))

    async def close(self) -> None:
        """Stop deciding. Starts in progress are undone; running sandboxes run on and are adopted by the next start."""
        self._closing = True
        for entry in self._entries.values():
            if entry.timer is not None:
                entry.timer.cancel()
        creating = [entry for entry in self._entries.values() if entry.record.state == "creating"]
        for entry in creating:
            self._apply(entry, lifecycle.Killed("the control plane stopped while it was starting"))
        await asyncio.gather(*(entry.gone.wait() for entry in creating))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for entry in self._entries.values():
            if entry.running is not None:
                await entry.running.machine.close()

    # --- what callers ask -------------------------------------------------------------------------------------------

    async def create(self, record: Sandbox) -> Sandbox:
        """Start a sandbox and return its record when the guest answers.

        Raises Unavailable when the node is full, and what went wrong when the start fails; then nothing is left.
        """
        if record.idempotency_key is not None:
            earlier = self._by_idempotency_key(record.idempotency_key)
            if earlier is not None:
                if earlier.record.fingerprint != record.fingerprint:
                    raise Conflict("this idempotency key was used for another request", remedy="use a new key")
                return await self._started(earlier)
        if len(self._entries) >= self.settings.sandbox.max_running:
            raise Unavailable(f"the node runs {len(self._entries)} sandboxes, its limit", remedy="try again later")
        self._store.save(record)
        entry = self._entries[record.sandbox_id] = _Entry(record)
        self._carry_out(entry, lifecycle.create(record))
        return await self._started(entry)

    def get(self, sandbox_id: str) -> Sandbox:
        """The record of a running sandbox, else NotFound that says why it ended if that is known."""
        return self._find(sandbox_id).record

    def list(self) -> Sequence[Sandbox]:
        """All running sandboxes, in no order."""
        return [entry.record for entry in self._entries.values() if entry.record.state == "running"]

    def all(self) -> Sequence[Sandbox]:
        """All records, those that are starting or ending included."""
        return [entry.record for entry in self._entries.values()]

    async def kill(self, sandbox_id: str) -> None:
        """End a sandbox; returns when nothing of it is left. NotFound if there is none."""
        entry = self._entries.get(sandbox_id)
        if entry is None or entry.record.state == "killing":
            raise self._not_found(sandbox_id)
        self._apply(entry, lifecycle.Killed())
        await entry.gone.wait()

    def set_timeout(self, sandbox_id: str, seconds: int) -> Sandbox:
        """Let it end ``seconds`` from now, sooner or later than before."""
        entry = self._find(sandbox_id)
        self._apply(entry, lifecycle.SetDeadline(_now() + timedelta(seconds=seconds)))
        return entry.record

    def extend(self, sandbox_id: str, seconds: int) -> Sandbox:
        """Let it end ``seconds`` from now unless it would live longer anyway."""
        entry = self._find(sandbox_id)
        self._apply(entry, lifecycle.Extended(_now() + timedelta(seconds=seconds)))
        return entry.record

    def serial_tail(self, sandbox_id: str, limit: int) -> str:
        """The last ``limit`` bytes of the guest's console."""
        running = self._find(sandbox_id).running
        return running.machine.serial_tail(limit) if running is not None else ""

    # --- deciding ---------------------------------------------------------------------------------------------------

    def _apply(self, entry: _Entry, event: lifecycle.Event) -> None:
        self._carry_out(entry, lifecycle.decide(entry.record, event))

    def _carry_out(self, entry: _Entry, decision: lifecycle.Decision) -> None:
        """Make the record durable, then let the effects happen."""
        if decision.record is not None:
            self._save(entry, decision.record)
            entry.record = decision.record
            if entry.record.state != "creating":
                entry.settled.set()
        for effect in decision.effects:
            match effect:
                case lifecycle.Start():
                    entry.starting = self._spawn(self._start(entry))
                case lifecycle.OpenRoute():
                    if entry.running is not None:
                        self._spawn(self._watch(entry, entry.running))
                case lifecycle.Timer():
                    self._set_timer(entry, effect.at)
                case lifecycle.CloseRoute():
                    pass  # the first step of the tear-down, which must wait for it
                case lifecycle.TearDown():
                    if entry.timer is not None:
                        entry.timer.cancel()
                    self._spawn(self._tear_down(entry))
                case lifecycle.Forget():
                    self._store.end(Ended(entry.record.sandbox_id, effect.reason, _now()))
                    del self._entries[entry.record.sandbox_id]
                    entry.gone.set()

    def _save(self, entry: _Entry, record: Sandbox) -> None:
        if record is entry.record:
            return  # nothing new; a start-up on a full disk depends on it
        try:
            self._store.save(record)
        except AenvError as error:
            if record.state != "killing":
                raise
            # An end must not fail for want of disk space: should we die now, recovery finds that its VMM is gone.
            log.error("%s; sandbox %s is ended all the same", error, record.sandbox_id)

    # --- effects ----------------------------------------------------------------------------------------------------

    async def _start(self, entry: _Entry) -> None:
        record = entry.record
        try:
            async with self._start_slots:
                entry.running = await self._resources.start(record, lambda claimed: self._remember(entry, claimed))
            async with self._routing:
                await self._edge.put_route(self._route(entry))
            now = _now()
            self._apply(entry, lifecycle.Started(now, now + timedelta(seconds=record.timeout)))
            log.info("sandbox %s runs", record.sandbox_id)
        except AenvError as error:
            entry.failure = error
            self._apply(entry, lifecycle.StartFailed(str(error)))
        except Exception as error:
            log.exception("starting sandbox %s failed", record.sandbox_id)
            entry.failure = OperationFailed(f"starting the sandbox failed: {error!r}")
            self._apply(entry, lifecycle.StartFailed(repr(error)))

    def _remember(self, entry: _Entry, claimed: Sandbox) -> None:
        """Store a claim (slot, VMM) made during the start, as soon as it is made."""
        self._store.save(claimed)
        entry.record = claimed

    async def _watch(self, entry: _Entry, running: Running) -> None:
        end = await running.machine.wait()
        if self._closing or entry.record.state != "running":
            return
        code = end.code
        cause = "unknown cause" if code is None else f"signal {-code}" if code < 0 else f"exit status {code}"
        log.warning("the VMM of sandbox %s ended: %s", entry.record.sandbox_id, cause)
        self._apply(entry, lifecycle.VmmExited(entry.record.generation, cause))

    async def _tear_down(self, entry: _Entry) -> None:
        sandbox_id = entry.record.sandbox_id
        if entry.starting is not None and not entry.starting.done() and entry.starting is not asyncio.current_task():
            entry.starting.cancel()
            await asyncio.wait([entry.starting])
        while True:
            try:
                # Traffic first: nobody may reach a guest, or wait for one, that is going away.
                async with self._routing:
                    await self._edge.delete_route(sandbox_id)
                await self._resources.release(entry.record, entry.running)
                self._apply(entry, lifecycle.TornDown())
                break
            except Exception:
                log.exception("cannot clean up after sandbox %s; trying again", sandbox_id)
                await asyncio.sleep(TEAR_DOWN_RETRY)
        log.info("sandbox %s is gone: %s", sandbox_id, entry.record.reason)

    async def _adopt(self, entry: _Entry) -> bool:
        if entry.record.state == "running":
            entry.running = await self._resources.adopt(entry.record)
        return entry.running is not None

    # --- small parts ------------------------------------------------------------------------------------------------

    async def _started(self, entry: _Entry) -> Sandbox:
        await entry.settled.wait()
        if entry.record.state == "running":
            return entry.record
        await entry.gone.wait()
        if entry.failure is not None:
            raise entry.failure
        raise Conflict(f"the sandbox was ended while it started: {entry.record.reason}")

    def _find(self, sandbox_id: str) -> _Entry:
        entry = self._entries.get(sandbox_id)
        if entry is None or entry.record.state != "running":
            raise self._not_found(sandbox_id)
        return entry

    def _not_found(self, sandbox_id: str) -> NotFound:
        entry = self._entries.get(sandbox_id)
        if entry is not None and entry.record.state == "killing":
            return NotFound(f"sandbox {sandbox_id} is being ended: {entry.record.reason}")
        ended = self._store.ended(sandbox_id)
        if ended is None:
            return NotFound(f"there is no sandbox {sandbox_id}")
        return NotFound(f"sandbox {sandbox_id} ended at {ended.at.isoformat(timespec='seconds')}: {ended.reason}")

    def _by_idempotency_key(self, key: str) -> _Entry | None:
        return next((entry for entry in self._entries.values() if entry.record.idempotency_key == key), None)

    def _route(self, entry: _Entry) -> Route:
        assert entry.running is not None
        slot: Slot = entry.running.slot
        record = entry.record
        return Route(record.sandbox_id, record.generation, slot.guest_address, str(slot.netns), record.traffic_token)

    def _set_timer(self, entry: _Entry, at: datetime) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
        # Never longer than an hour at once: the deadline is wall-clock time, the loop's clock is not.
        delay = min(max(0.0, (at - _now()).total_seconds()), 3600.0)
        entry.timer = asyncio.get_running_loop().call_later(delay, self._expire, entry)

    def _expire(self, entry: _Entry) -> None:
        self._apply(entry, lifecycle.Expired(_now()))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the node failed", exc_info=task.exception())


def _now() -> datetime:
    return datetime.now(UTC)
