"""Runs ``aenv`` as a user does: a process of its own, with pipes or with a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DEADLINE = 60.0
"""Seconds after which what was waited for is not going to happen."""


class CommandLine:
    """``aenv`` with a home directory and an environment of its own; nothing of the tester's leaks in."""

    def __init__(self, directory: Path, **environ: str) -> None:
        self.directory = directory
        self.environ = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "HOME": str(directory),
            "AENV_HOME": str(directory / "node"),
            "TERM": "xterm",
            "PYTHONWARNINGS": "error",
            **environ,
        }

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "aenv.cli", *arguments]

    def __call__(self, *arguments: str, input: bytes = b"", **environ: str) -> subprocess.CompletedProcess[bytes]:
        """Run with pipes, to the end."""
        return subprocess.run(
            self.command(*arguments),
            env=self.environ | environ,
            cwd=self.directory,
            input=input,
            capture_output=True,
            timeout=DEADLINE,
            check=False,
        )

    @contextmanager
    def running(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run with pipes, beside the test."""
        with subprocess.Popen(
            self.command(*arguments),
            env=self.environ,
            cwd=self.directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    @contextmanager
    def terminal(self, *arguments: str, cols: int = 100, rows: int = 30) -> Iterator[Terminal]:
        """Start in a terminal of its own."""
        pid, descriptor = pty.fork()
        if pid == 0:
            # The other side may not have set the size yet: the child does it before anybody asks.
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
            os.chdir(self.directory)
            os.execve(sys.executable, self.command(*arguments), self.environ)
        terminal = Terminal(pid, descriptor)
        try:
            yield terminal
        finally:
            terminal.close()


class Terminal:
    """The user's side of a terminal in which a program runs."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self.shown = b""
        self._descriptor = descriptor
        self._status: int | None = None

    def type(self, keys: bytes) -> None:
        while keys:
            keys = keys[os.write(self._descriptor, keys) :]

    def resize(self, cols: int, rows: int) -> None:
        """The kernel tells the program with SIGWINCH."""
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    def expect(self, text: bytes) -> bytes:
        """Wait until ``text`` is shown, and return what was shown up to it; it does not match twice."""
        deadline = time.monotonic() + DEADLINE
        while text not in self.shown:
            if not self._read(deadline):
                raise AssertionError(f"{text!r} never came, but:\n{self.shown.decode(errors='replace')}")
        before, _, self.shown = self.shown.partition(text)
        return before

    def is_raw(self) -> bool:
        return not termios.tcgetattr(self._descriptor)[3] & termios.ICANON

    def wait(self) -> int:
        """Wait for the program to end, and return its exit status."""
        deadline = time.monotonic() + DEADLINE
        while self._read(deadline):
            pass
        while self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = status
            elif time.monotonic() > deadline:
                raise AssertionError(f"still running, and shows:\n{self.shown.decode(errors='replace')}")
            else:
                time.sleep(0.01)
        return os.waitstatus_to_exitcode(self._status)

    def close(self) -> None:
        if self._status is None:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
        os.close(self._descriptor)

    def _read(self, deadline: float) -> bool:
        """Take what is shown next; False at the end of the program or of our patience."""
        ready, _, _ = select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        try:
            data = os.read(self._descriptor, 65536)
        except OSError:
            return False
        self.shown += data
        return bool(data)
