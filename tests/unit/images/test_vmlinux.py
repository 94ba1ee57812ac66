from __future__ import annotations

import lzma
import struct
import subprocess
import zlib
from collections.abc import Callable

import pytest

from aenv.errors import OperationFailed
from aenv.vmm import vmlinux

ELF = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HH", 2, 62) + bytes(44) + b"kernel text " * 5000


def bzimage(payload: bytes, *, length: int | None = None) -> bytes:
    setup_sectors = 3
    image = bytearray((setup_sectors + 1) * 512)
    image[0x1F1] = setup_sectors
    image[0x202:0x206] = b"HdrS"
    struct.pack_into("<H", image, 0x206, 0x20F)
    struct.pack_into("<II", image, 0x248, 64, len(payload) if length is None else length)
    return bytes(image) + bytes(64) + payload + b"after the payload"


def sized(data: bytes) -> bytes:
    return data + struct.pack("<I", len(ELF))


def _program(*argv: str) -> Callable[[bytes], bytes]:
    return lambda data: sized(subprocess.run(argv, input=data, capture_output=True, check=True).stdout)


def _gzip(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=31)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(
    "pack",
    [
        _program("lz4", "-l", "-c", "-q"),
        _program("zstd", "-c", "-q"),
        lambda data: sized(lzma.compress(data, check=lzma.CHECK_CRC32)),
        _gzip,
    ],
    ids=["lz4", "zstd", "xz", "gzip"],
)
def test_every_compression_of_a_kernel(pack: Callable[[bytes], bytes]) -> None:
    assert vmlinux.extract(bzimage(pack(ELF))) == ELF


@pytest.mark.parametrize(
    ("image", "cause"),
    [
        (b"", "does not hold a bzImage"),
        (bytes(4096), "does not hold a bzImage"),
        (bzimage(b"plain text, not compressed"), "unknown way"),
        (bzimage(_gzip(ELF), length=1 << 30), "reaches beyond its end"),
        (bzimage(_gzip(ELF)[:-4] + b"abcd"), "damaged"),
        (bzimage(_program("zstd", "-c", "-q")(ELF[:-1])), "another size"),
        (bzimage(_gzip(b"not an ELF file" * 10)), "not a 64-bit ELF"),
        (bzimage(_gzip(b"\x7fELF\x01\x01" + ELF[6:])), "not a 64-bit ELF"),
        (bzimage(_gzip(ELF[:18] + struct.pack("<H", 183) + ELF[20:])), "not an x86-64"),
        (bzimage(b"\x28\xb5\x2f\xfd" + bytes(200)), "unpack the kernel"),
        (bzimage(b"\xfd7zXZ\0" + bytes(200)), "damaged"),
        (bzimage(b"\x1f\x8b\x08" + b"\xff" * 200), "damaged"),
    ],
)
def test_anything_else_is_refused(image: bytes, cause: str) -> None:
    with pytest.raises(OperationFailed, match=cause):
        vmlinux.extract(image)
