"""What a sandbox costs: the time of a cold create, of a first command and of an end, and the memory of its VMM.

    sudo python benchmarks/sandboxes.py [--count 20] [--raw samples.json]

It starts a node in a temporary home. Floors, measured in the same run and turn about with what they belong to: for the
create, the same guest booted by a bare driver until its console says that the agent is ready, without API, database,
network or route. The added latency of the edge has a benchmark of its own (``cargo run --release -p aenv-edge --example
load``). Not measured: many sandboxes at once, hardware virtualization on a machine without it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import httpx

from aenv.config import Settings
from aenv.model import MachineShape
from aenv.templates.store import TemplateStore
from aenv.vmm import process
from aenv.vmm.interface import BootConfig, Disk
from aenv.vmm.kernel import load_kernel
from aenv.vmm.qemu import QemuDriver

Samples = dict[str, list[float]]
Result = TypeVar("Result")
KEY = f"e2b_{secrets.token_hex(20)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--raw", type=Path, help="where to write the raw samples, in milliseconds or MiB")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aenv-bench-") as directory:
        home = Path(directory) / "home"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            listen = f"127.0.0.1:{probe.getsockname()[1]}"
        environment = {
            **os.environ,
            "AENV_HOME": str(home),
            "AENV_LISTEN": listen,
            "AENV_API_KEY": KEY,
            "AENV_SANDBOX_ON_STOP": "kill",
            "AENV_LOG_LEVEL": "warning",
        }
        server = subprocess.Popen([sys.executable, "-m", "aenv.cli", "serve"], env=environment, stdout=sys.stderr)
        try:
            samples = run(f"http://{listen}", home, arguments.count, server)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
    report(samples)
    if arguments.raw is not None:
        arguments.raw.write_text(json.dumps(samples))


def run(url: str, home: Path, count: int, server: subprocess.Popen[bytes]) -> Samples:
    samples: Samples = {}

    def timed(name: str, work: Callable[[], Result]) -> Result:
        started = time.monotonic()
        result = work()
        samples.setdefault(name, []).append(1000 * (time.monotonic() - started))
        return result

    with httpx.Client(base_url=url, headers={"X-API-Key": KEY}, timeout=120) as api:
        while True:
            if server.poll() is not None:
                raise SystemExit("the server did not start")
            try:
                if api.get("/health").status_code == 204:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        settings = Settings(home=home)
        for _ in range(count):
            samples.setdefault("floor: bare VMM, spawn to agent ready", []).append(
                1000 * asyncio.run(bare_boot(settings))
            )
            started = time.monotonic()
            sandbox = timed("create: call to 201", partial(created, api))
            guest = {
                "E2b-Sandbox-Id": sandbox["sandboxID"],
                "E2b-Sandbox-Port": "49983",
                "X-Access-Token": sandbox["envdAccessToken"],
            }
            timed("first command (/bin/true)", partial(command, api, guest))
            samples.setdefault("create to first command done", []).append(1000 * (time.monotonic() - started))
            for _ in range(20):
                timed("command through the edge (/bin/true)", partial(command, api, guest))
            [(identity, _)] = process.find(home / "sandboxes")
            for name, size in memory(identity.pid).items():
                samples.setdefault(f"VMM {name} (MiB), 512 MiB guest after 21 commands", []).append(size)
            timed("kill: call to 204", partial(api.delete, f"/sandboxes/{sandbox['sandboxID']}"))
    return samples


def created(api: httpx.Client) -> dict[str, str]:
    response = api.post("/v2/sandboxes", json={"templateID": "base", "timeout": 600})
    response.raise_for_status()
    answer: dict[str, str] = response.json()
    return answer


def command(api: httpx.Client, guest: dict[str, str]) -> None:
    message = b'{"process":{"cmd":"/bin/true"},"stdin":false}'
    headers = {**guest, "Content-Type": "application/connect+json", "Connect-Protocol-Version": "1"}
    content = b"\0" + len(message).to_bytes(4, "big") + message
    response = api.post("/process.Process/Start", headers=headers, content=content)
    if b'"exited":true' not in response.content.replace(b" ", b""):
        raise SystemExit(f"the command did not end: {response.status_code} {response.content!r}")


async def bare_boot(settings: Settings) -> float:
    """Seconds from spawn until the console says that the agent is ready."""
    driver = await QemuDriver.open(settings.vmm, settings.home)
    template = TemplateStore(settings).get("base")
    kernel = load_kernel(settings, template.kernel)
    with tempfile.TemporaryDirectory() as directory:
        disk = Path(directory) / "rootfs.qcow2"
        base = TemplateStore(settings).rootfs(template)
        subprocess.run(  # noqa: ASYNC221 - nothing else runs here
            ["/usr/bin/qemu-img", "create", "-q", "-f", "qcow2", "-b", base, "-F", "raw", disk],
            check=True,
        )
        config = BootConfig(
            name="bare",
            shape=MachineShape(template.shape.vcpus, template.shape.memory, template.shape.disk),
            kernel=kernel,
            disks=(Disk(disk, "qcow2", False), Disk(kernel.modules, "raw", True)),
            directory=Path(directory),
            tap_fd=None,
            mac="02:ae:00:00:00:15",
            netns=None,
            arguments=("aenv.root=/dev/vda", "aenv.modules=/dev/vdb"),
        )
        started = time.monotonic()
        machine = await driver.boot(config)
        try:
            while "aenv-envd: ready" not in machine.serial_tail():  # noqa: ASYNC110 - only the guest knows
                await asyncio.sleep(0.005)
            return time.monotonic() - started
        finally:
            await machine.kill()
            await machine.close()


def memory(pid: int) -> dict[str, float]:
    """RSS, PSS and private anonymous memory of a process, in MiB."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return {name: int(fields[name].split()[0]) / 1024 for name in ("Rss", "Pss", "Anonymous")}


def report(samples: Samples) -> None:
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{platform.platform()}, {os.cpu_count()} CPUs, load {load}")
    print(f"{'':52} {'N':>4} {'p50':>8} {'p95':>8} {'p99':>8} {'max':>8}")
    for name, values in samples.items():
        values = sorted(values)
        at = [values[min(len(values) - 1, int(len(values) * part))] for part in (0.5, 0.95, 0.99)]
        print(f"{name:52} {len(values):4} {at[0]:8.1f} {at[1]:8.1f} {at[2]:8.1f} {values[-1]:8.1f}")


if __name__ == "__main__":
    main()
