"""System calls made inside another process, through ptrace.

A VMM that waits for a guest is given its memory and its network this way: ``mmap`` puts an image over the memory it was
started with, ``dup3`` puts another open file under a descriptor number it already uses. Nothing of the VMM has to
cooperate, and its seccomp filter applies to what is injected too.

The main thread is stopped while it sleeps in a system call; the address and the registers of that call are borrowed,
and it is restarted afterwards as after a signal. Signals wait meanwhile. The kernel ties a tracer to its *thread*: an
Injection must be used from one thread, and it blocks for a millisecond, so not from an event loop's. Should this
program die halfway, the kernel kills the process (``PTRACE_O_EXITKILL``).

Needs what reading the memory of the process needs: root, or the same account and no policy against it. x86-64 only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import signal
import time

from aenv.errors import VmmFailed
from aenv.vmm.process import Identity, start_time

PATIENCE = 2.0  # seconds to find the process asleep in a system call
STOP_LIMIT = 5.0  # seconds for it to stop when told, and for one injected call
_PAUSE = 0.0005  # seconds between two tries

_CONT, _STEP, _GETREGS, _SETREGS, _DETACH, _SEIZE, _INTERRUPT = 7, 9, 12, 13, 17, 0x4206, 0x4207
_GETSIGMASK, _SETSIGMASK = 0x420A, 0x420B
_EXITKILL = 0x00100000
_WALL = 0x40000000
_TRAP = 5  # SIGTRAP
_EVENT_STOP = 128 << 8 | _TRAP  # the stop that _INTERRUPT causes
# What the kernel makes of "block everything": SIGKILL and SIGSTOP cannot be blocked. SIGTRAP is ours.
_ALL_BUT_TRAP = 2**64 - 1 ^ 1 << (_TRAP - 1) ^ 1 << (signal.SIGKILL - 1) ^ 1 << (signal.SIGSTOP - 1)
_SYSCALL = b"\x0f\x05"
_NO_CALL = 2**64 - 1  # in orig_rax: there is no system call to be restarted

_MMAP, _DUP3 = 9, 292
_READ_WRITE = 3
_PRIVATE_FIXED_NORESERVE = 0x4012

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


class Refused(Exception):
    """This program may not trace that process, or not on this machine."""


class _Registers(ctypes.Structure):
    """``struct user_regs_struct`` of x86-64 (sys/user.h)."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            *("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi"),
            *("orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs"),
        )
    )
    rax: int
    orig_rax: int
    rip: int


