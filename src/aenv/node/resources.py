"""What one sandbox occupies on this machine: a directory, a disk, a network slot, a VMM process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec

from aenv import programs
from aenv.config import Settings
from aenv.errors import AenvError, DiskFull, GuestFailed, OperationFailed
from aenv.model import ProcessRecord, Sandbox, Template
from aenv.network import Network, Slot
from aenv.node.agent import AgentClient
from aenv.templates.store import TemplateStore
from aenv.vmm import process
from aenv.vmm.interface import BootConfig, Disk, Driver, Machine, MachineRecord
from aenv.vmm.kernel import load_kernel

log = logging.getLogger(__name__)

CONSOLE_IN_ERROR = 2000
"""Bytes of the guest's console that an error message carries."""


class Running(msgspec.Struct, frozen=True):
    """A started sandbox, as far as this process holds it."""

    machine: Machine
    slot: Slot


class Resources:
    """Claims and gives back. Claims are reported through ``remember`` the moment they are made, so that a crash at
    any point leaves only what a record or the kernel itself can name."""

    def __init__(self, settings: Settings, templates: TemplateStore, driver: Driver, network: Network) -> None:
        self._settings = settings
        self._templates = templates
        self._driver = driver
        self._network = network

    def directory(self, sandbox_id: str) -> Path:
        return self._settings.home / "sandboxes" / sandbox_id

    async def start(self, record: Sandbox, remember: Callable[[Sandbox], None]) -> Running:
        """Boot the sandbox and return when its agent has its identity. On failure the caller calls ``release``."""
        template = self._templates.get(record.template_id)
        directory = self.directory(record.sandbox_id)
        claim = asyncio.create_task(self._claim_slot(record, remember))
        disk = asyncio.create_task(self._make_disk(directory, template, record.shape.disk))
        await _undisturbed(claim, disk)
        record, slot = claim.result()
        boot = asyncio.create_task(self._boot(record, template, disk.result(), slot, remember))
        try:
            await _undisturbed(boot)
            running = Running(boot.result(), slot)
            await self._introduce(record, template, running)
        except BaseException:
            # ``release`` finds the VMM through the record; this object is lost to it.
            if not boot.cancelled() and boot.exception() is None:
                await boot.result().close()
            raise
        return running

    async def adopt(self, record: Sandbox) -> Running | None:
        """Take over the VMM and slot of a running sandbox; None if either is gone."""
        machine = await self._adopt_machine(record)
        if machine is None:
            return None
        slot = await self._network.adopt(record.slot) if record.slot is not None else None
        if slot is None:
            await _end(machine)
            return None
        return Running(machine, slot)

    async def release(self, record: Sandbox, running: Running | None) -> None:
        """Give back all a sandbox has, in the order that leaves nothing dangling. Idempotent."""
        machine = running.machine if running is not None else await self._adopt_machine(record)
        if machine is not None:
            await _end(machine)
        else:
            await asyncio.to_thread(kill_strays, self.directory(record.sandbox_id))
        if record.slot is not None:
            slot = running.slot if running is not None else await self._network.adopt(record.slot)
            if slot is not None:
                await self._network.destroy(slot)
        await asyncio.to_thread(shutil.rmtree, self.directory(record.sandbox_id), ignore_errors=True)

    async def _adopt_machine(self, record: Sandbox) -> Machine | None:
        if record.vmm is None:
            return None
        try:
            described = msgspec.json.decode(record.vmm.data, type=MachineRecord, dec_hook=lambda kind, text: kind(text))
        except msgspec.DecodeError as error:
            # Of another release. One sandbox that cannot be taken over must not keep the node from starting.
            log.error(
                "the VMM of sandbox %s cannot be taken over: its record is unreadable: %s", record.sandbox_id, error
            )
            return None
        return await self._driver.adopt(described)

    async def _make_disk(self, directory: Path, template: Template, size: int) -> Path:
        """A copy-on-write overlay over the root file system of the template; ``size`` in MiB."""
        try:
            directory.mkdir(parents=True, mode=0o711)
        except OSError as error:
            raise DiskFull(f"cannot create {directory}: {error.strerror}", remedy="free space in the home") from error
        disk = directory / "rootfs.qcow2"
        base = self._templates.rootfs(template)
        program = programs.system_program("qemu-img", "qemu-utils")
        options = ("create", "-q", "-f", "qcow2", "-b", str(base), "-F", "raw", str(disk), f"{size}M")
        creation = await asyncio.create_subprocess_exec(
            program, *options, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        _, errors = await creation.communicate()
        if creation.returncode != 0:
            said = errors.decode("utf-8", "replace").strip()
            kind = DiskFull if "No space left" in said else OperationFailed
            raise kind(f"cannot create the disk of the sandbox: {said}")
        return disk

    async def _claim_slot(self, record: Sandbox, remember: Callable[[Sandbox], None]) -> tuple[Sandbox, Slot]:
        slot = await self._network.create()
        record = msgspec.structs.replace(record, slot=slot.index)
        remember(record)
        return record, slot

    async def _boot(
        self, record: Sandbox, template: Template, disk: Path, slot: Slot, remember: Callable[[Sandbox], None]
    ) -> Machine:
        kernel = load_kernel(self._settings, template.kernel)
        dns = ",".join(self._settings.network.dns)
        tap = await asyncio.to_thread(self._network.open_tap, slot)
        try:
            machine = await self._driver.boot(
                BootConfig(
                    name=record.sandbox_id,
                    shape=record.shape,
                    kernel=kernel,
                    disks=(Disk(disk, "qcow2", False), Disk(kernel.modules, "raw", True)),
                    directory=self.directory(record.sandbox_id),
                    tap_fd=tap,
                    mac=slot.mac,
                    netns=slot.netns,
                    arguments=(
                        f"aenv.ip={slot.guest_address}/{slot.prefix}",
                        f"aenv.gw={slot.gateway}",
                        f"aenv.mtu={slot.mtu}",
                        f"aenv.dns={dns}",
                        "aenv.root=/dev/vda",
                        "aenv.modules=/dev/vdb",
                        "aenv.hostname=sandbox",
                    ),
                )
            )
        finally:
            os.close(tap)
        vmm = ProcessRecord(machine.record.driver, msgspec.json.encode(machine.record, enc_hook=str))
        try:
            remember(msgspec.structs.replace(record, vmm=vmm))
        except BaseException:
            await _end(machine)
            raise
        return machine

    async def _introduce(self, record: Sandbox, template: Template, running: Running) -> None:
        """Wait for the agent, then hand over the sandbox's identity; GuestFailed with the console's last words."""
        machine, slot = running.machine, running.slot
        limit = self._settings.sandbox.boot_timeout
        death = asyncio.create_task(machine.wait())
        try:
            async with AgentClient(
                slot.guest_address, record.control_token, lambda: self._network.socket(slot)
            ) as agent:
                ready = asyncio.create_task(agent.wait_ready())
                try:
                    done, _ = await asyncio.wait([ready, death], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    ready.cancel()
                if death in done:
                    raise GuestFailed(f"the VMM ended while the guest booted; {self._console(machine)}")
                if ready not in done:
                    raise GuestFailed(f"the guest did not answer within {limit} s; {self._console(machine)}")
                ready.result()
                try:
                    await agent.init(record, template.user, template.workdir, template.env)
                except AenvError as error:
                    raise GuestFailed(f"{error.message}; {self._console(machine)}") from error
        finally:
            death.cancel()

    @staticmethod
    def _console(machine: Machine) -> str:
        tail = machine.serial_tail(CONSOLE_IN_ERROR).strip()
        return f"its console ends with:\n{tail}" if tail else "its console is empty"


async def _end(machine: Machine) -> None:
    """Kill a VMM, and let go of the descriptors this process has of it: its pidfd, its output, its monitor."""
    await machine.kill()
    await machine.close()


def kill_strays(root: Path, keep: Collection[str] = ()) -> None:
    """Kill every VMM that was started for a directory at or below ``root``, except those whose directory has a name
    in ``keep``: a crash may have come between its start and the record of it."""
    for identity, directory in process.find(root):
        if directory.name not in keep:
            log.warning("killing VMM %d of %s: no record names it", identity.pid, directory)
            with contextlib.suppress(ProcessLookupError):
                os.kill(identity.pid, signal.SIGKILL)


async def _undisturbed(*tasks: asyncio.Task[Any]) -> None:
    """Wait until all tasks are done even if the caller is cancelled meanwhile: a claim is made and remembered, or
    not made, never made and forgotten. Raises the first failure."""
    waiting = asyncio.gather(*tasks, return_exceptions=True)
    try:
        await asyncio.shield(waiting)
    except asyncio.CancelledError:
        await waiting
        raise
    for task in tasks:
        task.result()
