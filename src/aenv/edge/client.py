"""Client of the edge's control socket (docs/protocols.md, section 1)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import aiohttp
import msgspec

from aenv.errors import OperationFailed, Unavailable

TIMEOUT = 10.0
"""Seconds. The edge answers from memory; only a stuck one needs longer."""


class Route(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a sandbox is; fields as in the protocol."""

    sandbox_id: str
    generation: int
    address: str
    netns: str | None
    traffic_token: str | None = None


class EdgeStatus(msgspec.Struct, frozen=True):
    version: str
    pid: int
    listen: str


class EdgeClient:
    """``async with EdgeClient(path) as edge``. Safe for concurrent calls.

    Every call raises Unavailable when nobody listens on the socket, OperationFailed when the edge refuses.
    """

    def __init__(self, control: Path) -> None:
        self.control = control
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> EdgeClient:
        connector = aiohttp.UnixConnector(path=str(self.control))
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=TIMEOUT))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def status(self) -> EdgeStatus:
        return msgspec.json.decode(await self._call("GET", "/v1/status"), type=EdgeStatus)

    async def replace_routes(self, routes: Iterable[Route]) -> None:
        """Make these the only routes; connections of unchanged ones go on."""
        await self._call("PUT", "/v1/routes", msgspec.json.encode({"routes": list(routes)}))

    async def put_route(self, route: Route) -> None:
        await self._call("PUT", f"/v1/routes/{route.sandbox_id}", msgspec.json.encode(route))

    async def delete_route(self, sandbox_id: str) -> None:
        """Returns after new requests are refused and open connections are cut. Idempotent."""
        await self._call("DELETE", f"/v1/routes/{sandbox_id}")

    async def shutdown(self) -> None:
        await self._call("POST", "/v1/shutdown")

    async def _call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        assert self._session is not None, "use `async with`"
        headers = {"Content-Type": "application/json"} if body is not None else None
        try:
            async with self._session.request(method, f"http://edge{path}", data=body, headers=headers) as response:
                answer = await response.read()
                if response.status >= 400:
                    text = answer.decode("utf-8", "replace")[:500]
                    raise OperationFailed(f"aenv-edge refused {method} {path}: {response.status} {text}")
                return answer
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(
                f"aenv-edge does not answer on {self.control}: {error or type(error).__name__}"
            ) from error
