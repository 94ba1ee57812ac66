"""The asynchronous Python SDK, unmodified, against a running node."""

from __future__ import annotations

import asyncio

import pytest
from e2b import AsyncSandbox, CommandExitException, TimeoutException


async def test_commands(async_sandbox: AsyncSandbox) -> None:
    result = await async_sandbox.commands.run("echo $FROM_CREATE; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code) == ("yes\n", "err\n", 0)
    with pytest.raises(CommandExitException) as failure:
        await async_sandbox.commands.run("exit 7")
    assert failure.value.exit_code == 7


async def test_many_commands_at_once(async_sandbox: AsyncSandbox) -> None:
    results = await asyncio.gather(*(async_sandbox.commands.run(f"echo {number}") for number in range(20)))
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(20)]


async def test_background_and_stdin(async_sandbox: AsyncSandbox) -> None:
    first: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_stdout(data: str) -> None:
        if not first.done():
            first.set_result(data)

    handle = await async_sandbox.commands.run("echo ready; cat", background=True, stdin=True, on_stdout=on_stdout)
    assert await asyncio.wait_for(first, 20) == "ready\n"
    await async_sandbox.commands.send_stdin(handle.pid, "text\n")
    if hasattr(async_sandbox.commands, "close_stdin"):
        await async_sandbox.commands.close_stdin(handle.pid)
        assert (await handle.wait()).stdout == "ready\ntext\n"
    else:
        assert await handle.kill() is True


async def test_timeout(async_sandbox: AsyncSandbox) -> None:
    with pytest.raises(TimeoutException):
        await async_sandbox.commands.run("sleep 30", timeout=2)


async def test_pty(async_sandbox: AsyncSandbox) -> None:
    from e2b import PtySize

    output = b""

    def on_data(data: bytes) -> None:
        nonlocal output
        output += data

    terminal = await async_sandbox.pty.create(PtySize(rows=20, cols=90), on_data=on_data)
    await async_sandbox.pty.send_stdin(terminal.pid, b"tput cols; exit\n")
    await terminal.wait()
    assert b"90" in output


async def test_files(async_sandbox: AsyncSandbox) -> None:
    await async_sandbox.files.write("/tmp/async/a.txt", "text")
    assert await async_sandbox.files.read("/tmp/async/a.txt") == "text"
    assert [entry.name for entry in await async_sandbox.files.list("/tmp/async")] == ["a.txt"]
    await async_sandbox.files.rename("/tmp/async/a.txt", "/tmp/async/b.txt")
    assert await async_sandbox.files.exists("/tmp/async/a.txt") is False
    await async_sandbox.files.remove("/tmp/async")
    assert await async_sandbox.files.exists("/tmp/async/b.txt") is False


async def test_list_and_kill(async_sandbox: AsyncSandbox) -> None:
    found = await AsyncSandbox.list().next_items()
    assert async_sandbox.sandbox_id in [item.sandbox_id for item in found]
    short = await AsyncSandbox.create(timeout=60)
    assert await short.kill() is True
    assert await short.is_running() is False
