"""The memory map of a process, and of a range of it."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from aenv.errors import VmmFailed
from aenv.vmm.memory_map import Mapping, mappings, within

PAGE = mmap.PAGESIZE


def test_our_own_map(tmp_path: Path) -> None:
    path = tmp_path / "a file with\nstrange name (deleted)"
    path.write_bytes(bytes(3 * PAGE))
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 2 * PAGE, flags=mmap.MAP_PRIVATE, offset=PAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        (found,) = (it for it in mappings(os.getpid()) if it.inode == path.stat().st_ino)
        assert found == Mapping(address, address + 2 * PAGE, "rw-p", PAGE, path.stat().st_ino)
    starts = [it.start for it in mappings(os.getpid())]
    assert starts == sorted(starts)


def test_a_process_that_is_gone() -> None:
    with pytest.raises(VmmFailed, match="cannot read the memory map"):
        mappings(1 << 22)


def test_a_range_is_covered_by_its_parts() -> None:
    first, second, third = (Mapping(n * 100, (n + 1) * 100, "rw-p", 0, n) for n in range(3))
    assert within([first, second, third], 100, 100) == [second]
    assert within([first, second, third], 0, 300) == [first, second, third]
    assert within([first, second, third], 150, 100) == [second, third]
    for found, address, size, end in (
        ([first, third], 0, 300, 0x64),
        ([first, second], 0, 300, 0xC8),
        ([second, third], 0, 300, 0),
        ([], 0, 300, 0),
        ([first, Mapping(100, 200, "r--p", 0, 1), third], 0, 300, 0x64),
        ([first, Mapping(100, 200, "rw-s", 0, 1), third], 0, 300, 0x64),
    ):
        with pytest.raises(VmmFailed, match=f"end at {end:#x}"):
            within(found, address, size)
