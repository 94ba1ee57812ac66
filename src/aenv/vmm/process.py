"""A VMM process: started apart from this program, watched through a pidfd, taken over after a restart.

The process is in a session of its own, has none of our file descriptors but those it is meant to have, and prints into
sealed memory (``output.py``), so neither our end nor a full pipe can touch it. It runs as an account of its own with no
groups but those named, can never gain privileges (``no_new_privs``), leaves no core dump with a guest's memory in it,
and is what the kernel kills first when the machine runs out of memory.

It carries its directory in the environment variable ``AENV_MACHINE``. ``find`` looks for that: a process that was
started a moment before this program died, and that nobody could write down, is not lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from aenv.errors import VmmFailed
from aenv.programs import system_program
from aenv.vmm.output import Output
from aenv.vmm.threads import in_thread

MARK = "AENV_MACHINE"
CONSOLE_SIZE = 1 << 20  # bytes kept of standard output, which is the console of the guest
MESSAGES_SIZE = 64 << 10  # bytes kept of standard error
WRAP_INTERVAL = 1.0  # seconds between two looks at how full the console is
OOM_SCORE = 500  # of 1000: before the control plane (0), whose death would hurt every sandbox

_PREFIX = MARK.encode() + b"="
_EXEC_TRIES = 5
_EXEC_PAUSE = 0.002  # seconds
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class Account(msgspec.Struct, frozen=True):
    """Who a process runs as. ``groups`` are all its supplementary groups."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


class Identity(msgspec.Struct, frozen=True):
    """Names a process for good: a pid is reused, but not with the same start time (clock ticks since boot) in the
    same ``boot_id``."""

    pid: int
    start_time: int
    boot_id: str


class Launch(msgspec.Struct, frozen=True):
    """What to start, and how.

    ``fds`` keep their numbers. ``netns`` is the network namespace it starts in (None: ours). ``account`` needs root;
    None keeps ours. ``file_limit`` is the size in bytes beyond which it cannot grow any file.
    """

    arguments: Sequence[str]
    directory: Path
    fds: tuple[int, ...] = ()
    netns: Path | None = None
    account: Account | None = None
    file_limit: int | None = None


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, field 2, may contain anything, spaces and parentheses too; nothing after it does.
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


def find(root: Path) -> list[tuple[Identity, Path]]:
    """Every process that ``start`` was ever asked for, by whomever, with a directory at or below ``root``."""
    found = []
    boot = boot_id()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        started = start_time(int(entry.name))
        directory = _marked(entry)
        if started is not None and directory is not None and (directory == root or root in directory.parents):
            found.append((Identity(int(entry.name), started, boot), directory))
    return found


def _marked(entry: Path) -> Path | None:
    """The directory in the environment of a process."""
    try:
        for _ in range(_EXEC_TRIES):
            if environment := (entry / "environ").read_bytes():
                break
            # Empty while it becomes another program, always for kernel threads, which have none.
            (entry / "exe").readlink()
            time.sleep(_EXEC_PAUSE)
    except OSError:
        return None
    for item in environment.split(b"\0"):
        if item.startswith(_PREFIX):
            return Path(os.fsdecode(item.removeprefix(_PREFIX)))
    return None


