from __future__ import annotations

import time
from pathlib import Path

import pytest

from aenv.errors import DiskFull, OperationFailed
from aenv.vmm import command


def _sh(script: str, **options: object) -> bytes:
    return command.run(["/bin/sh", "-c", script], "try", **{"timeout": 30, **options})  # type: ignore[arg-type]


def test_output_and_lines() -> None:
    lines: list[str] = []
    assert _sh("echo one >&2; echo out; echo two >&2", on_line=lines.append) == b"out\n"
    assert lines == ["one", "two"]


def test_large_output_on_both_streams_does_not_block() -> None:
    assert len(_sh("head -c 3000000 /dev/zero >&2; head -c 3000000 /dev/zero")) == 3000000


def test_a_failure_says_what_and_why() -> None:
    with pytest.raises(OperationFailed, match="cannot try: sh: no such thing"):
        _sh("echo no such thing >&2; exit 3")
    with pytest.raises(OperationFailed, match="exit status 3"):
        _sh("exit 3")


def test_a_full_disk_is_recognised() -> None:
    with pytest.raises(DiskFull):
        _sh("dd if=/dev/zero of=/dev/full count=1")


def test_a_timeout_kills_the_children_too(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(OperationFailed, match="longer than 1 s"):
        _sh(f"sleep 600 & echo $! > {pid_file}; wait", timeout=1)
    process = Path(f"/proc/{pid_file.read_text().strip()}")
    deadline = time.monotonic() + 10
    while process.exists() and "Z" not in (process / "stat").read_text().rsplit(")", 1)[1]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_interrupted_call_kills_too(tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        _sh("echo go >&2; sleep 600", on_line=interrupt)
    assert time.monotonic() - started < 60
