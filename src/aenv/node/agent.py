"""The node's conversation with ``aenv-envd`` inside a guest (docs/protocols.md, section 2)."""

from __future__ import annotations

import asyncio
import base64
import secrets
import socket
import struct
from collections.abc import Callable
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from aenv.errors import GuestFailed
from aenv.model import Sandbox

PORT = 49983
POLL = 0.02
"""Seconds between two tries while a guest boots; each try is one SYN."""
TRY = 0.5
"""Seconds one try may take. A guest that is not up yet drops the SYN, so a longer wait would only see retransmits."""
CALL = 10.0
"""Seconds for a call to an agent that is up."""
ANSWER_LIMIT = 64 * 1024
"""Bytes of an answer that are read; the guest is not trusted."""


class AgentClient:
    """``make_socket`` gives a new non-blocking TCP socket inside the sandbox's namespace."""

    def __init__(self, address: str, control_token: str, make_socket: Callable[[], socket.socket]) -> None:
        self._base = f"http://{address}:{PORT}"
        self._headers = {"X-Aenv-Control": control_token}
        self._address = address
        self._new_socket = make_socket
        # One connection per call: calls are rare, and a connection kept over a pause would be a stale one.
        connector = aiohttp.TCPConnector(socket_factory=lambda _: self._make_socket(), force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=CALL))

    def _make_socket(self) -> socket.socket:
        """End connections with a reset. After an orderly end the kernel would wait for the answer of a guest that may
        be gone by then, and the waiting socket would keep the namespace of the sandbox alive for minutes."""
        made = self._new_socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return made

    async def __aenter__(self) -> AgentClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def wait_ready(self) -> None:
        """Return when the agent accepts connections. No time limit of its own: the caller has one."""
        loop = asyncio.get_running_loop()
        while True:
            with self._make_socket() as probe:
                try:
                    async with asyncio.timeout(TRY):
                        await loop.sock_connect(probe, (self._address, PORT))
                    return
                except (OSError, TimeoutError):
                    await asyncio.sleep(POLL)

    async def init(self, record: Sandbox, user: str, workdir: str, env: dict[str, str]) -> None:
        """Give the guest its identity, clock and entropy; the last step before user code may run."""
        await self._post(
            "/init",
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "envVars": {**env, **record.env},
                "accessToken": record.access_token or "",
                "defaultUser": user,
                "defaultWorkdir": workdir,
                "sandboxId": record.sandbox_id,
                "templateId": record.template_id,
                "hostname": "sandbox",
                "entropy": base64.b64encode(secrets.token_bytes(64)).decode(),
            },
        )

    async def _post(self, path: str, body: dict[str, Any]) -> None:
        data = msgspec.json.encode(body)
        headers = {**self._headers, "Content-Type": "application/json"}
        try:
            # No redirects: whoever answers may not choose whom we give the token to.
            async with self._session.post(
                self._base + path, data=data, headers=headers, allow_redirects=False
            ) as response:
                if response.status >= 300:
                    said = (await response.content.read(ANSWER_LIMIT)).decode("utf-8", "replace")
                    raise GuestFailed(f"the guest agent refused {path}: {response.status} {said[:300]}")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise GuestFailed(f"the guest agent did not answer {path}: {error or 'timeout'}") from error
