"""Files with the state of a machine, and who may load them."""

from __future__ import annotations

import hashlib
import os
import resource
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aenv.errors import VmmFailed
from aenv.vmm import saved_state
from aenv.vmm.interface import MachineClass, MachineRecord, SavedState

MACHINE = MachineClass(vcpus=1, memory=256, disks=("rw", "ro"), network=True)
RECORD = MachineRecord(
    driver="qemu",
    version="7.2.22",
    build="ab" * 32,
    accelerator="tcg",
    processor="max",
    tsc_khz=2_600_000,
    machine=MACHINE,
    pid=1,
    start_time=2,
    boot_id="3",
    directory=Path("/nowhere"),
)
WHOLE = b"QEVM\0\0\0\3 devices \0"


@pytest.fixture
def saved(tmp_path: Path) -> SavedState:
    return saved_state.write(tmp_path / "state", WHOLE, RECORD)


def test_what_was_written_is_described_and_read_again(saved: SavedState, tmp_path: Path) -> None:
    assert saved.size == len(WHOLE)
    assert saved.digest == hashlib.sha256(WHOLE).hexdigest()
    assert saved.machine == MACHINE
    assert saved_state.read(tmp_path / "state", saved) == WHOLE
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o600
    saved_state.check(saved, RECORD)
    assert msgspec.json.decode(msgspec.json.encode(saved), type=SavedState) == saved


@pytest.mark.parametrize(
    "content", [WHOLE[:-1], WHOLE + b"\0", WHOLE.replace(b"devices", b"Devices"), b"", b"\0" * len(WHOLE)]
)
def test_what_is_not_what_was_written_is_refused(saved: SavedState, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state").write_bytes(content)
    with pytest.raises(VmmFailed, match="damaged"):
        saved_state.read(tmp_path / "state", saved)


@pytest.mark.parametrize("size", [0, -1, saved_state.LIMIT + 1])
def test_impossible_sizes_are_refused(saved: SavedState, tmp_path: Path, size: int) -> None:
    with pytest.raises(VmmFailed, match="not possible"):
        saved_state.read(tmp_path / "state", msgspec.structs.replace(saved, size=size))


def test_what_is_no_file_is_refused_without_waiting(saved: SavedState, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "nothing", Path("/dev/zero"), Path("a\0b")):
        with pytest.raises(VmmFailed):
            saved_state.read(path, saved)


def test_a_file_is_never_replaced(saved: SavedState, tmp_path: Path) -> None:
    with pytest.raises(VmmFailed, match="File exists"):
        saved_state.write(tmp_path / "state", b"other", RECORD)
    assert saved_state.read(tmp_path / "state", saved) == WHOLE


def test_what_cannot_be_written_whole_is_removed(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(VmmFailed, match="cannot write the state file"):
            saved_state.write(tmp_path / "state", bytes(5000), RECORD)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("written", [b"", b"QEVM", b"\0" + WHOLE, WHOLE[:-1], WHOLE.replace(b"\3", b"\2")])
def test_half_a_state_is_not_taken(tmp_path: Path, written: bytes) -> None:
    path = tmp_path / "state"
    path.write_bytes(written)
    with path.open("rb") as file, pytest.raises(VmmFailed, match="not a whole state"):
        saved_state.take(file.fileno())
    path.write_bytes(WHOLE)
    with path.open("rb") as file:
        assert saved_state.take(file.fileno()) == WHOLE


def test_an_endless_state_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.touch()
    os.truncate(path, saved_state.LIMIT + 1)
    with path.open("rb") as file, pytest.raises(VmmFailed, match="limit"):
        saved_state.take(file.fileno())


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"driver": "firecracker"}, "one of firecracker, not of qemu"),
        ({"accelerator": "kvm-intel"}, "accelerator kvm-intel, not with tcg"),
        ({"version": "10.0.2"}, r"needs the very qemu 10\.0\.2 \(abababababab\), this is qemu 7\.2\.22"),
        ({"build": "cd" * 32}, r"7\.2\.22 \(cdcdcdcdcdcd\), this is qemu 7\.2\.22 \(abababababab\)"),
        ({"processor": "other"}, "processor is other"),
        ({"tsc_khz": 2_600_600}, "2600600 kHz and that of this host 2600000 kHz"),
        ({"tsc_khz": 2_599_400}, "2599400 kHz"),
        (
            {"machine": msgspec.structs.replace(MACHINE, vcpus=2)},
            r"2 vCPUs, 256 MiB, rw\+ro disks .* not a machine of 1",
        ),
        ({"machine": msgspec.structs.replace(MACHINE, network=False)}, "no network card"),
        ({"machine": msgspec.structs.replace(MACHINE, disks=())}, "no disks"),
    ],
)
def test_what_cannot_go_on_here_is_refused(saved: SavedState, changes: dict[str, Any], cause: str) -> None:
    with pytest.raises(VmmFailed, match=cause) as caught:
        saved_state.check(msgspec.structs.replace(saved, **changes), RECORD)
    assert caught.value.remedy is not None


@pytest.mark.parametrize("tsc_khz", [2_600_519, 2_599_481])
def test_clocks_differ_a_little_from_host_to_host(saved: SavedState, tsc_khz: int) -> None:
    saved_state.check(msgspec.structs.replace(saved, tsc_khz=tsc_khz), RECORD)
