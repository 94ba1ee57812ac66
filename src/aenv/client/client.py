"""The control API."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlencode

from aenv.client.credentials import Credentials, resolve
from aenv.client.http import Http
from aenv.client.models import LogLine, Logs, SandboxAccess, SandboxDetail, SandboxInfo, SandboxState, TemplateInfo
from aenv.client.sandbox import Sandbox
from aenv.errors import BadRequest, NotFound, OperationFailed
from aenv.model import is_sandbox_id

_MAX_PAGES = 10_000


class Client:
    """A connection to one server. Use as ``async with``; safe for concurrent tasks of one event loop.

    Every method raises Unauthorized for a wrong key, Unavailable when there is no server, NotFound for what does not
    exist, and BadRequest when the server says that an argument is wrong.
    """

    def __init__(self, credentials: Credentials | None = None) -> None:
        self.credentials = credentials or resolve()
        # Without a key we ask all the same: what is missing first may be the server.
        self._headers = {} if self.credentials.key is None else {"X-API-KEY": self.credentials.key}
        self._http = Http(self.credentials)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def check(self) -> None:
        """Raise what is wrong with the server or the key, if anything is."""
        await self._http.call("GET", "/v2/sandboxes", list[SandboxInfo], headers=self._headers, params={"limit": 1})

    async def create(
        self,
        template: str = "base",
        *,
        timeout: int | None = None,
        env: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        internet: bool | None = None,
        wait: float = 300.0,
    ) -> Sandbox:
        """Create a sandbox; when this returns its agent answers.

        ``timeout`` in seconds until it is deleted (None: the server's default), ``env`` for every process in it,
        ``internet`` False cuts it off from everything outside, ``wait`` in seconds for the answer. Sent again by
        itself only when the server did nothing yet, and never made twice.
        """
        body: dict[str, Any] = {"templateID": template}
        if timeout is not None:
            body["timeout"] = timeout
        if env:
            body["envVars"] = dict(env)
        if metadata:
            body["metadata"] = dict(metadata)
        if internet is not None:
            body["allow_internet_access"] = internet
        headers = {**self._headers, "Idempotency-Key": str(uuid.uuid4())}
        access, _ = await self._http.call(
            "POST", "/v2/sandboxes", SandboxAccess, headers=headers, body=body, timeout=wait
        )
        return self._sandbox(access.sandbox_id, access.access_token)

    async def connect(self, sandbox_id: str, *, timeout: int | None = None) -> Sandbox:
        """A handle of an existing sandbox, resumed if it is paused. Its end moves to ``timeout`` seconds (None: the
        server's default) from now if that is later."""
        body = {} if timeout is None else {"timeout": timeout}
        access, _ = await self._http.call(
            "POST", f"/v2/sandboxes/{_checked(sandbox_id)}/connect", SandboxAccess, headers=self._headers, body=body
        )
        return self._sandbox(access.sandbox_id, access.access_token)

    async def attach(self, sandbox_id: str) -> Sandbox:
        """A handle of an existing sandbox whose end does not move, unless it is paused and therefore resumed."""
        detail = await self.info(sandbox_id)
        if detail.state == "paused" or detail.access_token is None:
            return await self.connect(sandbox_id)
        return self._sandbox(detail.sandbox_id, detail.access_token)

    async def info(self, sandbox_id: str) -> SandboxDetail:
        detail, _ = await self._http.call(
            "GET", f"/sandboxes/{_checked(sandbox_id)}", SandboxDetail, headers=self._headers
        )
        return detail

    async def sandboxes(
        self,
        *,
        states: tuple[SandboxState, ...] = (),
        metadata: Mapping[str, str] | None = None,
        template: str | None = None,
    ) -> AsyncIterator[SandboxInfo]:
        """Sandboxes, newest first, fetched a page at a time. Empty filters match everything."""
        params: dict[str, str | int] = {"limit": 100}
        if states:
            params["state"] = ",".join(states)
        if metadata:
            # The query value is itself a form whose keys and values are encoded once more.
            params["metadata"] = urlencode({quote(key, ""): quote(value, "") for key, value in metadata.items()})
        if template is not None:
            params["template"] = template
        for _ in range(_MAX_PAGES):
            page, headers = await self._http.call(
                "GET", "/v2/sandboxes", list[SandboxInfo], headers=self._headers, params=params
            )
            for info in page:
                yield info
            token = headers.get("X-Next-Token")
            if not token:
                return
            params["nextToken"] = token
        raise OperationFailed(f"the list of sandboxes does not end after {_MAX_PAGES} pages")

    async def set_timeout(self, sandbox_id: str, seconds: int) -> None:
        """See ``Sandbox.set_timeout``."""
        await self._sandbox(_checked(sandbox_id), None).set_timeout(seconds)

    async def delete(self, sandbox_id: str) -> None:
        """See ``Sandbox.delete``."""
        await self._sandbox(_checked(sandbox_id), None).delete()

    async def logs(self, sandbox_id: str, *, start: int | None = None, limit: int = 1000) -> list[LogLine]:
        """Console of the guest, oldest line first, from ``start`` (milliseconds since 1970) on."""
        params: dict[str, str | int] = {"limit": limit}
        if start is not None:
            params["start"] = start
        logs, _ = await self._http.call(
            "GET", f"/sandboxes/{_checked(sandbox_id)}/logs", Logs, headers=self._headers, params=params
        )
        return logs.logs

    async def templates(self) -> list[TemplateInfo]:
        found, _ = await self._http.call("GET", "/templates", list[TemplateInfo], headers=self._headers)
        return found

    async def delete_template(self, name: str) -> None:
        """Delete a template by id or name. Raises BadRequest while sandboxes still use it."""
        if not name:
            raise BadRequest("the name of the template is empty")
        await self._http.call("DELETE", f"/templates/{quote(name, '')}", type(None), headers=self._headers)

    def _sandbox(self, sandbox_id: str, access_token: str | None) -> Sandbox:
        return Sandbox(self._http, self._headers, _checked(sandbox_id), access_token)


def _checked(sandbox_id: str) -> str:
    """``sandbox_id`` goes into paths and headers, so it must be one."""
    if not is_sandbox_id(sandbox_id):
        raise NotFound(f"there is no sandbox {sandbox_id!r}: ids are lower-case letters and digits")
    return sandbox_id
