"""A QEMU that waits, and becomes a saved machine.

It was started with everything a machine of its class has, but with an empty file as memory and placeholders as disks.
What is left to do when a guest is wanted, in this order:

1. its memory image is mapped, privately, over the empty file, and the tap replaced if it is to be another (ptrace);
2. its images are put below the disks;
3. the state of devices and CPUs is loaded.

Where ptrace is not allowed, the image is copied into the empty file instead: slower, and siblings share no memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
from pathlib import Path
from typing import Any

import msgspec

from aenv.errors import VmmFailed
from aenv.vmm import memory_map, qemu_disks, saved_state
from aenv.vmm.injection import Injection, Refused
from aenv.vmm.interface import Exit, MachineRecord, RestoreConfig
from aenv.vmm.process import Identity, Process
from aenv.vmm.qemu_machine import MONITOR, QemuMachine, guest_memory
from aenv.vmm.qmp import Message, Qmp
from aenv.vmm.threads import undivided

log = logging.getLogger(__name__)

LOAD_TIMEOUT = 30.0  # seconds; parts of the memory may have to be fetched from afar
COPY_PIECE = 1 << 20  # bytes


class QemuPrepared:
    """``placeholder`` is a descriptor of the empty file that is its memory, and becomes this object's; ``tap`` the
    number of its own descriptor of its tap. ``by_name`` tells that it loads a state from a file with a name."""

    def __init__(
        self, record: MachineRecord, process: Process, *, placeholder: int, tap: int | None, by_name: bool
    ) -> None:
        self._record = record
        self._process = process
        self._placeholder = placeholder
        self._tap = tap
        self._by_name = by_name
        self._qmp: Qmp | None = None
        self._address = 0
        self._loaded: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._used = False
        self._became_machine = False
        process.on_exit(self._ended)

    @property
    def record(self) -> MachineRecord:
        return self._record

    @property
    def identity(self) -> Identity:
        return Identity(self._record.pid, self._record.start_time, self._record.boot_id)

    @property
    def memory_size(self) -> int:
        return self._record.machine.memory << 20

    async def ready(self, qmp: Qmp) -> None:
        """Take over the monitor when QEMU has built the machine."""
        self._qmp = qmp
        await qmp.execute("migrate-set-capabilities", capabilities=[{"capability": "events", "state": True}])
        # Nobody has to learn where the guest is now: it has a network of its own.
        await qmp.execute("migrate-set-parameters", announce_rounds=0)
        (region,) = await guest_memory(qmp, self._record.pid, self.memory_size)
        self._address = region.address

    def take_event(self, name: str, message: Message) -> None:
        data = message.get("data")
        status = data.get("status") if isinstance(data, dict) else None
        if name == "MIGRATION" and status in ("completed", "failed") and not self._loaded.done():
            self._loaded.set_result(status == "completed")

    async def restore(self, config: RestoreConfig, *, run: bool) -> QemuMachine:
        if self._used:
            raise VmmFailed("a prepared VMM can be used once")
        self._used = True
        try:
            if self._qmp is None or self._process.exited:
                raise VmmFailed("the prepared VMM has ended")
            await self._restore(self._qmp, config)
            if run:
                await self._qmp.execute("cont")
        except BaseException as error:
            await asyncio.shield(self._process.kill())
            said = self._process.messages().strip()
            await self._close()
            if isinstance(error, VmmFailed):
                more = f"; QEMU said: {said}" if said else ""
                raise VmmFailed(f"cannot restore: {error.message}{more}", remedy=error.remedy) from error
            raise
        self._became_machine = True
        self._release()
        # Its kernel goes on to believe what it was told when it booted.
        record = msgspec.structs.replace(self._record, tsc_khz=config.saved.tsc_khz)
        return QemuMachine(record, self._process, self._qmp)

    async def kill(self) -> None:
        if not self._became_machine:
            await self._process.kill()
            await self._close()

    async def wait(self) -> Exit:
        return Exit(await self._process.wait())

    async def _close(self) -> None:
        if self._qmp is not None:
            await self._qmp.close()
        self._process.close()
        self._release()

    def _ended(self) -> None:
        (self._record.directory / MONITOR).unlink(missing_ok=True)
        self._release()

    def _release(self) -> None:
        placeholder, self._placeholder = self._placeholder, -1
        if placeholder >= 0:
            os.close(placeholder)

    async def _restore(self, qmp: Qmp, config: RestoreConfig) -> None:
        saved_state.check(config.saved, self._record)
        if tuple("ro" if disk.read_only else "rw" for disk in config.disks) != self._record.machine.disks:
            raise VmmFailed(f"the machine has the disks {self._record.machine.disks}, and {config.disks} were given")
        if config.tap_fd is not None and self._tap is None:
            raise VmmFailed("the machine has no network card")
        state = await undivided(lambda: saved_state.read(config.state, config.saved))
        await self._bind(qmp, config)
        await qemu_disks.attach(qmp, config.disks, qemu_disks.file_limit(self._record.pid))
        await self._load(qmp, state)

    async def _bind(self, qmp: Qmp, config: RestoreConfig) -> None:
        """Give it memory and network."""
        image = await undivided(lambda: _open_image(config.memory, self.memory_size), os.close)
        try:
            memory = await self._give(qmp, "memory", image)
            tap = None if config.tap_fd is None else await self._give(qmp, "tap", config.tap_fd)
            try:
                await undivided(lambda: self._inject(memory, image, tap))
            except Refused as refusal:
                if tap is not None:
                    raise VmmFailed(f"the tap cannot be replaced: ptrace is not allowed ({refusal})") from refusal
                log.warning("ptrace is not allowed (%s): copying a memory image of %s", refusal, config.memory)
                await undivided(lambda: _copy(image, self._placeholder, self.memory_size))
        finally:
            os.close(image)
        for name in ("memory", *(("tap",) if tap is not None else ())):
            await qmp.execute("closefd", fdname=name)

    async def _give(self, qmp: Qmp, name: str, fd: int) -> int:
        """Hand over a descriptor; returns the number it has there."""
        before = _descriptors(self._record.pid)
        await qmp.execute("getfd", fds=(fd,), fdname=name)
        new = _descriptors(self._record.pid) - before
        if len(new) != 1:
            raise VmmFailed(f"QEMU has {len(new)} new descriptors after it was given one")
        return new.pop()

    def _inject(self, memory: int, image: int, tap: int | None) -> None:
        """On a thread."""
        pid, size = self._record.pid, self.memory_size
        try:
            if not os.path.samestat(Path(f"/proc/{pid}/fd/{memory}").stat(), os.fstat(image)):
                raise VmmFailed("QEMU has another file where the memory image should be")
        except OSError as error:
            raise VmmFailed(f"cannot look at the files of process {pid}: {error.strerror}") from error
        with Injection(self.identity) as injection:
            injection.map(memory, self._address, size)
            if tap is not None:
                assert self._tap is not None
                injection.replace(tap, self._tap)
        parts = memory_map.within(memory_map.mappings(pid), self._address, size)
        if len(parts) != 1 or parts[0].inode == 0 or parts[0].start != self._address or parts[0].offset != 0:
            raise VmmFailed(f"the memory image is not where it should be, but {parts}")

    async def _load(self, qmp: Qmp, state: bytes) -> None:
        with contextlib.ExitStack() as stack:
            fd = os.memfd_create("state", os.MFD_CLOEXEC)
            stack.callback(os.close, fd)
            os.write(fd, state)
            reading = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, reading)
            if self._by_name:
                number = await qemu_disks.next_set(qmp)
                await qmp.execute("add-fd", fds=(reading,), fdset_id=number)
                uri = f"file:/dev/fdset/{number}"
            else:
                await qmp.execute("getfd", fds=(reading,), fdname="state")
                uri = "fd:state"
        await qmp.execute("migrate-incoming", uri=uri, timeout=LOAD_TIMEOUT)
        end = asyncio.ensure_future(self._process.wait())
        waiting: list[asyncio.Future[Any]] = [self._loaded, end]
        try:
            await asyncio.wait(waiting, timeout=LOAD_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
        finally:
            end.cancel()
        if not self._loaded.done() or not self._loaded.result():
            # QEMU ends when a state is no good.
            cause = "QEMU gave up" if self._loaded.done() or self._process.exited else f"took over {LOAD_TIMEOUT:g} s"
            raise VmmFailed(f"loading the state of its devices failed: {cause}")
        if self._by_name:
            await qmp.execute("remove-fd", fdset_id=number)


def _open_image(path: Path, size: int) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise VmmFailed(f"cannot open the memory image {path}: {error}") from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size != size:
        os.close(fd)
        raise VmmFailed(f"the memory image {path} is not a file of {size} bytes, as large as the machine's memory")
    return fd


def _descriptors(pid: int) -> set[int]:
    try:
        return {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError as error:
        raise VmmFailed(f"cannot list the descriptors of process {pid}: {error.strerror}") from error


def _copy(source: int, target: int, size: int) -> None:
    """Copy a sparse file. Its holes are holes in the copy, too."""
    try:
        position = 0
        while position < size:
            try:
                start = os.lseek(source, position, os.SEEK_DATA)
            except OSError:  # there is none any more
                return
            position = min(os.lseek(source, start, os.SEEK_HOLE), size)
            while start < position:
                data = os.pread(source, min(COPY_PIECE, position - start), start)
                if not data:
                    raise VmmFailed("the memory image ended while it was copied")
                start += os.pwrite(target, data, start)
    except OSError as error:
        raise VmmFailed(f"cannot copy the memory image: {error.strerror}") from error
