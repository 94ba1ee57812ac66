"""The ELF kernel inside a bzImage.

QEMU boots the bzImage; Firecracker wants the ELF file it contains. The setup header (Documentation/arch/x86/boot.rst of
Linux) says where the compressed payload is.
"""

from __future__ import annotations

import lzma
import struct
import tempfile
import zlib

from aenv.errors import OperationFailed
from aenv.programs import system_program
from aenv.vmm import command

_LZ4_LEGACY = b"\x02\x21\x4c\x18"
_ZSTD = b"\x28\xb5\x2f\xfd"
_XZ = b"\xfd7zXZ\0"
_GZIP = b"\x1f\x8b\x08"


def extract(bzimage: bytes) -> bytes:
    """The uncompressed kernel; OperationFailed if ``bzimage`` is not one, or holds no x86-64 ELF file."""
    payload = _payload(bzimage)
    try:
        kernel = _decompress(payload)
    except (lzma.LZMAError, zlib.error) as error:
        raise OperationFailed(f"the kernel is damaged: {error}") from error
    if struct.unpack("<I", payload[-4:])[0] != len(kernel):
        raise OperationFailed("the kernel is damaged: it has another size than it says")
    check(kernel[:64])
    return kernel


def _decompress(payload: bytes) -> bytes:
    # All of them end with the size of the kernel in four bytes: gzip by its own format, the others by that of Linux.
    if payload.startswith(_XZ):
        return lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(payload)
    if payload.startswith(_GZIP):
        return zlib.decompressobj(31).decompress(payload)
    if payload.startswith(_LZ4_LEGACY):
        return _filter("lz4", "lz4", payload[:-4])
    if payload.startswith(_ZSTD):
        return _filter("zstd", "zstd", payload[:-4])
    raise OperationFailed(f"the kernel is compressed in an unknown way (it starts with {payload[:6].hex()})")


def check(header: bytes) -> None:
    """OperationFailed unless ``header``, the first 64 bytes of a file, are those of an x86-64 ELF executable."""
    if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":
        raise OperationFailed("the unpacked kernel is not a 64-bit ELF file")
    kind, machine = struct.unpack_from("<HH", header, 16)
    if kind not in (2, 3) or machine != 62:
        raise OperationFailed("the unpacked kernel is not an x86-64 executable")


def _payload(bzimage: bytes) -> bytes:
    if len(bzimage) < 0x260 or bzimage[0x202:0x206] != b"HdrS" or struct.unpack_from("<H", bzimage, 0x206)[0] < 0x208:
        raise OperationFailed("the kernel package does not hold a bzImage with boot protocol 2.08 or later")
    offset, length = struct.unpack_from("<II", bzimage, 0x248)
    start = (bzimage[0x1F1] + 1) * 512 + offset
    if length < 8 or start + length > len(bzimage):
        raise OperationFailed("the kernel is damaged: its payload reaches beyond its end")
    return bzimage[start : start + length]


def _filter(name: str, package: str, data: bytes) -> bytes:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        return command.run(
            [system_program(name, package), "-d", "-c", "-q", "-"],
            "unpack the kernel",
            timeout=120,
            stdin=file,
        )
