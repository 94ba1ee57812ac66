"""The memory map of a VMM (``/proc/PID/maps``), which the kernel vouches for and not the VMM."""

from __future__ import annotations

from pathlib import Path

import msgspec

from aenv.errors import VmmFailed


class Mapping(msgspec.Struct, frozen=True):
    """One line: addresses in bytes, ``end`` exclusive; ``permissions`` like ``rw-p``; ``offset`` into the file."""

    start: int
    end: int
    permissions: str
    offset: int
    inode: int


def mappings(pid: int) -> list[Mapping]:
    """All of a process, in order of address. VmmFailed if it is gone or may not be looked into."""
    try:
        text = Path(f"/proc/{pid}/maps").read_bytes()
    except OSError as error:
        raise VmmFailed(f"cannot read the memory map of process {pid}: {error.strerror}") from error
    found = []
    for line in text.splitlines():
        # A file name, the sixth field, may contain anything but a line feed.
        addresses, permissions, offset, _, inode = line.split(None, 5)[:5]
        start, _, end = addresses.partition(b"-")
        found.append(Mapping(int(start, 16), int(end, 16), permissions.decode(), int(offset, 16), int(inode)))
    return found


def within(found: list[Mapping], address: int, size: int) -> list[Mapping]:
    """Those that make up a range. VmmFailed unless they cover all of it, private and writable."""
    covered, parts = address, []
    for mapping in found:
        if mapping.end > address and mapping.start < address + size:
            if mapping.start > covered or mapping.permissions != "rw-p":
                break
            parts.append(mapping)
            covered = mapping.end
    if covered < address + size:
        raise VmmFailed(f"there is no guest memory at {address:#x}: the private mappings there end at {covered:#x}")
    return parts
