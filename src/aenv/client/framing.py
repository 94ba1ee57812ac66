"""Envelopes of the Connect protocol: one byte of flags, four bytes of length (big-endian), then the payload.

A stream is a sequence of envelopes whose last one has the flag ``END``. The other end is a guest, so nothing it says
about sizes is believed before it is compared with ``MAX_FRAME``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from aenv.errors import OperationFailed

MAX_FRAME = 4 << 20
"""Largest accepted payload in bytes. The agent sends at most 32 KiB of output at a time, in base64."""

COMPRESSED = 1
END = 2
_HEADER = 5


class Frame(NamedTuple):
    flags: int
    payload: bytes

    @property
    def last(self) -> bool:
        return bool(self.flags & END)


def encode(payload: bytes, flags: int = 0) -> bytes:
    return bytes((flags,)) + len(payload).to_bytes(4, "big") + payload


class Decoder:
    """Cuts a byte stream into frames, however it was split on the way. Holds at most one unfinished frame."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._limit = limit
        self._buffer = bytearray()

    @property
    def pending(self) -> int:
        """Bytes of a frame that has not arrived completely."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that ``data`` completes. Raises OperationFailed for a frame that nobody sends."""
        self._buffer += data
        position = 0
        try:
            while len(self._buffer) - position >= _HEADER:
                flags = self._buffer[position]
                length = int.from_bytes(self._buffer[position + 1 : position + _HEADER], "big")
                if flags & ~END:
                    raise OperationFailed(f"the answer is not a Connect stream: envelope flags are {flags:#04x}")
                if length > self._limit:
                    raise OperationFailed(f"a message of {length} bytes is too large, at most {self._limit} are read")
                end = position + _HEADER + length
                if end > len(self._buffer):
                    break
                frame = Frame(flags, bytes(self._buffer[position + _HEADER : end]))
                position = end
                yield frame
        finally:
            del self._buffer[:position]
