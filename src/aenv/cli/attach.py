"""This process's standard streams joined to a process in a sandbox, with its exit status as the result."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from aenv.cli import streams, terminal
from aenv.client import ConnectionLost, Process, Sandbox, Size
from aenv.client.processes import LOGIN, SCRIPT
from aenv.errors import AenvError, NotFound

_GRACE = 2.0
_KEEP_ALIVE = 300
_LEAVING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DESCRIPTORS = {"stdout": 1, "stderr": 2, "pty": 1}

Signals = asyncio.Queue[int]


class Left(Exception):
    """The user, or a signal, wants out before the process has ended. ``code`` is the exit status to leave with."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


async def pipes(
    sandbox: Sandbox,
    command: str | Sequence[str],
    *,
    stdin: bool,
    user: str | None = None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
) -> int:
    """Run ``command`` with stdin, stdout and stderr each on its own.

    SIGINT, SIGTERM and SIGHUP ask the process to end (SIGTERM), a second one kills it, a third gives up waiting. When
    nobody reads our output any more the process is ended too, as a local one would be.
    """
    async with _lost(sandbox), sandbox.processes.start(command, user=user, cwd=cwd, env=env, stdin=stdin) as process:
        feeding = [_feed(process)] if stdin else []
        with _signals(*_LEAVING) as received:
            async with _beside(*feeding, _end_on_signals(process, received)):
                try:
                    async for stream, data in process:
                        await streams.write(_DESCRIPTORS[stream], data)
                except BrokenPipeError:
                    await _end(process)
                    raise
    assert process.exit is not None
    return process.exit.code


async def shell(
    sandbox: Sandbox,
    *,
    user: str | None = None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
) -> int:
    """A login shell: in a terminal if we have one, else it reads its commands from our standard input. The sandbox
    does not end while it is open."""
    if terminal.interactive():
        return await tty(sandbox, LOGIN, user=user, cwd=cwd, env=env, keep_alive=True)
    async with _beside(_keep_alive(sandbox)):
        return await pipes(sandbox, SCRIPT, stdin=True, user=user, cwd=cwd, env=env)


async def tty(
    sandbox: Sandbox,
    command: str | Sequence[str],
    *,
    user: str | None = None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    keep_alive: bool = False,
) -> int:
    """Run ``command`` in a terminal of its own that is shown in ours; ``~.`` at the start of a line leaves.

    Leaving it in any way but the end of the process kills the process. ``keep_alive``: the sandbox does not end
    while this runs.
    """
    shown = terminal.size()
    variables = {**terminal.environment(os.environ), **(env or {})}
    async with (
        _lost(sandbox),
        sandbox.processes.start(command, user=user, cwd=cwd, env=variables, stdin=True, pty=shown) as process,
    ):
        keeping = [_keep_alive(sandbox)] if keep_alive else []
        try:
            with (
                _signals(*_LEAVING) as received,
                _signals(signal.SIGWINCH) as resized,
                terminal.raw(sys.stdin.fileno()),
            ):
                async with _beside(
                    _type(process), _follow_size(process, shown, resized), _leave_on_signals(received), *keeping
                ):
                    async for stream, data in process:
                        await streams.write(_DESCRIPTORS[stream], data)
        finally:
            if process.exit is None:
                await _kill(process)
    assert process.exit is not None
    return process.exit.code


@asynccontextmanager
async def _lost(sandbox: Sandbox) -> AsyncIterator[None]:
    """Say what happened when the connection breaks: most often the sandbox ended."""
    try:
        yield
    except ConnectionLost:
        try:
            await sandbox.info()
        except NotFound as ended:
            raise NotFound(f"the sandbox ended while the command ran: {ended}") from None
        except AenvError:
            pass
        raise


@asynccontextmanager
async def _beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Do ``work`` while the body runs and no longer; the first failure of any ends all, and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
            yield
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _feed(process: Process) -> None:
    """Standard input to the process. What it does not want to read is not an error, as with a pipe."""
    try:
        async for chunk in streams.chunks(sys.stdin.fileno()):
            await process.send(chunk)
        await process.close_stdin()
    except NotFound:
        pass
    except AenvError as error:
        if "Broken pipe" not in str(error):
            # Its input would end in the middle, and it could not know.
            await _kill(process)
            raise


async def _type(process: Process) -> None:
    escape = terminal.Escape()
    with suppress(NotFound):
        async for chunk in streams.chunks(sys.stdin.fileno()):
            keys, out = escape.feed(chunk)
            if keys:
                await process.send(keys)
            if out:
                raise Left(128 + signal.SIGHUP)
        raise Left(128 + signal.SIGHUP)


async def _follow_size(process: Process, shown: Size, resized: Signals) -> None:
    while True:
        size = terminal.size()
        if size != shown:
            with suppress(AenvError):  # a wrong size is no reason to lose a shell
                await process.resize(size)
            shown = size
        await resized.get()


async def _keep_alive(sandbox: Sandbox) -> None:
    """Move the end of the sandbox ahead of us. A server that is away, or fails, for a moment is asked again."""
    while True:
        with suppress(AenvError):
            await sandbox.keep_alive(_KEEP_ALIVE)
        await asyncio.sleep(_KEEP_ALIVE / 5)


async def _end_on_signals(process: Process, received: Signals) -> None:
    await received.get()
    await process.signal(15)
    await received.get()
    await process.signal(9)
    raise Left(128 + await received.get())


async def _leave_on_signals(received: Signals) -> None:
    raise Left(128 + await received.get())


@contextmanager
def _signals(*numbers: signal.Signals) -> Iterator[Signals]:
    """Collect signals from now on. Not a task's work: it could begin only after the first output was shown."""
    loop = asyncio.get_running_loop()
    received: Signals = asyncio.Queue()
    for number in numbers:
        loop.add_signal_handler(number, received.put_nowait, number)
    try:
        yield received
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _end(process: Process) -> None:
    """SIGTERM, then SIGKILL if it still runs after a moment."""
    with suppress(AenvError, TimeoutError):
        async with asyncio.timeout(_GRACE):
            if await process.signal(15):
                await process.wait()
    if process.exit is None:
        await _kill(process)


async def _kill(process: Process) -> None:
    with suppress(AenvError, TimeoutError):
        async with asyncio.timeout(_GRACE):
            await process.signal(9)
