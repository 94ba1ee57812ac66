"""Network namespaces: entering, making and pinning them.

A namespace belongs to a thread, not to a process. Everything here that enters one runs on threads kept for that
(``Threads``), never on the thread of the event loop.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

_CLONE_NEWNET = 0x40000000
_MS_BIND = 0x1000
_MS_PRIVATE = 1 << 18
_MNT_DETACH = 2
_UMOUNT_NOFOLLOW = 8

_libc = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def open_own() -> int:
    """File descriptor of the namespace of the calling thread."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _setns(fd: int) -> None:
    _check(_libc.setns(fd, _CLONE_NEWNET), "setns")


@contextmanager
def _returning() -> Iterator[None]:
    home = open_own()
    try:
        try:
            yield
        finally:
            _setns(home)
    finally:
        os.close(home)


@contextmanager
def inside(path: Path) -> Iterator[None]:
    """Run the block in the pinned namespace ``path``. OSError if that is not one (any more)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with _returning():
        try:
            _setns(fd)
        finally:
            os.close(fd)
        yield


@contextmanager
def fresh() -> Iterator[int]:
    """Run the block in a new namespace, given as a file descriptor. Unless the block pins it, or a process
    stays in it, it ends with the block and takes every device in it along: so does a crash."""
    with _returning():
        _check(_libc.unshare(_CLONE_NEWNET), "unshare")
        fd = open_own()
        try:
            yield fd
        finally:
            os.close(fd)


def pin(path: Path) -> None:
    """Keep the namespace of the calling thread alive under ``path``, which must not exist."""
    os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        _mount(Path("/proc/thread-self/ns/net"), path, _MS_BIND)
    except OSError:
        unpin(path)
        raise


def unpin(path: Path) -> None:
    """Let the namespace at ``path`` go and remove the file. Idempotent."""
    while is_pinned(path):
        umount(path)
    path.unlink(missing_ok=True)


def is_pinned(path: Path) -> bool:
    """Whether ``path`` is a namespace rather than the empty file that a crash or a reboot may leave."""
    # All namespace files live on one file system of the kernel's own.
    with suppress(FileNotFoundError):
        return path.lstat().st_dev == Path("/proc/self/ns/net").stat().st_dev
    return False


def make_private(directory: Path) -> None:
    """Make ``directory`` a mount point of its own from which pins do not spread into other mount namespaces:
    a copy there would keep a dead sandbox's namespace alive. Idempotent."""
    if not is_mount(directory):
        _mount(directory, directory, _MS_BIND)
    _mount(None, directory, _MS_PRIVATE)


def is_mount(path: Path) -> bool:
    wanted = os.fsencode(path.resolve()).replace(b"\\", b"\\134").replace(b" ", b"\\040")
    wanted = wanted.replace(b"\t", b"\\011").replace(b"\n", b"\\012")
    table = Path("/proc/thread-self/mountinfo").read_bytes()
    return any(line.split(b" ", 5)[4] == wanted for line in table.splitlines())


def umount(path: Path) -> None:
    _check(_libc.umount2(os.fsencode(path), _MNT_DETACH | _UMOUNT_NOFOLLOW), f"umount {path}")


def _mount(source: Path | None, target: Path, flags: int) -> None:
    origin = None if source is None else os.fsencode(source)
    _check(_libc.mount(origin, os.fsencode(target), None, flags, None), f"mount on {target}")


class Threads:
    """A few threads that may enter namespaces. Every job starts in the namespace of the thread that made this object,
    so one that could not come back from elsewhere leads no later job astray."""

    def __init__(self, count: int, name: str) -> None:
        self._home = open_own()
        self._executor = ThreadPoolExecutor(count, name)

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Run ``function`` on one of the threads."""

        def job() -> T:
            _setns(self._home)
            return function()

        return self._executor.submit(job)

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` on one of the threads and wait for it."""
        return self.submit(function).result()

    def close(self) -> None:
        """Finish what was submitted and end the threads. Idempotent."""
        self._executor.shutdown()
        if self._home >= 0:
            os.close(self._home)
            self._home = -1
