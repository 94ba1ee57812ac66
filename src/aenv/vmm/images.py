"""Disk images for QEMU, opened here and handed over as file descriptors.

QEMU runs as an account that may open nothing. It gets every image as an open descriptor (``-add-fd``), named
``/dev/fdset/N``, so neither the images nor the directories above them need to belong to that account. The price:
QEMU cannot follow the chain of a qcow2 image by itself, so the chain is read here and spelled out.
"""

from __future__ import annotations

import os
import stat
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from aenv.errors import VmmFailed
from aenv.vmm.interface import Disk

CHAIN_LIMIT = 64  # images; more is a loop
CLUSTER_LIMIT = 2 << 20  # bytes; the header and the name of the backing image are in the first cluster
SIZE_LIMIT = 1 << 62  # bytes; what a header says may be anything

_MAGIC = 0x514649FB
_BACKING_FORMAT = 0xE2792ACA

Format = Literal["raw", "qcow2"]


class DescriptorSets:
    """Descriptors for a QEMU, each alone in a set; the sets are numbered from ``first`` on. Closes them on exit."""

    def __init__(self, first: int = 0) -> None:
        self.fds: list[int] = []
        self._first = first
        self._stack = ExitStack()

    def __enter__(self) -> DescriptorSets:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(self, what: str, path: Path, flags: int) -> int:
        """Open a file or a block device; VmmFailed says ``what`` it was to be."""
        try:
            # Non-blocking, or to open a named pipe would take for ever.
            fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
        except OSError as error:
            raise VmmFailed(f"cannot open the {what} {path}: {error.strerror}") from error
        except ValueError as error:  # a zero byte
            raise VmmFailed(f"cannot open the {what} {str(path)!r}: {error}") from error
        self._stack.callback(os.close, fd)
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISBLK(mode):
            raise VmmFailed(f"the {what} {path} is neither a file nor a block device")
        os.set_blocking(fd, True)
        self.fds.append(fd)
        return fd

    def name(self, fd: int) -> str:
        return f"/dev/fdset/{self._first + self.fds.index(fd)}"

    def numbered(self) -> list[tuple[int, int]]:
        """Number of the set, and descriptor."""
        return list(enumerate(self.fds, self._first))

    def arguments(self) -> list[str]:
        return [part for number, fd in self.numbered() for part in ("-add-fd", f"fd={fd},set={number}")]


def block_device(disk: Disk, name: str, sets: DescriptorSets) -> tuple[dict[str, Any], int]:
    """The ``-blockdev`` of a disk, and the size in bytes to which its file may have to grow.

    As short as it can be: QEMU reads from its monitor one byte at a time, which takes it 3 µs."""
    node, size = _node(disk.path, disk.format, disk.read_only, sets, 1)
    return {**node, "node-name": name}, size


def _node(path: Path, format: Format, read_only: bool, sets: DescriptorSets, depth: int) -> tuple[dict[str, Any], int]:
    if depth > CHAIN_LIMIT:
        raise VmmFailed(f"the chain of images that ends in {path} is longer than {CHAIN_LIMIT}")
    fd = sets.open("disk image", path, os.O_RDONLY if read_only else os.O_RDWR)
    file = {
        "driver": "host_device" if stat.S_ISBLK(os.fstat(fd).st_mode) else "file",
        "filename": sets.name(fd),
        # Or the pages of an image would be dropped, for everybody, whenever a saved machine that uses it is restored.
        "drop-cache": False,
    }
    options: dict[str, Any] = {
        # Discards reach the lowest node if every node above it passes them on.
        "discard": "unmap",
        # A sandbox promises nothing about a crash of the host, so a flush of the guest need not reach the host's disk.
        "cache": {"no-flush": True},
    }
    if read_only:
        options["read-only"] = True
    size = os.lseek(fd, 0, os.SEEK_END)
    if format == "raw":
        # An image needs nothing between itself and the device, but below another one QEMU wants a format.
        return ({**file, **options} if depth == 1 else {"driver": "raw", **options, "file": file}), size
    virtual, backing = read_qcow2(fd, path)
    # What lies below inherits the options.
    node = {"driver": format, **options, "file": file, "backing": None}
    if backing is not None:
        node["backing"], _ = _node(*backing, True, sets, depth + 1)
    # The tables of qcow2 take an eighth of a per mille; twice the size leaves ample room.
    return node, max(size, min(2 * virtual, SIZE_LIMIT))


def read_qcow2(fd: int, path: Path) -> tuple[int, tuple[Path, Format] | None]:
    """Virtual size in bytes and backing image of a qcow2 image (docs/interop/qcow2.txt of QEMU).

    A backing image of unknown format is refused: QEMU would guess the format from content that a guest wrote.
    """
    header = os.pread(fd, 4096, 0)
    try:
        magic, version, offset, length, _, size = struct.unpack_from(">IIQIIQ", header)
        if magic != _MAGIC or version not in (2, 3):
            raise VmmFailed(f"the disk image {path} is not qcow2")
        if offset == 0:
            return size, None
        if not 0 < length <= 1023 or offset + length > CLUSTER_LIMIT:
            raise VmmFailed(f"the qcow2 image {path} is damaged: {length} bytes at {offset} cannot be a file name")
        position = struct.unpack_from(">I", header, 100)[0] if version == 3 else 72
        format = None
        while position + 8 <= offset:
            kind, extent = struct.unpack_from(">II", header, position)
            if kind == 0:
                break
            if kind == _BACKING_FORMAT:
                format = header[position + 8 : position + 8 + extent].decode("ascii", "replace")
            position += 8 + extent + -extent % 8
    except struct.error:
        raise VmmFailed(f"the qcow2 image {path} is damaged: its header is cut short") from None
    name = os.fsdecode(os.pread(fd, length, offset))
    if len(os.fsencode(name)) < length:
        raise VmmFailed(f"the qcow2 image {path} is damaged: it ends inside its header")
    if format not in ("raw", "qcow2"):
        raise VmmFailed(
            f"the qcow2 image {path} does not say that its backing image is raw or qcow2",
            remedy="create it with qemu-img create -F",
        )
    if ":" in name.split("/")[0]:
        raise VmmFailed(f"the backing image of {path} is not a file: {name[:100]!r}")
    return size, (path.parent / name, "raw" if format == "raw" else "qcow2")
