"""A control API that follows the contract, in memory.

It is what the command line and the client are tried against where no virtual machine is needed. Alone it has sandboxes
that are records and nothing else; behind a real edge, all of them lead to one real agent on this machine.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

import httpx
from aiohttp import web

KEY = "e2b_" + "0123456789" * 4
DEFAULT_TIMEOUT = 300


@dataclass
class Record:
    sandbox_id: str
    body: dict[str, Any]
    started_at: datetime
    end_at: datetime
    state: str = "running"
    token: str = "token-of-the-agent"

    def listed(self) -> dict[str, Any]:
        return {
            "templateID": "tbase",
            "sandboxID": self.sandbox_id,
            "clientID": "node",
            "startedAt": self.started_at.isoformat(),
            "endAt": self.end_at.isoformat(),
            "cpuCount": 1,
            "memoryMB": 512,
            "diskSizeMB": 4096,
            "state": self.state,
            "envdVersion": "0.6.13",
            "alias": self.body["templateID"],
            "metadata": self.body.get("metadata", {}),
        }

    def access(self) -> dict[str, Any]:
        return {
            "templateID": "tbase",
            "sandboxID": self.sandbox_id,
            "clientID": "node",
            "envdVersion": "0.6.13",
            "envdAccessToken": self.token,
        }


@dataclass
class Contract:
    """The server's state, open to the tests."""

    url: str = ""
    routes: Routes | None = None
    page: int = 100
    sandboxes: dict[str, Record] = field(default_factory=dict)
    created: dict[str, str] = field(default_factory=dict)
    console: list[str] = field(default_factory=list)
    busy: int = 0
    requests: list[tuple[str, str]] = field(default_factory=list)
    refreshes: list[int] = field(default_factory=list)

    def add(self, sandbox_id: str, **body: Any) -> Record:
        now = datetime.now(UTC)
        timeout = timedelta(seconds=body.get("timeout", DEFAULT_TIMEOUT))
        record = Record(sandbox_id, {"templateID": "base", **body}, now, now + timeout)
        if self.routes is not None:
            self.routes.add(sandbox_id)
        self.sandboxes[sandbox_id] = record
        return record

    def remove(self, sandbox_id: str) -> None:
        """The end of a sandbox: unknown first, then its connections break."""
        del self.sandboxes[sandbox_id]
        if self.routes is not None:
            self.routes.remove(sandbox_id)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._front])
        app.add_routes(
            [
                web.post("/v2/sandboxes", self._create),
                web.get("/v2/sandboxes", self._list),
                web.get("/sandboxes/{id}", self._get),
                web.delete("/sandboxes/{id}", self._delete),
                web.post("/sandboxes/{id}/timeout", self._timeout),
                web.post("/sandboxes/{id}/refreshes", self._refresh),
                web.post("/v2/sandboxes/{id}/connect", self._connect),
                web.get("/sandboxes/{id}/logs", self._logs),
                web.get("/templates", self._templates),
                web.delete("/templates/{id}", self._delete_template),
            ]
        )
        return app

    @web.middleware
    async def _front(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append((request.method, request.path_qs))
        if self.busy:
            self.busy -= 1
            return failure(503, "the control plane is starting", {"Retry-After": "0"})
        if request.headers.get("X-API-KEY") != KEY:
            return failure(401, "the API key is wrong")
        if "id" in request.match_info and request.match_info["id"] not in (*self.sandboxes, "tbase"):
            return failure(404, f"there is no sandbox {request.match_info['id']}")
        return await handler(request)  # type: ignore[no-any-return]

    async def _create(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["templateID"] != "base":
            return failure(404, f"there is no template {body['templateID']!r}")
        key = request.headers["Idempotency-Key"]
        if key not in self.created:
            self.created[key] = self.add(f"i{len(self.created):020}", **body).sandbox_id
        return web.json_response(self.sandboxes[self.created[key]].access(), status=201)

    async def _list(self, request: web.Request) -> web.Response:
        parts = [part.partition("=") for part in unquote_plus(request.query.get("metadata", "")).split("&") if part]
        wanted = {unquote_plus(name): unquote_plus(value) for name, _, value in parts}
        states = request.query.get("state", "running,paused").split(",")
        found = [
            record
            for record in reversed(self.sandboxes.values())
            if record.state in states and wanted.items() <= record.body.get("metadata", {}).items()
        ]
        start = int(request.query.get("nextToken", "0"))
        end = start + min(self.page, int(request.query["limit"]))
        headers = {"X-Next-Token": str(end)} if end < len(found) else {}
        return web.json_response([record.listed() for record in found[start:end]], headers=headers)

    async def _get(self, request: web.Request) -> web.Response:
        record = self.sandboxes[request.match_info["id"]]
        internet = record.body.get("allow_internet_access")
        detail = {**record.listed(), "envdAccessToken": record.token, "allowInternetAccess": internet}
        return web.json_response(detail)

    async def _delete(self, request: web.Request) -> web.Response:
        self.remove(request.match_info["id"])
        return web.Response(status=204)

    async def _timeout(self, request: web.Request) -> web.Response:
        seconds = (await request.json())["timeout"]
        self.sandboxes[request.match_info["id"]].end_at = datetime.now(UTC) + timedelta(seconds=seconds)
        return web.Response(status=204)

    async def _refresh(self, request: web.Request) -> web.Response:
        self.refreshes.append((await request.json())["duration"])
        return web.Response(status=204)

    async def _connect(self, request: web.Request) -> web.Response:
        record = self.sandboxes[request.match_info["id"]]
        status = 200 if record.state == "running" else 201
        record.state = "running"
        return web.json_response(record.access(), status=status)

    async def _logs(self, request: web.Request) -> web.Response:
        now = datetime.now(UTC).isoformat()
        lines = self.console[-int(request.query["limit"]) :]
        return web.json_response({"logs": [{"timestamp": now, "line": line} for line in lines], "logEntries": []})

    async def _templates(self, request: web.Request) -> web.Response:
        template = {
            "templateID": "tbase",
            "buildID": "b1",
            "cpuCount": 1,
            "memoryMB": 512,
            "diskSizeMB": 4096,
            "public": False,
            "aliases": ["base"],
            "names": ["base"],
            "createdAt": "2026-01-01T00:00:00Z",
            "updatedAt": "2026-01-01T00:00:00Z",
            "createdBy": None,
            "lastSpawnedAt": None,
            "spawnCount": 0,
            "buildCount": 1,
            "envdVersion": "0.6.13",
            "buildStatus": "ready",
        }
        return web.json_response([template])

    async def _delete_template(self, request: web.Request) -> web.Response:
        if self.sandboxes:
            return failure(400, "the template is in use by 1 sandboxes")
        return web.Response(status=204)

    @contextmanager
    def serve(self, socket: Path | None = None) -> Iterator[None]:
        """Serve from a thread of its own, so that tests may block: on a port, or on a Unix ``socket``."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        runner = web.AppRunner(self.app(), access_log=None, shutdown_timeout=1)

        async def listen() -> None:
            await runner.setup()
            if socket is not None:
                await web.UnixSite(runner, str(socket)).start()
            else:
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                self.url = "http://{}:{}".format(*runner.addresses[0][:2])

        try:
            asyncio.run_coroutine_threadsafe(listen(), loop).result(10)
            yield
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()


class Routes:
    """The part of the control socket of an edge that a control plane needs to move sandboxes in and out."""

    def __init__(self, control: Path, address: str) -> None:
        self._client = httpx.Client(transport=httpx.HTTPTransport(uds=str(control)), base_url="http://edge")
        self.address = address
        self._generation = 0

    def add(self, sandbox_id: str) -> None:
        self._generation += 1
        route = {
            "sandbox_id": sandbox_id,
            "generation": self._generation,
            "address": self.address,
            "netns": None,
        }
        self._client.put(f"/v1/routes/{sandbox_id}", json=route).raise_for_status()

    def remove(self, sandbox_id: str) -> None:
        self._client.delete(f"/v1/routes/{sandbox_id}").raise_for_status()

    def close(self) -> None:
        self._client.close()


def failure(status: int, message: str, headers: dict[str, str] | None = None, **more: Any) -> web.Response:
    return web.json_response({"code": status, "message": message, **more}, status=status, headers=headers)
