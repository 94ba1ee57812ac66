"""What the executor tells the edge, and what it does with records it cannot read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

from aenv.config import Settings
from aenv.edge import Route
from aenv.errors import NotFound
from aenv.model import ProcessRecord
from aenv.network import Slot
from aenv.node.node import Node
from aenv.node.store import Store
from aenv.templates.store import TemplateStore
from tests.unit.test_lifecycle import record

SLOT = Slot(3, Path("/run/3"), "tap0", "169.254.0.21", 30, "169.254.0.22", "02:ae:00:00:00:15", 1500, "aenv3")
VMM = (
    b'{"driver":"qemu","version":"7.2","build":"b","accelerator":"tcg","processor":"max","tsc_khz":1,"machine":'
    b'{"vcpus":1,"memory":512,"disks":["rw"],"network":true},"pid":1,"start_time":1,"boot_id":"b","directory":"/d"}'
)


class Machine:
    """One that runs until it is killed."""

    def __init__(self) -> None:
        self._over = asyncio.Event()

    async def wait(self) -> None:
        await self._over.wait()

    async def kill(self) -> None:
        self._over.set()

    async def close(self) -> None:
        pass


class World:
    """The driver, the network and the edge at once. A slot is not gone before ``freed`` is set."""

    def __init__(self) -> None:
        self.freed = asyncio.Event()
        self.routes: dict[str, Route] = {}

    async def adopt(self, what: Any) -> Any:
        return SLOT if what == SLOT.index else Machine()

    async def reap(self, _: Any) -> list[int]:
        return []

    async def destroy(self, _: Slot) -> None:
        await self.freed.wait()

    async def replace_routes(self, routes: Iterable[Route]) -> None:
        self.routes = {route.sandbox_id: route for route in routes}

    async def delete_route(self, sandbox_id: str) -> None:
        self.routes.pop(sandbox_id, None)


@pytest.fixture
async def world() -> World:
    return World()


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    made = Store(tmp_path / "aenv.db")
    yield made
    made.close()


async def opened(world: Any, store: Store, home: Path) -> Node:
    settings = Settings(home=home)
    node = Node(settings, store, TemplateStore(settings), world, world, world)
    await node.open()
    return node


async def test_a_new_edge_does_not_learn_of_a_sandbox_that_is_being_ended(
    world: World, store: Store, tmp_path: Path
) -> None:
    store.save(record("running", slot=3, vmm=ProcessRecord("qemu", VMM), end_at=record().end_at.replace(year=2999)))
    node = await opened(world, store, tmp_path)
    assert set(world.routes) == {"i1"}
    ending = asyncio.create_task(node.kill("i1"))
    while world.routes:
        await asyncio.sleep(0)
    await node.sync_routes()
    assert world.routes == {}
    world.freed.set()
    await ending
    await node.close()


async def test_a_vmm_of_another_release_does_not_keep_the_node_from_starting(
    world: World, store: Store, tmp_path: Path
) -> None:
    store.save(record("running", vmm=ProcessRecord("qemu", b'{"pid": 1}')))
    node = await opened(world, store, tmp_path)
    async with asyncio.timeout(5):
        while node.all():
            await asyncio.sleep(0.01)
    with pytest.raises(NotFound, match="its VMM ended"):
        node.get("i1")
    await node.close()
