"""The command line of a QEMU ``microvm`` that boots a kernel."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from aenv.errors import VmmFailed
from aenv.vmm.interface import BootConfig

COMMAND_LINE_LIMIT = 2047  # bytes, COMMAND_LINE_SIZE of x86 without the terminating zero
# MiB of translated code that a TCG guest may keep; taken as it is used. Kernel and shell alone overflow 16, and then
# everything is translated again and again: starting Python takes 590 ms with 16, 180 with 48, 115 with 96 and more.
TRANSLATION_CACHE = 64

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")


class Resources(msgspec.Struct, frozen=True):
    """What is opened for QEMU: descriptor numbers, and the ``-blockdev`` of each disk with the ``-add-fd`` that its
    file names refer to."""

    monitor: int
    kernel: int
    initramfs: int
    disks: Sequence[dict[str, Any]]
    descriptor_sets: Sequence[str]


def check(config: BootConfig) -> None:
    """Refuse what QEMU would misread or cut short."""
    shape = config.shape
    if not _NAME.fullmatch(config.name):
        raise VmmFailed(f"{config.name[:80]!r} cannot be the name of a machine")
    if not 1 <= shape.vcpus <= 255 or not 64 <= shape.memory <= 1 << 20:
        raise VmmFailed(f"no machine has {shape.vcpus} vCPUs and {shape.memory} MiB of memory")
    if config.tap_fd is not None and not _MAC.fullmatch(config.mac):
        raise VmmFailed(f"{config.mac[:80]!r} is not a MAC address")


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


def arguments(
    config: BootConfig, resources: Resources, accelerator: Literal["kvm", "tcg"], command_line: str
) -> list[str]:
    """Everything after the name of the program. For QEMU 7.2 and later."""
    memory = config.shape.memory << 20
    # No device names a bus: QEMU hands out the virtio-mmio buses in the order in which the guest then finds them.
    devices: list[dict[str, Any]] = [
        {"driver": "virtio-blk-device", "drive": f"disk{number}", "id": f"vd{number}", "werror": "report"}
        for number in range(len(resources.disks))
    ]
    netdev: list[str] = []
    if config.tap_fd is not None:
        netdev = ["-netdev", _json({"type": "tap", "id": "net0", "fd": str(config.tap_fd)})]
        devices.append({"driver": "virtio-net-device", "netdev": "net0", "id": "eth0", "mac": config.mac})
    devices.append({"driver": "virtio-rng-device", "id": "rng0"})
    devices.append(
        {
            "driver": "virtio-balloon-device",
            "id": "balloon0",
            "free-page-reporting": True,
            "deflate-on-oom": True,
        }
    )
    return [
        *("-name", f"guest={config.name}"),
        # Without a PIC, because a stray interrupt of it looks like a division by zero to an early kernel.
        *("-machine", "microvm,acpi=on,rtc=on,isa-serial=on,pit=off,pic=off,suppress-vmdesc=on,memory-backend=ram"),
        *("-accel", "kvm" if accelerator == "kvm" else f"tcg,tb-size={TRANSLATION_CACHE},thread=multi"),
        *("-cpu", "host" if accelerator == "kvm" else "max"),
        *("-smp", str(config.shape.vcpus)),
        *("-m", f"size={config.shape.memory}M"),
        # Private to this process, so that pages the guest gives back are nobody else's.
        *("-object", _json({"qom-type": "memory-backend-ram", "id": "ram", "size": memory, "share": False})),
        *("-nodefaults", "-no-user-config", "-no-reboot"),
        *("-display", "none"),
        # The console is standard output, which is bounded; standard input is /dev/null.
        *("-chardev", "stdio,id=console,signal=off,mux=off", "-serial", "chardev:console"),
        *("-chardev", f"socket,id=monitor,fd={resources.monitor},server=on,wait=off"),
        *("-mon", "chardev=monitor,mode=control"),
        *resources.descriptor_sets,
        *(part for disk in resources.disks for part in ("-blockdev", _json(disk))),
        *netdev,
        *(part for device in devices for part in ("-device", _json(device))),
        *("-kernel", f"/proc/self/fd/{resources.kernel}"),
        *("-initrd", f"/proc/self/fd/{resources.initramfs}"),
        *("-append", command_line),
        *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"),
    ]


def _json(value: dict[str, Any]) -> str:
    """Options as JSON have no commas to escape."""
    return msgspec.json.encode(value).decode()
