"""The rate of the host's time stamp counter.

Under TCG a guest's counter is the host's. Left alone, an early kernel measures its rate against an emulated timer,
which fails on a busy host and then never ends; told the rate, it has nothing to measure.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from aenv.errors import SetupError

INTERVAL = 0.05  # seconds of one measurement
# rdtsc; shl rdx, 32; or rax, rdx; ret
_CODE = bytes.fromhex("0f31 48c1e220 4809d0 c3")
_ATTEMPTS = 3
_READINGS = 10


def tsc_khz() -> int:
    """Measured against CLOCK_MONOTONIC_RAW; blocks for a sixth of a second. SetupError if there is no way to tell."""
    try:
        # Kept in a variable: the code is in this memory.
        memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:  # a policy against memory that is writable and executable
        return nominal_khz(Path("/proc/cpuinfo").read_text())
    memory.write(_CODE)
    counter = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    return round(statistics.median(_measure(counter) for _ in range(_ATTEMPTS)))


def nominal_khz(cpuinfo: str) -> int:
    """The rate in the name of the processor model, within a per mille or so of that of its counter."""
    found = re.search(r"^model name\s*:.*@ (\d+\.\d+)GHz", cpuinfo, re.MULTILINE)
    if found is None:
        raise SetupError(
            "the rate of the time stamp counter can neither be measured nor read",
            remedy="allow memory that is writable and executable, or use KVM",
        )
    return round(float(found[1]) * 1e6)


def _measure(counter: Callable[[], int]) -> float:
    time_0, ticks_0 = _reading(counter)
    time.sleep(INTERVAL)
    time_1, ticks_1 = _reading(counter)
    return (ticks_1 - ticks_0) * 1e6 / (time_1 - time_0)


def _reading(counter: Callable[[], int]) -> tuple[int, int]:
    """Time in ns and counter, taken as close together as several tries allow."""
    best: tuple[int, int, int] | None = None
    for _ in range(_READINGS):
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        ticks = counter()
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        if best is None or after - before < best[0]:
            best = (after - before, (before + after) // 2, ticks)
    assert best is not None
    return best[1], best[2]
