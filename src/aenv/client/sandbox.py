"""A sandbox as its user holds it."""

from __future__ import annotations

from typing import Any

from aenv.client.files import Files
from aenv.client.http import Http
from aenv.client.models import SandboxDetail
from aenv.client.processes import Processes
from aenv.client.rpc import Rpc

AGENT_PORT = 49983


class Sandbox:
    """Handle of one sandbox: its processes, its files, its lifetime. Made by ``Client``.

    Holds no resources of its own; the sandbox lives until its timeout passes or ``delete``.
    """

    def __init__(self, http: Http, api_headers: dict[str, str], sandbox_id: str, access_token: str | None) -> None:
        self.sandbox_id = sandbox_id
        self._http = http
        self._api_headers = api_headers
        headers = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": str(AGENT_PORT)}
        if access_token is not None:
            headers["X-Access-Token"] = access_token
        self.processes = Processes(Rpc(http, headers))
        self.files = Files(http, headers)

    def __repr__(self) -> str:
        return f"Sandbox({self.sandbox_id!r})"

    async def info(self) -> SandboxDetail:
        detail, _ = await self._http.call("GET", self._path(), SandboxDetail, headers=self._api_headers)
        return detail

    async def set_timeout(self, seconds: int) -> None:
        """Let the sandbox end ``seconds`` from now, sooner or later than it would have. 0 ends it."""
        await self._post("timeout", {"timeout": seconds})

    async def keep_alive(self, seconds: int) -> None:
        """Let the sandbox live for at least ``seconds`` (0 to 3600) from now; never shortens its life."""
        await self._post("refreshes", {"duration": seconds})

    async def delete(self) -> None:
        """End the sandbox and forget it. Raises NotFound if it is gone already."""
        await self._http.call("DELETE", self._path(), type(None), headers=self._api_headers)

    async def _post(self, action: str, body: dict[str, Any]) -> None:
        await self._http.call("POST", f"{self._path()}/{action}", type(None), headers=self._api_headers, body=body)

    def _path(self) -> str:
        return f"/sandboxes/{self.sandbox_id}"
