"""How long a saved machine takes to come back, and a running one to be saved.

    sudo python benchmarks/restore.py [--count 50] [--memory 256 512] [--raw samples.json]

A guest with the template ``minimal`` and the product's agent is booted and saved once for each size of memory; then a
VMM is prepared, restored and saved, over and over. The steps of a restore are timed inside it. "guest answers" is a new
TCP connection to the agent and ``GET /health`` on it; the floor beside it is the same in a guest that has run for a
while. Under TCG nearly all of the difference is the translation of the code that the guest runs for the first time. The
floor of everything else is the answer of QEMU's monitor to a question that costs it nothing. Not measured: many
restores at once, images that are not in the page cache, the copy of the memory, hardware virtualization on a machine
without it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.agent_guest import Guest, Workshop

from aenv.network import namespace
from aenv.vmm.qemu_prepared import QemuPrepared
from aenv.vmm.qmp import Message

Samples = dict[str, list[float]]
Result = TypeVar("Result")
SETTLE = 0.5  # seconds that a guest runs before it is saved again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--memory", type=int, nargs="+", default=[256, 512], help="MiB")
    parser.add_argument("--raw", type=Path, help="where to write the raw samples, in milliseconds")
    arguments = parser.parse_args()
    everything: dict[int, Samples] = {}
    for memory in arguments.memory:
        with tempfile.TemporaryDirectory(prefix="aenv-bench-") as directory, namespace.fresh():
            load = os.getloadavg()[0]
            everything[memory] = asyncio.run(measure(Path(directory), memory, arguments.count))
        report(memory, everything[memory], load)
    if arguments.raw is not None:
        arguments.raw.write_text(json.dumps(everything))


async def measure(root: Path, memory: int, count: int) -> Samples:
    samples: Samples = {}

    async def timed(name: str, work: Callable[[], Awaitable[Result]]) -> Result:
        start = time.perf_counter()
        result = await work()
        samples.setdefault(name, []).append(1000 * (time.perf_counter() - start))
        return result

    async with Workshop.open(root) as workshop:
        guest = await workshop.boot(memory)
        await guest.run("sync; echo 3 > /proc/sys/vm/drop_caches")
        await asyncio.sleep(3)  # free pages are reported
        await guest.machine.pause()
        snapshot = await workshop.snapshot(guest)
        await workshop.clear()
        slot = await workshop.slot()
        for _ in range(count):
            prepared = await timed("prepare: spawn to ready", lambda: workshop.prepare(snapshot.saved.machine, slot))
            config = workshop.configuration(snapshot)
            watch(prepared, samples)
            start = time.perf_counter()
            machine = await timed("restore, all of it", lambda: prepared.restore(config, run=True))  # noqa: B023
            guest = Guest(machine, workshop.network, slot, config.disks, snapshot.memory)
            await timed("guest answers for the first time", guest.healthy)
            samples.setdefault("restore begins to guest answers", []).append(1000 * (time.perf_counter() - start))
            await asyncio.sleep(SETTLE)
            for _ in range(5):
                await timed("floor: a guest that runs answers", guest.healthy)
            qmp = await machine.connect(1)
            for _ in range(5):
                await timed("floor: the monitor answers", lambda: qmp.execute("query-name"))  # noqa: B023
            start = time.perf_counter()
            await timed("pause", machine.pause)
            state = workshop.directory() / "state"
            await timed("save", lambda: machine.save(state))  # noqa: B023
            samples.setdefault("pause begins to state written", []).append(1000 * (time.perf_counter() - start))
            await timed("resume", machine.resume)
            await machine.kill()
            await machine.close()
    return samples


def watch(prepared: QemuPrepared, samples: Samples) -> None:
    """Time the steps of a restore; from where commands are sent together on, by the clock of QEMU's events."""
    qmp = prepared._qmp
    assert qmp is not None
    bind, until_loaded, take_event = prepared._bind, prepared._until_loaded, prepared.take_event
    at = {"begin": time.time()}

    def step(name: str, begin: str, end: str) -> None:
        samples.setdefault(f"  {name}", []).append(1000 * (at[end] - at[begin]))

    async def timed_bind(*arguments: Any) -> Any:
        at["opened"] = time.time()
        result = await bind(*arguments)
        at["mapped"] = time.time()
        return result

    def timed_event(name: str, message: Message) -> None:
        if name == "MIGRATION":
            stamp = message["timestamp"]
            at[message["data"]["status"]] = stamp["seconds"] + stamp["microseconds"] / 1e6
        take_event(name, message)

    async def timed_until_loaded() -> None:
        await until_loaded()
        step("files opened and checked", "begin", "opened")
        step("memory mapped", "opened", "mapped")
        step("disks attached", "mapped", "setup")
        step("state loaded", "setup", "completed")

    for owner, name, value in (
        (prepared, "_bind", timed_bind),
        (prepared, "_until_loaded", timed_until_loaded),
        (qmp, "_on_event", timed_event),
    ):
        setattr(owner, name, value)


def report(memory: int, samples: Samples, load: float) -> None:
    print(f"{memory} MiB, {platform.platform()}, {os.cpu_count()} CPUs, load {load:.1f} before")
    print(f"{'':40} {'N':>4} {'p50':>8} {'p95':>8} {'p99':>8} {'max':>8}  ms")
    for name, values in samples.items():
        values = sorted(values)
        at = [values[min(len(values) - 1, int(len(values) * part))] for part in (0.5, 0.95, 0.99)]
        print(f"{name:40} {len(values):4} {at[0]:8.2f} {at[1]:8.2f} {at[2]:8.2f} {values[-1]:8.2f}")


if __name__ == "__main__":
    main()
