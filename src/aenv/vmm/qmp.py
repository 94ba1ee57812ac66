"""QMP, the monitor protocol of QEMU: JSON lines over a Unix socket (docs/interop/qmp-spec.rst of QEMU).

The peer is a process that a hostile guest may have taken over. A line has a bounded length, every wait has an end, and
whatever breaks the protocol ends the connection with a VmmFailed that names the command at hand.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from aenv.errors import VmmFailed

LINE_LIMIT = 1 << 20  # bytes; the longest answer this program asks for has a few thousand
EVENT_LIMIT = 1000  # a second; QEMU itself limits most kinds to one a second
GREETING_TIMEOUT = 30.0  # seconds from connection to greeting: QEMU builds the whole machine before it answers
COMMAND_TIMEOUT = 10.0  # seconds

Message = dict[str, Any]
Command = tuple[str, Sequence[int], dict[str, Any]]
"""Name, descriptors that travel with it, and arguments."""


@contextmanager
def reachable(path: Path) -> Iterator[str]:
    """An address of the socket ``path``, which itself may be longer than the 107 bytes that fit into an address."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


class Qmp:
    """One connection. Several tasks may call ``execute`` at once; answers are told apart by their ``id``."""

    def __init__(self, sock: socket.socket, on_event: Callable[[str, Message], None] | None = None) -> None:
        self._socket = sock
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._greeting: asyncio.Future[Message] = self._loop.create_future()
        self._waiting: dict[int, tuple[str, asyncio.Future[Message]]] = {}
        self._next = 0
        self._sending = asyncio.Lock()
        self._events = 0
        self._events_since = 0.0
        self._broken: str | None = None  # why it is of no more use
        self._reader = self._loop.create_task(self._read())

    @classmethod
    async def connect(
        cls,
        path: Path,
        *,
        timeout: float | None = None,
        on_event: Callable[[str, Message], None] | None = None,
    ) -> Qmp:
        """Connect and negotiate, within ``timeout`` seconds or GREETING_TIMEOUT each."""
        timeout = GREETING_TIMEOUT if timeout is None else timeout
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # Not wait_for, which in Python 3.11 swallows a cancellation that comes together with the result.
            with reachable(path) as address:
                async with asyncio.timeout(timeout):
                    await asyncio.get_running_loop().sock_connect(sock, address)
        except (OSError, TimeoutError) as error:
            sock.close()
            raise VmmFailed(f"cannot reach the monitor {path}: {error or 'timeout'}") from error
        except BaseException:
            sock.close()
            raise
        connection = cls(sock, on_event)
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(connection._greeting)
            await connection.execute("qmp_capabilities", timeout=timeout)
        except TimeoutError:
            await connection.close()
            raise VmmFailed(f"the monitor {path} did not greet within {timeout:g} s") from None
        except BaseException:
            await connection.close()
            raise
        return connection

    @property
    def broken(self) -> bool:
        return self._broken is not None

    async def execute(
        self, command: str, *, timeout: float | None = None, fds: Sequence[int] = (), **arguments: object
    ) -> Any:
        """Run a command and return what it returns, within ``timeout`` seconds or COMMAND_TIMEOUT. ``fds`` travel with
        it (``getfd``, ``add-fd``); underscores in the names of arguments stand for dashes. Raises VmmFailed when QEMU
        refuses, hangs or is gone."""
        timeout = COMMAND_TIMEOUT if timeout is None else timeout
        if self._broken is not None:
            raise VmmFailed(f"{command}: {self._broken}")
        number, self._next = self._next, self._next + 1
        request = {"execute": command, "id": number}
        if arguments:
            request["arguments"] = {name.replace("_", "-"): value for name, value in arguments.items()}
        answer: asyncio.Future[Message] = self._loop.create_future()
        self._waiting[number] = (command, answer)
        try:
            async with asyncio.timeout(timeout):
                await self._send(msgspec.json.encode(request) + b"\n", fds)
                message = await answer
        except TimeoutError:
            raise VmmFailed(f"{command}: QEMU did not answer within {timeout:g} s") from None
        except OSError as error:
            raise VmmFailed(f"{command}: the monitor is gone ({error})") from error
        finally:
            self._waiting.pop(number, None)
            if answer.done() and not answer.cancelled():
                answer.exception()  # seen, even if sending failed first
        if "error" in message:
            refusal = message["error"]
            cause = refusal.get("desc") if isinstance(refusal, dict) else refusal
            raise VmmFailed(f"{command}: QEMU refused: {str(cause)[:1000]}")
        return message["return"]

    async def execute_all(self, *commands: Command, timeout: float | None = None) -> list[Any]:
        """Run commands, in order, without waiting for one before the next is sent, and return what they return. Raises
        what the first one raised that failed; those behind it were run all the same."""
        tasks = [
            asyncio.ensure_future(self.execute(name, timeout=timeout, fds=fds, **arguments))
            for name, fds, arguments in commands
        ]
        # Tasks begin in the order in which they were made, and get the lock in the order in which they asked for it.
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    async def close(self) -> None:
        self._fail("the connection to the monitor was closed")
        await asyncio.wait([self._reader])

    async def _send(self, data: bytes, fds: Sequence[int]) -> None:
        async with self._sending:
            if self._broken is not None:
                raise OSError(self._broken)
            try:
                if fds:
                    # Descriptors travel with the first byte; what is left is ordinary data.
                    data = data[await self._send_fds(data, fds) :]
                if data:
                    await self._loop.sock_sendall(self._socket, data)
            except BaseException:
                # Half a request is on its way, and nothing that follows could be understood.
                self._fail("a request could not be sent")
                raise

    async def _send_fds(self, data: bytes, fds: Sequence[int]) -> int:
        while True:
            try:
                return socket.send_fds(self._socket, [data], list(fds))
            except BlockingIOError:
                ready = self._loop.create_future()
                self._loop.add_writer(self._socket, ready.set_result, None)
                try:
                    await ready
                finally:
                    self._loop.remove_writer(self._socket)

    async def _read(self) -> None:
        buffer = bytearray()
        try:
            while data := await self._loop.sock_recv(self._socket, 65536):
                searched = len(buffer)
                buffer += data
                while (end := buffer.find(b"\n", searched)) >= 0:
                    line = bytes(buffer[:end])
                    del buffer[: end + 1]
                    searched = 0
                    if line.strip():
                        self._take(line)
                if len(buffer) > LINE_LIMIT:
                    return self._fail(f"QEMU sent a line of more than {LINE_LIMIT} bytes")
            self._fail("QEMU closed the monitor")
        except OSError as error:
            self._fail(f"the monitor is gone ({error})")
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._fail(f"QEMU sent what is not QMP: {error}")
        except Exception as error:
            self._fail(f"an event could not be handled: {error!r}")
            raise
        finally:
            self._socket.close()

    def _take(self, line: bytes) -> None:
        message = msgspec.json.decode(line, type=dict[str, Any])
        if "event" in message:
            self._count_event()
            if self._on_event is not None:
                self._on_event(str(message["event"]), message)
        elif "QMP" in message:
            if not self._greeting.done():
                self._greeting.set_result(message)
        elif "return" in message or "error" in message:
            number = message.get("id")
            # An answer that nobody waits for any more came after its time was over.
            _, answer = self._waiting.get(number, ("", None)) if type(number) is int else ("", None)
            if answer is not None and not answer.done():
                answer.set_result(message)
        else:
            raise ValueError(f"neither answer nor event: {line[:80]!r}")

    def _count_event(self) -> None:
        now = self._loop.time()
        if now - self._events_since > 1.0:
            self._events_since, self._events = now, 0
        self._events += 1
        if self._events > EVENT_LIMIT:
            raise ValueError(f"more than {EVENT_LIMIT} events in a second")

    def _fail(self, cause: str) -> None:
        """The connection is of no more use: tell everybody who waits."""
        if self._broken is None:
            self._broken = cause
            if self._reader is not asyncio.current_task():
                self._reader.cancel()  # which closes the socket
        for command, answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(VmmFailed(f"{command}: {self._broken}"))
        if not self._greeting.done():
            self._greeting.set_exception(VmmFailed(self._broken))
            self._greeting.exception()  # seen, even if nobody waits for it
