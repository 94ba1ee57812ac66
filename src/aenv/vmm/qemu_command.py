"""The command line of a QEMU ``microvm``: one that boots a kernel, or one that waits for a saved machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from aenv.errors import VmmFailed
from aenv.vmm import qemu_disks
from aenv.vmm.interface import BootConfig, MachineClass

COMMAND_LINE_LIMIT = 2047  # bytes, COMMAND_LINE_SIZE of x86 without the terminating zero
# MiB of translated code that a TCG guest may keep; taken as it is used. Kernel and shell alone overflow 16, and then
# everything is translated again and again: starting Python takes 590 ms with 16, 180 with 48, 115 with 96 and more.
TRANSLATION_CACHE = 64

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")


class Resources(msgspec.Struct, frozen=True):
    """What is opened for QEMU: descriptor numbers, and the node of each disk's image (None: there is none yet) with the
    ``-add-fd`` that its file names refer to."""

    monitor: int
    tap: int | None
    images: Sequence[dict[str, Any] | None]
    descriptor_sets: Sequence[str] = ()


def check(name: str, machine: MachineClass) -> None:
    """Refuse what QEMU would misread or cut short."""
    if not _NAME.fullmatch(name):
        raise VmmFailed(f"{name[:80]!r} cannot be the name of a machine")
    if not 1 <= machine.vcpus <= 255 or not 64 <= machine.memory <= 1 << 20:
        raise VmmFailed(f"no machine has {machine.vcpus} vCPUs and {machine.memory} MiB of memory")


def check_mac(mac: str) -> None:
    if not _MAC.fullmatch(mac):
        raise VmmFailed(f"{mac[:80]!r} is not a MAC address")


def kernel_command_line(config: BootConfig, *, tsc_khz: int | None) -> str:
    """``tsc_khz`` is for guests under TCG and only for them; their TSC is the host's.

    To measure its rate with nothing but an emulated timer fails on a busy host, after which the kernel waits for ever.
    To check it against ticks that come late makes the kernel distrust it (3 of 16 guests on a busy host), and then it
    has no clock that is better than those ticks.
    """
    words = [
        *([f"tsc_early_khz={tsc_khz}", "tsc=reliable"] if tsc_khz is not None else []),
        "console=ttyS0",
        "quiet",
        "loglevel=3",
        "panic=-1",  # reboot at once, which ends QEMU
        "reboot=t",
        "mitigations=off",  # there is one tenant in a guest; the host keeps its own mitigations
        "cryptomgr.notests",  # 0.3 s of boot time under TCG
        "random.trust_cpu=on",
        "i8042.noaux",
        "i8042.nokbd",
        "pci=off",
        *config.arguments,
    ]
    line = " ".join(words)
    if len(line.encode()) > COMMAND_LINE_LIMIT:
        raise VmmFailed(f"the kernel command line has {len(line.encode())} bytes, {COMMAND_LINE_LIMIT} is the limit")
    if not line.isprintable():
        raise VmmFailed("the kernel command line has control characters in it")
    return line


def booting(kernel: int, initramfs: int, command_line: str) -> list[str]:
    """Further arguments of a QEMU that boots; the kernel and the initramfs are descriptors."""
    return [
        *("-kernel", f"/proc/self/fd/{kernel}"),
        *("-initrd", f"/proc/self/fd/{initramfs}"),
        *("-append", command_line),
    ]


def waiting() -> list[str]:
    """Further arguments of a QEMU that waits for a state. It writes nothing into the guest's memory before it has one,
    and does not run by itself when it has."""
    # The states we load begin without the section that describes the machine; we compare that ourselves.
    return ["-incoming", "defer", "-S", "-global", "migration.send-configuration=off"]


def own_memory(size: int) -> dict[str, Any]:
    """Memory of ``size`` bytes for a guest that boots."""
    return {"qom-type": "memory-backend-ram", "id": "ram", "size": size, "share": False}


def memory_to_come(size: int, fd: int) -> dict[str, Any]:
    """A mapping of an empty file of ``size`` bytes, over which the memory of a saved guest is put later.

    QEMU punches holes into the file for pages that the guest gives back. It must never know the image that is put in
    its place, or it would do so there, under all other guests that run from it."""
    return {
        "qom-type": "memory-backend-file",
        "id": "ram",
        "size": size,
        "mem-path": f"/proc/self/fd/{fd}",
        "share": False,
    }


def hardware(
    name: str,
    machine: MachineClass,
    memory: dict[str, Any],
    resources: Resources,
    accelerator: Literal["kvm", "tcg"],
    mac: str | None = None,
) -> list[str]:
    """The arguments that make the machine, for QEMU 7.2 and later. All but names of files, descriptors and ``mac`` has
    to be the same where a state is saved and where it is loaded."""
    # No device names a bus: QEMU hands out the virtio-mmio buses in the order in which the guest then finds them.
    nodes: list[dict[str, Any]] = []
    devices: list[dict[str, Any]] = []
    for number, (access, image) in enumerate(zip(machine.disks, resources.images, strict=True)):
        nodes += [image] if image is not None else []
        below = qemu_disks.placeholder(access == "ro") if image is None else image["node-name"]
        nodes.append(qemu_disks.top(number, below, access == "ro"))
        block = {"driver": "virtio-blk-device", "id": f"vd{number}", "drive": f"disk{number}", "werror": "report"}
        devices.append(block)
    netdev: list[str] = []
    if resources.tap is not None:
        netdev = ["-netdev", _json({"type": "tap", "id": "net0", "fd": str(resources.tap)})]
        devices.append({"driver": "virtio-net-device", "netdev": "net0", "id": "eth0"} | ({"mac": mac} if mac else {}))
    devices.append({"driver": "virtio-rng-device", "id": "rng0"})
    devices.append(
        {
            "driver": "virtio-balloon-device",
            "id": "balloon0",
            "free-page-reporting": True,
            "deflate-on-oom": True,
        }
    )
    # Without a PIC, because a stray interrupt of it looks like a division by zero to an early kernel. Without merging
    # of equal pages, by whose timing one guest could find out what another has in its memory.
    board = "microvm,acpi=on,rtc=on,isa-serial=on,pit=off,pic=off,suppress-vmdesc=on,mem-merge=off,memory-backend=ram"
    return [
        *("-name", f"guest={name}"),
        *("-machine", board),
        *("-accel", "kvm" if accelerator == "kvm" else f"tcg,tb-size={TRANSLATION_CACHE},thread=multi"),
        *("-cpu", "host" if accelerator == "kvm" else "max"),
        *("-smp", str(machine.vcpus)),
        *("-m", f"size={machine.memory}M"),
        *("-object", _json(memory)),
        *("-nodefaults", "-no-user-config", "-no-reboot"),
        *("-display", "none"),
        # The console is standard output, which is bounded; standard input is /dev/null.
        *("-chardev", "stdio,id=console,signal=off,mux=off", "-serial", "chardev:console"),
        *("-chardev", f"socket,id=monitor,fd={resources.monitor},server=on,wait=off"),
        *("-mon", "chardev=monitor,mode=control"),
        *resources.descriptor_sets,
        *(part for number in range(len(machine.disks)) for part in ("-object", _json(qemu_disks.group(number)))),
        *(part for node in nodes for part in ("-blockdev", _json(node))),
        *netdev,
        *(part for device in devices for part in ("-device", _json(device))),
        *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"),
    ]


def _json(value: dict[str, Any]) -> str:
    """Options as JSON have no commas to escape."""
    return msgspec.json.encode(value).decode()
