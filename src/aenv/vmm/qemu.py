"""The QEMU driver: ``microvm`` machines, with KVM or with software emulation (TCG).

A QEMU is given everything as open file descriptors: its images, kernel, tap and the listening socket of its monitor. It
runs under an account that owns nothing, behind its own seccomp filter, and needs no directory it may write to. The
monitor's socket listens before QEMU starts, so one connects at once and the greeting says that QEMU is ready; if it
dies first, the connection breaks, and its messages tell why.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from aenv.config import VmmSettings
from aenv.errors import SetupError, VmmFailed
from aenv.programs import system_program
from aenv.vmm.accounts import Accounts
from aenv.vmm.images import DescriptorSets, block_device
from aenv.vmm.interface import BootConfig, Exit, Machine, MachineRecord
from aenv.vmm.probe import Acceleration, choose, device_groups
from aenv.vmm.process import Account, Identity, Launch, Process
from aenv.vmm.qemu_command import Resources, arguments, check, kernel_command_line
from aenv.vmm.qmp import COMMAND_TIMEOUT, GREETING_TIMEOUT, Qmp, reachable
from aenv.vmm.tsc import tsc_khz

NAME = "qemu"
MONITOR = "qmp.sock"
DYING_TIME = 0.5  # seconds
OLDEST = (7, 2)


class QemuMachine:
    """A running QEMU. Connects to its monitor when it first needs to."""

    def __init__(self, record: MachineRecord, process: Process) -> None:
        self._record = record
        self._process = process
        self._qmp: Qmp | None = None
        self._lock = asyncio.Lock()
        process.on_exit(lambda: (record.directory / MONITOR).unlink(missing_ok=True))

    @property
    def record(self) -> MachineRecord:
        return self._record

    async def status(self) -> Literal["running", "paused", "gone"]:
        async with self._lock:
            try:
                answer = await self._execute("query-status")
            except VmmFailed:
                if not self._process.exited:
                    raise
                return "gone"
            if not isinstance(answer, dict) or not isinstance(answer.get("running"), bool):
                raise VmmFailed(f"query-status: QEMU answered nonsense: {str(answer)[:200]}")
            return "running" if answer["running"] else "paused"

    async def pause(self) -> None:
        async with self._lock:
            await self._execute("stop")

    async def resume(self) -> None:
        async with self._lock:
            await self._execute("cont")

    async def shutdown(self, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                async with self._lock:
                    await self._execute("cont")  # a guest that stands still cannot power off
                    await self._execute("system_powerdown")
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

    async def _execute(self, command: str) -> Any:
        try:
            return await (await self.connect(COMMAND_TIMEOUT)).execute(command)
        except VmmFailed:
            if self._qmp is None or self._qmp.broken:
                # A process that ends closes its monitor first; give it the time to be what it seems.
                with suppress(TimeoutError):
                    async with asyncio.timeout(DYING_TIME):
                        await self._process.wait()
            raise


class QemuDriver:
    """Starts QEMUs of one installed version."""

    def __init__(
        self, program: Path, version: str, acceleration: Acceleration, accounts: Accounts | None, tsc_khz: int
    ) -> None:
        self.program = program
        self.version = version
        self.acceleration = acceleration
        self._accounts = accounts
        self._tsc_khz = tsc_khz

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
        check(config)
        self._check_kernel(config)
        with self._account() as account, _listening(config.directory / MONITOR) as listener:
            process = await self._start(config, account, listener)
            machine = QemuMachine(self._record(process.identity, config.directory), process)
            # Ours must be closed before we connect: when QEMU dies, the connection has to break.
            listener.close()
            try:
                await machine.connect(GREETING_TIMEOUT)
            except BaseException as error:
                await asyncio.shield(machine.kill())
                said = machine.messages()
                await machine.close()
                if isinstance(error, VmmFailed):
                    raise VmmFailed(f"QEMU did not start {config.name}: {said or error}") from error
                raise
            return machine

    async def adopt(self, record: MachineRecord) -> Machine | None:
        process = Process.adopt(Identity(record.pid, record.start_time, record.boot_id))
        if process is None:
            with suppress(OSError):
                (record.directory / MONITOR).unlink(missing_ok=True)
            return None
        return QemuMachine(record, process)

    @contextmanager
    def _account(self) -> Iterator[Account | None]:
        if self._accounts is None:
            yield None
        else:
            with self._accounts.claim() as account:
                yield account

    async def _start(self, config: BootConfig, account: Account | None, listener: socket.socket) -> Process:
        tcg = self.acceleration.kind == "tcg"
        command_line = kernel_command_line(config, tsc_khz=self._tsc_khz if tcg else None)
        with DescriptorSets() as sets, DescriptorSets() as files:
            disks = [block_device(disk, f"disk{number}", sets) for number, disk in enumerate(config.disks)]
            resources = Resources(
                monitor=listener.fileno(),
                kernel=_open_kernel(files, config.kernel.bzimage),
                initramfs=files.open("initramfs", config.kernel.initramfs, os.O_RDONLY),
                disks=[node for node, _ in disks],
                descriptor_sets=sets.arguments(),
            )
            tap = () if config.tap_fd is None else (config.tap_fd,)
            return await Process.start(
                Launch(
                    arguments=[str(self.program), *arguments(config, resources, "tcg" if tcg else "kvm", command_line)],
                    directory=config.directory,
                    fds=(*sets.fds, *files.fds, listener.fileno(), *tap),
                    netns=config.netns,
                    account=account,
                    file_limit=max((size for _, size in disks), default=0) + (64 << 20),
                )
            )

    def _record(self, identity: Identity, directory: Path) -> MachineRecord:
        return MachineRecord(
            driver=NAME,
            version=self.version,
            accelerator=self.acceleration.kind,
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
