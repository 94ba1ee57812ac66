"""Files with the state of a machine's devices and CPUs: written whole, checked before anybody loads them.

What is in them is the VMM's own format. A VMM believes much of what it reads there, and parts of it came from a guest,
so a file is only handed to a VMM of the very build that wrote it and if it is, byte for byte, what was written.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from aenv.errors import VmmFailed
from aenv.vmm.interface import MachineClass, MachineRecord, SavedState

LIMIT = 64 << 20  # bytes; a QEMU of one CPU writes 20,000, each further CPU 10,000
TSC_TOLERANCE = 200e-6  # clocks of guests go wrong by as much; NTP corrects 500e-6

_QEMU_MAGIC = b"QEVM\0\0\0\3"  # with the version, migration/savevm.c
_QEMU_END = b"\0"


def check(saved: SavedState, record: MachineRecord) -> None:
    """Raise VmmFailed unless what was saved can go on in the VMM of ``record``."""

    def refuse(difference: str, remedy: str) -> VmmFailed:
        return VmmFailed(f"the saved machine cannot go on here: {difference}", remedy=remedy)

    elsewhere = "restore it on a node like the one it was saved on, or start it from its disk"
    if saved.driver != record.driver:
        raise refuse(f"it is one of {saved.driver}, not of {record.driver}", elsewhere)
    if saved.accelerator != record.accelerator:
        raise refuse(f"it ran with the accelerator {saved.accelerator}, not with {record.accelerator}", elsewhere)
    if (saved.version, saved.build) != (record.version, record.build):
        theirs, ours = (f"{it.driver} {it.version} ({it.build[:12]})" for it in (saved, record))
        raise refuse(f"it needs the very {theirs}, this is {ours}", f"install that version, or {elsewhere}")
    if saved.processor != record.processor:
        raise refuse(f"its processor is {saved.processor}, not {record.processor}", elsewhere)
    if abs(saved.tsc_khz - record.tsc_khz) > record.tsc_khz * TSC_TOLERANCE:
        raise refuse(
            f"its time stamp counter has {saved.tsc_khz} kHz and that of this host {record.tsc_khz} kHz", elsewhere
        )
    if saved.machine != record.machine:
        raise refuse(f"it is {_describe(saved.machine)}, not {_describe(record.machine)}", "prepare a VMM of its class")


def _describe(machine: MachineClass) -> str:
    disks = "+".join(machine.disks) or "no"
    network = "a network card" if machine.network else "no network card"
    return f"a machine of {machine.vcpus} vCPUs, {machine.memory} MiB, {disks} disks and {network}"


def take(fd: int) -> bytes:
    """What a QEMU wrote to ``fd``. VmmFailed if it is not a whole state."""
    size = os.fstat(fd).st_size
    if size > LIMIT:
        raise VmmFailed(f"QEMU wrote a state of {size} bytes, {LIMIT} is the limit")
    data = os.pread(fd, size, 0)
    if len(data) < size or not data.startswith(_QEMU_MAGIC) or not data.endswith(_QEMU_END):
        raise VmmFailed(f"QEMU wrote {size} bytes that are not a whole state")
    return data


def write(path: Path, data: bytes, record: MachineRecord) -> SavedState:
    """Put the state of a machine into a new file. VmmFailed if there is one already, or no space; then there is no new
    one."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except (OSError, ValueError) as error:
        raise VmmFailed(f"cannot create the state file {path}: {error}") from error
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise VmmFailed(f"cannot write the state file {path}: {error.strerror}") from error
        raise
    return SavedState(
        driver=record.driver,
        version=record.version,
        build=record.build,
        accelerator=record.accelerator,
        processor=record.processor,
        tsc_khz=record.tsc_khz,
        machine=record.machine,
        size=len(data),
        digest=hashlib.sha256(data).hexdigest(),
    )


def read(path: Path, saved: SavedState) -> bytes:
    """The content of a state file. VmmFailed if it is not what ``saved`` describes."""
    if not 0 < saved.size <= LIMIT:
        raise VmmFailed(f"a state of {saved.size} bytes is not possible")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            size, data = os.fstat(fd).st_size, os.pread(fd, saved.size, 0)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise VmmFailed(f"cannot read the state file {path}: {error}") from error
    if size != saved.size or len(data) != saved.size or hashlib.sha256(data).hexdigest() != saved.digest:
        raise VmmFailed(f"the state file {path} is damaged: it is not what was written when the machine was saved")
    return data
