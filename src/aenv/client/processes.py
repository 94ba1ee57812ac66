"""Processes inside a sandbox.

A process belongs to the sandbox, not to the connection: leaving a stream detaches from it, and only ``signal`` ends
it. Output that nobody reads is dropped by the agent; every attached reader gets all of it.
"""

from __future__ import annotations

import re
import signal as signals
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, NamedTuple

import msgspec

from aenv.client.refusals import printable
from aenv.client.rpc import Rpc
from aenv.errors import NotFound, OperationFailed

MAX_OUTPUT = 16 << 20
"""Bytes of output that ``run`` collects unless told otherwise."""

SHELL = ("/bin/sh", "-c", 'if [ -x /bin/bash ]; then exec /bin/bash -l -c "$1"; else exec /bin/sh -l -c "$1"; fi', "sh")
"""Runs the one argument appended to it as a command line in a login shell, also in images without bash."""

LOGIN = ("/bin/sh", "-c", "if [ -x /bin/bash ]; then exec /bin/bash -i -l; else exec /bin/sh -i -l; fi")
"""An interactive login shell."""

SCRIPT = ("/bin/sh", "-c", "if [ -x /bin/bash ]; then exec /bin/bash -l; else exec /bin/sh -l; fi")
"""A login shell that reads its commands from standard input."""


class Size(NamedTuple):
    cols: int
    rows: int


class Output(NamedTuple):
    stream: Literal["stdout", "stderr", "pty"]
    data: bytes


class Exit(NamedTuple):
    """How a process ended: an exit status, or the number of the signal that killed it."""

    status: int
    signal: int | None

    @property
    def code(self) -> int:
        """What a shell reports: the exit status, or 128 + signal."""
        return self.status if self.signal is None else 128 + self.signal


class Result(NamedTuple):
    stdout: bytes
    stderr: bytes
    exit: Exit


class _Start(msgspec.Struct):
    pid: int


class _Data(msgspec.Struct):
    stdout: bytes | None = None
    stderr: bytes | None = None
    pty: bytes | None = None


class _End(msgspec.Struct, rename="camel"):
    exit_code: int = 0
    exited: bool = False
    status: str = ""
    error: str | None = None


class _Event(msgspec.Struct):
    start: _Start | None = None
    data: _Data | None = None
    end: _End | None = None
    keepalive: dict[str, Any] | None = None


class _Message(msgspec.Struct):
    event: _Event


class _Config(msgspec.Struct):
    cmd: str
    args: list[str] = []
    envs: dict[str, str] = {}
    cwd: str | None = None


class Listed(msgspec.Struct):
    """A process as the agent lists it."""

    pid: int
    config: _Config
    tag: str | None = None


class _List(msgspec.Struct):
    processes: list[Listed] = []


class Process:
    """A process to which this client is attached. Iterate for its output; ``exit`` is set when that ends."""

    def __init__(self, rpc: Rpc, pid: int, events: AsyncIterator[_Message], pty: bool) -> None:
        self.pid = pid
        self.exit: Exit | None = None
        self._rpc = rpc
        self._events = events
        self._pty = pty

    async def __aiter__(self) -> AsyncIterator[Output]:
        """Output until the process ended. Raises ConnectionLost if the sandbox ends first."""
        async for message in self._events:
            data, end = message.event.data, message.event.end
            if data is not None:
                if data.stdout:
                    yield Output("stdout", data.stdout)
                if data.stderr:
                    yield Output("stderr", data.stderr)
                if data.pty:
                    yield Output("pty", data.pty)
            if end is not None:
                self.exit = _exit(end)
                return
        raise OperationFailed(f"the agent never said how process {self.pid} ended")

    async def wait(self) -> Exit:
        """Discard the output until the end of the process."""
        async for _ in self:
            pass
        assert self.exit is not None
        return self.exit

    async def send(self, data: bytes) -> None:
        """Write to standard input, or type into the terminal. Returns when the process (or its pipe) took it."""
        body = {"process": {"pid": self.pid}, "input": {"pty" if self._pty else "stdin": data}}
        await self._rpc.unary("process.Process/SendInput", body, dict[str, Any], timeout=None)

    async def close_stdin(self) -> None:
        await self._rpc.unary("process.Process/CloseStdin", {"process": {"pid": self.pid}}, dict[str, Any])

    async def resize(self, size: Size) -> None:
        body = {"process": {"pid": self.pid}, "pty": {"size": size._asdict()}}
        await self._rpc.unary("process.Process/Update", body, dict[str, Any])

    async def signal(self, number: Literal[9, 15]) -> bool:
        """Send SIGTERM (15) or SIGKILL (9). False if the process had already ended."""
        return await send_signal(self._rpc, self.pid, number)


