"""Starting, watching and adopting real processes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from pathlib import Path

import pytest

from aenv.errors import VmmFailed
from aenv.vmm.process import MARK, Account, Identity, Launch, Process, boot_id, find, start_time


def launch(directory: Path, script: str, **options: object) -> Launch:
    return Launch(arguments=("/bin/sh", "-c", script), directory=directory, **options)  # type: ignore[arg-type]


async def run(directory: Path, script: str, **options: object) -> tuple[int | None, str, str]:
    process = await Process.start(launch(directory, script, **options))
    code = await asyncio.wait_for(process.wait(), 10)
    result = code, process.console(65536), process.messages(65536)
    process.close()
    return result


async def test_output_and_exit_status(tmp_path: Path) -> None:
    assert await run(tmp_path, "echo out; echo err >&2; exit 7") == (7, "out\n", "err\n")


async def test_death_by_a_signal(tmp_path: Path) -> None:
    assert (await run(tmp_path, "kill -TERM $$"))[0] == -signal.SIGTERM


async def test_a_program_that_does_not_exist_says_so(tmp_path: Path) -> None:
    process = await Process.start(Launch(arguments=(str(tmp_path / "nothing"),), directory=tmp_path))
    assert await process.wait() == 127
    assert "nothing" in process.messages()
    process.close()


async def test_what_a_process_inherits(tmp_path: Path) -> None:
    os.environ["SECRET_OF_THE_PARENT"] = "x"
    try:
        _, environment, _ = await run(tmp_path, "env; pwd; cat; ls /proc/self/fd | wc -l")
    finally:
        del os.environ["SECRET_OF_THE_PARENT"]
    assert "SECRET" not in environment
    assert f"{MARK}={tmp_path}\n" in environment
    assert environment.splitlines()[-2:] == ["/", "4"], "in the root, standard input empty, nothing open but 0, 1, 2"


async def test_it_is_unprivileged_and_limited(tmp_path: Path) -> None:
    script = (
        # Set from outside, a moment after the start.
        "until [ $(cat /proc/self/oom_score_adj) = 500 ]; do :; done; "
        "id -u; id -G; ulimit -c; ulimit -Hf; umask; ps -o sid= -p $$; echo $$"
    )
    code, out, _ = await run(tmp_path, script, account=Account(61380, 61381, (61382,)), file_limit=1 << 20)
    lines = out.split()
    assert code == 0
    assert lines[:6] == ["61380", "61381", "61382", "0", "2048", "0077"]
    assert lines[6] == lines[7]


async def test_a_file_cannot_grow_beyond_the_limit(tmp_path: Path) -> None:
    code, _, errors = await run(tmp_path, f"head -c 5000 /dev/zero > {tmp_path}/file", file_limit=4096)
    assert code == 1
    assert "File too large" in errors, "an error and not a signal"
    assert (tmp_path / "file").stat().st_size == 4096


async def test_many_at_once(tmp_path: Path) -> None:
    results = await asyncio.gather(*(run(tmp_path, f"echo {number}; exit {number}") for number in range(40)))
    assert results == [(number, f"{number}\n", "") for number in range(40)]


async def test_kill(tmp_path: Path) -> None:
    process = await Process.start(launch(tmp_path, "trap '' TERM INT HUP; exec sleep 100"))
    assert set(await asyncio.gather(process.kill(), process.kill())) == {-signal.SIGKILL}
    assert process.exited
    assert await process.kill() == -signal.SIGKILL
    process.close()


async def test_a_process_that_was_let_go_runs_on_and_is_adopted(tmp_path: Path) -> None:
    first = await Process.start(launch(tmp_path, "echo first; read line < /dev/null; exec sleep 100"))
    while first.console(100) != "first\n":
        await asyncio.sleep(0.01)
    first.close()
    gc.collect()
    # Starting another one must not reap it behind our back either.
    await run(tmp_path, "true")
    second = Process.adopt(first.identity)
    assert second is not None
    assert second.console(100) == "first\n"
    assert await second.kill() == -signal.SIGKILL
    assert Process.adopt(first.identity) is None
    second.close()


async def test_only_the_very_process_is_adopted(tmp_path: Path) -> None:
    process = await Process.start(launch(tmp_path, "exec sleep 100"))
    it = process.identity
    assert Process.adopt(Identity(it.pid, it.start_time + 1, it.boot_id)) is None
    assert Process.adopt(Identity(it.pid, it.start_time, "another boot")) is None
    assert Process.adopt(Identity(2**22 + 1, it.start_time, it.boot_id)) is None
    assert start_time(it.pid) == it.start_time
    await process.kill()
    assert start_time(it.pid) is None
    process.close()


async def test_one_that_is_dead_but_not_reaped_is_reaped_and_not_adopted(tmp_path: Path) -> None:
    process = await Process.start(launch(tmp_path, "exec sleep 100"))
    process.close()
    os.kill(process.identity.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.identity.pid, os.WEXITED | os.WNOWAIT)
    assert Process.adopt(process.identity) is None
    assert start_time(process.identity.pid) is None


async def test_find_knows_every_process_by_its_directory(tmp_path: Path) -> None:
    inner = tmp_path / "machines" / "one"
    process = await Process.start(launch(inner, "exec sleep 100"))
    assert find(tmp_path) == find(tmp_path / "machines") == find(inner) == [(process.identity, inner)]
    assert find(tmp_path / "machine") == find(inner / "deeper") == []
    assert process.identity.boot_id == boot_id()
    await process.kill()
    assert find(tmp_path) == []
    process.close()


async def test_a_start_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    for delay in (0, 0.0005, 0.001, 0.002, 0.004, 0.008):
        starting = asyncio.create_task(Process.start(launch(tmp_path, "exec sleep 100")))
        await asyncio.sleep(delay)
        if starting.cancel():
            with pytest.raises(asyncio.CancelledError):
                await starting
        else:
            process = await starting
            await process.kill()
            process.close()
        assert find(tmp_path) == []


async def test_a_namespace_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(VmmFailed, match="nowhere"):
        await Process.start(launch(tmp_path, "true", netns=tmp_path / "nowhere"))
