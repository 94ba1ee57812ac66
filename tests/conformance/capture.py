"""Memory images the way they are to be made: from the private pages of a process that stands still."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from aenv.vmm.interface import Region

PAGE = 4096
PIECE = 1 << 20
_PAGEMAP_SCAN = 0xC0606610
_FILE, _PRESENT, _SWAPPED, _ZERO = 4, 8, 16, 32
_libc = ctypes.CDLL(None, use_errno=True)


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def capture(pid: int, regions: Sequence[Region], target: Path, base: Path | None = None) -> int:
    """Make ``target`` the memory image of a process that was restored from ``base``, or booted if there is none.
    Returns how many bytes are not from ``base``."""
    if base is None:
        with target.open("xb") as file:
            file.truncate(sum(region.size for region in regions))
    else:
        shutil.copyfile(base, target)
    copied = 0
    with target.open("r+b") as file:
        for region in regions:
            for address, size in private_ranges(pid, region):
                for start in range(address, address + size, PIECE):
                    data = read(pid, start, min(PIECE, address + size - start))
                    os.pwrite(file.fileno(), data, start - region.address + region.offset)
                    copied += len(data)
    return copied


def private_ranges(pid: int, region: Region) -> list[tuple[int, int]]:
    """Address and size of what the process does not share with a file, and is not just zeros."""
    ranges: list[tuple[int, int]] = []
    vector = ctypes.create_string_buffer(24 * 1000)
    start, end = region.address, region.address + region.size
    with Path(f"/proc/{pid}/pagemap").open("rb") as pagemap:
        while start < end:
            request = bytearray(
                struct.pack(
                    "12Q",
                    *(96, 0, start, end, 0, ctypes.addressof(vector), 1000, 0),
                    *(_FILE | _ZERO, _FILE | _ZERO, _PRESENT | _SWAPPED, _PRESENT),
                )
            )
            count = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, request)
            for number in range(count):
                first, last, _ = struct.unpack_from("3Q", vector, 24 * number)
                ranges.append((first, last - first))
            start = struct.unpack_from("12Q", request)[4]
    return ranges


def read(pid: int, address: int, size: int) -> bytes:
    buffer = ctypes.create_string_buffer(size)
    here, there = _IoVec(ctypes.addressof(buffer), size), _IoVec(address, size)
    got = _libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    if got != size:
        raise OSError(ctypes.get_errno(), f"{got} of {size} bytes at {address:#x} of process {pid}")
    return buffer.raw


def digest(pid: int, regions: Sequence[Region]) -> str:
    """sha256 of all memory of a guest, as the guest sees it."""
    return _sha256(
        read(pid, address, min(PIECE, region.address + region.size - address))
        for region in regions
        for address in range(region.address, region.address + region.size, PIECE)
    )


def image_digest(image: Path) -> str:
    with image.open("rb") as file:
        return _sha256(iter(lambda: file.read(PIECE), b""))


def _sha256(pieces: Iterator[bytes]) -> str:
    total = hashlib.sha256()
    for piece in pieces:
        total.update(piece)
    return total.hexdigest()