class Processes:
    """The processes of one sandbox."""

    def __init__(self, rpc: Rpc) -> None:
        self._rpc = rpc

    @asynccontextmanager
    async def start(
        self,
        command: str | Sequence[str],
        *,
        user: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bool = False,
        pty: Size | None = None,
        tag: str | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[Process]:
        """Start a process and attach to it.

        ``command`` as a string is a line for a login shell; as a sequence it is the exact argument vector and no shell
        sees it. ``stdin`` False is /dev/null. With ``pty`` the process gets a terminal of that size. After ``timeout``
        seconds the agent kills the process.

        Leaving the context detaches. Raises BadRequest if the program or ``cwd`` does not exist, Unauthorized for an
        unknown ``user``.
        """
        argv = [*SHELL, command] if isinstance(command, str) else list(command)
        process: dict[str, Any] = {"cmd": argv[0], "args": argv[1:], "envs": dict(env or {})}
        if cwd is not None:
            process["cwd"] = cwd
        body: dict[str, Any] = {"process": process, "stdin": stdin}
        if pty is not None:
            body["pty"] = {"size": pty._asdict()}
        if tag is not None:
            body["tag"] = tag
        async with self._rpc.stream("process.Process/Start", body, _Message, user=user, lifetime=timeout) as events:
            yield await self._attach(events, pty is not None)

    @asynccontextmanager
    async def attach(self, pid: int, *, pty: bool = False) -> AsyncIterator[Process]:
        """Attach to a running process; its earlier output is gone. Raises NotFound."""
        body = {"process": {"pid": pid}}
        async with self._rpc.stream("process.Process/Connect", body, _Message) as events:
            yield await self._attach(events, pty)

    async def _attach(self, events: AsyncIterator[_Message], pty: bool) -> Process:
        async for message in events:
            if message.event.start is not None:
                return Process(self._rpc, message.event.start.pid, events, pty)
            if message.event.keepalive is None:
                break
        raise OperationFailed("the agent did not say which process it started")

    async def run(
        self,
        command: str | Sequence[str],
        *,
        user: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        max_output: int = MAX_OUTPUT,
    ) -> Result:
        """Run to the end and collect the output. A non-zero exit is a result, not an error.

        More than ``max_output`` bytes kill the process and raise OperationFailed.
        """
        stdout, stderr = bytearray(), bytearray()
        async with self.start(command, user=user, cwd=cwd, env=env, timeout=timeout) as process:
            async for stream, data in process:
                (stderr if stream == "stderr" else stdout).extend(data)
                if len(stdout) + len(stderr) > max_output:
                    await process.signal(9)
                    raise OperationFailed(
                        f"process {process.pid} wrote more than {max_output} bytes and was killed",
                        remedy="read its output as a stream",
                    )
        assert process.exit is not None
        return Result(bytes(stdout), bytes(stderr), process.exit)

    async def list(self) -> list[Listed]:
        """Live processes that were started through the agent."""
        return (await self._rpc.unary("process.Process/List", {}, _List)).processes

    async def signal(self, pid: int, number: Literal[9, 15]) -> bool:
        """Send SIGTERM (15) or SIGKILL (9). False if there is no such process."""
        return await send_signal(self._rpc, pid, number)


async def send_signal(rpc: Rpc, pid: int, number: Literal[9, 15]) -> bool:
    body = {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL" if number == 9 else "SIGNAL_SIGTERM"}
    try:
        await rpc.unary("process.Process/SendSignal", body, dict[str, Any])
    except NotFound:
        return False
    return True


_SIGNALS = {
    "hangup": signals.SIGHUP,
    "interrupt": signals.SIGINT,
    "quit": signals.SIGQUIT,
    "illegal instruction": signals.SIGILL,
    "trace/breakpoint trap": signals.SIGTRAP,
    "aborted": signals.SIGABRT,
    "bus error": signals.SIGBUS,
    "floating point exception": signals.SIGFPE,
    "killed": signals.SIGKILL,
    "user defined signal 1": signals.SIGUSR1,
    "segmentation fault": signals.SIGSEGV,
    "user defined signal 2": signals.SIGUSR2,
    "broken pipe": signals.SIGPIPE,
    "alarm clock": signals.SIGALRM,
    "terminated": signals.SIGTERM,
    "stack fault": signals.Signals(16),
    "virtual timer expired": signals.SIGVTALRM,
    "CPU time limit exceeded": signals.SIGXCPU,
    "file size limit exceeded": signals.SIGXFSZ,
    "profiling timer expired": signals.SIGPROF,
    "I/O possible": signals.SIGIO,
    "power failure": signals.SIGPWR,
    "bad system call": signals.SIGSYS,
}
"""Names of signals in the ``status`` of an end event: ``signal: killed``, ``signal: aborted (core dumped)``."""


def _exit(end: _End) -> Exit:
    if end.exited or not end.status.startswith("signal: "):
        if not 0 <= end.exit_code <= 255:
            raise OperationFailed(f"the agent cannot tell how the process ended: {printable(end.status)!r}")
        return Exit(end.exit_code, None)
    name = end.status.removeprefix("signal: ").removesuffix(" (core dumped)")
    if name in _SIGNALS:
        return Exit(-1, int(_SIGNALS[name]))
    number = re.fullmatch(r"(?:signal )?([0-9]{1,2})", name)
    if number is None or not 1 <= int(number[1]) <= 64:
        raise OperationFailed(f"the agent names a signal that does not exist: {printable(name)!r}")
    return Exit(-1, int(number[1]))
