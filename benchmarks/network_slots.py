"""How long network slots take to make and to remove, one after another and several at once.

    sudo python benchmarks/network_slots.py [--count 200] [--concurrency 16] [--raw samples.json]

It runs in a network namespace of its own, so it neither sees nor touches the machine's links. The floor beside each
figure is the bare kernel doing the two things that cannot be left out: a new namespace with a veth pair into it, and
the disappearance of that pair once the namespace is let go. Not measured: the first packet, and a machine with
thousands of slots.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from aenv.config import Settings
from aenv.network import Network, Slot, namespace, rtnetlink
from aenv.network.rtnetlink import End, Rtnetlink

Samples = dict[str, list[float]]


def report(samples: Samples) -> None:
    for name, values in samples.items():
        ordered = sorted(values)
        cells = [
            f"{label} {ordered[min(len(ordered) - 1, int(len(ordered) * q))] * 1e3:8.2f}" for label, q in QUANTILES
        ]
        print(f"{name:32} N={len(values):4}  {'  '.join(cells)}  ms")


QUANTILES = (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0))


async def timed(samples: list[float], action: Callable[[], Awaitable[Slot | None]]) -> Slot | None:
    start = time.perf_counter()
    result = await action()
    samples.append(time.perf_counter() - start)
    return result


def floor(count: int, samples: Samples) -> None:
    create, destroy = samples.setdefault("floor create", []), samples.setdefault("floor destroy", [])
    with Rtnetlink() as host:
        for _ in range(count):
            start = time.perf_counter()
            with namespace.fresh() as fd:
                near, far = End("floor", "02:00:00:00:00:01", 1500), End("far", "02:00:00:00:00:02", 1500)
                host.run(rtnetlink.add_pair(near, 1, far, fd))
                create.append(time.perf_counter() - start)
            start = time.perf_counter()
            while host.ifindex("floor") is not None:
                time.sleep(0.001)
            destroy.append(time.perf_counter() - start)


async def measure(network: Network, count: int, concurrency: int, samples: Samples) -> None:
    slots: list[Slot] = []
    gate = asyncio.Semaphore(concurrency)

    async def create(name: str) -> None:
        async with gate:
            slot = await timed(samples.setdefault(name, []), network.create)
            assert slot is not None
            slots.append(slot)

    async def destroy(name: str, slot: Slot) -> None:
        async with gate:
            await timed(samples.setdefault(name, []), lambda: network.destroy(slot))

    for _ in range(count):
        await create("create, serial")
        await destroy("destroy, serial", slots.pop())
    start = time.perf_counter()
    await asyncio.gather(*(create(f"create, {concurrency} at once") for _ in range(count)))
    middle = time.perf_counter()
    await asyncio.gather(*(destroy(f"destroy, {concurrency} at once", slot) for slot in slots))
    end = time.perf_counter()
    print(f"sustained: {count / (middle - start):.0f} creates/s, {count / (end - middle):.0f} destroys/s")
    slot = await network.create()
    for _ in range(count):
        begin = time.perf_counter()
        network.socket(slot).close()
        samples.setdefault("socket", []).append(time.perf_counter() - begin)
    await network.destroy(slot)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--raw", type=Path)
    options = parser.parse_args()
    print(
        f"{platform.platform()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}"
    )
    samples: Samples = {}
    with tempfile.TemporaryDirectory(prefix="aenv-bench-") as directory, namespace.fresh():
        floor(options.count, samples)
        network = Network(Settings(home=Path(directory), runtime=Path(directory, "run")))
        await network.open()
        await measure(network, options.count, options.concurrency, samples)
        await network.close()
    report(samples)
    if options.raw:
        options.raw.write_text(json.dumps(samples))


asyncio.run(main())
