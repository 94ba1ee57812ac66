"""Runs a loop of 200,000 rounds in a KVM guest, in real mode and in long mode, and prints how long it took.

Started by ``probe.py`` as a program of its own, so that a KVM that hangs or crashes takes nobody with it. Prints one
JSON object: ``{"api", "missing", "real", "long"}`` with milliseconds, or ``{"error"}``. ``long`` is absent when
``real`` is hopeless already. Uses the standard library only. Interface: Documentation/virt/kvm/api.rst of Linux.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import signal
import struct
import sys
import time
from typing import Any

ROUNDS = 200_000
# Milliseconds. Hardware takes less than 1, an honest nested KVM less than 2; PVM, which emulates every instruction of
# such a guest, took 78 and 200 on two machines, and no emulator does better than 40.
THRESHOLD = 15.0
ALARM = 1  # seconds, after which this program dies
MEMORY = 2 << 20
CODE = 0x1000
TABLES = 0x2000

# What Firecracker asks for, which is also more than enough for QEMU.
EXTENSIONS = {
    "IRQCHIP": 0,
    "USER_MEMORY": 3,
    "SET_TSS_ADDR": 4,
    "EXT_CPUID": 7,
    "MP_STATE": 14,
    "IRQFD": 32,
    "PIT2": 33,
    "PIT_STATE2": 35,
    "IOEVENTFD": 36,
    "ADJUST_CLOCK": 39,
    "VCPU_EVENTS": 41,
    "DEBUGREGS": 50,
    "XSAVE": 55,
    "XCRS": 56,
}

_GET_API_VERSION, _CREATE_VM, _CHECK_EXTENSION, _GET_VCPU_MMAP_SIZE = 0xAE00, 0xAE01, 0xAE03, 0xAE04
_CREATE_VCPU, _SET_USER_MEMORY_REGION, _SET_TSS_ADDR, _RUN = 0xAE41, 0x4020AE46, 0xAE47, 0xAE80
_GET_REGS, _SET_REGS, _GET_SREGS, _SET_SREGS = 0x8090AE81, 0x4090AE82, 0x8138AE83, 0x4138AE84
_EXIT_HLT = 5

# mov ecx, ROUNDS; again: dec ecx; jnz again; hlt
_REAL_CODE = b"\x66\xb9" + struct.pack("<I", ROUNDS) + b"\x66\x49\x75\xfc\xf4"
_LONG_CODE = b"\xb9" + struct.pack("<I", ROUNDS) + b"\xff\xc9\x75\xfc\xf4"


def trial(kvm: int, *, long_mode: bool) -> float:
    """Milliseconds from entering the guest to its ``hlt``. Raises OSError or RuntimeError."""
    code = _LONG_CODE if long_mode else _REAL_CODE
    memory = mmap.mmap(-1, MEMORY)
    memory[CODE : CODE + len(code)] = code
    # One page directory that maps the first 2 MiB to themselves.
    for at, entry in ((TABLES, TABLES + 0x1003), (TABLES + 0x1000, TABLES + 0x2003), (TABLES + 0x2000, 0x83)):
        memory[at : at + 8] = struct.pack("<Q", entry)
    vm = fcntl.ioctl(kvm, _CREATE_VM, 0)
    fcntl.ioctl(vm, _SET_TSS_ADDR, 0x7FFB0000)  # anywhere below 4 GiB that is no memory
    fcntl.ioctl(vm, _SET_USER_MEMORY_REGION, struct.pack("<IIQQQ", 0, 0, 0, MEMORY, _address(memory)))
    vcpu = fcntl.ioctl(vm, _CREATE_VCPU, 0)
    run = mmap.mmap(vcpu, fcntl.ioctl(kvm, _GET_VCPU_MMAP_SIZE, 0))
    registers = bytearray(312)
    fcntl.ioctl(vcpu, _GET_SREGS, registers)
    _set_mode(registers, long_mode)
    fcntl.ioctl(vcpu, _SET_SREGS, registers)
    general = bytearray(144)
    struct.pack_into("<QQ", general, 16 * 8, CODE, 2)  # rip, rflags
    fcntl.ioctl(vcpu, _SET_REGS, general)
    begin = time.perf_counter()
    fcntl.ioctl(vcpu, _RUN, 0)
    elapsed = time.perf_counter() - begin
    (reason,) = struct.unpack_from("<I", run, 8)
    fcntl.ioctl(vcpu, _GET_REGS, general)
    (rip,) = struct.unpack_from("<Q", general, 16 * 8)
    os.close(vcpu)
    os.close(vm)
    if reason != _EXIT_HLT or rip != CODE + len(code):
        raise RuntimeError(f"the guest stopped at {rip:#x} with exit reason {reason}")
    return elapsed * 1000


def _best_of_two(kvm: int, *, long_mode: bool) -> float:
    first = trial(kvm, long_mode=long_mode)
    # The first may have been interrupted by something else on the machine.
    return first if first < THRESHOLD else min(first, trial(kvm, long_mode=long_mode))


def _set_mode(registers: bytearray, long_mode: bool) -> None:
    """Edit a ``struct kvm_sregs``: eight segments of 24 bytes, two tables of 16, then cr0 cr2 cr3 cr4 cr8 efer."""

    def segment(number: int, limit: int, selector: int, kind: int, *, size: int, long: int, pages: int) -> None:
        present, level, plain, available, unusable = 1, 0, 1, 0, 0
        fields = (kind, present, level, size, plain, long, pages, available, unusable, 0)
        struct.pack_into("<QIH10B", registers, 24 * number, 0, limit, selector, *fields)

    if not long_mode:
        segment(0, 0xFFFF, 0, 11, size=0, long=0, pages=0)
        return
    segment(0, 0xFFFFFFFF, 8, 11, size=0, long=1, pages=1)
    for number in range(1, 6):
        segment(number, 0xFFFFFFFF, 16, 3, size=1, long=0, pages=1)
    struct.pack_into("<6Q", registers, 224, 0x80050033, 0, TABLES, 0x20, 0, 0x500)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def main(device: str) -> None:
    signal.alarm(ALARM)
    result: dict[str, Any]
    try:
        kvm = os.open(device, os.O_RDWR | os.O_CLOEXEC)
        result = {
            "api": fcntl.ioctl(kvm, _GET_API_VERSION, 0),
            "missing": [name for name, it in EXTENSIONS.items() if fcntl.ioctl(kvm, _CHECK_EXTENSION, it) <= 0],
            "real": _best_of_two(kvm, long_mode=False),
        }
        if result["real"] < THRESHOLD:
            result["long"] = _best_of_two(kvm, long_mode=True)
    except (OSError, RuntimeError, ValueError) as error:
        result = {"error": str(error)}
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
