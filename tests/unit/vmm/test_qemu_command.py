"""The command line of QEMU: what depends on the machine, and what must not get into it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from aenv.errors import VmmFailed
from aenv.model import KernelImage, MachineShape
from aenv.vmm.interface import BootConfig, MachineClass
from aenv.vmm.qemu_command import (
    COMMAND_LINE_LIMIT,
    Resources,
    check,
    check_mac,
    hardware,
    kernel_command_line,
    memory_to_come,
    own_memory,
    waiting,
)

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


MACHINE = MachineClass(vcpus=2, memory=512, disks=("rw", "ro"), network=True)
BARE = MachineClass(vcpus=2, memory=512, disks=(), network=False)


def line(
    machine: MachineClass = MACHINE, accelerator: Literal["kvm", "tcg"] = "tcg", prepared: bool = False
) -> list[str]:
    """Of a machine that boots, or one that waits."""
    if prepared:
        resources = Resources(3, 7 if machine.network else None, [None] * len(machine.disks))
        return [*hardware("guest", machine, memory_to_come(512 << 20, 11), resources, accelerator), *waiting()]
    images = [{"driver": "raw", "node-name": f"disk{number}-a"} for number in range(len(machine.disks))]
    resources = Resources(4, 8 if machine.network else None, images, ["-add-fd", "fd=9,set=0"])
    return hardware("guest", machine, own_memory(512 << 20), resources, accelerator, CONFIG.mac)


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
    devices = [msgspec.json.decode(it) for it in values(line(), "-device")]
    assert [it["driver"].removesuffix("-device") for it in devices] == [
        *("virtio-blk", "virtio-blk", "virtio-net", "virtio-rng", "virtio-balloon")
    ]
    assert [it.get("drive") for it in devices[:2]] == ["disk0", "disk1"]
    assert devices[2]["mac"] == CONFIG.mac
    assert msgspec.json.decode(values(line(), "-netdev")[0]) == {"type": "tap", "id": "net0", "fd": "8"}
    assert not values(line(BARE), "-netdev")


@pytest.mark.parametrize("machine", [MACHINE, BARE])
def test_a_machine_that_waits_is_the_same_as_one_that_boots(machine: MachineClass) -> None:
    booted, prepared = line(machine), line(machine, prepared=True)
    for option in ("-machine", "-accel", "-cpu", "-smp", "-m"):
        assert values(booted, option) == values(prepared, option)
    mac = f',"mac":"{CONFIG.mac}"'
    assert [it.replace(mac, "") for it in values(booted, "-device")] == values(prepared, "-device")
    assert [msgspec.json.decode(it)["id"] for it in values(booted, "-object")] == [
        msgspec.json.decode(it)["id"] for it in values(prepared, "-object")
    ]
    assert "-S" in prepared, "or it would run by itself"
    assert values(prepared, "-incoming") == ["defer"]


def test_disks_can_be_exchanged_below_their_devices() -> None:
    nodes = [msgspec.json.decode(it) for it in values(line(), "-blockdev")]
    assert [it["node-name"] for it in nodes] == ["disk0-a", "disk0", "disk1-a", "disk1"]
    assert [it["file"] for it in nodes[1::2]] == ["disk0-a", "disk1-a"]
    assert [it.get("read-only", False) for it in nodes[1::2]] == [False, True]
    assert [it["throttle-group"] for it in nodes[1::2]] == ["limit0", "limit1"]
    waiting = [msgspec.json.decode(it) for it in values(line(prepared=True), "-blockdev")]
    assert [it["node-name"] for it in waiting] == ["disk0", "disk1"]
    assert all(it["file"]["driver"] == "null-co" and "node-name" not in it["file"] for it in waiting)


def test_memory_is_private() -> None:
    memory = msgspec.json.decode(values(line(), "-object")[0])
    assert memory == {"qom-type": "memory-backend-ram", "id": "ram", "size": 512 << 20, "share": False}
    memory = msgspec.json.decode(values(line(prepared=True), "-object")[0])
    assert (memory["mem-path"], memory["share"], memory["size"]) == ("/proc/self/fd/11", False, 512 << 20)
    assert "mem-merge=off" in values(line(), "-machine")[0].split(",")


def test_the_sandbox_is_on() -> None:
    (sandbox,) = values(line(), "-sandbox")
    assert sandbox.split(",") == [
        "on",
        *(f"{it}=deny" for it in ("obsolete", "elevateprivileges", "spawn", "resourcecontrol")),
    ]


@pytest.mark.parametrize("name", ["", "a,process=b", "a" * 65, "-h", "a\n"])
def test_names_that_qemu_would_misread_are_refused(name: str) -> None:
    check("sandbox-1", MACHINE)
    with pytest.raises(VmmFailed, match="cannot be the name"):
        check(name, MACHINE)


@pytest.mark.parametrize(("vcpus", "memory", "cause"), [(0, 512, "0 vCPUs"), (1, 63, "63 MiB"), (1, 1 << 21, "MiB")])
def test_impossible_machines_are_refused(vcpus: int, memory: int, cause: str) -> None:
    with pytest.raises(VmmFailed, match=cause):
        check("sandbox-1", msgspec.structs.replace(MACHINE, vcpus=vcpus, memory=memory))


@pytest.mark.parametrize("mac", ["02:FC:00:00:00:05", "02:fc:00:00:00:05\n", ""])
def test_strange_hardware_addresses_are_refused(mac: str) -> None:
    check_mac(CONFIG.mac)
    with pytest.raises(VmmFailed, match="MAC"):
        check_mac(mac)


def test_a_command_line_that_the_kernel_would_cut_is_refused() -> None:
    own = len(kernel_command_line(changed(arguments=()), tsc_khz=None))
    longest = changed(arguments=("x" * (COMMAND_LINE_LIMIT - own - 1),))
    assert len(kernel_command_line(longest, tsc_khz=None)) == COMMAND_LINE_LIMIT
    with pytest.raises(VmmFailed, match=str(COMMAND_LINE_LIMIT)):
        kernel_command_line(longest, tsc_khz=1)
    with pytest.raises(VmmFailed, match="control characters"):
        kernel_command_line(changed(arguments=("a\tb",)), tsc_khz=None)
