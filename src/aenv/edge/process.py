"""The ``aenv-edge`` process: found running, or started. It outlives the control plane on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import selectors
import subprocess
from pathlib import Path

from aenv import programs
from aenv.edge.client import EdgeClient
from aenv.errors import SetupError, Unavailable

log = logging.getLogger(__name__)

START_TIMEOUT = 10.0
"""Seconds from spawn to the line ``ready``; binding three sockets takes milliseconds."""


class EdgeProcess:
    """``listen`` is ``address:port``; ``run`` takes the sockets, ``logs`` the log file."""

    def __init__(self, listen: str, run: Path, logs: Path) -> None:
        self.listen = listen
        self.control = run / "edge.sock"
        self.api = run / "api.sock"
        self.log_file = logs / "edge.log"
        self._pid: int | None = None

    async def ensure(self) -> None:
        """Take over the edge that runs, or start one; one that listens at another address is replaced, and its open
        connections break. SetupError if the port is taken by somebody else."""
        try:
            async with EdgeClient(self.control) as client:
                status = await client.status()
                if status.listen == self.listen:
                    log.info("took over aenv-edge, pid %d", status.pid)
                    self._pid = status.pid
                    return
                log.info("aenv-edge moves from %s to %s", status.listen, self.listen)
                await client.shutdown()
        except Unavailable:
            pass
        self.control.unlink(missing_ok=True)
        await self._start()

    async def died(self) -> None:
        """Return when the edge that ``ensure`` found or started has ended."""
        if self._pid is None:
            return
        try:
            descriptor = os.pidfd_open(self._pid)
        except ProcessLookupError:
            return
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, os.WNOHANG)  # noqa: ASYNC222 - it has ended; this only collects it

    async def _start(self) -> None:
        # Starting waits for a line of output: a thread does that, once in the life of a node.
        self._pid = await asyncio.to_thread(self._spawn)
        log.info("started aenv-edge, pid %d, on %s", self._pid, self.listen)

    def _spawn(self) -> int:
        command = [
            str(programs.own_program("aenv-edge")),
            *("--listen", self.listen),
            *("--control", str(self.control)),
            *("--api", str(self.api)),
        ]
        with self.log_file.open("ab") as output:
            position = output.tell()
            # Its own session: neither a Ctrl-C in our terminal nor our death may end it.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
                cwd="/",
            )
        assert process.stdout is not None
        with process.stdout, selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            line = process.stdout.readline() if selector.select(START_TIMEOUT) else b""
        if line.strip() == b"ready":
            return process.pid
        process.kill()
        process.wait()
        with self.log_file.open("rb") as output:
            output.seek(position)
            said = output.read(2000).decode("utf-8", "replace").strip()
        raise SetupError(
            f"aenv-edge did not start on {self.listen}: {said or 'no message'}",
            remedy="choose another address with --listen, or stop what uses it",
        )
