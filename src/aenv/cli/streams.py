"""File descriptors of this process in an event loop, without threads.

Standard input and output may be terminals, pipes, sockets or files, and are shared with other processes, so they stay
in blocking mode: each is waited for first, and then touched for no more than what cannot block.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import select
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

_READ = 1 << 20
_PIECE = select.PIPE_BUF
"""A pipe that is ready takes at least this many bytes at once."""


async def chunks(descriptor: int) -> AsyncIterator[bytes]:
    """What arrives on ``descriptor``, until its end. As much at a time as there is: each piece may cost its reader a
    journey to a guest."""
    loop = asyncio.get_running_loop()
    with suppress(OSError):  # not a pipe, or a limit of this user
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _READ)
    while True:
        await _wait(descriptor, loop.add_reader, loop.remove_reader)
        try:
            data = os.read(descriptor, _READ)
        except BlockingIOError:
            continue
        except OSError as error:
            if error.errno == errno.EIO:  # the terminal was hung up
                return
            raise
        if not data:
            return
        yield data


async def write(descriptor: int, data: bytes) -> None:
    """Write all of ``data``. Raises BrokenPipeError when nobody reads any more."""
    loop = asyncio.get_running_loop()
    rest = memoryview(data)
    piece = len(rest) if stat.S_ISREG(os.fstat(descriptor).st_mode) else _PIECE
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    while rest:
        if not poll.poll(0):
            await _wait(descriptor, loop.add_writer, loop.remove_writer)
        try:
            rest = rest[os.write(descriptor, rest[:piece]) :]
        except BlockingIOError:
            await asyncio.sleep(0)


async def _wait(descriptor: int, add: Callable[..., None], remove: Callable[[int], bool]) -> None:
    ready = asyncio.Event()
    try:
        add(descriptor, ready.set)
    except PermissionError:
        return  # a file or /dev/null: always ready
    try:
        await ready.wait()
    finally:
        remove(descriptor)
