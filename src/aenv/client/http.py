"""The one HTTP connection pool under everything, and what a network failure means to the user."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import httpx
import msgspec

from aenv import __version__
from aenv.client import refusals
from aenv.client.credentials import Credentials, is_local
from aenv.errors import AenvError, OperationFailed, Unauthorized, Unavailable

T = TypeVar("T")

MAX_ANSWER = 16 << 20
"""Largest JSON answer that is read, in bytes; a full page of sandboxes with large metadata is under 1 MiB."""

_MAX_REFUSAL = 64 << 10
_CONNECT_TIMEOUT = 10.0
_TIMEOUT = 60.0
_RETRY_SECONDS = 10.0

Params = Mapping[str, str | int]


class Http:
    """Sends requests to one server and turns every failure into an error of our tree.

    Safe for concurrent tasks of one event loop. Close with ``aclose``.
    """

    def __init__(self, credentials: Credentials) -> None:
        self.credentials = credentials
        self._client = httpx.AsyncClient(
            base_url=credentials.url,
            headers={"User-Agent": f"aenv/{__version__}", "Accept-Encoding": "identity"},
            timeout=timeouts(_TIMEOUT),
            limits=httpx.Limits(max_connections=256, max_keepalive_connections=32),
            # A proxy for the internet is never the way to a server on this machine.
            trust_env=not is_local(credentials.url),
            verify=_trust(credentials.url),
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    @asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        params: Params | None = None,
        content: bytes | AsyncIterator[bytes] | None = None,
        timeout: httpx.Timeout | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """Send, and yield the successful answer with its body unread. Leaving early closes the connection."""
        request = self._client.build_request(
            method, path, headers=dict(headers), params=params, content=content, timeout=timeout or timeouts(_TIMEOUT)
        )
        with self._translated():
            response = await self._client.send(request, stream=True)
        try:
            if not response.is_success:
                refusal = refusals.from_answer(response.status_code, await self._refusal(response))
                if isinstance(refusal, Unavailable):
                    refusal = Busy.read(refusal, response.headers)
                raise refusal
            yield response
        finally:
            await response.aclose()

    async def call(
        self,
        method: str,
        path: str,
        type: type[T],
        *,
        headers: Mapping[str, str],
        params: Params | None = None,
        body: Any = None,
        timeout: float = _TIMEOUT,
    ) -> tuple[T, httpx.Headers]:
        """Send JSON, receive JSON of ``type`` and the headers. ``timeout`` bounds each wait, in seconds.

        While the control plane restarts the edge answers 503 with ``Retry-After``; then nothing was done yet, and
        the request is sent again for up to ten seconds.
        """
        content = None if body is None else msgspec.json.encode(body)
        sent = dict(headers) | ({} if content is None else {"Content-Type": "application/json"})
        deadline = asyncio.get_running_loop().time() + _RETRY_SECONDS
        while True:
            try:
                async with self.open(
                    method, path, headers=sent, params=params, content=content, timeout=timeouts(timeout)
                ) as response:
                    answer = await self.read(response, MAX_ANSWER)
                break
            except Unauthorized as error:
                raise self._unauthorized(error) from None
            except Busy as busy:
                if asyncio.get_running_loop().time() + busy.retry_after > deadline:
                    raise
                await asyncio.sleep(max(busy.retry_after, 0.1))
        try:
            return msgspec.json.decode(answer or b"null", type=type), response.headers
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise OperationFailed(
                f"{self.credentials.url} answered something else than the API does: {error}",
                remedy="is it an AENV server?",
            ) from error

    def _unauthorized(self, error: Unauthorized) -> Unauthorized:
        if self.credentials.key is None:
            return Unauthorized(
                f"no API key for {self.credentials.url}", remedy="`aenv auth login` stores one, or set AENV_API_KEY"
            )
        return Unauthorized(error.message, remedy=f"the key is from {self.credentials.key_source}")

    async def read(self, response: httpx.Response, limit: int) -> bytes:
        """The whole body; OperationFailed if it is longer than ``limit`` bytes."""
        body = bytearray()
        async for chunk in self.chunks(response):
            body += chunk
            if len(body) > limit:
                raise OperationFailed(f"the answer to {response.request.url.path} is longer than {limit} bytes")
        return bytes(body)

    async def chunks(self, response: httpx.Response) -> AsyncIterator[bytes]:
        """The body as it arrives, never decompressed: little from a guest must not become a lot here."""
        stream = response.aiter_raw()
        while True:
            with self._translated():
                try:
                    chunk = await anext(stream)
                except StopAsyncIteration:
                    return
            yield chunk

    async def _refusal(self, response: httpx.Response) -> bytes:
        body = bytearray()
        async for chunk in self.chunks(response):
            body += chunk
            if len(body) >= _MAX_REFUSAL:
                break
        return bytes(body[:_MAX_REFUSAL])

    @contextmanager
    def _translated(self) -> Iterator[None]:
        url = self.credentials.url
        try:
            yield
        except httpx.ConnectTimeout as error:
            raise Unavailable(f"{url} does not answer", remedy="check the address and the network") from error
        except httpx.ConnectError as error:
            untrusted = next((each for each in _causes(error) if isinstance(each, ssl.SSLCertVerificationError)), None)
            if untrusted is not None:
                raise Unavailable(
                    f"{url} cannot be trusted: {untrusted.verify_message}",
                    remedy="SSL_CERT_FILE names the certificate of its authority, if that is a private one",
                ) from error
            remedy = "start one with `aenv serve`" if is_local(url) else "check AENV_URL, or `aenv auth login`"
            raise Unavailable(f"no server at {url}: {_reason(error)}", remedy=remedy) from error
        except httpx.TimeoutException as error:
            raise Unavailable(f"{url} took too long to answer") from error
        except httpx.TransportError as error:
            raise ConnectionLost(f"the connection to {url} broke: {_reason(error)}") from error


class ConnectionLost(Unavailable):
    """The connection broke after it was made: the server or the sandbox ended, or the network did."""


class Busy(Unavailable):
    """The server is there but cannot serve now; nothing was done. ``retry_after`` in seconds is its own estimate."""

    retry_after: float

    @classmethod
    def read(cls, refusal: AenvError, headers: httpx.Headers) -> AenvError:
        """``refusal``, as a Busy if ``headers`` say when to come back."""
        after = headers.get("Retry-After", "")
        if headers.get("Should-Retry") == "false" or not (after.isascii() and after.isdigit() and len(after) < 8):
            return refusal
        busy = cls(refusal.message, remedy=refusal.remedy)
        busy.retry_after = float(after)
        return busy


def timeouts(seconds: float | None, *, read: float | None = None) -> httpx.Timeout:
    """Bounds for one request: connecting, then each wait for data. None waits forever."""
    return httpx.Timeout(seconds, connect=_CONNECT_TIMEOUT, read=seconds if read is None else read)


def _trust(url: str) -> ssl.SSLContext:
    """The machine's own certificates, which is where those of a private server are; none, and no time to read them,
    if there is no encryption."""
    return ssl.create_default_context() if url.startswith("https:") else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _reason(error: BaseException) -> str:
    """The operating system's word for it, where there is one: the libraries between have vaguer ones."""
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.strerror and not isinstance(cause, ssl.SSLError):
            return (os.strerror(cause.errno) if cause.errno and cause.errno > 0 else cause.strerror).lower()
    return refusals.printable(" ".join(str(error).split())) or type(error).__name__


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
