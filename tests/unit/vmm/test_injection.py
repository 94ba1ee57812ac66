"""System calls made inside another process, a real one."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aenv.errors import VmmFailed
from aenv.vmm import injection
from aenv.vmm.injection import Injection, Refused
from aenv.vmm.process import Identity, start_time

# Prints where its memory is; then, for each line it gets, how many signals it had and what is in its memory, on
# whatever descriptor 9 is.
CHILD = """
import ctypes, mmap, os, signal, sys
signals = []
signal.signal(signal.SIGUSR1, lambda *_: signals.append(1))
memory = mmap.mmap(-1, 4 * 4096, flags=mmap.MAP_PRIVATE)
memory[:] = b"o" * len(memory)
os.dup2(1, 9)
print(ctypes.addressof(ctypes.c_char.from_buffer(memory)), flush=True)
for line in sys.stdin:
    os.write(9, f"{len(signals)} {memory[:4].decode()} {memory[-4:].decode()}\\n".encode())
"""
SIZE = 4 * 4096


class Child:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self.stdin, self.stdout = process.stdin, process.stdout
        self.address = int(self.stdout.readline())

    @property
    def identity(self) -> Identity:
        return identity(self.process.pid)

    def look(self) -> None:
        self.stdin.write("\n")
        self.stdin.flush()

    def ask(self) -> tuple[int, str, str]:
        self.look()
        signals, first, last = self.stdout.readline().split()
        return int(signals), first, last


def identity(pid: int) -> Identity:
    started = start_time(pid)
    assert started is not None
    return Identity(pid, started, "")


@contextmanager
def running(code: str, *fds: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, pass_fds=fds) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def image(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "image"
    path.write_bytes(b"n" * SIZE)
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture
def child(image: int) -> Iterator[Child]:
    with running(CHILD, image) as process:
        yield Child(process)


def test_memory_is_replaced(child: Child, image: int) -> None:
    assert child.ask() == (0, "oooo", "oooo")
    with Injection(child.identity) as it:
        it.map(image, child.address, SIZE // 2)
    assert child.ask() == (0, "nnnn", "oooo")
    with Injection(child.identity) as it:
        it.map(image, child.address, SIZE)
    assert child.ask() == (0, "nnnn", "nnnn")
    assert os.pread(image, SIZE, 0) == b"n" * SIZE


def test_a_descriptor_is_replaced(image: int) -> None:
    reading, writing = os.pipe()
    with running(CHILD, image, writing) as process:
        child = Child(process)
        with Injection(child.identity) as it:
            it.replace(writing, 9)
            it.map(image, child.address, SIZE)
        child.look()
        assert os.read(reading, 100) == b"0 nnnn nnnn\n"
    os.close(reading)
    os.close(writing)


def test_an_error_of_the_kernel_is_told_and_changes_nothing(child: Child, image: int) -> None:
    with Injection(child.identity) as it:
        with pytest.raises(VmmFailed, match=r"mmap in process .*Bad file descriptor"):
            it.map(999, child.address, SIZE)
        with pytest.raises(VmmFailed, match=r"mmap in process .*Invalid argument"):
            it.map(image, child.address + 1, SIZE)
        with pytest.raises(VmmFailed, match=r"dup3 in process .*Bad file descriptor"):
            it.replace(999, 9)
    assert child.ask() == (0, "oooo", "oooo")


def test_signals_that_come_meanwhile_arrive(child: Child, image: int) -> None:
    """A thread sends them as fast as it can."""
    stop = threading.Event()

    def send() -> None:
        while not stop.is_set():
            os.kill(child.process.pid, signal.SIGUSR1)
            time.sleep(0)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        for _ in range(30):
            with Injection(child.identity) as it:
                it.map(image, child.address, SIZE)
    finally:
        stop.set()
        sender.join()
    count, first, last = child.ask()
    assert count > 0
    assert (first, last) == ("nnnn", "nnnn")
    blocked = re.search(r"SigBlk:\s+(\w+)", Path(f"/proc/{child.process.pid}/status").read_text())
    assert blocked is not None
    assert int(blocked[1], 16) == 0, "the mask of the process is back"


def test_many_times(child: Child, image: int) -> None:
    for number in range(200):
        with Injection(child.identity) as it:
            it.map(image, child.address, SIZE)
        if number % 20 == 0:
            assert child.ask() == (0, "nnnn", "nnnn")


def test_a_process_that_never_sleeps_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injection, "PATIENCE", 0.1)
    # No system calls at all: the interpreter makes none in such a loop.
    with running("print(flush=True)\nwhile True: pass") as process:
        assert process.stdout is not None
        process.stdout.readline()
        while float(Path(f"/proc/{process.pid}/stat").read_text().split()[13]) < 20:  # ticks in user mode
            time.sleep(0.01)
        with pytest.raises(VmmFailed, match=r"did not sleep for 0\.1 s"), Injection(identity(process.pid)):
            pass
        assert process.poll() is None
        with pytest.raises(VmmFailed, match=r"did not sleep for 0\.1 s"), Injection(identity(process.pid)):
            pass


def test_a_process_that_is_stopped_is_waited_for(child: Child, image: int) -> None:
    os.kill(child.process.pid, signal.SIGSTOP)
    threading.Timer(0.2, os.kill, (child.process.pid, signal.SIGCONT)).start()
    with Injection(child.identity) as it:
        it.map(image, child.address, SIZE)
    assert child.ask() == (0, "nnnn", "nnnn")


def test_a_process_that_is_gone(child: Child) -> None:
    gone = child.identity
    child.process.kill()
    child.process.wait()
    with pytest.raises(VmmFailed, match="is gone"), Injection(gone):
        pass


def test_a_number_that_another_process_has(child: Child) -> None:
    other = Identity(child.process.pid, child.identity.start_time - 1, "")
    with pytest.raises(VmmFailed, match="another has its number"), Injection(other):
        pass
    assert child.ask() == (0, "oooo", "oooo")


def test_a_process_that_dies_meanwhile(child: Child, image: int) -> None:
    with Injection(child.identity) as it:
        child.process.kill()
        with pytest.raises(VmmFailed):
            it.map(image, child.address, SIZE)
    assert child.process.wait() == -signal.SIGKILL, "its exit status is not lost"


def test_a_process_that_somebody_else_traces(child: Child) -> None:
    entered, leave = threading.Event(), threading.Event()

    def trace() -> None:
        with Injection(child.identity):
            entered.set()
            leave.wait(10)

    other = threading.Thread(target=trace)
    other.start()
    assert entered.wait(10)
    with pytest.raises(Refused, match="not permitted"), Injection(child.identity):
        pass
    leave.set()
    other.join()
    assert child.ask() == (0, "oooo", "oooo")


def test_should_the_tracer_die_the_process_does(child: Child) -> None:
    """Half of an injection is worse than an end."""
    code = f"""
import os
from aenv.vmm.injection import Injection
from aenv.vmm.process import Identity
Injection(Identity({child.identity.pid}, {child.identity.start_time}, "")).__enter__()
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    pidfd = os.pidfd_open(child.process.pid)
    assert select.select([pidfd], [], [], 5)[0]
    os.close(pidfd)
    assert child.process.wait() == -signal.SIGKILL


def test_other_machines_are_refused(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(Refused, match="aarch64"), Injection(child.identity):
        pass
