"""Remote calls to the agent inside a sandbox: Connect protocol, JSON codec.

A unary call is one JSON object each way. A server stream is a sequence of envelopes that ends with one that says how
it went; a stream without that end broke on the way.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec

from aenv.client import framing, refusals
from aenv.client.http import ConnectionLost, Http, timeouts
from aenv.errors import OperationFailed

T = TypeVar("T")

_KEEPALIVE = 30
_SILENCE = 100.0
"""Seconds without any event after which the connection counts as dead: three keepalives of the agent were lost."""


class _Fault(msgspec.Struct, frozen=True):
    code: str = "unknown"
    message: str = ""


class _End(msgspec.Struct, frozen=True):
    error: _Fault | None = None


class Rpc:
    """Calls to one agent. ``headers`` route and authorise."""

    def __init__(self, http: Http, headers: Mapping[str, str]) -> None:
        self._http = http
        self._headers = {**headers, "Connect-Protocol-Version": "1"}

    async def unary(
        self, method: str, body: Any, type: type[T], *, user: str | None = None, timeout: float | None = 60.0
    ) -> T:
        """One call. ``timeout`` None waits for as long as the agent needs, e.g. until a process reads its input."""
        headers = {**self._headers, **_authorization(user), "Content-Type": "application/json"}
        async with self._http.open(
            "POST", f"/{method}", headers=headers, content=msgspec.json.encode(body), timeout=timeouts(timeout)
        ) as response:
            answer = await self._http.read(response, framing.MAX_FRAME)
        return _decode(answer, type, method)

    @asynccontextmanager
    async def stream(
        self, method: str, body: Any, type: type[T], *, user: str | None = None, lifetime: float | None = None
    ) -> AsyncIterator[AsyncIterator[T]]:
        """A server stream. ``lifetime`` in seconds bounds it on the server side; None is unlimited.

        Leaving the context closes the connection, which detaches from the process and never ends it.
        """
        headers = {
            **self._headers,
            **_authorization(user),
            "Content-Type": "application/connect+json",
            "Keepalive-Ping-Interval": str(_KEEPALIVE),
        }
        if lifetime is not None:
            headers["Connect-Timeout-Ms"] = str(max(1, round(lifetime * 1000)))
        content = framing.encode(msgspec.json.encode(body))
        async with self._http.open(
            "POST", f"/{method}", headers=headers, content=content, timeout=timeouts(60.0, read=_SILENCE)
        ) as response:
            content_type = response.headers.get("Content-Type", "")
            if content_type.partition(";")[0].strip() != "application/connect+json":
                raise OperationFailed(f"{method} answered {refusals.printable(content_type)!r} instead of a stream")
            yield self._events(self._http.chunks(response), type, method)

    async def _events(self, chunks: AsyncIterator[bytes], type: type[T], method: str) -> AsyncIterator[T]:
        decoder = framing.Decoder()
        async for chunk in chunks:
            for frame in decoder.feed(chunk):
                if not frame.last:
                    yield _decode(frame.payload, type, method)
                    continue
                end = _decode(frame.payload, _End, method)
                if end.error is not None:
                    raise refusals.from_code(end.error.code, end.error.message)
                return
        raise ConnectionLost(f"the stream of {method} ended too early")


def _authorization(user: str | None) -> dict[str, str]:
    if user is None:
        return {}
    return {"Authorization": "Basic " + b64encode(f"{user}:".encode()).decode()}


def _decode(payload: bytes, type: type[T], method: str) -> T:
    try:
        return msgspec.json.decode(payload, type=type)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise OperationFailed(f"{method} answered something that is not its answer: {error}") from error
