"""What a VMM prints, in a piece of memory that cannot grow.

A guest may print for ever, and nobody may be there to read: the VMM outlives this program. So the standard output and
the standard error of a VMM are each a *sealed memory file* (``memfd`` with ``F_SEAL_GROW``): the kernel itself refuses
the write that would make it longer, whoever is alive. Nothing lies on a disk, no helper process is needed, and the
unprivileged VMM needs no directory it can write to.

Writer and reader share one open file description and therefore one position. ``wrap``, called now and then while this
program lives, moves that position back to the start once half of the file is used, so the newest output replaces the
oldest. Without anybody to wrap, the file fills up and further output is dropped until somebody does.
After a restart the same description is fetched out of the running process with ``pidfd_getfd``.
"""

from __future__ import annotations

import ctypes
import fcntl
import os

_PIDFD_GETFD = 438  # the same number on every architecture
_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_libc = ctypes.CDLL(None, use_errno=True)


class Output:
    """The bounded output of one process. Not safe for use by several threads."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd
        self.size = os.fstat(fd).st_size

    @classmethod
    def create(cls, name: str, size: int) -> Output:
        """A new one of ``size`` bytes; ``fileno`` goes to the process that writes."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def adopt(cls, pidfd: int, number: int, size: int) -> Output | None:
        """The one of ``size`` bytes that is file descriptor ``number`` of a running process. None if that cannot be
        had: the process is gone, this program may not look into it, or the descriptor is not what it was."""
        fd = _libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
        if fd < 0:
            return None
        try:
            # The process may have been taken over and have put anything there.
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) != _SEALS or os.fstat(fd).st_size != size:
                raise OSError("not what create made")
            return cls(fd)
        except OSError:
            os.close(fd)
            return None

    def fileno(self) -> int:
        if self._fd is None:
            raise ValueError("the output is closed")
        return self._fd

    def wrap(self) -> None:
        """Let the writer start again at the beginning if it has used more than half. A few bytes may be lost when it
        writes at that very moment."""
        if self._fd is None:
            return
        used = self._used(self._fd)
        if used > self.size // 2:
            os.lseek(self._fd, 0, os.SEEK_SET)
            # What lies behind is of an older round; as zeros it is not taken for the end of this one.
            _zero(self._fd, used, self.size - used)

    def tail(self, limit: int) -> str:
        """The last ``limit`` bytes that were written, undecodable ones replaced."""
        if self._fd is None or limit <= 0:
            return ""
        used = self._used(self._fd)
        start = max(0, used - limit)
        newest = os.pread(self._fd, used - start, start)
        if start == 0:
            older = os.pread(self._fd, self.size - used, used).rstrip(b"\0")
            newest = (older + newest)[-limit:]
        return newest.replace(b"\0", b"").decode("utf-8", "replace")

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _used(self, fd: int) -> int:
        # The writer shares the position and is not trusted to leave it inside the file.
        return min(os.lseek(fd, 0, os.SEEK_CUR), self.size)


def _zero(fd: int, start: int, length: int) -> None:
    keep_size_and_punch = 3
    if length > 0 and _libc.fallocate(fd, keep_size_and_punch, ctypes.c_long(start), ctypes.c_long(length)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
