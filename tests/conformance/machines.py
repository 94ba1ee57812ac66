"""The drivers under test and the guest they run: a real kernel, and an ``/init`` that does what a test asks it to.

``python -m tests.conformance.machines KIND DRIVER CACHE`` boots the machine whose ``BootConfig`` is on standard input,
or prepares one for a ``PrepareConfig``, prints its record and sleeps: a control plane to be killed.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import msgspec

from aenv.config import Settings, VmmSettings
from aenv.errors import VmmFailed
from aenv.model import KernelImage, MachineShape
from aenv.vmm import kernel as kernels
from aenv.vmm import process
from aenv.vmm.interface import (
    BootConfig,
    Disk,
    Driver,
    Machine,
    MachineClass,
    MachineRecord,
    PrepareConfig,
    Prepared,
)
from aenv.vmm.qemu import QemuDriver

DRIVERS = ("qemu",)
MAC = "02:fc:00:00:00:05"
SHAPE = MachineShape(vcpus=1, memory=128, disk=0)
BOOT_LIMIT = 60.0  # seconds until a guest must have said something; it takes two on an idle machine

_Value = TypeVar("_Value")


async def open_driver(name: str, cache: Path) -> Driver:
    """The one that is installed; the environment variable ``AENV_TEST_QEMU`` names another QEMU to be tested."""
    assert name == "qemu"
    other = os.environ.get("AENV_TEST_QEMU")
    if other is None:
        return await QemuDriver.open(VmmSettings(), cache)
    with mock.patch("aenv.vmm.qemu.system_program", lambda name, package: Path(other)):
        return await QemuDriver.open(VmmSettings(), cache)


def build_guest(directory: Path) -> KernelImage:
    """The product's kernel and early modules around the test's ``/init``."""
    image = kernels.ensure_kernel(Settings(home=directory / "home"), (7, 2), lambda text: print(text))
    program = directory / "init"
    subprocess.run(
        [
            *("rustc", "--edition", "2024", "-O", "-C", "panic=abort", "-C", "strip=symbols"),
            *("-C", "target-feature=+crt-static", "--target", "x86_64-unknown-linux-gnu"),
            *("-D", "warnings", "-o", str(program), str(Path(__file__).parent / "guest" / "init.rs")),
        ],
        check=True,
    )
    manifest = msgspec.json.decode((image.bzimage.parent / "manifest.json").read_bytes(), type=kernels.Manifest)
    early = [(name, (image.bzimage.parent / "early" / name).read_bytes()) for name in manifest.early]
    initramfs = directory / "initramfs.img"
    initramfs.write_bytes(kernels.initramfs(program.read_bytes(), early))
    return msgspec.structs.replace(image, initramfs=initramfs)


class Lab:
    """Boots machines for one test, each in a directory of its own, and knows what may be left of them."""

    def __init__(self, driver: Driver, kernel: KernelImage, root: Path) -> None:
        self.driver = driver
        self.kernel = kernel
        self.root = root
        self._machines: list[Machine] = []
        self._prepared: list[Prepared] = []

    def config(self, test: str = "ready", **changes: Any) -> BootConfig:
        directory = self.root / str(time.monotonic_ns())
        directory.mkdir(mode=0o700)
        config = BootConfig(
            name="conformance",
            shape=SHAPE,
            kernel=self.kernel,
            disks=(),
            directory=directory,
            tap_fd=None,
            mac=MAC,
            netns=None,
            arguments=(f"test={test}",),
        )
        return msgspec.structs.replace(config, **changes)

    def disk(self, name: str, size: int, content: bytes = b"", **options: Any) -> Disk:
        """A raw disk of ``size`` bytes that only root can reach."""
        path = self.root / name
        path.write_bytes(content.ljust(size, b"\0"))
        path.chmod(0o600)
        return Disk(path, "raw", **{"read_only": False} | options)

    async def boot(self, test: str = "ready", **changes: Any) -> Machine:
        return self.keep(await self.driver.boot(self.config(test, **changes)))

    def preparation(self, machine: MachineClass, **changes: Any) -> PrepareConfig:
        directory = self.root / str(time.monotonic_ns())
        directory.mkdir(mode=0o700)
        config = PrepareConfig("conformance", machine, directory, tap_fd=None, netns=None, disk_limit=256 << 20)
        return msgspec.structs.replace(config, **changes)

    async def prepare(self, machine: MachineClass, **changes: Any) -> Prepared:
        prepared = await self.driver.prepare(self.preparation(machine, **changes))
        self._prepared.append(prepared)
        return prepared

    def keep(self, machine: Machine) -> Machine:
        self._machines.append(machine)
        return machine

    def forget(self, machine: Machine) -> None:
        """It is somebody else's now."""
        self._machines.remove(machine)

    async def close(self) -> None:
        for machine in self._machines:
            await machine.kill()
            await machine.close()
        for prepared in self._prepared:
            await prepared.kill()
        assert self.leftovers() == []

    def leftovers(self) -> list[str]:
        """Processes and files that should not be there when no machine is."""
        sockets = [str(path) for path in self.root.rglob("*") if path.is_socket()]
        return [f"process {it.pid} of {where}" for it, where in process.find(self.root)] + sockets


async def eventually(look: Callable[[], _Value | None], machine: Machine, limit: float = BOOT_LIMIT) -> _Value:
    """Poll until ``look`` finds something; fail with the console after ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while (found := look()) is None:
        assert time.monotonic() < deadline, f"nothing within {limit} s; the console says:\n{machine.serial_tail()}"
        await asyncio.sleep(0.01)
    return found


async def line(machine: Machine, pattern: str) -> re.Match[str]:
    """Wait for the newest match of a pattern on the console."""
    return await eventually(lambda: last(machine, pattern), machine)


def last(machine: Machine, pattern: str) -> re.Match[str] | None:
    found = None
    for found in re.finditer(pattern, machine.serial_tail()):  # noqa: B007
        pass
    return found


def open_files() -> list[str]:
    """What this process has open, without the order and the numbers."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(entry.readlink()))
        except FileNotFoundError:  # the listing of the directory itself
            continue
    return sorted(found)


async def elsewhere(
    lab: Lab, config: BootConfig | PrepareConfig, cache: Path
) -> tuple[MachineRecord, Callable[[], Awaitable[None]]]:
    """Boot or prepare in another process; returns the record, and what kills that process."""
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.conformance.machines", type(config).__name__, lab.driver.name, str(cache)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write(msgspec.json.encode(config, enc_hook=str))
    parent.stdin.close()
    record = _decode(await asyncio.wait_for(parent.stdout.readline(), 60), MachineRecord)

    async def kill() -> None:
        parent.kill()
        await parent.wait()

    return record, kill


def _decode(data: bytes, kind: type[_Value]) -> _Value:
    return msgspec.json.decode(data, type=kind, dec_hook=lambda path, text: path(text))


async def _control_plane(kind: str, driver: str, cache: Path) -> None:
    made = await open_driver(driver, cache)
    data = sys.stdin.buffer.read()
    started: Machine | Prepared
    try:
        if kind == BootConfig.__name__:
            started = await made.boot(_decode(data, BootConfig))
        else:
            started = await made.prepare(_decode(data, PrepareConfig))
    except VmmFailed as error:
        sys.exit(str(error))
    print(msgspec.json.encode(started.record, enc_hook=str).decode(), flush=True)
    await started.wait()


if __name__ == "__main__":
    asyncio.run(_control_plane(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
