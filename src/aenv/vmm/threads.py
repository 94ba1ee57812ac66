"""Blocking work, each piece in a thread of its own that ends with it.

A pooled thread would keep what it became: in a network namespace, or the tracer of a process. And a pool may be full of
threads that wait for a file system.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


async def in_thread(work: Callable[[], _Result]) -> _Result:
    """What ``work`` returns or raises. Whoever is cancelled while waiting leaves it running."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_Result] = loop.create_future()

    def finish(set_outcome: Callable[[], None]) -> None:
        if not done.done():
            set_outcome()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            failure = error
            loop.call_soon_threadsafe(finish, lambda: done.set_exception(failure))
        else:
            loop.call_soon_threadsafe(finish, lambda: done.set_result(result))

    threading.Thread(target=run, name="vmm", daemon=True).start()
    return await done


async def undivided(work: Callable[[], _Result], undo: Callable[[_Result], object] | None = None) -> _Result:
    """The same, but a cancellation takes effect only when ``work`` has come to its end: nothing it uses is taken away
    from under it. ``undo`` then gets the result that nobody else will get."""
    task = asyncio.ensure_future(in_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):  # once is enough
                await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None and undo is not None:
            undo(task.result())
        raise
