"""The accelerator probe: the verdict on every kind of trial, the cache, and this very host."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from aenv.errors import SetupError
from aenv.vmm import kvm_trial, probe
from aenv.vmm.probe import Acceleration, choose, judge, run_trial

GOOD: dict[str, Any] = {"api": 12, "missing": [], "real": 0.4, "long": 0.5}


@pytest.mark.parametrize(
    ("modules", "vendor", "trial", "kind", "words"),
    [
        (("kvm_intel",), "GenuineIntel", {}, "kvm-intel", "hardware speed"),
        (("kvm_amd",), "AuthenticAMD", {}, "kvm-amd", "hardware speed"),
        # Built into the kernel, where no module shows.
        ((), "GenuineIntel", {}, "kvm-intel", "hardware speed"),
        ((), "HygonGenuine", {}, "kvm-amd", "hardware speed"),
        # Nested in an emulated processor of the other vendor.
        (("kvm_amd",), "GenuineIntel", {}, "kvm-amd", "hardware speed"),
        (("kvm_pvm",), "GenuineIntel", {"real": 78.0}, "tcg", "PVM"),
        (("kvm_pvm",), "AuthenticAMD", {"real": 1.0, "long": 240.0}, "tcg", "in long mode took 240 ms"),
        (("kvm_intel", "kvm_pvm"), "GenuineIntel", {}, "kvm-intel", "hardware speed"),
        (("kvm_intel",), "GenuineIntel", {"real": 15.0}, "tcg", "in real mode took 15 ms"),
        (("kvm_intel",), "GenuineIntel", {"long": None}, "tcg", "in long mode did not run"),
        (("kvm_intel",), "GenuineIntel", {"api": 11}, "tcg", "API version 11"),
        (("kvm_intel",), "GenuineIntel", {"missing": ["IRQFD", "PIT2"]}, "tcg", "lacks IRQFD, PIT2"),
        (("kvm_intel",), "GenuineIntel", {"error": "the guest stopped"}, "tcg", "the guest stopped"),
    ],
)
def test_verdicts(modules: tuple[str, ...], vendor: str, trial: dict[str, Any], kind: str, words: str) -> None:
    verdict = judge(modules, vendor, GOOD | trial)
    assert verdict.kind == kind
    assert words in verdict.reason
    assert (verdict.remedy is None) == (kind != "tcg")


def test_a_host_with_nothing_but_pvm_is_refused_and_any_other_judged_by_its_speed(tmp_path: Path) -> None:
    found = probe.probe(tmp_path)
    slow = any(float(found.details.get(mode, 0)) >= kvm_trial.THRESHOLD for mode in ("real", "long"))
    only_pvm = found.details.get("modules") == "kvm_pvm"
    assert (found.kind == "tcg") == (slow or only_pvm or "error" in found.details or found.remedy is not None)
    if only_pvm:
        assert "PVM" in found.reason
    assert probe.probe(tmp_path) == found


def test_the_trial_is_run_once_a_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = []

    def trial(device: Path) -> dict[str, Any]:
        trials.append(device)
        return GOOD

    monkeypatch.setattr(probe, "run_trial", trial)
    device = tmp_path / "kvm"
    device.touch()
    cache = tmp_path / "cache" / "deep"
    first = probe.probe(cache, device)
    assert first.kind != "tcg"
    assert probe.probe(cache, device) == first
    assert len(trials) == 1
    monkeypatch.setattr(probe, "boot_id", lambda: "another boot")
    probe.probe(cache, device)
    assert len(trials) == 2
    monkeypatch.setattr(probe, "_MODULES", ("kvm_of_the_future", "loop", "tun", "fuse", "memory", "kernel"))
    probe.probe(cache, device)
    assert len(trials) == 3
    for damage in (b"", b"{}", b"\xff", b"[" * 10_000):
        next(cache.iterdir()).write_bytes(damage)
        assert probe.probe(cache, device).kind == first.kind
    assert len(trials) == 7


def test_no_device(tmp_path: Path) -> None:
    found = probe.probe(tmp_path, tmp_path / "kvm")
    assert found.kind == "tcg"
    assert str(tmp_path / "kvm") in found.reason
    assert "kvm_intel" in str(found.remedy)
    assert list(tmp_path.iterdir()) == [], "what is so easily repaired is not remembered"


def test_a_device_that_may_not_be_opened_is_another_matter() -> None:
    """As an unprivileged user, since root may open everything."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        device = Path(directory, "kvm")
        device.touch(mode=0o600)
        before = os.geteuid()
        os.seteuid(61380)
        try:
            found = probe.probe(Path(directory), device)
        finally:
            os.seteuid(before)
    assert found.kind == "tcg"
    assert "may not be opened" in found.reason
    assert "group kvm" in str(found.remedy)


def test_a_device_that_is_not_kvm() -> None:
    assert "error" in run_trial(Path("/dev/null"))
    assert judge((), "GenuineIntel", run_trial(Path("/dev/zero"))).kind == "tcg"


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import signal; signal.alarm(1); signal.pause()", "did not end within 1 s"),
        ("import os; os.abort()", "signal 6"),
        ("raise SystemExit('it broke')", "it broke"),
        ("print('no JSON')", "failed"),
        ("import time; time.sleep(60)", "hung"),
    ],
)
def test_a_trial_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, words: str) -> None:
    script = tmp_path / "trial.py"
    script.write_text(program)
    monkeypatch.setattr(kvm_trial, "__file__", str(script))
    monkeypatch.setattr(probe, "TRIAL_TIMEOUT", 2.0)
    assert words in run_trial()["error"]


@pytest.mark.parametrize(
    ("mode", "group", "groups"),
    [
        (0o666, 0, ()),
        (0o606, 107, ()),
        (0o660, 107, (107,)),
        (0o600, 107, None),
        (0o660, 0, None),
        (0o640, 107, None),
    ],
)
def test_the_group_that_opens_the_device(tmp_path: Path, mode: int, group: int, groups: tuple[int, ...] | None) -> None:
    device = tmp_path / "kvm"
    device.touch()
    os.chown(device, 0, group)
    device.chmod(mode)
    if groups is None:
        with pytest.raises(SetupError, match="chmod 0660"):
            probe.device_groups(device)
    else:
        assert probe.device_groups(device) == groups


def test_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Acceleration("tcg", "there is none", "buy some")
    monkeypatch.setattr(probe, "probe", lambda directory: refused)
    assert choose("auto", tmp_path) == refused
    with pytest.raises(SetupError, match=r"there is none.*buy some"):
        choose("kvm", tmp_path)
    monkeypatch.setattr(probe, "probe", lambda directory: pytest.fail("needless"))
    assert choose("tcg", tmp_path).kind == "tcg"
    with pytest.raises(SetupError, match=r"vmm\.accelerator.*auto, kvm or tcg"):
        choose("xen", tmp_path)


def test_the_trial_needs_nothing_but_the_standard_library() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", kvm_trial.__file__, "/nowhere"], capture_output=True, text=True, check=True
    )
    assert "/nowhere" in done.stdout
