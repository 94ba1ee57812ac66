"""One interface for every VMM.

The life of a machine::

    Driver.boot(config) ──────────────────────────► running ⇄ paused          pause(), resume()
                                                       │        │  └──► save(), memory()
    Driver.prepare(config) ─► Prepared ─ restore() ────┼────────┘
                                  │                    │
                                kill()                 └── shutdown() / kill() / the process dies ──► gone

``boot`` returns as soon as the VMM process runs and its CPUs were started; whether the guest answers is for the caller
to find out. A machine lives as long as its process, not as long as this program: ``Machine.record`` is plain data
that, stored before anything else happens, lets a later process take the machine over with ``Driver.adopt``.

A saved machine is three things that belong together: the state of its devices and CPUs (``save``), its memory, and its
disks, all of the same pause and in this order, because to save the state may still change memory. Memory is not copied
here: ``memory`` says where it is, and whoever copies it reads the process. In a machine that was booted every page that
is present counts, all others are zero. In one that was restored only private (anonymous) pages do: all others are those
of the image it was restored from, which is mapped, never written, and shared by all machines that came from it.

``prepare`` starts a VMM before anybody knows what it will run; ``restore`` gives it memory, disks, network and state in
a few milliseconds. It can be done once. Whatever goes wrong in it, the VMM is gone afterwards.

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


class MachineClass(msgspec.Struct, frozen=True):
    """The hardware of a machine: what is saved in one class can only go on in the same class. ``memory`` is in MiB;
    ``disks`` says of each disk, in order, whether the guest may write to it; ``network`` whether there is a card."""

    vcpus: int
    memory: int
    disks: tuple[Literal["rw", "ro"], ...]
    network: bool


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


class PrepareConfig(msgspec.Struct, frozen=True):
    """A VMM that waits for a saved machine of one class. ``directory``, ``tap_fd`` and ``netns`` as for a boot; the
    guest keeps the hardware address it was saved with. ``disk_limit`` is the size in bytes beyond which none of its
    disks will be able to grow."""

    name: str
    machine: MachineClass
    directory: Path
    tap_fd: int | None
    netns: Path | None
    disk_limit: int


class Platform(msgspec.Struct, frozen=True):
    """What a saved machine depends on besides its class: the VMM, down to the ``build`` (sha256, hex, of the program),
    the accelerator, the processor as the guest sees it, and the rate of the time stamp counter its kernel was told."""

    driver: str
    version: str
    build: str
    accelerator: str
    processor: str
    tsc_khz: int


class MachineRecord(Platform, frozen=True):
    """Names a running VMM process for good: ``pid`` alone may be reused, the triple with its start time (clock ticks
    since boot, field 22 of ``/proc/PID/stat``) and the host's ``boot_id`` is not."""

    machine: MachineClass
    pid: int
    start_time: int
    boot_id: str
    directory: Path


class SavedState(Platform, frozen=True):
    """Describes a file with the state of a machine's devices and CPUs; belongs into the manifest of a snapshot.
    ``size`` is in bytes, ``digest`` the sha256 (hex) of the file."""

    machine: MachineClass
    size: int
    digest: str


class RestoreConfig(msgspec.Struct, frozen=True):
    """A saved machine, and what it gets here.

    ``memory`` is an image exactly as large as the machine's memory; nobody may ever change it while a machine runs from
    it. ``state`` is the file that ``saved`` describes. ``tap_fd`` replaces the tap that the VMM was prepared with, in
    whatever network namespace it is; None keeps that. The caller closes its own copy afterwards.
    """

    memory: Path
    disks: tuple[Disk, ...]
    state: Path
    saved: SavedState
    tap_fd: int | None = None


class Region(msgspec.Struct, frozen=True):
    """A piece of guest memory, in bytes: ``address`` in the VMM's address space, ``offset`` in a memory image."""

    address: int
    size: int
    offset: int


class DiskLimits(msgspec.Struct, frozen=True):
    """Bytes and operations a second, reading and writing together; 0 is no limit."""

    bytes: int = 0
    operations: int = 0


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
        """Stop the CPUs; what the guest had asked of its disks is done when this returns. Idempotent."""

    async def resume(self) -> None:
        """Let the CPUs run. Idempotent. Refused while a disk has no image."""

    async def save(self, path: Path) -> SavedState:
        """Write the state of a paused machine's devices and CPUs to ``path``, which must not exist. Not yet on stable
        storage. The machine stays paused and may go on; on failure there is no file."""

    async def memory(self) -> tuple[Region, ...]:
        """Where guest memory is, for whoever reads it through ``/proc/PID/pagemap`` and ``process_vm_readv``."""

    async def switch_disk(self, index: int, disk: Disk | None) -> None:
        """Put another image into the place of a disk, running or paused. The guest learns nothing of it but the size.
        On failure it keeps the one it has.

        None takes the image away, from a paused machine only: one that stands still as the source of a successor's
        memory lets go of what the successor needs. Given back, it may be resumed."""

    async def resize_disk(self, index: int, size: int) -> None:
        """Grow a disk to ``size`` bytes; the guest is told at once."""

    async def limit_disk(self, index: int, limits: DiskLimits) -> None:
        """Slow down a disk from now on. Part of the process, not of a saved state."""

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


class Prepared(Protocol):
    """A VMM process without a guest."""

    @property
    def record(self) -> MachineRecord:
        """Names the process until it is a machine with a record of its own. A process of which only this was stored has
        to be killed, not adopted: nobody knows how far it came."""

    async def restore(self, config: RestoreConfig, *, run: bool) -> Machine:
        """Become the machine that was saved; paused, or running if ``run``. May be called once. Raises VmmFailed that
        names what does not fit; this VMM has ended then, and nothing of it is left."""

    async def kill(self) -> None:
        """End the process at once, wait until it has ended, and let go of it. Wanted also for one that has died by
        itself. Idempotent; does nothing once it is a machine."""

    async def wait(self) -> Exit:
        """Return when the process has ended, as for a machine."""


class Driver(Protocol):
    """Starts machines of one kind of VMM."""

    @property
    def name(self) -> str: ...

    async def boot(self, config: BootConfig) -> Machine:
        """Start a VMM and its guest. On failure nothing is left: no process, no socket."""

    async def prepare(self, config: PrepareConfig) -> Prepared:
        """Start a VMM that waits to be given a saved machine. On failure nothing is left."""

    async def adopt(self, record: MachineRecord) -> Machine | None:
        """Take over a machine that another process started; None if that process is gone."""
