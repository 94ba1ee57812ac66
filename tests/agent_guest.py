"""Guests with the product's agent, in network slots, without a node: to be saved, restored and measured."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from aenv.config import Settings
from aenv.model import KernelImage, MachineShape, Template
from aenv.network import Network, Slot
from aenv.templates import minimal
from aenv.templates.store import TemplateStore
from aenv.vmm import kernel as kernels
from aenv.vmm.interface import BootConfig, Disk, Machine, MachineClass, PrepareConfig, RestoreConfig, SavedState
from aenv.vmm.qemu import QemuDriver
from aenv.vmm.qemu_prepared import QemuPrepared
from tests.conformance import capture

PORT = 49983
TOKEN = "a token"
CALL = 30.0  # seconds


class Snapshot(msgspec.Struct, frozen=True):
    directory: Path
    saved: SavedState

    @property
    def memory(self) -> Path:
        return self.directory / "memory"

    @property
    def disk(self) -> Path:
        return self.directory / "disk"

    @property
    def state(self) -> Path:
        return self.directory / "state"


class Guest(msgspec.Struct):
    machine: Machine
    network: Network
    slot: Slot
    disks: tuple[Disk, ...]
    base: Path | None

    async def healthy(self) -> None:
        """Return when the agent answers, asked as often as that takes."""
        deadline = time.monotonic() + 60
        while True:
            try:
                async with asyncio.timeout(0.5):
                    answer = await self._request(b"GET /health HTTP/1.1\r\nHost: guest\r\nConnection: close\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 204"), answer[:200]
                return
            except (OSError, TimeoutError):
                assert time.monotonic() < deadline, self.machine.serial_tail()
                await asyncio.sleep(0.01)

    async def init(self) -> None:
        body = msgspec.json.encode({"accessToken": TOKEN, "defaultUser": "root", "defaultWorkdir": "/"})
        answer = await self._post("/init", "application/json", body, "X-Aenv-Control: control")
        assert answer.startswith(b"HTTP/1.1 204"), answer

    async def run(self, command: str) -> str:
        """What a shell command prints; it must succeed."""
        message = msgspec.json.encode({"process": {"cmd": "/bin/sh", "args": ["-c", command]}, "stdin": False})
        body = b"\0" + len(message).to_bytes(4, "big") + message
        answer = await self._post("/process.Process/Start", "application/connect+json", body)
        head, _, rest = answer.partition(b"\r\n\r\n")
        if b"chunked" in head.lower():
            rest = _unchunked(rest)
        output, end = b"", None
        while rest:
            size = int.from_bytes(rest[1:5], "big")
            event: dict[str, Any] = msgspec.json.decode(rest[5 : 5 + size]).get("event", {})
            rest = rest[5 + size :]
            output += base64.b64decode(event.get("data", {}).get("stdout", ""))
            end = event.get("end", end)
        assert end is not None, answer
        assert end.get("exitCode", 0) == 0, (end, output)
        return output.decode()

    async def _post(self, path: str, kind: str, body: bytes, *headers: str) -> bytes:
        lines = [
            f"POST {path} HTTP/1.1",
            "Host: guest",
            "Connection: close",
            f"X-Access-Token: {TOKEN}",
            f"Content-Type: {kind}",
            "Connect-Protocol-Version: 1",
            f"Content-Length: {len(body)}",
            *headers,
        ]
        async with asyncio.timeout(CALL):
            return await self._request("\r\n".join([*lines, "", ""]).encode() + body)

    async def _request(self, data: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        with self.network.socket(self.slot) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(sock, (self.slot.guest_address, PORT))
            await loop.sock_sendall(sock, data)
            answer = b""
            while piece := await loop.sock_recv(sock, 65536):
                answer += piece
            return answer


def _unchunked(data: bytes) -> bytes:
    found = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        found += data[: int(size, 16)]
        data = data[int(size, 16) + 2 :]
    return found


class Workshop:
    """Makes guests, and clears up after them. Every slot is a namespace of its own with the one guest address."""

    def __init__(self, root: Path, network: Network, driver: QemuDriver, kernel: KernelImage, rootfs: Path) -> None:
        self.root = root
        self.network = network
        self.driver = driver
        self.kernel = kernel
        self.rootfs = rootfs
        self._machines: list[Machine] = []
        self._slots: list[Slot] = []

    @classmethod
    @asynccontextmanager
    async def open(cls, root: Path) -> AsyncIterator[Workshop]:
        settings = Settings(home=root / "home", runtime=root / "run")
        driver = await QemuDriver.open(settings.vmm, root)
        kernel = await asyncio.to_thread(kernels.ensure_kernel, settings, driver.version_numbers, _silent)
        template: Template = await asyncio.to_thread(minimal.ensure_minimal, settings, kernel, _silent)
        network = Network(settings)
        await network.open()
        workshop = cls(root, network, driver, kernel, TemplateStore(settings).rootfs(template))
        try:
            yield workshop
        finally:
            await workshop.clear()
            await network.close()

    async def clear(self) -> None:
        for machine in self._machines:
            await machine.kill()
            await machine.close()
        for slot in self._slots:
            await self.network.destroy(slot)
        self._machines, self._slots = [], []

    async def slot(self) -> Slot:
        slot = await self.network.create()
        self._slots.append(slot)
        return slot

    def directory(self) -> Path:
        directory = self.root / str(time.monotonic_ns())
        directory.mkdir(mode=0o700)
        return directory

    async def boot(self, memory: int, vcpus: int = 1) -> Guest:
        directory, slot = self.directory(), await self.slot()
        shutil.copyfile(self.rootfs, directory / "disk")
        tap = self.network.open_tap(slot)
        disks = self.disks(directory / "disk")
        machine = await self.driver.boot(
            BootConfig(
                name="boot",
                shape=MachineShape(vcpus, memory, 0),
                kernel=self.kernel,
                disks=disks,
                directory=directory,
                tap_fd=tap,
                mac=slot.mac,
                netns=slot.netns,
                arguments=(
                    f"aenv.ip={slot.guest_address}/{slot.prefix}",
                    f"aenv.gw={slot.gateway}",
                    f"aenv.mtu={slot.mtu}",
                    "aenv.root=/dev/vda",
                    "aenv.modules=/dev/vdb",
                ),
            )
        )
        os.close(tap)
        self._machines.append(machine)
        guest = Guest(machine, self.network, slot, disks, None)
        await guest.healthy()
        await guest.init()
        return guest

    def disks(self, writable: Path) -> tuple[Disk, ...]:
        return Disk(writable, "raw", False), Disk(self.kernel.modules, "raw", True)

    async def snapshot(self, guest: Guest) -> Snapshot:
        """Of a guest that stands still."""
        directory = self.directory()
        saved = await guest.machine.save(directory / "state")
        regions = await guest.machine.memory()
        await asyncio.to_thread(capture.capture, guest.machine.record.pid, regions, directory / "memory", guest.base)
        shutil.copyfile(guest.disks[0].path, directory / "disk")
        return Snapshot(directory, saved)

    async def prepare(self, machine: MachineClass, slot: Slot, tap: int | None = None) -> QemuPrepared:
        """In a slot, with its tap or another."""
        opened = self.network.open_tap(slot) if tap is None else os.dup(tap)
        try:
            return await self.driver.prepare(
                PrepareConfig("prepared", machine, self.directory(), opened, slot.netns, 1 << 30)
            )
        finally:
            os.close(opened)

    def configuration(self, snapshot: Snapshot, tap: int | None = None) -> RestoreConfig:
        """To restore a snapshot with a new copy of its disk."""
        disk = self.directory() / "disk"
        shutil.copyfile(snapshot.disk, disk)
        return RestoreConfig(snapshot.memory, self.disks(disk), snapshot.state, snapshot.saved, tap)

    async def restore(
        self, snapshot: Snapshot, slot: Slot, prepared: QemuPrepared | None = None, tap: int | None = None
    ) -> Guest:
        prepared = prepared or await self.prepare(snapshot.saved.machine, slot)
        config = self.configuration(snapshot, tap)
        machine = await prepared.restore(config, run=True)
        self._machines.append(machine)
        return Guest(machine, self.network, slot, config.disks, snapshot.memory)


def _silent(_: str) -> None:
    pass
