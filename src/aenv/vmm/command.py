"""Programs of the system, run to the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from aenv.errors import DiskFull, OperationFailed

# Enough for the last few messages of any tool; what came before is rarely the cause.
_STDERR_TAIL = 2000
_MAX_LINE = 64 * 1024

# Settings of the network and of temporary files belong to the machine; everything else would only make runs differ.
_INHERITED = (
    "HOME",
    "TMPDIR",
    "http_proxy",
    "https_proxy",
    "ftp_proxy",
    "all_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "APT_CONFIG",
)


def run(
    argv: Sequence[str | Path],
    what: str,
    *,
    timeout: float,
    cwd: Path | None = None,
    stdin: IO[bytes] | int = subprocess.DEVNULL,
    environ: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> bytes:
    """Run ``argv`` without a shell and return what it printed. ``what`` completes "cannot …" in errors.

    ``on_line`` gets each line of standard error as it comes. Raises DiskFull if the program complained about that,
    else OperationFailed with the end of its standard error. The program and its children are killed when ``timeout``
    (seconds) passes or this call is interrupted.
    """
    variables = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
    variables |= {name: os.environ[name] for name in _INHERITED if name in os.environ}
    variables |= environ or {}
    late = threading.Event()
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            [str(part) for part in argv],
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE,
            env=variables,
            start_new_session=True,
        )

        def give_up() -> None:
            late.set()
            _kill(process)

        timer = threading.Timer(timeout, give_up)
        timer.start()
        try:
            assert process.stderr is not None
            while line := process.stderr.readline(_MAX_LINE):
                stderr.write(line)
                if on_line is not None:
                    on_line(line.decode(errors="replace").rstrip())
            # Not reaped yet: until all signals are sent, its number must not go to another process.
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        finally:
            timer.cancel()
            timer.join()
            _kill(process)
            process.wait()
            if process.stderr is not None:
                process.stderr.close()
        if late.is_set():
            raise OperationFailed(f"cannot {what}: {Path(argv[0]).name} took longer than {timeout:.0f} s")
        if process.returncode != 0:
            stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _STDERR_TAIL))
            said = _summary(stderr.read().decode(errors="replace")) or f"exit status {process.returncode}"
            if "No space left on device" in said:
                raise DiskFull(f"cannot {what}: the disk is full ({said})", remedy="free some space, then try again")
            raise OperationFailed(f"cannot {what}: {Path(argv[0]).name}: {said}")
        stdout.seek(0)
        return stdout.read()


def _summary(text: str) -> str:
    """What a program said, in one line; of apt and mmdebstrap, which mark them, the errors alone."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("E: ") for line in lines if line.startswith("E: ")]
    return "; ".join(errors or lines)


def _kill(process: subprocess.Popen[bytes]) -> None:
    # The program leads its own process group, which outlives it as long as one of its children does.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
