"""Life and death of slots: alone, many at once, beside other homes, after a restart."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from aenv.config import NetworkSettings, Settings
from aenv.errors import Unavailable
from aenv.network import Network, Slot
from tests.integration.network.lab import (
    HOST,
    OUTSIDE,
    Lab,
    command,
    guest,
    in_slot,
    traces,
)


async def test_fifty_at_once(network: Network) -> None:
    slots = await asyncio.gather(*(network.create() for _ in range(50)))
    assert len({slot.index for slot in slots}) == 50
    with guest(network, slots[0]) as one, guest(network, slots[-1]) as other:
        assert one.ask(OUTSIDE) == other.ask(OUTSIDE) == f"{HOST} 0"
    await asyncio.gather(*map(network.destroy, slots))


async def test_destroy_frees_the_number_and_may_be_repeated(network: Network, settings: Settings) -> None:
    before = traces(settings.run)
    slot = await network.create()
    await network.destroy(slot)
    assert traces(settings.run) == before
    await asyncio.gather(network.destroy(slot), network.destroy(slot))
    await network.open()
    assert traces(settings.run) == before


async def test_a_process_inside_does_not_keep_a_slot(network: Network, settings: Settings) -> None:
    before = traces(settings.run)
    slot = await network.create()
    tap = network.open_tap(slot)
    process = subprocess.Popen(["nsenter", f"--net={slot.netns}", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin and process.stdout
    process.stdin.write(b"x")
    process.stdin.flush()
    assert process.stdout.read(1) == b"x"  # it is inside now
    await network.destroy(slot)
    assert traces(settings.run) == before
    assert process.poll() is None
    os.close(tap)
    process.communicate()


async def test_a_later_server_adopts_what_runs_and_reaps_the_rest(network: Network, settings: Settings) -> None:
    kept, lost = await network.create(), await network.create()
    with guest(network, kept) as vm:
        await network.close()
        later = Network(settings)
        await later.open()
        assert await later.adopt(kept.index) == kept
        assert await later.reap([]) == [lost.index]
        assert vm.ask(OUTSIDE) == f"{HOST} 0"
        assert await later.adopt(lost.index) is None
        assert await later.reap([]) == []
    await later.destroy(kept)
    await later.close()


async def test_reap_spares_what_it_is_told_and_what_was_just_made(network: Network, settings: Settings) -> None:
    told = await network.create()
    await network.close()
    later = Network(settings)
    await later.open()
    mine = await later.create()
    assert await later.reap([told.index]) == []
    await later.destroy(mine)
    assert await later.reap([]) == [told.index]
    await later.close()


@pytest.mark.parametrize(
    "damage",
    ["ip link del tap0", "nft delete table inet aenv", "ip link del uplink"],
)
async def test_an_incomplete_slot_is_not_adopted_but_reaped(network: Network, settings: Settings, damage: str) -> None:
    slot = await network.create()
    in_slot(slot, lambda: command("sh", "-c", damage))
    await network.close()
    later = Network(settings)
    await later.open()
    assert await later.adopt(slot.index) is None
    assert await later.reap([]) == [slot.index]
    await later.close()


@pytest.mark.parametrize("index", [-1, 0, 31_999, 1 << 40])
async def test_no_slot_is_adopted_where_there_is_none(network: Network, index: int) -> None:
    assert await network.adopt(index) is None


async def test_files_of_an_earlier_boot_are_removed(network: Network, settings: Settings) -> None:
    # After a reboot a run directory on a disk still has the files, but nothing is mounted on them.
    network._next = 7
    for name in ("7", "9"):
        (settings.run / "netns" / name).touch()
    slot = await network.create()
    assert slot.index == 7 and slot == await network.adopt(7)
    assert await network.reap([]) == [9]
    await network.destroy(slot)


async def test_two_homes_share_a_machine(network: Network, slot: Slot, tmp_path: Path) -> None:
    neighbour = Network(Settings(home=tmp_path / "other", runtime=tmp_path / "other-run"))
    await neighbour.open()
    network._next = neighbour._next = slot.index
    slots = await asyncio.gather(*(one.create() for one in (network, neighbour) * 10))
    assert len({made.index for made in slots} | {slot.index}) == 21
    theirs = [made for made in slots if made.netns.is_relative_to(tmp_path / "other-run")]
    assert len(theirs) == 10
    await neighbour.destroy(slot)  # not theirs to destroy
    ours = {made.index for made in slots} - {made.index for made in theirs} | {slot.index}
    assert await network.reap(ours) == []
    with guest(neighbour, theirs[0]) as vm, guest(network, slot) as own:
        assert vm.ask(OUTSIDE) == own.ask(OUTSIDE) == f"{HOST} 0"
        await asyncio.gather(*map(neighbour.destroy, theirs[1:]))
        assert vm.ask(OUTSIDE) == f"{HOST} 0"
    await neighbour.destroy(theirs[0])
    await neighbour.close()
    with guest(network, slot) as own:
        assert own.ask(OUTSIDE) == f"{HOST} 0"
    await asyncio.gather(*(network.destroy(made) for made in slots if made not in theirs))


async def test_the_machine_s_table_stays_while_another_home_is_open_or_has_slots(lab: Lab, tmp_path: Path) -> None:
    def home(name: str) -> Network:
        return Network(Settings(home=tmp_path / name, runtime=tmp_path / f"{name}-run"))

    one, other = home("one"), home("other")
    await one.open()
    await other.open()
    await one.close()
    assert "inet aenv" in command("nft", "list", "tables")  # open, without a slot
    slot = await other.create()
    await other.close()
    assert "inet aenv" in command("nft", "list", "tables")  # a slot, without a server
    third = home("third")
    await third.open()
    await third.close()
    assert "inet aenv" in command("nft", "list", "tables")
    other = home("other")
    await other.open()
    assert await other.adopt(slot.index) == slot
    await other.destroy(slot)
    await other.close()
    assert "inet aenv" not in command("nft", "list", "tables")


async def test_links_and_tables_of_others_are_left_alone(network: Network, settings: Settings) -> None:
    command("ip", "link", "add", "aenvx", "group", str(network._group), "type", "bridge")
    command("ip", "link", "add", "aenv31", "type", "bridge")
    command("nft", "add table inet others")
    network._next = 31
    slot = await network.create()
    assert slot.index != 31
    assert await network.reap([]) == []
    await network.destroy(Slot(31, slot.netns, *("",) * 2, 0, *("",) * 2, 0, "aenv31"))
    for name in ("aenvx", "aenv31"):
        command("ip", "link", "del", name)
    command("nft", "delete table inet others")
    await network.destroy(slot)


async def test_no_more_slots_than_the_subnet_has_room_for(lab: Lab, tmp_path: Path) -> None:
    network = Network(Settings(home=tmp_path, runtime=tmp_path / "run", network=NetworkSettings(subnet="10.44.0.0/29")))
    await network.open()
    slots = await asyncio.gather(*(network.create() for _ in range(4)))
    with pytest.raises(Unavailable, match="4 on this machine"):
        await network.create()
    await network.destroy(slots.pop())
    slots.append(await network.create())
    await asyncio.gather(*map(network.destroy, slots))
    await network.close()
