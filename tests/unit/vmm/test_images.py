"""Disk images as open descriptors, with the chain of a qcow2 image spelled out."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aenv.errors import VmmFailed
from aenv.vmm.images import CHAIN_LIMIT, SIZE_LIMIT, DescriptorSets, block_device
from aenv.vmm.interface import Disk

MIB = 1 << 20


def create(path: Path, *options: str) -> Path:
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", *options[:-1], str(path), options[-1]], check=True)
    return path


def target(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())


def test_a_raw_image(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    path.write_bytes(bytes(MIB))
    with DescriptorSets() as sets:
        node, size = block_device(Disk(path, "raw", False), "disk0", sets)
        fd = sets.fds[0]
        assert target(fd) == str(path)
        assert os.get_inheritable(fd) is False
        assert sets.arguments() == ["-add-fd", f"fd={fd},set=0"]
        os.write(fd, b"x")
    with pytest.raises(OSError):
        os.fstat(fd)
    assert size == MIB
    assert (node["driver"], node["filename"], node["node-name"]) == ("file", "/dev/fdset/0", "disk0")
    assert "read-only" not in node
    assert node["drop-cache"] is False
    assert len(msgspec.json.encode(node)) < 150, "QEMU takes its time to read it"


def test_a_read_only_image_is_opened_for_reading(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    path.write_bytes(bytes(MIB))
    with DescriptorSets() as sets:
        node, _ = block_device(Disk(path, "raw", True), "disk0", sets)
        assert node["read-only"] is True
        with pytest.raises(OSError):
            os.write(sets.fds[0], b"x")


def test_a_chain_is_spelled_out_and_everything_below_the_top_is_read_only(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.write_bytes(bytes(2 * MIB))
    create(tmp_path / "middle", "-b", str(base), "-F", "raw", "3M")
    top = create(tmp_path / "top", "-b", "middle", "-F", "qcow2", "4M")
    with DescriptorSets() as sets:
        node, size = block_device(Disk(top, "qcow2", False), "disk0", sets)
        assert [target(fd) for fd in sets.fds] == [str(top), str(tmp_path / "middle"), str(base)]
    names, read_only, formats = [], [], []
    link: Any = node
    while link is not None:
        file = link.get("file", link)
        assert file["drop-cache"] is False
        names.append(file["filename"])
        read_only.append(link.get("read-only", False))
        formats.append(link["driver"])
        link = link.get("backing")
    assert names == ["/dev/fdset/0", "/dev/fdset/1", "/dev/fdset/2"]
    assert read_only == [False, True, True]
    assert formats == ["qcow2", "qcow2", "raw"]
    assert size == 8 * MIB


def test_an_image_without_backing_says_so(tmp_path: Path) -> None:
    with DescriptorSets() as sets:
        node, _ = block_device(Disk(create(tmp_path / "it", "1M"), "qcow2", False), "disk0", sets)
    assert node["backing"] is None


def test_a_block_device_has_its_own_driver(tmp_path: Path) -> None:
    image = tmp_path / "raw"
    image.write_bytes(bytes(MIB))
    device = subprocess.run(
        ["losetup", "--find", "--show", str(image)], check=True, capture_output=True, text=True
    ).stdout.strip()
    try:
        with DescriptorSets() as sets:
            node, size = block_device(Disk(Path(device), "raw", False), "disk0", sets)
        assert node["driver"] == "host_device"
        assert size == MIB
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


def test_a_chain_that_bites_its_tail(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    create(first, "1M")
    create(second, "-b", str(first), "-F", "qcow2", "1M")
    subprocess.run(["qemu-img", "rebase", "-u", "-b", str(second), "-F", "qcow2", str(first)], check=True)
    with DescriptorSets() as sets, pytest.raises(VmmFailed, match=f"longer than {CHAIN_LIMIT}"):
        block_device(Disk(first, "qcow2", False), "disk0", sets)


def header(
    *, name: bytes = b"base", offset: int = 512, length: int | None = None, kind: bytes | None = b"raw", size: int = MIB
) -> bytes:
    """The header of a qcow2 image of version 3 that has a backing image."""
    fixed = struct.pack(
        ">IIQIIQ", 0x514649FB, 3, offset, len(name) if length is None else length, 16, size
    ) + struct.pack(">II", 0, 0)
    fixed = fixed.ljust(100, b"\0") + struct.pack(">I", 104)
    if kind is not None:
        fixed += struct.pack(">II", 0xE2792ACA, len(kind)) + kind + bytes(-len(kind) % 8)
    return fixed.ljust(512, b"\0") + name


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "damaged"),
        (b"QFI\xfb", "damaged"),
        (bytes(4096), "is not qcow2"),
        (header(kind=None), "does not say"),
        (header(kind=b"vmdk"), "does not say"),
        (header(length=0), "0 bytes"),
        (header(length=1 << 31), "bytes"),
        (header(offset=1 << 60), "cannot be a file name"),
        (header(offset=(1 << 64) - 1), "cannot be a file name"),
        (header(offset=1 << 20), "ends inside|cut short"),
        (header(length=1000), "ends inside"),
        (header(name=b"nbd://example.com/x"), "is not a file"),
        (header(name=b'json:{"driver":"null-co"}'), "is not a file"),
        (header(name=b"a\0b"), "null byte"),
        (header(name=b"nowhere"), "nowhere"),
        (header(name=b".."), "neither a file"),
    ],
)
def test_headers_that_are_refused(tmp_path: Path, content: bytes, cause: str) -> None:
    path = tmp_path / "image"
    path.write_bytes(content)
    with DescriptorSets() as sets, pytest.raises(VmmFailed, match=cause):
        block_device(Disk(path, "qcow2", False), "disk0", sets)


def test_a_size_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "base").touch()
    path = tmp_path / "image"
    path.write_bytes(header(size=(1 << 64) - 1))
    with DescriptorSets() as sets:
        _, size = block_device(Disk(path, "qcow2", False), "disk0", sets)
    assert size == SIZE_LIMIT


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(noise=st.binary(max_size=600), at=st.integers(0, 520))
def test_noise_in_a_header_never_does_more_than_fail(tmp_path: Path, noise: bytes, at: int) -> None:
    (tmp_path / "base").touch()
    path = tmp_path / "image"
    whole = header()
    path.write_bytes(whole[:at] + noise + whole[at + len(noise) :])
    with DescriptorSets() as sets:
        try:
            node, _ = block_device(Disk(path, "qcow2", False), "disk0", sets)
        except VmmFailed:
            return
        assert node["driver"] == "qcow2"
