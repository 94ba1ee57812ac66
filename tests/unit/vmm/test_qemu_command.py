"""The command line of QEMU: what depends on the machine, and what must not get into it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from aenv.errors import VmmFailed
from aenv.model import KernelImage, MachineShape
from aenv.vmm.interface import BootConfig
from aenv.vmm.qemu_command import COMMAND_LINE_LIMIT, Resources, arguments, check, kernel_command_line

NOWHERE = Path("/nowhere")
CONFIG = BootConfig(
    name="sandbox-1",
    shape=MachineShape(vcpus=2, memory=512, disk=0),
    kernel=KernelImage("6.1.0-57-cloud-amd64", "0" * 64, NOWHERE, NOWHERE, NOWHERE, NOWHERE),
    disks=(),
    directory=NOWHERE,
    tap_fd=None,
    mac="02:fc:00:00:00:05",
    netns=None,
    arguments=("aenv.ip=169.254.0.21/30",),
)


def changed(**changes: Any) -> BootConfig:
    return msgspec.structs.replace(CONFIG, **changes)


def line(config: BootConfig = CONFIG, accelerator: Literal["kvm", "tcg"] = "tcg", disks: int = 0) -> list[str]:
    nodes = [{"driver": "raw", "node-name": f"disk{number}"} for number in range(disks)]
    return arguments(config, Resources(3, 4, 5, nodes, ["-add-fd", "fd=9,set=0"]), accelerator, "console=ttyS0")


def values(arguments: list[str], option: str) -> list[str]:
    return [value for name, value in pairwise(arguments) if name == option]


def test_the_counter_rate_is_for_tcg_alone() -> None:
    assert kernel_command_line(CONFIG, tsc_khz=2596098).split()[:2] == ["tsc_early_khz=2596098", "tsc=reliable"]
    assert "tsc" not in kernel_command_line(CONFIG, tsc_khz=None)
    assert kernel_command_line(CONFIG, tsc_khz=None).endswith(" aenv.ip=169.254.0.21/30")


def test_accelerators() -> None:
    assert values(line(), "-accel") == ["tcg,tb-size=64,thread=multi"]
    assert values(line(), "-cpu") == ["max"]
    assert values(line(accelerator="kvm"), "-accel") == ["kvm"]
    assert values(line(accelerator="kvm"), "-cpu") == ["host"]


def test_devices_come_in_a_fixed_order() -> None:
    made = line(changed(tap_fd=7), disks=2)
    devices = [msgspec.json.decode(it) for it in values(made, "-device")]
    assert [it["driver"].removesuffix("-device") for it in devices] == [
        *("virtio-blk", "virtio-blk", "virtio-net", "virtio-rng", "virtio-balloon")
    ]
    assert [it.get("drive") for it in devices[:2]] == ["disk0", "disk1"]
    assert devices[2]["mac"] == CONFIG.mac
    assert msgspec.json.decode(values(made, "-netdev")[0]) == {"type": "tap", "id": "net0", "fd": "7"}
    assert not values(line(), "-netdev")


def test_memory_is_private() -> None:
    memory = msgspec.json.decode(values(line(), "-object")[0])
    assert memory == {"qom-type": "memory-backend-ram", "id": "ram", "size": 512 << 20, "share": False}


def test_the_sandbox_is_on() -> None:
    (sandbox,) = values(line(), "-sandbox")
    assert sandbox.split(",") == [
        "on",
        *(f"{it}=deny" for it in ("obsolete", "elevateprivileges", "spawn", "resourcecontrol")),
    ]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"name": ""}, "name"),
        ({"name": "a,process=b"}, "name"),
        ({"name": "a" * 65}, "name"),
        ({"name": "-h"}, "name"),
        ({"shape": MachineShape(0, 512, 0)}, "0 vCPUs"),
        ({"shape": MachineShape(1, 63, 0)}, "63 MiB"),
        ({"shape": MachineShape(1, 1 << 21, 0)}, "MiB"),
        ({"tap_fd": 3, "mac": "02:FC:00:00:00:05"}, "MAC"),
        ({"tap_fd": 3, "mac": "02:fc:00:00:00:05\n"}, "MAC"),
        ({"tap_fd": 3, "mac": ""}, "MAC"),
    ],
)
def test_what_qemu_would_misread_is_refused(changes: dict[str, Any], cause: str) -> None:
    check(CONFIG)
    with pytest.raises(VmmFailed, match=cause):
        check(changed(**changes))


def test_a_command_line_that_the_kernel_would_cut_is_refused() -> None:
    own = len(kernel_command_line(changed(arguments=()), tsc_khz=None))
    longest = changed(arguments=("x" * (COMMAND_LINE_LIMIT - own - 1),))
    assert len(kernel_command_line(longest, tsc_khz=None)) == COMMAND_LINE_LIMIT
    with pytest.raises(VmmFailed, match=str(COMMAND_LINE_LIMIT)):
        kernel_command_line(longest, tsc_khz=1)
    with pytest.raises(VmmFailed, match="control characters"):
        kernel_command_line(changed(arguments=("a\tb",)), tsc_khz=None)
