"""Output in sealed memory: never longer than its bound, and its end is what was written last."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.vmm.output import Output

SIZE = 64 << 10


@pytest.fixture
def output() -> Iterator[Output]:
    made = Output.create("test", SIZE)
    yield made
    made.close()


def test_it_keeps_what_was_written(output: Output) -> None:
    assert output.tail(100) == ""
    os.write(output.fileno(), "grüße\n".encode())
    assert output.tail(100) == "grüße\n"
    assert output.tail(2) == "e\n"
    assert output.tail(0) == output.tail(-1) == ""


def test_half_a_character_is_replaced(output: Output) -> None:
    os.write(output.fileno(), "ß\n".encode())
    assert output.tail(2) == "\ufffd\n"


def test_the_kernel_refuses_more_than_the_bound(output: Output) -> None:
    os.write(output.fileno(), b"x" * (SIZE - 10))
    assert os.write(output.fileno(), b"y" * 10) == 10
    with pytest.raises(PermissionError):
        os.write(output.fileno(), b"z")
    with pytest.raises(PermissionError):
        os.ftruncate(output.fileno(), SIZE + 1)
    assert os.fstat(output.fileno()).st_size == SIZE
    assert output.tail(12) == "xx" + "y" * 10


def test_wrapping_makes_room_and_forgets_the_oldest(output: Output) -> None:
    os.write(output.fileno(), b"x" * (SIZE // 2))
    output.wrap()
    os.write(output.fileno(), b"y" * 100)
    assert output.tail(200) == "x" * 100 + "y" * 100, "half of it is no reason to wrap"
    os.write(output.fileno(), b"w" * (SIZE // 2 - 100))
    output.wrap()
    assert output.tail(3) == "www"
    os.write(output.fileno(), b"z" * 10)
    assert output.tail(12) == "ww" + "z" * 10


def test_an_older_round_is_not_taken_for_the_end_of_this_one(output: Output) -> None:
    os.write(output.fileno(), b"a" * SIZE)
    output.wrap()
    os.write(output.fileno(), b"b" * (SIZE // 2 + 1))
    output.wrap()
    os.write(output.fileno(), b"c")
    assert set(output.tail(SIZE)) == {"b", "c"}


@given(st.lists(st.binary(min_size=1, max_size=5000).map(lambda it: it.replace(b"\0", b".")), max_size=40))
def test_the_tail_is_the_end_of_all_that_was_written(chunks: list[bytes]) -> None:
    output = Output.create("test", SIZE)
    written = b""
    try:
        for chunk in chunks:
            os.write(output.fileno(), chunk)
            written += chunk
            output.wrap()
            assert output.tail(10_000) == written[-10_000:].decode("utf-8", "replace")
    finally:
        output.close()


def test_a_writer_that_leaves_the_file_does_no_harm(output: Output) -> None:
    os.write(output.fileno(), b"before")
    os.lseek(output.fileno(), 1 << 50, os.SEEK_SET)
    output.tail(100)
    output.wrap()
    os.write(output.fileno(), b"after")
    assert output.tail(5) == "after"


def writer(output: int, code: str = "read -r line") -> subprocess.Popen[bytes]:
    return subprocess.Popen(["/bin/sh", "-c", code], stdin=subprocess.PIPE, stdout=output)


def end(child: subprocess.Popen[bytes]) -> None:
    child.communicate(b"\n")


def adopt(child: subprocess.Popen[bytes], number: int = 1) -> Output | None:
    pidfd = os.pidfd_open(child.pid)
    try:
        return Output.adopt(pidfd, number, SIZE)
    finally:
        os.close(pidfd)


def test_it_can_be_fetched_out_of_the_process_that_writes() -> None:
    output = Output.create("test", SIZE)
    child = writer(output.fileno(), "echo first; read -r line; echo second")
    output.close()
    found = adopt(child)
    assert found is not None
    while found.tail(6) != "first\n":
        time.sleep(0.001)
    # Filled up and wrapped by the one, continued by the other: the position is common.
    os.write(found.fileno(), b"x" * (SIZE // 2))
    found.wrap()
    end(child)
    assert found.tail(8) == "xsecond\n"
    found.close()


def test_other_files_are_not_adopted(tmp_path: Path) -> None:
    small = Output.create("test", 100)
    unsealed = os.memfd_create("test")
    os.ftruncate(unsealed, SIZE)
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    os.ftruncate(file, SIZE)
    reading, writing = os.pipe()
    for fd in (small.fileno(), unsealed, file, writing):
        child = writer(fd)
        assert adopt(child) is None
        assert adopt(child, 77) is None
        end(child)
    small.close()
    for fd in (unsealed, file, reading, writing):
        os.close(fd)


def test_a_closed_one_is_empty(output: Output) -> None:
    os.write(output.fileno(), b"text")
    output.close()
    output.close()
    assert output.tail(10) == ""
    output.wrap()
    with pytest.raises(ValueError, match="closed"):
        output.fileno()
