"""Saved guests with the product's agent: their network, their processes and their files when they are back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aenv.errors import VmmFailed
from tests.agent_guest import Snapshot, Workshop


@pytest.fixture(scope="module")
async def workshop(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workshop]:
    async with Workshop.open(tmp_path_factory.mktemp("workshop")) as workshop:
        yield workshop


@pytest.fixture(scope="module")
async def snapshot(workshop: Workshop) -> Snapshot:
    """Of a guest in whose memory a process counts, and which has files in memory and on disk."""
    guest = await workshop.boot(256)
    await guest.run("head -c 20000000 /dev/urandom > /tmp/disk; sync")
    await guest.run("mount -t tmpfs none /mnt || mkdir -p /mnt && mount -t tmpfs none /mnt")
    await guest.run("head -c 20000000 /dev/urandom > /mnt/memory")
    await guest.run("(n=0; while true; do n=$((n+1)); echo $n > /mnt/count; sleep 0.1; done) > /dev/null 2>&1 &")
    await guest.run("cat /tmp/disk /mnt/memory | sha256sum > /mnt/sum; cat /mnt/count")
    await guest.machine.pause()
    taken = await workshop.snapshot(guest)
    await workshop.clear()
    return taken


CHECK = 'test "$(cat /tmp/disk /mnt/memory | sha256sum)" = "$(cat /mnt/sum)" && echo same'


@pytest.fixture(autouse=True)
async def cleared(workshop: Workshop) -> AsyncIterator[None]:
    yield
    await workshop.clear()


async def test_files_and_processes_go_on(workshop: Workshop, snapshot: Snapshot) -> None:
    guest = await workshop.restore(snapshot, await workshop.slot())
    before = int(await guest.run("cat /mnt/count"))
    assert await guest.run(CHECK) == "same\n"
    assert await guest.run("echo 3 > /proc/sys/vm/drop_caches; " + CHECK) == "same\n"
    deadline = asyncio.get_running_loop().time() + 20
    while int(await guest.run("cat /mnt/count")) < before + 10:
        assert asyncio.get_running_loop().time() < deadline
    assert await guest.run("dmesg | grep -ciE 'oops|bug:|lockup|stall|i/o error' || true") == "0\n"


async def test_a_guest_comes_back_in_another_slot(workshop: Workshop, snapshot: Snapshot) -> None:
    """With another namespace and another tap; both guests have the same address, and neither sees the other."""
    slots = [await workshop.slot() for _ in range(2)]
    guests = [await workshop.restore(snapshot, slot) for slot in slots]
    for number, guest in enumerate(guests):
        await guest.run(f"echo {number} > /mnt/number")
    for number, guest in enumerate(guests):
        await guest.healthy()
        assert await guest.run("cat /mnt/number") == f"{number}\n"
        assert guest.slot.mac in await guest.run("cat /sys/class/net/eth0/address")


async def test_generations_with_a_network(workshop: Workshop, snapshot: Snapshot) -> None:
    for generation in range(3):
        guest = await workshop.restore(snapshot, await workshop.slot())
        if generation:
            assert await guest.run("cat /mnt/generation") == f"{generation - 1}\n"
        await guest.run(f"echo {generation} > /mnt/generation; echo {generation} > /tmp/generation; sync")
        await guest.machine.pause()
        snapshot = await workshop.snapshot(guest)
        await workshop.clear()
    guest = await workshop.restore(snapshot, await workshop.slot())
    assert await guest.run("cat /mnt/generation /tmp/generation") == "2\n2\n"
    assert await guest.run(CHECK) == "same\n"


async def test_the_tap_can_be_replaced(workshop: Workshop, snapshot: Snapshot) -> None:
    """A VMM that was prepared in one slot takes the place of a frozen one in another, behind the very same tap."""
    first, second = await workshop.slot(), await workshop.slot()
    tap = workshop.network.open_tap(first)
    frozen = await workshop.restore(snapshot, first, await workshop.prepare(snapshot.saved.machine, first, tap))
    await frozen.run("echo here > /mnt/place")
    await frozen.machine.pause()
    taken = await workshop.snapshot(frozen)

    prepared = await workshop.prepare(snapshot.saved.machine, second)
    successor = await workshop.restore(taken, first, prepared, tap)
    os.close(tap)
    assert await successor.run("cat /mnt/place") == "here\n"
    assert await frozen.machine.status() == "paused"
    await frozen.machine.kill()
    for _ in range(3):
        assert await successor.run("cat /mnt/place") == "here\n"
    # The slot it came from is free again.
    os.close(workshop.network.open_tap(second))


async def test_what_is_no_tap_cannot_replace_one(workshop: Workshop, snapshot: Snapshot, tmp_path: Path) -> None:
    slot = await workshop.slot()
    prepared = await workshop.prepare(snapshot.saved.machine, slot)
    with (tmp_path / "file").open("w") as file, pytest.raises(VmmFailed, match="not a tap"):
        await prepared.restore(workshop.configuration(snapshot, file.fileno()), run=True)
    os.close(workshop.network.open_tap(slot))
