"""A guest that obeys (``guest/mailbox.rs``), and what has to be kept to have it again."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import msgspec

from aenv.model import MachineShape
from aenv.vmm.interface import Disk, Machine, Prepared, RestoreConfig, SavedState
from tests.conformance import capture
from tests.conformance.machines import Lab, line

MIB = 1 << 20
DISK = 16 * MIB
SHAPE = MachineShape(vcpus=1, memory=256, disk=0)


class Snapshot(msgspec.Struct, frozen=True):
    """Everything a machine was, in files of one directory."""

    directory: Path
    saved: SavedState
    number: int  # of the last order
    captured: int  # bytes that are not from the image it was restored from

    @property
    def memory(self) -> Path:
        return self.directory / "memory"

    @property
    def state(self) -> Path:
        return self.directory / "state"

    @property
    def disk(self) -> Path:
        return self.directory / "disk"


class Guest:
    def __init__(self, lab: Lab, machine: Machine, directory: Path, base: Path | None, number: int) -> None:
        self.lab = lab
        self.machine = machine
        self.directory = directory
        self.base = base
        self.number = number

    @classmethod
    async def boot(cls, lab: Lab, shape: MachineShape = SHAPE) -> Guest:
        directory = furnished(lab, None)
        machine = await lab.boot("mailbox", shape=shape, disks=disks(directory))
        guest = cls(lab, machine, directory, None, 0)
        await guest.sum()
        return guest

    async def ask(self, order: str) -> str:
        """Give an order and wait for the answer."""
        self.number += 1
        with (self.directory / "mailbox").open("r+b") as mailbox:
            mailbox.write(f"{self.number} {order}\n".encode().ljust(512, b"\0"))
        found = await line(self.machine, rf"guest: answer {self.number} (.*) end")
        assert not found[1].startswith("error"), found[1]
        return found[1]

    async def sum(self) -> str:
        """Of memory and disk; different every time, because it counts the orders."""
        return await self.ask("sum")

    async def contents(self) -> str:
        """Of memory and disk alone."""
        return re.sub(r" orders=\d+", "", await self.sum())

    async def snapshot(self) -> Snapshot:
        """Of a machine that stands still."""
        directory = _directory(self.lab)
        saved = await self.machine.save(directory / "state")
        regions = await self.machine.memory()
        captured = capture.capture(self.machine.record.pid, regions, directory / "memory", self.base)
        shutil.copyfile(self.directory / "disk", directory / "disk")
        return Snapshot(directory, saved, self.number, captured)

    async def pause_and_snapshot(self) -> Snapshot:
        await self.machine.pause()
        return await self.snapshot()


async def restore(lab: Lab, snapshot: Snapshot, *, run: bool = True, prepared: Prepared | None = None) -> Guest:
    """A new guest from a snapshot, with its own copy of the disk."""
    prepared = prepared or await lab.prepare(snapshot.saved.machine)
    directory = furnished(lab, snapshot)
    config = RestoreConfig(snapshot.memory, disks(directory), snapshot.state, snapshot.saved)
    machine = lab.keep(await prepared.restore(config, run=run))
    return Guest(lab, machine, directory, snapshot.memory, snapshot.number)


def disks(directory: Path) -> tuple[Disk, Disk]:
    return Disk(directory / "disk", "raw", False), Disk(directory / "mailbox", "raw", True)


def furnished(lab: Lab, snapshot: Snapshot | None) -> Path:
    """A directory with the disks of a guest."""
    directory = _directory(lab)
    if snapshot is None:
        with (directory / "disk").open("xb") as disk:
            disk.truncate(DISK)
    else:
        shutil.copyfile(snapshot.disk, directory / "disk")
    (directory / "mailbox").write_bytes(bytes(4096))
    return directory


def _directory(lab: Lab) -> Path:
    directory = lab.root / f"guest-{time.monotonic_ns()}"
    directory.mkdir(mode=0o700)
    return directory
