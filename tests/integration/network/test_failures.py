"""Whatever fails, and whenever the process is killed, nothing of a slot is left."""

from __future__ import annotations

import asyncio
import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aenv.config import Settings
from aenv.errors import OperationFailed
from aenv.network import Network, Slot, host, links, namespace
from aenv.network.nft import Nftables
from tests.integration.network.lab import (
    HOST,
    OUTSIDE,
    guest,
    reap,
    traces,
)

STEPS: list[tuple[object, str]] = [
    (host, "inner_settings"),
    (links, "claim"),
    (links, "configure"),
    (links, "make_tap"),
    (links, "furnish"),
    (Nftables, "run"),
    (namespace, "pin"),
    (namespace, "_mount"),
]


@pytest.mark.parametrize(("where", "name"), STEPS, ids=[name for _, name in STEPS])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_create_that_fails_leaves_nothing(
    network: Network, settings: Settings, monkeypatch: pytest.MonkeyPatch, where: object, name: str, after: bool
) -> None:
    original = getattr(where, name)

    def fail(*arguments: object) -> object:
        if after:
            original(*arguments)
        raise OSError(errno.ENOSPC, "injected")

    before = traces(settings.run)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, fail)
        with pytest.raises(OperationFailed, match=r"cannot create a network slot.*injected"):
            await network.create()
    if (name, after) == ("claim", True):
        await network.reap([])  # nothing to cut by hand: it was not known to be there, and went with its namespace
    assert traces(settings.run) == before
    slot = await network.create()
    await network.destroy(slot)


async def test_a_cancelled_create_is_undone(settings: Settings) -> None:
    settings.run.mkdir()
    before = traces(settings.run)
    for delay in range(12):
        network = Network(settings)
        await network.open()
        task = asyncio.create_task(network.create())
        await asyncio.wait([task], timeout=delay * 0.0004)
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(result, Slot):
            await network.destroy(result)
        await network.close()
        assert traces(settings.run) == before, delay


async def test_a_thread_that_cannot_come_back_leads_nothing_astray(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = namespace._setns
    calls = 0

    def fail(fd: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:  # entering is allowed, coming back is not
            raise OSError(errno.ENOMEM, "injected")
        original(fd)

    with monkeypatch.context() as patch:
        patch.setattr(namespace, "_setns", fail)
        with pytest.raises(OperationFailed, match="injected"):
            await network.create()
        with pytest.raises(OperationFailed, match="injected"):
            await network.create()
    await network.reap([])
    slots = await asyncio.gather(*(network.create() for _ in range(12)))
    with guest(network, slots[-1]) as vm:
        assert vm.ask(OUTSIDE) == f"{HOST} 0"
    await asyncio.gather(*map(network.destroy, slots))


async def test_a_lack_of_file_descriptors_is_an_error_and_not_the_end(network: Network) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    failures = 0
    made: list[Slot] = []
    for spare in range(12):
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, hard))
        try:
            made.append(await network.create())
        except OperationFailed as error:
            assert "Too many open files" in str(error)
            failures += 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert failures > 2
    await asyncio.gather(*map(network.destroy, made))


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from aenv.config import Settings
from aenv.network import Network, namespace, links
from aenv.network.nft import Nftables
from aenv.network.rtnetlink import Rtnetlink

countdown = int(sys.argv[1])

def instrument(owner, name):
    original = getattr(owner, name)
    def step(*arguments, **options):
        global countdown
        countdown -= 1
        if countdown == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)
    setattr(owner, name, step)

class Libc:
    def __init__(self, library):
        for name in ("setns", "unshare", "mount", "umount2"):
            setattr(self, name, getattr(library, name))
            instrument(self, name)

namespace._libc = Libc(namespace._libc)
for owner, names in ((Rtnetlink, "run"), (Nftables, "run"), (links, "make_tap"), (Path, "unlink"), (os, "open close")):
    for name in names.split():
        instrument(owner, name)

async def main():
    network = Network(Settings(home=Path(sys.argv[2]), runtime=Path(sys.argv[3])))
    await network.open()
    first = await network.create()
    second = await network.create()
    await network.destroy(first)
    print("done", flush=True)

asyncio.run(main())
"""


async def test_kill_9_between_any_two_steps_leaves_only_what_reap_removes(settings: Settings) -> None:
    settings.run.mkdir()
    before = traces(settings.run)
    finished = False
    left = 0
    for step in range(1, 1000):
        arguments = [sys.executable, "-c", KILLED, str(step), str(settings.home), str(settings.run)]
        done = await asyncio.to_thread(subprocess.run, arguments, capture_output=True, text=True)
        finished = done.returncode == 0
        assert finished or done.returncode == -signal.SIGKILL, done.stderr
        left += len(await reap(settings))
        assert traces(settings.run) == before, f"killed at step {step}"
        if finished:
            break
    assert finished and step > 40
    assert left > 10
