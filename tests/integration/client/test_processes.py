"""Processes through the client, with the real agent at the other end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aenv.client import Client, ConnectionLost, Credentials, Exit, Sandbox, Size
from aenv.client.processes import LOGIN, SHELL
from aenv.errors import BadRequest, NotFound, OperationFailed, Unauthorized
from tests.contract import KEY, Contract


async def test_output_and_exit_status(sandbox: Sandbox) -> None:
    result = await sandbox.processes.run("echo out; echo err >&2; exit 7")
    assert result == (b"out\n", b"err\n", Exit(7, None))
    assert result.exit.code == 7


async def test_arguments_are_exact(sandbox: Sandbox) -> None:
    words = ["two words", "it's", '"', "$HOME", "`id`", "*", "", "ü\n", "--", "-n"]
    result = await sandbox.processes.run(["printf", "%s\\0", *words])
    assert result.stdout.decode().split("\0")[:-1] == words


async def test_a_string_is_a_line_for_a_login_shell(sandbox: Sandbox) -> None:
    result = await sandbox.processes.run("echo $((6*7)) | tr 4 5; shopt -q login_shell && echo login")
    assert result.stdout == b"52\nlogin\n"


async def test_a_shell_is_found_without_bash(sandbox: Sandbox, tmp_path: Path) -> None:
    script = SHELL[2].replace("/bin/bash", "/bin/no-bash")
    result = await sandbox.processes.run([SHELL[0], SHELL[1], script, "sh", "echo $0 works"])
    assert result.stdout == b"/bin/sh works\n"


@pytest.mark.parametrize("number", [1, 2, 3, 6, 9, 11, 13, 15, 24, 31, 34])
async def test_death_by_signal(sandbox: Sandbox, number: int) -> None:
    result = await sandbox.processes.run(["sh", "-c", f"ulimit -c 0; kill -{number} $$"])
    assert result.exit == Exit(-1, number)
    assert result.exit.code == 128 + number


async def test_environment_directory_and_user(sandbox: Sandbox, tmp_path: Path) -> None:
    result = await sandbox.processes.run(
        ["sh", "-c", 'echo "$A|$(pwd)|$(id -un)"'], env={"A": "x y"}, cwd=str(tmp_path), user="root"
    )
    assert result.stdout.decode() == f"x y|{tmp_path}|root\n"


async def test_what_cannot_be_started(sandbox: Sandbox) -> None:
    with pytest.raises(BadRequest, match="/nonexistent"):
        await sandbox.processes.run(["true"], cwd="/nonexistent")
    with pytest.raises(BadRequest, match="no-such-program"):
        await sandbox.processes.run(["no-such-program"])
    with pytest.raises(Unauthorized, match="invalid username: 'nobody-here'"):
        await sandbox.processes.run(["true"], user="nobody-here")
    with pytest.raises(NotFound):
        async with sandbox.processes.attach(2**30):
            pass


async def test_a_process_that_takes_too_long_is_killed(sandbox: Sandbox) -> None:
    with pytest.raises(OperationFailed):
        await sandbox.processes.run(["sleep", "1000.25"], timeout=0.2)
    async with asyncio.timeout(30):
        while any(process.config.args == ["1000.25"] for process in await sandbox.processes.list()):
            await asyncio.sleep(0.02)


async def test_more_output_than_wanted_kills_the_process(sandbox: Sandbox) -> None:
    with pytest.raises(OperationFailed, match=r"process \d+ wrote more than 100000 bytes and was killed"):
        await sandbox.processes.run(["yes"], max_output=100_000)


async def test_large_output_is_complete(sandbox: Sandbox) -> None:
    result = await sandbox.processes.run(["seq", "300000"])
    assert result.stdout == b"".join(b"%d\n" % number for number in range(1, 300_001))


async def test_standard_input_to_its_end(sandbox: Sandbox) -> None:
    sent = bytes(range(256)) * 4096
    async with sandbox.processes.start(["cat"], stdin=True) as process:

        async def feed() -> None:
            for start in range(0, len(sent), 50_000):
                await process.send(sent[start : start + 50_000])
            await process.close_stdin()

        feeding = asyncio.create_task(feed())
        received = b"".join([data async for _, data in process])
        await feeding
    assert received == sent
    assert process.exit == Exit(0, None)


async def test_without_standard_input_there_is_an_empty_one(sandbox: Sandbox) -> None:
    assert (await sandbox.processes.run(["cat"])).exit.code == 0


async def test_signals(sandbox: Sandbox) -> None:
    async with sandbox.processes.start(["sleep", "1000"]) as process:
        assert await process.signal(15)
        assert await process.wait() == Exit(-1, signal.SIGTERM)
        assert not await process.signal(9)


async def test_leaving_does_not_end_a_process_and_attaching_finds_it(sandbox: Sandbox) -> None:
    async with sandbox.processes.start(["sh", "-c", "read line; echo $line"], stdin=True, tag="mine") as first:
        pass
    (listed,) = [process for process in await sandbox.processes.list() if process.tag == "mine"]
    assert listed.pid == first.pid
    async with sandbox.processes.attach(listed.pid) as second:
        await second.send(b"hello\n")
        assert [output async for output in second] == [("stdout", b"hello\n")]
    assert second.exit == Exit(0, None)


async def test_a_terminal(sandbox: Sandbox) -> None:
    async with sandbox.processes.start(LOGIN, pty=Size(91, 17), stdin=True, env={"PS1": "$ "}) as process:
        shown = b""
        await process.send(b"stty size; tty\r")
        async for stream, data in process:
            assert stream == "pty"
            shown += data
            if b"17 91" in shown and process.exit is None and b"/dev/pts/" in shown:
                break
        await process.resize(Size(60, 20))
        await process.send(b"stty size; exit 3\r")
        async for _, data in process:
            shown += data
    assert b"20 60" in shown
    assert process.exit == Exit(3, None)


async def test_a_sandbox_that_ends_under_a_process(contract: Contract, sandbox: Sandbox) -> None:
    async with sandbox.processes.start(["sh", "-c", "echo on; sleep 1000"]) as process:
        with pytest.raises(ConnectionLost):
            async for output in process:
                assert output == ("stdout", b"on\n")
                contract.remove(sandbox.sandbox_id)


async def test_files_of_every_size(sandbox: Sandbox, tmp_path: Path) -> None:
    for size in (0, 1, 100_000, 5_000_000):
        content = (b"%08d" % size) * (size // 8 + 1)
        path = str(tmp_path / "new" / f"file {size} ü")
        written = await sandbox.files.write(path, content[:size])
        assert written.path == path
        assert await sandbox.files.read(path) == content[:size]


async def test_files_from_a_stream(sandbox: Sandbox, tmp_path: Path) -> None:
    async def blocks() -> AsyncIterator[bytes]:
        for number in range(100):
            yield b"%d\n" % number

    await sandbox.files.write(str(tmp_path / "file"), blocks())
    assert (tmp_path / "file").read_text() == "".join(f"{number}\n" for number in range(100))


async def test_files_that_cannot_be(sandbox: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=f"path '{tmp_path}/none' does not exist"):
        await sandbox.files.read(f"{tmp_path}/none")
    with pytest.raises(BadRequest):
        await sandbox.files.read(str(tmp_path))
    (tmp_path / "large").write_bytes(b"x" * 1001)
    with pytest.raises(OperationFailed, match="longer than 1000 bytes"):
        await sandbox.files.read(str(tmp_path / "large"), limit=1000)


async def test_the_agent_wants_the_token(contract: Contract, sandbox: Sandbox) -> None:
    contract.sandboxes[sandbox.sandbox_id].token = "another"
    async with Client(Credentials(contract.url, "the test", KEY, "the test")) as client:
        other = await client.attach(sandbox.sandbox_id)
        with pytest.raises(Unauthorized):
            await other.processes.run(["true"])
