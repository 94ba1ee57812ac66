"""The rate of the time stamp counter."""

from __future__ import annotations

import mmap

import pytest

from aenv.errors import SetupError
from aenv.vmm import tsc

CPUINFO = (
    "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R) CPU @ 2.60GHz\ncpu MHz\t\t: 2600.1\n"
)


def test_it_is_measured_and_does_not_change() -> None:
    first, second = tsc.tsc_khz(), tsc.tsc_khz()
    assert 500_000 < first < 10_000_000
    # A guest whose clock is off by more would be noticed by its owner.
    assert abs(first - second) / first < 200e-6


def test_without_executable_memory_the_name_of_the_processor_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(mmap, "mmap", refuse)
    monkeypatch.setattr(tsc, "nominal_khz", lambda text: len(text))
    assert tsc.tsc_khz() > 100


def test_the_nominal_rate() -> None:
    assert tsc.nominal_khz(CPUINFO) == 2_600_000
    with pytest.raises(SetupError, match="time stamp counter"):
        tsc.nominal_khz("model name\t: AMD EPYC\n")
