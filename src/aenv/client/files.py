"""Files inside a sandbox. Relative paths are relative to the home directory of the user."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import msgspec

from aenv.client.http import Http, timeouts
from aenv.client.models import WrittenFile
from aenv.errors import OperationFailed

MAX_READ = 64 << 20
"""Bytes that ``read`` returns at most unless told otherwise."""

_IDLE = 60.0


class Files:
    """The file system of one sandbox, as ``user`` of each call (None: the sandbox's own default)."""

    def __init__(self, http: Http, headers: Mapping[str, str]) -> None:
        self._http = http
        self._headers = headers

    async def read(self, path: str, *, user: str | None = None, limit: int = MAX_READ) -> bytes:
        """Content of a file. Raises NotFound; OperationFailed if it is longer than ``limit`` bytes."""
        content = bytearray()
        async for chunk in self.stream(path, user=user):
            content += chunk
            if len(content) > limit:
                raise OperationFailed(f"{path} is longer than {limit} bytes", remedy="read it as a stream")
        return bytes(content)

    async def stream(self, path: str, *, user: str | None = None) -> AsyncIterator[bytes]:
        """Content of a file of any size, as it arrives. Raises ConnectionLost if it ends too early."""
        async with self._http.open(
            "GET", "/files", headers=self._headers, params=_query(path, user), timeout=timeouts(_IDLE)
        ) as response:
            async for chunk in self._http.chunks(response):
                yield chunk

    async def write(self, path: str, content: bytes | AsyncIterator[bytes], *, user: str | None = None) -> WrittenFile:
        """Create or replace a file, with its parent directories. Raises DiskFull."""
        headers = {**self._headers, "Content-Type": "application/octet-stream"}
        async with self._http.open(
            "POST", "/files", headers=headers, params=_query(path, user), content=content, timeout=timeouts(_IDLE)
        ) as response:
            answer = await self._http.read(response, 64 << 10)
        try:
            (written,) = msgspec.json.decode(answer, type=list[WrittenFile])
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise OperationFailed(f"the agent did not confirm that it wrote {path}: {error}") from error
        return written


def _query(path: str, user: str | None) -> dict[str, str]:
    return {"path": path} if user is None else {"path": path, "username": user}
