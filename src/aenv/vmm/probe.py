"""Which accelerator virtual machines get on this host: real KVM, or software emulation (TCG).

That ``/dev/kvm`` opens and makes virtual machines proves little: in some clouds it is PVM, which emulates nearly every
instruction of an ordinary guest and is far slower than TCG. So the probe times a loop in a small guest
(``kvm_trial.py``). The outcome is cached until the next boot, or until other KVM modules are loaded.
"""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import msgspec

from aenv.errors import SetupError
from aenv.vmm import kvm_trial
from aenv.vmm.process import boot_id

Kind = Literal["kvm-intel", "kvm-amd", "tcg"]

DEVICE = Path("/dev/kvm")
TRIAL_TIMEOUT = 10.0  # seconds, for a trial that ends itself after one second of running
_API_VERSION = 12
_CACHE = "accelerator.json"
_FORMAT = 1  # of the cache; raised when the trial or the verdict changes
_MODULES = ("kvm_intel", "kvm_amd", "kvm_pvm")


class Acceleration(msgspec.Struct, frozen=True):
    """``kind`` is part of the identity of a snapshot. ``reason`` says in a sentence why it is this one, ``remedy`` what
    could make it faster (None if nothing could). ``details`` are the observations behind it."""

    kind: Kind
    reason: str
    remedy: str | None = None
    details: dict[str, str] = {}


class _Cache(msgspec.Struct, frozen=True):
    format: int
    boot_id: str
    modules: tuple[str, ...]
    result: Acceleration


def choose(setting: str, directory: Path) -> Acceleration:
    """The accelerator that the setting ``vmm.accelerator`` leads to: ``auto``, ``kvm`` or ``tcg``. Raises SetupError
    for another one, and for ``kvm`` where there is no usable KVM. Like ``probe`` it blocks."""
    if setting == "tcg":
        return Acceleration("tcg", "the configuration says so")
    if setting not in ("auto", "kvm"):
        raise SetupError(f"vmm.accelerator is {setting[:40]!r}", remedy="it can be auto, kvm or tcg")
    found = probe(directory)
    if setting == "kvm" and found.kind == "tcg":
        raise SetupError(
            f"the configuration demands KVM, but {found.reason}", remedy=found.remedy or "set vmm.accelerator to auto"
        )
    return found


def probe(directory: Path, device: Path = DEVICE) -> Acceleration:
    """Find out, or read what was found since the last boot from ``directory``. Blocks for up to a second."""
    refusal = _refusal(device)
    if refusal is not None:  # cheap to find out again, and easily repaired
        return refusal
    modules = tuple(name for name in _MODULES if Path("/sys/module", name).is_dir())
    path = directory / _CACHE
    try:
        cache = msgspec.json.decode(path.read_bytes(), type=_Cache)
        if (cache.format, cache.boot_id, cache.modules) == (_FORMAT, boot_id(), modules):
            return cache.result
    except (OSError, msgspec.MsgspecError):
        pass
    result = judge(modules, _vendor(), run_trial(device))
    directory.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{_CACHE}.{os.getpid()}")
    temporary.write_bytes(msgspec.json.encode(_Cache(_FORMAT, boot_id(), modules, result)))
    temporary.replace(path)
    return result


def device_groups(device: Path = DEVICE) -> tuple[int, ...]:
    """The supplementary groups that an unprivileged account needs to open the device. SetupError if none would do."""
    status = device.stat()
    if status.st_mode & 0o006 == 0o006:
        return ()
    if status.st_mode & 0o060 == 0o060 and status.st_gid != 0:
        return (status.st_gid,)
    raise SetupError(
        f"{device} is open to root only, but virtual machines do not run as root",
        remedy=f"chgrp kvm {device} && chmod 0660 {device}",
    )


def run_trial(device: Path = DEVICE) -> dict[str, Any]:
    """What ``kvm_trial.py`` prints; ``{"error": …}`` if it dies."""
    try:
        # Isolated, so that nothing in the environment or the working directory gets into it.
        done = subprocess.run(
            [sys.executable, "-I", "-S", kvm_trial.__file__, str(device)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TRIAL_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": "the trial guest hung"}
    if done.returncode < 0:
        return {"error": f"the trial guest did not end within {kvm_trial.ALARM} s (signal {-done.returncode})"}
    try:
        return msgspec.json.decode(done.stdout, type=dict[str, Any])
    except msgspec.MsgspecError:
        return {"error": f"the trial guest failed: {done.stderr.decode(errors='replace')[-300:].strip()}"}


def judge(modules: tuple[str, ...], vendor: str, trial: dict[str, Any]) -> Acceleration:
    """The verdict on a trial; pure. ``modules`` are the KVM modules that are loaded, ``vendor`` is the processor's."""
    details = {"modules": " ".join(modules), "vendor": vendor} | {key: str(value) for key, value in trial.items()}
    only_pvm = "kvm_pvm" in modules and not {"kvm_intel", "kvm_amd"} & set(modules)
    name = "KVM here is PVM, which" if only_pvm else "KVM"

    def refuse(reason: str) -> Acceleration:
        return Acceleration("tcg", reason, "run on a machine with hardware virtualisation for full speed", details)

    if "error" in trial:
        return refuse(f"{name} cannot run a guest: {trial['error']}")
    if trial["api"] != _API_VERSION:
        return refuse(f"{name} has API version {trial['api']}, not {_API_VERSION}")
    for mode in ("real", "long"):
        elapsed = trial.get(mode)
        if elapsed is None or elapsed >= kvm_trial.THRESHOLD:
            took = "did not run" if elapsed is None else f"took {elapsed:.0f} ms"
            return refuse(
                f"{name} emulates guests instead of running them: {kvm_trial.ROUNDS} rounds of a loop in {mode} mode "
                f"{took}, hardware takes less than 1 ms"
            )
    if trial["missing"]:
        return refuse(f"{name} lacks {', '.join(trial['missing'])}")
    intel = "kvm_intel" in modules or ("kvm_amd" not in modules and vendor == "GenuineIntel")
    return Acceleration("kvm-intel" if intel else "kvm-amd", "KVM runs guests at hardware speed", None, details)


def host_processor() -> str:
    """What a guest of KVM sees of this host's processor, as the sha256 (hex) of it: a state is of no use where that
    differs."""
    seen: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("vendor_id", "cpu family", "model", "stepping", "flags"):
            seen.setdefault(name.strip(), value.strip())
    return hashlib.sha256("\n".join(f"{name}={value}" for name, value in sorted(seen.items())).encode()).hexdigest()


def _refusal(device: Path) -> Acceleration | None:
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        details = {"error": str(error)}
        if error.errno in (errno.EACCES, errno.EPERM):
            return Acceleration(
                "tcg", f"{device} may not be opened", "run as root, or add the user to the group kvm", details
            )
        return Acceleration(
            "tcg",
            f"there is no usable {device} ({error.strerror})",
            "enable virtualisation in the firmware or the cloud's instance type, then modprobe kvm_intel or kvm_amd",
            details,
        )
    return None


def _vendor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "vendor_id":
            return value.strip()
    return "unknown"