class Process:
    """A running VMM process. Belongs to the event loop it was made in."""

    def __init__(self, identity: Identity, pidfd: int, console: Output | None, messages: Output | None) -> None:
        self.identity = identity
        self._pidfd = pidfd
        self._console = console
        self._messages = messages
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int | None] = self._loop.create_future()
        self._loop.add_reader(pidfd, self._ended)
        self._timer = self._loop.call_later(WRAP_INTERVAL, self._wrap) if console or messages else None

    @classmethod
    async def start(cls, launch: Launch) -> Process:
        """Start a process; it has begun to execute its program when this returns. VmmFailed says why it could not."""
        work = asyncio.ensure_future(in_thread(lambda: _start(launch)))
        try:
            return _take(*await asyncio.shield(work))
        except asyncio.CancelledError:
            # The thread cannot be stopped; what it starts must not stay behind.
            with contextlib.suppress(VmmFailed):
                process = _take(*await work)
                await process.kill()
                process.close()
            raise

    @classmethod
    def adopt(cls, identity: Identity) -> Process | None:
        """Take over a running process that was started by whomever; None if it is gone."""
        if identity.boot_id != boot_id():
            return None
        try:
            pidfd = os.pidfd_open(identity.pid)
        except ProcessLookupError:
            return None
        # In this order: the pidfd holds the process that has the pid now, and this tells whether it is the one.
        if start_time(identity.pid) != identity.start_time:
            os.close(pidfd)
            return None
        process = cls(identity, pidfd, Output.adopt(pidfd, 1, CONSOLE_SIZE), Output.adopt(pidfd, 2, MESSAGES_SIZE))
        if _is_over(pidfd):
            process._ended()
            process.close()
            return None
        return process

    @property
    def exited(self) -> bool:
        return self._exit.done()

    def on_exit(self, call: Callable[[], None]) -> None:
        """Have something called when it has ended, before those wake up who began to wait later."""
        self._exit.add_done_callback(lambda exit: None if exit.cancelled() else call())

    async def wait(self) -> int | None:
        """Wait for its end: exit status, negative for a signal, None if it was not our child. For any number of
        tasks."""
        return await asyncio.shield(self._exit)

    async def kill(self) -> int | None:
        """End it at once, and return when it is over."""
        if not self._exit.done():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        return await self.wait()

    def console(self, limit: int) -> str:
        """The end of its standard output."""
        return self._console.tail(limit) if self._console else ""

    def messages(self, limit: int = 4096) -> str:
        """The end of its standard error."""
        return self._messages.tail(limit) if self._messages else ""

    def close(self) -> None:
        """Stop watching; a process that runs goes on. Those who wait get CancelledError."""
        if self._timer is not None:
            self._timer.cancel()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._exit.cancel()
        for output in (self._console, self._messages):
            if output is not None:
                output.close()

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        if self._timer is not None:
            self._timer.cancel()
        if not self._exit.done():
            self._exit.set_result(_reap(self._pidfd))

    def _wrap(self) -> None:
        for output in (self._console, self._messages):
            if output is not None:
                output.wrap()
        self._timer = self._loop.call_later(WRAP_INTERVAL, self._wrap)


def _take(pid: int, console: Output, messages: Output) -> Process:
    # A child that was not waited for keeps its pid, even dead: no other process can have it.
    started = start_time(pid)
    assert started is not None, "a child that was not reaped has an entry in /proc"
    return Process(Identity(pid, started, boot_id()), os.pidfd_open(pid), console, messages)


def _start(launch: Launch) -> tuple[int, Output, Output]:
    """Runs in a thread of its own, whose network namespace the child inherits. The other threads keep theirs."""
    program = launch.arguments[0]
    console = Output.create("console", CONSOLE_SIZE)
    messages = Output.create("messages", MESSAGES_SIZE)
    try:
        if launch.netns is not None:
            _enter(launch.netns)
        child = subprocess.Popen(
            [*_confinement(launch), *launch.arguments],
            stdin=subprocess.DEVNULL,
            stdout=console.fileno(),
            stderr=messages.fileno(),
            pass_fds=launch.fds,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C", MARK: str(launch.directory)},
            start_new_session=True,
            # Python ignores SIGPIPE and SIGXFSZ, and the child should too: a VMM that reaches its file limit gets
            # an error for the guest's write instead of a signal that kills it.
            restore_signals=False,
            umask=0o077,
        )
    except OSError as error:
        console.close()
        messages.close()
        raise VmmFailed(f"cannot start {program}: {error}") from error
    except BaseException:
        console.close()
        messages.close()
        raise
    # Reaping is done through the pidfd. Told that the child has ended, the Popen object neither waits for it behind
    # our back nor complains when it is collected while the child runs.
    child.returncode = 0
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # already dead
        Path(f"/proc/{child.pid}/oom_score_adj").write_text(str(OOM_SCORE))
    return child.pid, console, messages


def _confinement(launch: Launch) -> list[str]:
    """Two small programs that give up privileges and then become the next.

    Python could do half of it, but then it forks, which copies the page tables of a large control plane while nothing
    else in it runs (50 ms with 300 MiB); with nothing to do in the child it uses vfork. And limits set from outside,
    once the account has changed, need CAP_SYS_RESOURCE, which root in a container often lacks.
    """
    privileges = [str(system_program("setpriv", "util-linux")), "--no-new-privs"]
    if launch.account is not None:
        groups = launch.account.groups
        privileges += [f"--reuid={launch.account.uid}", f"--regid={launch.account.gid}"]
        privileges += [f"--groups={','.join(map(str, groups))}" if groups else "--clear-groups"]
    limits = [str(system_program("prlimit", "util-linux")), "--core=0"]
    if launch.file_limit is not None:
        limits.append(f"--fsize={launch.file_limit}")
    return [*privileges, "--", *limits, "--"]


def _enter(netns: Path) -> None:
    # os.setns came with Python 3.12.
    fd = os.open(netns, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(fd, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(netns))
    finally:
        os.close(fd)


def _reap(pidfd: int) -> int | None:
    try:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        return None
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def _is_over(pidfd: int) -> bool:
    """Whether the process is dead, reaped or not."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
