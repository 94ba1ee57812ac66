"""A QEMU with a guest, spoken to through its monitor."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from aenv.errors import VmmFailed
from aenv.vmm import memory_map, qemu_disks, saved_state
from aenv.vmm.interface import Disk, DiskLimits, Exit, MachineRecord, Region, SavedState
from aenv.vmm.process import Process
from aenv.vmm.qmp import COMMAND_TIMEOUT, Qmp
from aenv.vmm.threads import undivided

MONITOR = "qmp.sock"
DYING_TIME = 0.5  # seconds


class QemuMachine:
    """A running QEMU. Connects to its monitor when it first needs to. ``complete`` tells that it is known to have all
    it needs to run: true of one that was just booted or restored."""

    def __init__(self, record: MachineRecord, process: Process, qmp: Qmp | None = None, *, complete: bool) -> None:
        self._record = record
        self._process = process
        self._qmp = qmp
        self._complete = complete
        self._lock = asyncio.Lock()
        process.on_exit(lambda: (record.directory / MONITOR).unlink(missing_ok=True))

    @property
    def record(self) -> MachineRecord:
        return self._record

    async def status(self) -> Literal["running", "paused", "gone"]:
        try:
            async with self._monitor() as qmp:
                return _check_status(await qmp.execute("query-status"))
        except VmmFailed:
            if not self._process.exited:
                raise
            return "gone"

    async def pause(self) -> None:
        async with self._monitor() as qmp:
            await qmp.execute("stop")

    async def resume(self) -> None:
        async with self._monitor() as qmp:
            await self._check_complete(qmp)
            await qmp.execute("cont")

    async def save(self, path: Path) -> SavedState:
        async with self._monitor() as qmp:
            if not self._complete:
                _check_status(await qmp.execute("query-status"))
            data = await _device_state(qmp)
            return await undivided(lambda: saved_state.write(path, data, self._record), lambda _: path.unlink())

    async def memory(self) -> tuple[Region, ...]:
        async with self._monitor() as qmp:
            return await guest_memory(qmp, self._record.pid, self._record.machine.memory << 20)

    async def switch_disk(self, index: int, disk: Disk | None) -> None:
        access = self._access(index)
        if disk is not None and disk.read_only != (access == "ro"):
            raise VmmFailed(f"disk {index} of the machine is {access}, and the image {disk.path} is not to be")
        async with self._monitor() as qmp:
            if disk is None:
                if _check_status(await qmp.execute("query-status")) != "paused":
                    raise VmmFailed(f"disk {index} cannot be taken from a machine that runs", remedy="pause it first")
                self._complete = False
            await qemu_disks.switch(qmp, index, access == "ro", disk, qemu_disks.file_limit(self._record.pid))

    async def resize_disk(self, index: int, size: int) -> None:
        self._access(index)
        async with self._monitor() as qmp:
            await qemu_disks.resize(qmp, index, size, qemu_disks.file_limit(self._record.pid))

    async def limit_disk(self, index: int, limits: DiskLimits) -> None:
        self._access(index)
        async with self._monitor() as qmp:
            await qemu_disks.limit(qmp, index, limits)

    async def shutdown(self, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self.resume()  # a guest that stands still cannot power off
                async with self._monitor() as qmp:
                    await qmp.execute("system_powerdown")
                await self._process.wait()
        except (TimeoutError, VmmFailed):
            await self.kill()

    async def kill(self) -> None:
        # Not under the lock: whoever holds it may be waiting for a QEMU that hangs.
        await self._process.kill()

    async def wait(self) -> Exit:
        return Exit(await self._process.wait())

    def serial_tail(self, limit: int = 4096) -> str:
        return self._process.console(limit)

    async def close(self) -> None:
        if self._qmp is not None:
            await self._qmp.close()
        self._process.close()

    async def connect(self, timeout: float) -> Qmp:
        """The connection to the monitor; made if there is none yet, or none any more."""
        if self._process.exited:
            raise VmmFailed(f"the virtual machine of {self._record.directory} has ended")
        if self._qmp is None or self._qmp.broken:
            self._qmp = await Qmp.connect(self._record.directory / MONITOR, timeout=timeout)
        return self._qmp

    def messages(self) -> str:
        """What QEMU itself had to say."""
        return self._process.messages().strip()

    async def _check_complete(self, qmp: Qmp) -> None:
        if not self._complete:
            _check_status(await qmp.execute("query-status"))
            await qemu_disks.check_complete(qmp)
            self._complete = True

    def _access(self, index: int) -> Literal["rw", "ro"]:
        if not 0 <= index < len(self._record.machine.disks):
            raise VmmFailed(f"the machine has {len(self._record.machine.disks)} disks and none with the number {index}")
        return self._record.machine.disks[index]

    @asynccontextmanager
    async def _monitor(self) -> AsyncIterator[Qmp]:
        """The monitor, for one caller at a time."""
        async with self._lock:
            try:
                yield await self.connect(COMMAND_TIMEOUT)
            except VmmFailed:
                if self._qmp is None or self._qmp.broken:
                    # A process that ends closes its monitor first; give it the time to be what it seems.
                    with suppress(TimeoutError):
                        async with asyncio.timeout(DYING_TIME):
                            await self._process.wait()
                raise


async def guest_memory(qmp: Qmp, pid: int, size: int) -> tuple[Region, ...]:
    """Where a QEMU has the memory of its guest: in one piece, however it is spread over guest addresses."""
    answer = await qmp.execute("human-monitor-command", command_line="gpa2hva 0")
    found = re.search(r"\(ram\) is (0x[0-9a-f]{1,16})\b", str(answer))
    if found is None:
        raise VmmFailed(f"QEMU does not tell where the guest's memory is: {str(answer)[:200]}")
    address = int(found[1], 16)
    memory_map.within(memory_map.mappings(pid), address, size)
    return (Region(address, size, 0),)


def _check_status(answer: Any) -> Literal["running", "paused"]:
    if not isinstance(answer, dict) or not isinstance(answer.get("running"), bool):
        raise VmmFailed(f"query-status: QEMU answered nonsense: {str(answer)[:200]}")
    if answer.get("status") == "inmigrate":
        raise VmmFailed("the machine was never completely restored", remedy="kill it and restore it again")
    return "running" if answer["running"] else "paused"


async def _device_state(qmp: Qmp) -> bytes:
    """The command comes from Xen's tool stack and needs nothing of Xen: it writes all that ``migrate`` does, but no
    memory."""
    number = qemu_disks.fresh_set()
    memory = os.memfd_create("state", os.MFD_CLOEXEC)
    try:
        # QEMU wants a descriptor that is open for writing only.
        writing = os.open(f"/proc/self/fd/{memory}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            status, *_ = await qmp.execute_all(
                ("query-status", (), {}),
                ("add-fd", (writing,), {"fdset-id": number}),
                # Not ``live``, or a QEMU that stands still would let go of its disks.
                ("xen-save-devices-state", (), {"filename": f"/dev/fdset/{number}", "live": False}),
                ("remove-fd", (), {"fdset-id": number}),
            )
        finally:
            os.close(writing)
        if _check_status(status) != "paused":  # it was stopped for the moment
            raise VmmFailed("the state of a machine that runs cannot be saved", remedy="pause it first")
        return saved_state.take(memory)
    finally:
        os.close(memory)
