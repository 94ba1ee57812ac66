"""Archives the kernel unpacks as its first root file system (``newc`` of cpio(5)).

The same entries always give the same bytes: owner root, time 0, inode numbers by position, names sorted with every
directory before its content.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable

import msgspec

_TRAILER = "TRAILER!!!"


class Entry(msgspec.Struct, frozen=True):
    """``path`` is relative, without leading slash. ``mode`` includes the file type (``stat.S_IF…``); ``data`` is the
    content of a file or the target of a link; ``device`` is (major, minor) of a device node."""

    path: str
    mode: int
    data: bytes = b""
    device: tuple[int, int] = (0, 0)


def directory(path: str, mode: int = 0o755) -> Entry:
    return Entry(path, stat.S_IFDIR | mode)


def file(path: str, data: bytes, mode: int = 0o644) -> Entry:
    return Entry(path, stat.S_IFREG | mode, data)


def character_device(path: str, major: int, minor: int, mode: int = 0o600) -> Entry:
    return Entry(path, stat.S_IFCHR | mode, device=(major, minor))


def archive(entries: Iterable[Entry]) -> bytes:
    """The archive of ``entries``. ValueError for a path that is absolute, leaves the root or appears twice."""
    ordered = sorted(entries, key=lambda entry: entry.path.split("/"))
    seen: set[str] = set()
    out = bytearray()
    for inode, entry in enumerate(ordered, start=1):
        parts = entry.path.split("/")
        if "" in parts or "." in parts or ".." in parts or "\0" in entry.path or entry.path == _TRAILER:
            raise ValueError(f"not a path inside an archive: {entry.path!r}")
        if entry.path in seen:
            raise ValueError(f"twice in an archive: {entry.path!r}")
        seen.add(entry.path)
        _append(out, inode, entry)
    _append(out, 0, Entry(_TRAILER, 0))
    # Loaders read whole sectors.
    out += bytes(-len(out) % 512)
    return bytes(out)


def _append(out: bytearray, inode: int, entry: Entry) -> None:
    name = entry.path.encode() + b"\0"
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    major, minor = entry.device
    fields = (inode, entry.mode, 0, 0, links, 0, len(entry.data), 0, 0, major, minor, len(name), 0)
    out += b"070701" + b"".join(b"%08X" % field for field in fields) + name
    out += bytes(-len(out) % 4)
    out += entry.data
    out += bytes(-len(out) % 4)
