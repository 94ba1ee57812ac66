"""What every VMM driver promises of machines that are saved and restored, shown on real guests."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aenv.errors import VmmFailed
from aenv.model import KernelImage
from aenv.vmm import process
from aenv.vmm.interface import Disk, DiskLimits, Driver, Machine, RestoreConfig
from tests.conformance import capture
from tests.conformance.guests import DISK, MIB, SHAPE, Guest, Snapshot, disks, furnished, restore
from tests.conformance.machines import Lab, elsewhere, eventually, open_files


@pytest.fixture(scope="session")
async def template(driver: Driver, kernel: KernelImage, tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    """A guest that was booted once, for all tests that only want one to restore."""
    lab = Lab(driver, kernel, tmp_path_factory.mktemp("template"))
    guest = await Guest.boot(lab)
    await guest.ask("fill 2 0 4")
    await guest.ask("write 3 0 4")
    snapshot = await guest.pause_and_snapshot()
    await lab.close()
    return snapshot


async def contents(lab: Lab, snapshot: Snapshot) -> str:
    """What a guest restored from a snapshot finds in its memory and on its disk."""
    guest = await restore(lab, snapshot)
    found = await guest.contents()
    await guest.machine.kill()
    return found


# --- nothing is lost


async def test_a_restored_machine_is_the_saved_one(lab: Lab) -> None:
    guest = await Guest.boot(lab)
    await guest.ask("fill 5 3 9")
    await guest.ask("write 6 1 2")
    contents = await guest.contents()
    snapshot = await guest.pause_and_snapshot()
    whole = capture.digest(guest.machine.record.pid, await guest.machine.memory())
    assert capture.image_digest(snapshot.memory) == whole
    await guest.machine.kill()

    again = await restore(lab, snapshot, run=False)
    assert await again.machine.status() == "paused"
    assert capture.digest(again.machine.record.pid, await again.machine.memory()) == whole
    await again.machine.resume()
    assert await again.contents() == contents
    # It counts its orders, of which one has just been given, in memory.
    assert await again.sum() == f"{contents} orders={again.number}"


async def test_generations(lab: Lab, template: Snapshot) -> None:
    """Each is restored from the one before, changes, and is saved; what is captured is only what it changed."""
    snapshot = template
    for generation in range(2, 6):
        guest = await restore(lab, snapshot)
        before = await guest.contents()
        await guest.ask(f"fill {generation} {generation} 2")
        await guest.ask(f"write {generation} {generation} 1")
        changed = await guest.contents()
        assert changed != before
        snapshot = await guest.pause_and_snapshot()
        assert 2 * MIB < snapshot.captured < 8 * MIB
        whole = capture.digest(guest.machine.record.pid, await guest.machine.memory())
        assert capture.image_digest(snapshot.memory) == whole
        await guest.machine.kill()
        assert await contents(lab, snapshot) == changed


async def test_a_machine_goes_on_after_it_was_saved(lab: Lab, template: Snapshot) -> None:
    guest = await restore(lab, template)
    saved = await guest.contents()
    first = await guest.pause_and_snapshot()
    await guest.machine.resume()
    assert await guest.contents() == saved
    await guest.ask("fill 9 0 2")
    later = await guest.contents()
    second = await guest.pause_and_snapshot()
    await guest.machine.resume()
    assert await guest.contents() == later
    assert await contents(lab, first) == saved
    assert await contents(lab, second) == later


async def test_a_machine_that_was_never_resumed_can_be_saved(lab: Lab, template: Snapshot) -> None:
    guest = await restore(lab, template, run=False)
    snapshot = await guest.snapshot()
    assert snapshot.captured < MIB
    assert await contents(lab, snapshot) == await contents(lab, template)


async def test_two_processors(lab: Lab) -> None:
    guest = await Guest.boot(lab, shape=msgspec.structs.replace(SHAPE, vcpus=2))
    assert await guest.ask("cpus") == "cpus 2"
    expected = await guest.contents()
    snapshot = await guest.pause_and_snapshot()
    await guest.machine.kill()
    for _ in range(2):
        again = await restore(lab, snapshot)
        assert await again.ask("cpus") == "cpus 2"
        assert await again.contents() == expected
        snapshot = await again.pause_and_snapshot()
        await again.machine.kill()


@pytest.mark.parametrize("count", [2, 16])
async def test_siblings_disturb_neither_each_other_nor_their_image(lab: Lab, template: Snapshot, count: int) -> None:
    before = capture.image_digest(template.memory)
    siblings = [await restore(lab, template) for _ in range(count)]
    untouched = await siblings[0].contents()

    async def live(guest: Guest, seed: int) -> str:
        await guest.ask("take 40")  # and the guest tells its VMM a few seconds later that these pages are free
        await guest.ask(f"fill {seed} 1 4")
        await guest.ask(f"write {seed} 1 1")
        return await guest.contents()

    found = await asyncio.gather(*(live(guest, seed) for seed, guest in enumerate(siblings[1:], 100)))
    assert len({untouched, *found}) == count
    for guest in siblings[1:]:
        await free_pages_reported(guest)
    assert await asyncio.gather(*(guest.contents() for guest in siblings)) == [untouched, *found]
    assert capture.image_digest(template.memory) == before
    assert await contents(lab, template) == untouched


async def free_pages_reported(guest: Guest) -> None:
    regions = await guest.machine.memory()

    def look() -> bool | None:
        ranges = [it for region in regions for it in capture.private_ranges(guest.machine.record.pid, region)]
        return sum(size for _, size in ranges) < 20 * MIB or None

    await eventually(look, guest.machine)


# --- a new control plane


async def test_a_machine_can_be_saved_by_a_later_control_plane(lab: Lab, cache: Path) -> None:
    directory = furnished(lab, None)
    record, kill = await elsewhere(lab, lab.config("mailbox", shape=SHAPE, disks=disks(directory)), cache)
    await kill()
    machine = await lab.driver.adopt(record)
    assert machine is not None
    guest = Guest(lab, lab.keep(machine), directory, None, 0)
    expected = await guest.contents()
    snapshot = await guest.pause_and_snapshot()
    assert await contents(lab, snapshot) == expected
    await machine.resume()
    assert await guest.contents() == expected


async def test_a_restored_machine_can_be_adopted_and_saved(lab: Lab, template: Snapshot) -> None:
    first = await restore(lab, template)
    lab.forget(first.machine)
    await first.machine.close()
    machine = await lab.driver.adopt(first.machine.record)
    assert machine is not None
    assert machine.record == first.machine.record
    guest = Guest(lab, lab.keep(machine), first.directory, first.base, first.number)
    expected = await guest.contents()
    snapshot = await guest.pause_and_snapshot()
    assert snapshot.captured < 4 * MIB
    assert await contents(lab, snapshot) == expected


async def test_what_is_not_completely_restored_is_no_machine(lab: Lab, template: Snapshot, cache: Path) -> None:
    """A control plane that dies before or in a restore leaves a VMM that can be found, and that does not run should
    anybody adopt it."""
    record, kill = await elsewhere(lab, lab.preparation(template.saved.machine), cache)
    await kill()
    assert [identity.pid for identity, _ in process.find(lab.root)] == [record.pid]
    machine = await lab.driver.adopt(record)
    assert machine is not None
    for action in (machine.resume, machine.status, lambda: machine.save(lab.root / "state")):
        with pytest.raises(VmmFailed, match="never completely restored"):
            await action()
    await machine.kill()
    await machine.close()


# --- saving


async def test_a_running_machine_is_not_saved(lab: Lab, template: Snapshot) -> None:
    guest = await restore(lab, template)
    with pytest.raises(VmmFailed, match="pause it first"):
        await guest.machine.save(lab.root / "state")
    assert not (lab.root / "state").exists()
    await guest.sum()


async def test_no_file_is_overwritten(lab: Lab, template: Snapshot) -> None:
    guest = await restore(lab, template, run=False)
    (lab.root / "state").write_text("precious")
    for path in (lab.root / "state", lab.root / "nowhere" / "state"):
        with pytest.raises(VmmFailed, match="cannot create the state file"):
            await guest.machine.save(path)
    assert (lab.root / "state").read_text() == "precious"
    before = open_files()
    await guest.machine.save(lab.root / "other")
    assert open_files() == before


async def test_memory_is_where_the_machine_says(lab: Lab, template: Snapshot) -> None:
    guest = await restore(lab, template, run=False)
    regions = await guest.machine.memory()
    assert sum(region.size for region in regions) == SHAPE.memory * MIB
    assert sorted(region.offset for region in regions)[0] == 0
    await guest.machine.kill()
    with pytest.raises(VmmFailed):
        await guest.machine.memory()


# --- what cannot be restored is refused, and leaves nothing

Change = Callable[[Lab, Snapshot, RestoreConfig], RestoreConfig]


def changed(**changes: Any) -> Change:
    return lambda lab, snapshot, config: msgspec.structs.replace(config, **changes)


def saved(**changes: Any) -> Change:
    return lambda lab, snapshot, config: msgspec.structs.replace(
        config, saved=msgspec.structs.replace(snapshot.saved, **changes)
    )


def flipped(lab: Lab, snapshot: Snapshot, config: RestoreConfig) -> RestoreConfig:
    state = bytearray(snapshot.state.read_bytes())
    state[len(state) // 2] ^= 1
    return other_state(lab, config, bytes(state))


def truncated(lab: Lab, snapshot: Snapshot, config: RestoreConfig) -> RestoreConfig:
    return other_state(lab, config, snapshot.state.read_bytes()[:-100])


def longer(lab: Lab, snapshot: Snapshot, config: RestoreConfig) -> RestoreConfig:
    return other_state(lab, config, snapshot.state.read_bytes() + b"\0")


def other_state(lab: Lab, config: RestoreConfig, content: bytes) -> RestoreConfig:
    (lab.root / "state").write_bytes(content)
    return msgspec.structs.replace(config, state=lab.root / "state")


def smaller_memory(lab: Lab, snapshot: Snapshot, config: RestoreConfig) -> RestoreConfig:
    shutil.copyfile(snapshot.memory, lab.root / "memory")
    os.truncate(lab.root / "memory", (SHAPE.memory - 1) * MIB)
    return msgspec.structs.replace(config, memory=lab.root / "memory")


def one_disk(lab: Lab, snapshot: Snapshot, config: RestoreConfig) -> RestoreConfig:
    return msgspec.structs.replace(config, disks=config.disks[:1])


def swapped_disks(lab: Lab, snapshot: Snapshot, config: RestoreConfig) -> RestoreConfig:
    return msgspec.structs.replace(config, disks=config.disks[::-1])


def missing_disk(lab: Lab, snapshot: Snapshot, config: RestoreConfig) -> RestoreConfig:
    return msgspec.structs.replace(config, disks=(Disk(lab.root / "nothing", "raw", False), config.disks[1]))


def enormous_disk(lab: Lab, snapshot: Snapshot, config: RestoreConfig) -> RestoreConfig:
    disk = lab.disk("enormous", 0)
    os.truncate(disk.path, 1 << 30)
    return msgspec.structs.replace(config, disks=(disk, config.disks[1]))


def garbage_disk(lab: Lab, snapshot: Snapshot, config: RestoreConfig) -> RestoreConfig:
    disk = msgspec.structs.replace(lab.disk("garbage", MIB), format="qcow2")
    return msgspec.structs.replace(config, disks=(disk, config.disks[1]))


NOWHERE = Path("/nowhere")


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (flipped, "damaged"),
        (truncated, "damaged"),
        (longer, "damaged"),
        (changed(state=NOWHERE), "cannot read the state file /nowhere"),
        (changed(state=Path("/")), "cannot read the state file /"),
        (changed(memory=NOWHERE), "cannot open the memory image /nowhere"),
        (changed(memory=Path("/")), "memory image /"),
        (changed(memory=Path("/dev/zero")), "memory image /dev/zero"),
        (smaller_memory, "as large as the machine's memory"),
        (one_disk, "were given"),
        (swapped_disks, "were given"),
        (missing_disk, "cannot open the disk image"),
        (enormous_disk, "larger disk_limit"),
        (garbage_disk, "not qcow2"),
        (changed(tap_fd=0), "no network card"),
        (saved(driver="other"), "it is one of other"),
        (saved(version="1.2.3"), "1.2.3"),
        (saved(build="0" * 64), "0000"),
        (saved(accelerator="kvm-other"), "kvm-other"),
        (saved(processor="i486"), "i486"),
        (saved(tsc_khz=1_000_000), "1000000 kHz"),
        (saved(size=1 << 40), "not possible"),
    ],
)
async def test_what_does_not_fit_is_refused(lab: Lab, template: Snapshot, change: Change, cause: str) -> None:
    before = open_files()
    prepared = await lab.prepare(template.saved.machine)
    config = RestoreConfig(template.memory, disks(furnished(lab, template)), template.state, template.saved)
    with pytest.raises(VmmFailed) as caught:
        await prepared.restore(change(lab, template, config), run=True)
    assert cause in str(caught.value)
    assert lab.leftovers() == []
    assert open_files() == before
    assert (await prepared.wait()).code == -signal.SIGKILL


@pytest.mark.parametrize(
    "changes", [{"vcpus": 2}, {"memory": 128}, {"disks": ("rw",)}, {"disks": ("rw", "rw")}, {"network": True}]
)
async def test_another_class_is_refused(lab: Lab, template: Snapshot, changes: dict[str, Any]) -> None:
    other = msgspec.structs.replace(template.saved, machine=msgspec.structs.replace(template.saved.machine, **changes))
    with pytest.raises(VmmFailed, match="prepare a VMM of its class"):
        await restore(
            lab,
            msgspec.structs.replace(template, saved=other),
            prepared=await lab.prepare(template.saved.machine),
        )
    assert lab.leftovers() == []


async def test_a_state_that_only_looks_whole_is_refused_by_the_vmm(lab: Lab, template: Snapshot) -> None:
    state = bytearray(template.state.read_bytes())
    state[1000:-1000] = bytes(len(state) - 2000)
    forged = forge(lab, template, bytes(state))
    before = open_files()
    with pytest.raises(VmmFailed, match="loading the state of its devices failed"):
        await restore(lab, forged)
    assert lab.leftovers() == []
    assert open_files() == before


def forge(lab: Lab, template: Snapshot, state: bytes) -> Snapshot:
    """A snapshot with another state, and all the marks of a genuine one."""
    directory = lab.root / "forged"
    shutil.copytree(template.directory, directory)
    (directory / "state").write_bytes(state)
    saved = msgspec.structs.replace(template.saved, size=len(state), digest=capture.image_digest(directory / "state"))
    return msgspec.structs.replace(template, directory=directory, saved=saved)


async def test_a_vmm_that_is_killed_while_it_is_restored_leaves_nothing(lab: Lab, template: Snapshot) -> None:
    """At whatever moment: every 0.5 ms until a restore is over before."""
    before = open_files()
    completed = 0
    for delay in (step / 2 for step in range(2000)):
        prepared = await lab.prepare(template.saved.machine)
        config = RestoreConfig(template.memory, disks(furnished(lab, template)), template.state, template.saved)
        restoring = asyncio.create_task(prepared.restore(config, run=True))
        await asyncio.sleep(delay / 1000)
        os.kill(prepared.record.pid, signal.SIGKILL)
        try:
            machine = await asyncio.wait_for(restoring, 5)
        except VmmFailed as error:
            assert str(error).startswith("cannot restore")
        else:
            completed += 1
            await machine.wait()
            await machine.close()
        assert lab.leftovers() == [], f"after {delay} ms"
        assert open_files() == before, f"after {delay} ms"
        if completed == 3:
            break
    assert completed == 3


async def test_a_restore_that_is_cancelled_leaves_nothing(lab: Lab, template: Snapshot) -> None:
    before = open_files()
    completed = 0
    for delay in (step / 2 for step in range(2000)):
        prepared = await lab.prepare(template.saved.machine)
        config = RestoreConfig(template.memory, disks(furnished(lab, template)), template.state, template.saved)
        restoring = asyncio.create_task(prepared.restore(config, run=True))
        await asyncio.sleep(delay / 1000)
        if restoring.cancel():
            with pytest.raises(asyncio.CancelledError):
                await restoring
        else:
            completed += 1
            machine = await restoring
            await machine.kill()
            await machine.close()
        assert lab.leftovers() == [], f"after {delay} ms"
        assert open_files() == before, f"after {delay} ms"
        if completed == 3:
            break
    assert completed == 3


async def test_a_preparation_that_is_cancelled_leaves_nothing(lab: Lab, template: Snapshot) -> None:
    before = open_files()
    for delay in range(0, 120, 4):
        preparing = asyncio.create_task(lab.prepare(template.saved.machine))
        await asyncio.sleep(delay / 1000)
        if preparing.cancel():
            with pytest.raises(asyncio.CancelledError):
                await preparing
        else:
            await (await preparing).kill()
        await asyncio.sleep(0)
        assert lab.leftovers() == [], f"after {delay} ms"
        assert open_files() == before, f"after {delay} ms"


async def test_a_prepared_vmm_can_be_used_once(lab: Lab, template: Snapshot) -> None:
    prepared = await lab.prepare(template.saved.machine)
    guest = await restore(lab, template, prepared=prepared)
    with pytest.raises(VmmFailed, match="once"):
        await restore(lab, template, prepared=prepared)
    await guest.sum()


async def test_a_prepared_vmm_that_died_is_noticed_and_cannot_be_restored(lab: Lab, template: Snapshot) -> None:
    prepared = await lab.prepare(template.saved.machine)
    waiting = asyncio.create_task(prepared.wait())
    await asyncio.sleep(0)
    os.kill(prepared.record.pid, signal.SIGKILL)
    assert (await asyncio.wait_for(waiting, 1)).code == -signal.SIGKILL
    with pytest.raises(VmmFailed, match="ended"):
        await restore(lab, template, prepared=prepared)
    await prepared.kill()


# --- disks


async def test_a_disk_can_be_switched_under_a_running_guest(lab: Lab, template: Snapshot) -> None:
    guest = await restore(lab, template)
    before = await guest.contents()
    original = guest.directory / "disk"
    for number in range(3):
        other = lab.disk(f"other{number}", DISK, os.urandom(4096))
        await guest.machine.switch_disk(0, other)
        assert await guest.contents() != before
        await guest.ask(f"write {number} 0 1")
        assert other.path.read_bytes()[MIB : 2 * MIB] == bytes(MIB)
        assert other.path.read_bytes()[:MIB] != bytes(MIB)
    await guest.machine.switch_disk(0, Disk(original, "raw", False))
    assert await guest.contents() == before


async def test_a_switch_that_fails_changes_nothing(lab: Lab, template: Snapshot) -> None:
    guest = await restore(lab, template)
    before = await guest.contents()
    enormous = lab.disk("enormous", 0)
    os.truncate(enormous.path, 1 << 30)
    for index, disk, cause in (
        (0, Disk(lab.root / "nothing", "raw", False), "cannot open"),
        (0, msgspec.structs.replace(lab.disk("garbage", MIB), format="qcow2"), "not qcow2"),
        (0, lab.disk("disk", DISK, read_only=True), "is rw"),
        (0, enormous, "limit"),
        (0, None, "pause it first"),
        (2, lab.disk("disk", DISK), "none with the number 2"),
    ):
        for _ in range(2):
            with pytest.raises(VmmFailed, match=cause):
                await guest.machine.switch_disk(index, disk)
    assert await guest.contents() == before


async def test_a_frozen_machine_hands_its_disk_to_a_successor(lab: Lab, template: Snapshot) -> None:
    guest = await restore(lab, template)
    await guest.ask("write 8 2 1")
    expected = await guest.contents()
    snapshot = await guest.pause_and_snapshot()
    prepared = [await lab.prepare(snapshot.saved.machine) for _ in range(2)]
    config = RestoreConfig(snapshot.memory, disks(guest.directory), snapshot.state, snapshot.saved)
    with pytest.raises(VmmFailed, match="lock"):
        await prepared[0].restore(config, run=True)

    await guest.machine.switch_disk(0, None)
    with pytest.raises(VmmFailed, match="disk0 has no image"):
        await guest.machine.resume()
    successor = Guest(lab, lab.keep(await prepared[1].restore(config, run=True)), guest.directory, None, guest.number)
    assert await successor.contents() == expected
    guest.number = successor.number

    # Should the successor come to nothing, the first can go on.
    with pytest.raises(VmmFailed, match="lock"):
        await guest.machine.switch_disk(0, Disk(guest.directory / "disk", "raw", False))
    with pytest.raises(VmmFailed, match="disk0 has no image"):
        await guest.machine.resume()
    await successor.machine.kill()
    await guest.machine.switch_disk(0, Disk(guest.directory / "disk", "raw", False))
    await guest.machine.resume()
    assert await guest.contents() == expected


async def test_a_disk_can_grow(lab: Lab, template: Snapshot) -> None:
    guest = await restore(lab, template)
    await guest.machine.resize_disk(0, 2 * DISK)
    assert (guest.directory / "disk").stat().st_size == 2 * DISK
    assert await guest.ask("size") == f"size {2 * DISK}"
    await guest.ask("write 4 20 2")
    for size, cause in ((DISK, "cannot shrink"), (1 << 40, "limit")):
        with pytest.raises(VmmFailed, match=cause):
            await guest.machine.resize_disk(0, size)


async def test_a_disk_can_be_limited(lab: Lab, template: Snapshot) -> None:
    guest = await restore(lab, template)
    loop = asyncio.get_running_loop()

    async def took() -> float:
        begin = loop.time()
        await guest.ask("write 1 0 8")
        return loop.time() - begin

    free = await took()
    await guest.machine.limit_disk(0, DiskLimits(bytes=4 * MIB))
    assert await took() > max(1.0, 2 * free)
    await guest.machine.limit_disk(0, DiskLimits())
    assert await took() < 1.0
    with pytest.raises(VmmFailed):
        await guest.machine.limit_disk(0, DiskLimits(bytes=-1))


# --- confinement


async def test_a_restored_vmm_is_confined_and_never_has_the_image(lab: Lab, template: Snapshot) -> None:
    guest = await restore(lab, template)
    pid = guest.machine.record.pid
    status = Path(f"/proc/{pid}/status").read_text()
    assert "NoNewPrivs:\t1" in status
    assert "Seccomp:\t2" in status
    assert "CapEff:\t0000000000000000" in status
    files = {link for link in links(guest.machine) if link.startswith("/") and not link.startswith("/memfd:")}
    assert files <= {"/dev/null", "/dev/kvm", *(str(guest.directory / name) for name in ("disk", "mailbox"))}


def links(machine: Machine) -> set[str]:
    return {str(it.readlink()) for it in Path(f"/proc/{machine.record.pid}/fd").iterdir()}
