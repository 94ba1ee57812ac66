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
import fcntl
import logging
import os
import stat
import struct
from pathlib import Path
from typing import Any

import msgspec

from aenv.errors import VmmFailed
from aenv.vmm import memory_map, qemu_disks, saved_state
from aenv.vmm.images import DescriptorSets
from aenv.vmm.injection import Injection, Refused
from aenv.vmm.interface import Exit, MachineRecord, RestoreConfig
from aenv.vmm.process import Identity, Process
from aenv.vmm.qemu_machine import MONITOR, QemuMachine, guest_memory
from aenv.vmm.qmp import Command, Message, Qmp
from aenv.vmm.threads import undivided

log = logging.getLogger(__name__)

LOAD_TIMEOUT = 30.0  # seconds; parts of the memory may have to be fetched from afar
COPY_PIECE = 1 << 20  # bytes

_TUNGETIFF = 0x800454D2
_INTERFACE = struct.Struct("16sH22x")
_TAP_FLAGS = 0x5002  # IFF_TAP | IFF_NO_PI | IFF_VNET_HDR


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
            if config.tap_fd is not None:
                _keep_from_blocking(config.tap_fd)
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
        return QemuMachine(record, self._process, self._qmp, complete=True)

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
        if config.tap_fd is not None:
            if self._tap is None:
                raise VmmFailed("the machine has no network card")
            _check_tap(config.tap_fd)
        with contextlib.ExitStack() as stack, DescriptorSets() as sets:
            sources = await undivided(lambda: self._open(config, stack, sets))
            cleaning = await self._bind(qmp, config, sources.memory)
            disks = qemu_disks.attaching(config.disks, sources.images, sets)
            loading, done = self._loading(sources.state)
            await qmp.execute_all(*cleaning, *disks, *loading, timeout=LOAD_TIMEOUT)
            await self._until_loaded()
            await qmp.execute_all(*done)

    def _open(self, config: RestoreConfig, stack: contextlib.ExitStack, sets: DescriptorSets) -> _Sources:
        """Blocks."""
        data = saved_state.read(config.state, config.saved)
        memory = _open_image(config.memory, self.memory_size)
        stack.callback(os.close, memory)
        state = os.memfd_create("state", os.MFD_CLOEXEC)
        stack.callback(os.close, state)
        os.write(state, data)
        # QEMU wants one that is open for reading only.
        reading = os.open(f"/proc/self/fd/{state}", os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, reading)
        limit = qemu_disks.file_limit(self._record.pid)
        return _Sources(memory, reading, qemu_disks.open_images(config.disks, sets, limit))

    async def _bind(self, qmp: Qmp, config: RestoreConfig, image: int) -> list[Command]:
        """Give it memory and network. Returns what is left to be said."""
        memory = await self._give(qmp, "memory", image)
        cleaning: list[Command] = [("closefd", (), {"fdname": "memory"})]
        tap = None
        if config.tap_fd is not None:
            tap = await self._give(qmp, "tap", config.tap_fd)
            _keep_from_blocking(config.tap_fd)
            cleaning.append(("closefd", (), {"fdname": "tap"}))
        try:
            await undivided(lambda: self._inject(memory, image, tap))
        except Refused as refusal:
            if tap is not None:
                raise VmmFailed(f"the tap cannot be replaced: ptrace is not allowed ({refusal})") from refusal
            log.warning("ptrace is not allowed (%s): copying a memory image of %s", refusal, config.memory)
            await undivided(lambda: _copy(image, self._placeholder, self.memory_size))
        return cleaning

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

    def _loading(self, state: int) -> tuple[list[Command], list[Command]]:
        """What makes it load a state, and what is left to be said when it has."""
        if self._by_name:
            number = qemu_disks.fresh_set()
            uri = f"file:/dev/fdset/{number}"
            return (
                [("add-fd", (state,), {"fdset-id": number}), ("migrate-incoming", (), {"uri": uri})],
                [("remove-fd", (), {"fdset-id": number})],
            )
        return [("getfd", (state,), {"fdname": "state"}), ("migrate-incoming", (), {"uri": "fd:state"})], []

    async def _until_loaded(self) -> None:
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


class _Sources(msgspec.Struct, frozen=True):
    """Descriptors of the memory image and the state, and the nodes of the disk images."""

    memory: int
    state: int
    images: list[dict[str, Any]]


def _check_tap(fd: int) -> None:
    request = bytearray(_INTERFACE.size)
    try:
        fcntl.ioctl(fd, _TUNGETIFF, request)
    except OSError:
        raise VmmFailed(f"the file descriptor {fd} is not a tap") from None
    flags = _INTERFACE.unpack(request)[1]
    if flags & _TAP_FLAGS != _TAP_FLAGS:
        raise VmmFailed(f"the tap of the file descriptor {fd} has the flags {flags:#x}, which lack {_TAP_FLAGS:#x}")


def _keep_from_blocking(tap: int) -> None:
    """QEMU makes blocking what it is given through its monitor; one that shares the open tap would then hang."""
    with contextlib.suppress(OSError):  # the file descriptor may be anything
        os.set_blocking(tap, False)


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
