"""The QEMU driver: ``microvm`` machines, with KVM or with software emulation (TCG).

A QEMU is given everything as open file descriptors: its images, kernel, tap and the listening socket of its monitor. It
runs under an account that owns nothing, behind its own seccomp filter, and needs no directory it may write to. The
monitor's socket listens before QEMU starts, so one connects at once and the greeting says that QEMU is ready; if it
dies first, the connection breaks, and its messages tell why.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec

from aenv.config import VmmSettings
from aenv.errors import SetupError, VmmFailed
from aenv.programs import system_program
from aenv.vmm import qemu_disks
from aenv.vmm.accounts import Accounts
from aenv.vmm.images import DescriptorSets, block_device
from aenv.vmm.interface import BootConfig, Machine, MachineClass, MachineRecord, PrepareConfig
from aenv.vmm.probe import Acceleration, choose, device_groups, host_processor
from aenv.vmm.process import Account, Identity, Launch, Process
from aenv.vmm.qemu_command import (
    Resources,
    booting,
    check,
    check_mac,
    hardware,
    kernel_command_line,
    memory_to_come,
    own_memory,
    waiting,
)
from aenv.vmm.qemu_machine import MONITOR, QemuMachine
from aenv.vmm.qemu_prepared import QemuPrepared
from aenv.vmm.qmp import GREETING_TIMEOUT, Qmp, reachable
from aenv.vmm.threads import undivided
from aenv.vmm.tsc import tsc_khz

NAME = "qemu"
OLDEST = (7, 2)
FILE_URIS = (8, 2)  # version that loads a state from a file with a name


class QemuDriver:
    """Starts QEMUs of the one installed build."""

    def __init__(
        self, program: Path, version: str, acceleration: Acceleration, accounts: Accounts | None, tsc_khz: int
    ) -> None:
        self.program = program
        self.version = version
        self.acceleration = acceleration
        self._accounts = accounts
        self._tsc_khz = tsc_khz
        self._build: _Build | None = None

    @classmethod
    async def open(cls, settings: VmmSettings, directory: Path) -> QemuDriver:
        """A driver for the QEMU that is installed. ``directory`` keeps what the probe of the accelerator found.

        Virtual machines run as accounts of ``settings.user`` if this program is root; otherwise it has no choice but
        its own account. Raises SetupError if QEMU is missing, too old or cannot be run, or if a setting is wrong."""
        program = system_program("qemu-system-x86_64", "qemu-system-x86")
        version = await _version(program)
        if _numbers(version) < OLDEST:
            raise SetupError(
                f"QEMU {version} is too old", remedy=f"install version {'.'.join(map(str, OLDEST))} or later"
            )
        acceleration = await asyncio.to_thread(choose, settings.accelerator, directory)
        groups = device_groups() if acceleration.kind != "tcg" else ()
        accounts = Accounts.of(settings.user, groups) if os.geteuid() == 0 else None
        return cls(program, version, acceleration, accounts, await asyncio.to_thread(tsc_khz))

    @property
    def version_numbers(self) -> tuple[int, int]:
        """Major and minor version, on which the choice of the guest kernel depends."""
        return _numbers(self.version)

    @property
    def name(self) -> str:
        return NAME

    async def boot(self, config: BootConfig) -> Machine:
        machine = MachineClass(
            vcpus=config.shape.vcpus,
            memory=config.shape.memory,
            disks=tuple("ro" if disk.read_only else "rw" for disk in config.disks),
            network=config.tap_fd is not None,
        )
        check(config.name, machine)
        if config.tap_fd is not None:
            check_mac(config.mac)
        self._check_kernel(config)
        command_line = kernel_command_line(config, tsc_khz=self._tsc_khz if self._tcg else None)
        with DescriptorSets() as sets, DescriptorSets() as files:
            images = [block_device(disk, qemu_disks.names(number)[0], sets) for number, disk in enumerate(config.disks)]
            kernel = _open_kernel(files, config.kernel.bzimage)
            initramfs = files.open("initramfs", config.kernel.initramfs, os.O_RDONLY)

            def arguments(monitor: int) -> list[str]:
                nodes = [node for node, _ in images]
                resources = Resources(monitor, config.tap_fd, nodes, sets.arguments())
                memory = own_memory(machine.memory << 20)
                mine = hardware(config.name, machine, memory, resources, self._accelerator, config.mac)
                return [*mine, *booting(kernel, initramfs, command_line)]

            # Room for what else it might write. What it may write at all is decided by what it is given.
            limit = max((size for _, size in images), default=0) + (64 << 20)
            async with self._started(config, machine, arguments, (*sets.fds, *files.fds), limit) as (record, process):
                started = QemuMachine(record, process, complete=True)
                await started.connect(GREETING_TIMEOUT)
        return started

    async def prepare(self, config: PrepareConfig) -> QemuPrepared:
        check(config.name, config.machine)
        if config.machine.network != (config.tap_fd is not None):
            raise VmmFailed("a machine has a tap if it has a network card, and not otherwise")
        size = config.machine.memory << 20
        placeholder = os.memfd_create("memory", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(placeholder, size)
            fcntl.fcntl(placeholder, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)

            def arguments(monitor: int) -> list[str]:
                memory = memory_to_come(size, placeholder)
                resources = Resources(monitor, config.tap_fd, [None] * len(config.machine.disks))
                return [*hardware(config.name, config.machine, memory, resources, self._accelerator), *waiting()]

            limit = max(config.disk_limit, 0)
            async with self._started(config, config.machine, arguments, (placeholder,), limit) as (record, process):
                prepared = QemuPrepared(
                    record,
                    process,
                    placeholder=os.dup(placeholder),
                    tap=config.tap_fd,
                    by_name=_numbers(record.version) >= FILE_URIS,
                )
                monitor = config.directory / MONITOR
                qmp = await Qmp.connect(monitor, timeout=GREETING_TIMEOUT, on_event=prepared.take_event)
                try:
                    await prepared.ready(qmp)
                except BaseException:
                    await qmp.close()
                    raise
            return prepared
        finally:
            os.close(placeholder)

    async def adopt(self, record: MachineRecord) -> Machine | None:
        process = Process.adopt(Identity(record.pid, record.start_time, record.boot_id))
        if process is None:
            with suppress(OSError):
                (record.directory / MONITOR).unlink(missing_ok=True)
            return None
        return QemuMachine(record, process, complete=False)

    @property
    def _tcg(self) -> bool:
        return self.acceleration.kind == "tcg"

    @property
    def _accelerator(self) -> Literal["kvm", "tcg"]:
        return "tcg" if self._tcg else "kvm"

    @contextmanager
    def _account(self) -> Iterator[Account | None]:
        if self._accounts is None:
            yield None
        else:
            with self._accounts.claim() as account:
                yield account

    @asynccontextmanager
    async def _started(
        self,
        config: BootConfig | PrepareConfig,
        machine: MachineClass,
        arguments: Callable[[int], list[str]],
        fds: tuple[int, ...],
        file_limit: int,
    ) -> AsyncIterator[tuple[MachineRecord, Process]]:
        """A QEMU whose monitor can be connected to. If that fails inside the context, nothing of it stays."""
        build = await self._identify()
        tap = () if config.tap_fd is None else (config.tap_fd,)
        with self._account() as account, _listening(config.directory / MONITOR) as listener:
            process = await Process.start(
                Launch(
                    arguments=[str(self.program), *arguments(listener.fileno())],
                    directory=config.directory,
                    fds=(*fds, listener.fileno(), *tap),
                    netns=config.netns,
                    account=account,
                    file_limit=file_limit,
                )
            )
            # Ours must be closed before we connect: when QEMU dies, the connection has to break.
            listener.close()
            try:
                yield self._record(process.identity, config.directory, machine, build), process
            except BaseException as error:
                await asyncio.shield(process.kill())
                said = process.messages().strip()
                process.close()
                if isinstance(error, VmmFailed):
                    raise VmmFailed(f"QEMU did not start {config.name}: {said or error}") from error
                raise

    async def _identify(self) -> _Build:
        """The build that starts next: packages are upgraded under a running server."""
        try:
            status = self.program.stat()
            key = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
            if self._build is None or self._build.key != key:
                if self._build is not None:
                    self.version = await _version(self.program)
                self._build = _Build(key, self.version, await undivided(lambda: _sha256(self.program)))
        except OSError as error:
            raise VmmFailed(f"cannot read {self.program}: {error.strerror}") from error
        return self._build

    def _record(self, identity: Identity, directory: Path, machine: MachineClass, build: _Build) -> MachineRecord:
        return MachineRecord(
            driver=NAME,
            version=build.version,
            build=build.digest,
            accelerator=self.acceleration.kind,
            # What TCG emulates depends on nothing but its build.
            processor="max" if self._tcg else host_processor(),
            tsc_khz=self._tsc_khz,
            machine=machine,
            pid=identity.pid,
            start_time=identity.start_time,
            boot_id=identity.boot_id,
            directory=directory,
        )

    def _check_kernel(self, config: BootConfig) -> None:
        """QEMU 7.2 emulates something of which kernel 6.12 dies in one boot of twenty; 6.1 does not, nor does 6.12 in
        QEMU 10."""
        release = _numbers(config.kernel.version)
        if self.acceleration.kind == "tcg" and self.version_numbers < (10, 0) and release > (6, 1):
            raise VmmFailed(
                f"QEMU {self.version} cannot run the kernel {config.kernel.version} reliably without KVM",
                remedy="use a kernel 6.1, or QEMU 10",
            )


class _Build(msgspec.Struct, frozen=True):
    """A program: what tells it from another (device, inode, time in ns, size in bytes), and what it is."""

    key: tuple[int, int, int, int]
    version: str
    digest: str


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _numbers(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise VmmFailed(f"{version[:80]!r} is not a version")
    return int(found[1]), int(found[2])


def _open_kernel(files: DescriptorSets, path: Path) -> int:
    """QEMU takes whatever it gets for a boot sector, and the guest would do nothing for ever."""
    fd = files.open("kernel", path, os.O_RDONLY)
    if os.pread(fd, 4, 0x202) != b"HdrS":
        raise VmmFailed(f"the kernel {path} is not a bzImage")
    return fd


@contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """A socket that listens; its file stays only if all goes well."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            path.unlink(missing_ok=True)
            with reachable(path) as address:
                sock.bind(address)
            path.chmod(0o600)
            sock.listen(1)
        except OSError as error:
            raise VmmFailed(f"cannot listen on {path}: {error}") from error
        try:
            yield sock
        except BaseException:
            path.unlink(missing_ok=True)
            raise


async def _version(program: Path) -> str:
    try:
        process = await asyncio.create_subprocess_exec(
            program, "--version", stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
    except OSError as error:
        raise SetupError(f"cannot run {program}: {error.strerror}", remedy="apt-get install qemu-system-x86") from error
    found = re.search(rb"version (\d+\.\d+[\d.]*)", output)
    if found is None:
        raise SetupError(f"{program} --version does not tell its version", remedy="apt-get install qemu-system-x86")
    return found[1].decode()
