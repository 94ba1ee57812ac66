"""One interface for every VMM.

The life of a machine::

    Driver.boot(config) ─► running ⇄ paused          pause(), resume()
                              │        │
                              └── shutdown() / kill() / the process dies ──► gone     wait() returns

``boot`` returns as soon as the VMM process runs and its CPUs were started; whether the guest answers is for the caller
to find out. A machine lives as long as its process, not as long as this program: ``Machine.record`` is plain data
that, stored before anything else happens, lets a later process take the machine over with ``Driver.adopt``.

Calls on one machine are serialised by the machine itself; different machines are independent. Every method but
``serial_tail`` may raise VmmFailed when the VMM refuses, hangs or is gone. ``kill`` and ``wait`` never fail.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol

import msgspec

from aenv.model import KernelImage, MachineShape


class Disk(msgspec.Struct, frozen=True):
    """A block device of the guest, in the order of ``/dev/vda``, ``/dev/vdb``, …"""

    path: Path
    format: Literal["raw", "qcow2"]
    read_only: bool


class BootConfig(msgspec.Struct, frozen=True):
    """Everything a cold boot needs.

    ``directory`` exists, belongs to this machine alone and takes its sockets and logs. ``tap_fd`` is an open tap
    (``IFF_TAP | IFF_NO_PI | IFF_VNET_HDR``) that the VMM inherits; the caller closes its own copy afterwards. ``netns``
    is the namespace the VMM process itself runs in. ``arguments`` are appended to the driver's own kernel command line.
    """

    name: str
    shape: MachineShape
    kernel: KernelImage
    disks: tuple[Disk, ...]
    directory: Path
    tap_fd: int | None
    mac: str
    netns: Path | None
    arguments: tuple[str, ...] = ()


class MachineRecord(msgspec.Struct, frozen=True):
    """Names a running VMM process for good: ``pid`` alone may be reused, the triple with its start time (clock ticks
    since boot, field 22 of ``/proc/PID/stat``) and the host's ``boot_id`` is not."""

    driver: str
    version: str
    accelerator: str
    pid: int
    start_time: int
    boot_id: str
    directory: Path


class Exit(msgspec.Struct, frozen=True):
    """How a VMM process ended. ``code`` is its exit status, negative for a signal, None when this process is not its
    parent and cannot know."""

    code: int | None


class Machine(Protocol):
    """A VMM process with one guest."""

    @property
    def record(self) -> MachineRecord: ...

    async def status(self) -> Literal["running", "paused", "gone"]:
        """What the VMM says of its CPUs."""

    async def pause(self) -> None:
        """Stop the CPUs. Idempotent."""

    async def resume(self) -> None:
        """Let the CPUs run. Idempotent."""

    async def shutdown(self, timeout: float) -> None:
        """Ask the guest to power off, and kill the VMM if it has not within ``timeout`` seconds."""

    async def kill(self) -> None:
        """End the VMM process at once and wait until it has ended. Idempotent. A child of this program is reaped then;
        the child of another is reaped by whoever inherited it."""

    async def wait(self) -> Exit:
        """Return when the VMM process has ended, for whatever reason; noticed through a pidfd, without polling.
        May be awaited by several tasks."""

    def serial_tail(self, limit: int = 4096) -> str:
        """The last ``limit`` bytes of the guest's console, undecodable bytes replaced; empty if there is none."""

    async def close(self) -> None:
        """Let go of the machine without touching it: it runs on and can be adopted again. Whoever waits for its end is
        cancelled; the object is of no more use."""


class Driver(Protocol):
    """Starts machines of one kind of VMM."""

    @property
    def name(self) -> str: ...

    async def boot(self, config: BootConfig) -> Machine:
        """Start a VMM and its guest. On failure nothing is left: no process, no socket."""

    async def adopt(self, record: MachineRecord) -> Machine | None:
        """Take over a machine that another process started; None if that process is gone."""
