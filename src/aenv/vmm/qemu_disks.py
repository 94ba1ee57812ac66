"""The disks of a QEMU: what stays for its life, and what lies below and can be changed.

::

    virtio-blk-device vdN ─ diskN (throttle, in the group limitN) ─ diskN-a or diskN-b (the image), or a placeholder

The device and the node it is plugged into are the same when a machine is booted, saved and restored. Images come below
that node under one of two names in turn: whichever of the two is there is the one in use, also for a control plane that
has just been restarted. A placeholder is empty, and a guest must never run with one.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aenv.errors import VmmFailed
from aenv.vmm.images import DescriptorSets, block_device
from aenv.vmm.interface import Disk, DiskLimits
from aenv.vmm.qmp import Command, Qmp
from aenv.vmm.threads import undivided

PLACEHOLDER_SIZE = 1 << 20  # bytes


def names(number: int) -> tuple[str, str]:
    """Of the image of a disk: the first, and the other."""
    return f"disk{number}-a", f"disk{number}-b"


def group(number: int) -> dict[str, Any]:
    """The object that limits a disk."""
    return {"qom-type": "throttle-group", "id": f"limit{number}"}


def top(number: int, image: str | dict[str, Any], read_only: bool) -> dict[str, Any]:
    """The node a device is plugged into, above the node ``image`` or one that belongs to it."""
    node = {
        "driver": "throttle",
        "node-name": f"disk{number}",
        "throttle-group": f"limit{number}",
        "file": image,
        "discard": "unmap",
    }
    return node | {"read-only": True} if read_only else node


def placeholder(read_only: bool) -> dict[str, Any]:
    """In the place of an image; without a name it goes as soon as there is one."""
    node = {"driver": "null-co", "size": PLACEHOLDER_SIZE, "read-zeroes": True}
    return node | {"read-only": True} if read_only else node


def open_images(disks: Sequence[Disk], sets: DescriptorSets, file_limit: int) -> list[dict[str, Any]]:
    """Open the images of all disks of a machine. Blocks."""
    return [_open(disk, names(number)[0], sets, file_limit) for number, disk in enumerate(disks)]


def attaching(disks: Sequence[Disk], images: Sequence[dict[str, Any]], sets: DescriptorSets) -> list[Command]:
    """What gives a QEMU, all of whose disks are placeholders, its images."""
    reopening: list[Command] = [
        ("blockdev-reopen", (), {"options": [top(number, names(number)[0], disk.read_only)]})
        for number, disk in enumerate(disks)
    ]
    return [*handing_over(sets), *(("blockdev-add", (), image) for image in images), *reopening]


async def switch(qmp: Qmp, number: int, read_only: bool, disk: Disk | None, file_limit: int) -> None:
    """Put another image below a disk, or a placeholder; on failure it keeps what it has."""
    current, other = await _names_in_use(qmp, number)
    try:
        if disk is None:
            await qmp.execute("blockdev-add", **placeholder(read_only), node_name=other)
        else:
            with DescriptorSets(fresh_set()) as sets:
                node = await undivided(lambda: _open(disk, other, sets, file_limit))
                await qmp.execute_all(*handing_over(sets), ("blockdev-add", (), node))
        try:
            await qmp.execute("blockdev-reopen", options=[top(number, other, read_only)])
        except VmmFailed:
            await qmp.execute("blockdev-del", node_name=other)
            raise
        await qmp.execute("blockdev-del", node_name=current)
    finally:
        await _forget_sets(qmp)


async def check_complete(qmp: Qmp) -> None:
    """VmmFailed if a disk has no image: the guest would find it empty."""
    for name, node in (await _nodes(qmp)).items():
        if node["drv"] == "null-co":
            raise VmmFailed(f"the machine cannot run: {name.partition('-')[0]} has no image", remedy="switch it to one")


async def resize(qmp: Qmp, number: int, size: int, file_limit: int) -> None:
    if size > file_limit:
        raise VmmFailed(f"disk {number} cannot grow to {size} bytes: {file_limit} is the limit of its machine")
    node = (await _nodes(qmp)).get(f"disk{number}")
    now = node["image"]["virtual-size"] if node is not None else 0
    if size < now:
        raise VmmFailed(f"disk {number} has {now} bytes and cannot shrink to {size}")
    await qmp.execute("block_resize", node_name=f"disk{number}", size=size)


async def limit(qmp: Qmp, number: int, limits: DiskLimits) -> None:
    if limits.bytes < 0 or limits.operations < 0:
        raise VmmFailed(f"disk {number} cannot be limited to {limits.bytes} bytes and {limits.operations} operations")
    value = {"bps-total": limits.bytes, "iops-total": limits.operations}
    await qmp.execute("qom-set", path=f"/objects/limit{number}", property="limits", value=value)


def file_limit(pid: int) -> int:
    """Bytes beyond which a process can grow no file. VmmFailed if it is gone."""
    try:
        for line in Path(f"/proc/{pid}/limits").read_text().splitlines():
            if line.startswith("Max file size"):
                soft = line.split()[3]
                return 1 << 62 if soft == "unlimited" else int(soft)
    except OSError as error:
        raise VmmFailed(f"cannot read the limits of process {pid}: {error.strerror}") from error
    raise VmmFailed(f"process {pid} has no file size limit")


def _open(disk: Disk, name: str, sets: DescriptorSets, file_limit: int) -> dict[str, Any]:
    node, size = block_device(disk, name, sets)
    if not disk.read_only and size > file_limit:
        raise VmmFailed(
            f"the disk image {disk.path} may need {size} bytes, but {file_limit} is the limit of its machine",
            remedy="prepare it with a larger disk_limit",
        )
    return node


def fresh_set() -> int:
    """A number for sets of descriptors that QEMU, which knows those of its command line, does not have yet."""
    return secrets.randbelow(1 << 30) + (1 << 20)


def handing_over(sets: DescriptorSets) -> list[Command]:
    return [("add-fd", (fd,), {"fdset-id": number}) for number, fd in sets.numbered()]


async def _forget_sets(qmp: Qmp) -> None:
    """What images use stays open until these are closed; the rest is closed at once."""
    for entry in await qmp.execute("query-fdsets"):
        await qmp.execute("remove-fd", fdset_id=entry["fdset-id"])


async def _nodes(qmp: Qmp) -> dict[str, dict[str, Any]]:
    return {node["node-name"]: node for node in await qmp.execute("query-named-block-nodes", flat=True)}


async def _names_in_use(qmp: Qmp, number: int) -> tuple[str, str]:
    """The image of a disk, and the name that is free."""
    first, second = names(number)
    present = await _nodes(qmp)
    if first in present and second in present:
        # Somebody died between two steps of a switch. QEMU does not let go of the one that is in use.
        try:
            await qmp.execute("blockdev-del", node_name=first)
        except VmmFailed:
            await qmp.execute("blockdev-del", node_name=second)
            return first, second
        return second, first
    if first in present:
        return first, second
    if second in present:
        return second, first
    raise VmmFailed(f"the machine has no disk {number}")