class Injection:
    """A process that is held still for a few system calls. A context manager.

    Raises Refused on entry if it may not be done, VmmFailed if the process is gone or does not get to sleep. Calls
    raise VmmFailed with the error the kernel had for them; the process is as it was then."""

    def __init__(self, identity: Identity) -> None:
        self._pid = identity.pid
        self._start_time = identity.start_time
        self._mask = ctypes.c_uint64()
        self._signal = 0  # one that cannot be kept waiting, to be delivered at the end

    def __enter__(self) -> Injection:
        if platform.machine() != "x86_64":
            raise Refused(f"not possible on {platform.machine()}")
        try:
            self._ptrace(_SEIZE, data=_EXITKILL)
        except OSError as error:
            if error.errno == errno.ESRCH:
                raise VmmFailed(f"the process {self._pid} is gone") from error
            raise Refused(error.strerror) from error
        try:
            self._catch()
            if start_time(self._pid) != self._start_time:
                self.__exit__()
                raise VmmFailed(f"the process {self._pid} is gone, another has its number")
        except OSError as error:
            raise VmmFailed(f"the process {self._pid} cannot be held: {error.strerror}") from error
        return self

    def __exit__(self, *_: object) -> None:
        # A process that died meanwhile has nothing to be let go.
        with contextlib.suppress(OSError):
            self._ptrace(_SETSIGMASK, ctypes.sizeof(self._mask), ctypes.addressof(self._mask))
            self._ptrace(_SETREGS, data=ctypes.addressof(self._saved))
            self._ptrace(_DETACH, data=self._signal)

    def map(self, fd: int, address: int, size: int) -> None:
        """Replace the memory at ``address`` by a private mapping of the process's descriptor ``fd``."""
        found = self._call("mmap", _MMAP, address, size, _READ_WRITE, _PRIVATE_FIXED_NORESERVE, fd, 0)
        if found != address:
            raise VmmFailed(f"mmap in process {self._pid} answered {found:#x} instead of {address:#x}")

    def replace(self, fd: int, number: int) -> None:
        """Make the process's descriptor ``number`` another name of its descriptor ``fd``."""
        self._call("dup3", _DUP3, fd, number, os.O_CLOEXEC)

    def _catch(self) -> None:
        """Stop the main thread inside a system call."""
        deadline = time.monotonic() + PATIENCE
        everything, mask = ctypes.c_uint64(_ALL_BUT_TRAP), ctypes.c_uint64()
        while True:
            self._ptrace(_INTERRUPT)
            stop = self._stopped()
            self._ptrace(_GETSIGMASK, ctypes.sizeof(mask), ctypes.addressof(mask))
            if mask.value != everything.value:
                # The first time, and whenever a handler that ran before has returned and put its own mask back.
                self._mask.value = mask.value
                self._ptrace(_SETSIGMASK, ctypes.sizeof(everything), ctypes.addressof(everything))
            self._saved = self._registers()
            if stop == _EVENT_STOP and self._code(self._saved.rip - 2) == _SYSCALL:
                return
            # It runs, is about to receive a signal, or was stopped by one.
            self._signal = stop if stop < 128 else 0
            if time.monotonic() > deadline:
                self.__exit__()
                raise VmmFailed(f"the process {self._pid} did not sleep for {PATIENCE:g} s")
            self._ptrace(_CONT, data=self._signal)
            self._signal = 0
            time.sleep(_PAUSE)

    def _call(self, name: str, number: int, *arguments: int) -> int:
        registers = _Registers.from_buffer_copy(self._saved)
        registers.rip, registers.rax, registers.orig_rax = self._saved.rip - 2, number, _NO_CALL
        for register, value in zip(("rdi", "rsi", "rdx", "r10", "r8", "r9"), arguments, strict=False):
            setattr(registers, register, value)
        try:
            self._ptrace(_SETREGS, data=ctypes.addressof(registers))
            self._step()
            result = self._registers().rax
        except OSError as error:
            raise VmmFailed(f"{name} in process {self._pid}: {error.strerror}") from error
        if result >= 2**64 - 4095:
            raise VmmFailed(f"{name} in process {self._pid}: {os.strerror(2**64 - result)}")
        return result

    def _step(self) -> None:
        self._ptrace(_STEP)
        while (stop := self._stopped()) != _TRAP:
            if stop < 128:
                self._signal = stop
            self._ptrace(_STEP)

    def _stopped(self) -> int:
        """Wait for a stop: a signal number below 128, or an event. OSError if the process ends instead."""
        deadline = time.monotonic() + STOP_LIMIT
        while True:
            # Its exit status is for whoever watches over the process, so it is looked at but not taken.
            seen = os.waitid(os.P_PID, self._pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG | _WALL)
            if seen is None:
                if time.monotonic() > deadline:
                    raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
                time.sleep(_PAUSE / 10)
            elif seen.si_code == os.CLD_TRAPPED:
                os.waitid(os.P_PID, self._pid, os.WSTOPPED | os.WNOHANG | _WALL)
                return seen.si_status
            else:
                raise OSError(errno.ESRCH, "it has ended")

    def _registers(self) -> _Registers:
        registers = _Registers()
        self._ptrace(_GETREGS, data=ctypes.addressof(registers))
        return registers

    def _code(self, address: int) -> bytes:
        fd = os.open(f"/proc/{self._pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(fd, 2, address)
        finally:
            os.close(fd)

    def _ptrace(self, request: int, address: int = 0, data: int = 0) -> None:
        if _libc.ptrace(request, self._pid, address, data) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
