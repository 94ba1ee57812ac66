"""Blocking work in threads, and what becomes of it when nobody waits any more."""

from __future__ import annotations

import asyncio
import threading

import pytest

from aenv.vmm.threads import in_thread, undivided


async def test_results_and_errors_come_back() -> None:
    assert await in_thread(lambda: 5) == 5
    assert await undivided(threading.get_ident) != threading.get_ident()
    for run in (in_thread, undivided):
        with pytest.raises(ZeroDivisionError):
            await run(lambda: 1 // 0)


async def test_work_is_not_divided() -> None:
    begun, go_on = threading.Event(), threading.Event()
    undone: list[int] = []

    def work() -> int:
        begun.set()
        go_on.wait(10)
        return 7

    task = asyncio.create_task(undivided(work, undone.append))
    await in_thread(begun.wait)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert undone == [7]


async def test_an_error_that_nobody_gets_is_no_result() -> None:
    begun, go_on = threading.Event(), threading.Event()
    undone: list[int] = []

    def work() -> int:
        begun.set()
        go_on.wait(10)
        raise ValueError

    task = asyncio.create_task(undivided(work, undone.append))
    await in_thread(begun.wait)
    task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert undone == []


async def test_an_abandoned_thread_disturbs_nobody() -> None:
    go_on = threading.Event()
    task = asyncio.create_task(in_thread(lambda: go_on.wait(10)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    await in_thread(lambda: None)
