"""Removing what no record owns: left behind by a crash between an effect and its record."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path

from aenv.config import Settings
from aenv.model import Sandbox
from aenv.network import Network

log = logging.getLogger(__name__)


class Reaper:
    """Runs at start-up, before the first request."""

    def __init__(self, settings: Settings, network: Network) -> None:
        self._settings = settings
        self._network = network

    async def reap(self, owned: Iterable[Sandbox]) -> None:
        """Remove VMMs, slots and directories of this home that none of ``owned`` names."""
        owned = list(owned)
        slots = {record.slot for record in owned if record.slot is not None}
        namespaces = self._settings.run / "netns"
        if namespaces.is_dir():
            orphans = [
                entry for entry in namespaces.iterdir() if not (entry.name.isdigit() and int(entry.name) in slots)
            ]
            for pid in await asyncio.to_thread(_inhabitants, orphans):
                log.warning("killing process %d: it runs in the slot of no sandbox", pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for index in await self._network.reap(slots):
            log.warning("removed network slot %d: no sandbox owns it", index)
        directories = self._settings.home / "sandboxes"
        names = {record.sandbox_id for record in owned}
        if directories.is_dir():
            for directory in directories.iterdir():
                if directory.name not in names:
                    log.warning("removing %s: no sandbox owns it", directory)
                    await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)


def _inhabitants(namespaces: Iterable[Path]) -> list[int]:
    """Pids of the processes that live in one of these network namespaces."""
    inodes = set()
    for path in namespaces:
        with contextlib.suppress(OSError):
            status = path.stat()
            inodes.add((status.st_dev, status.st_ino))
    pids = []
    for process in Path("/proc").iterdir():
        if inodes and process.name.isdigit() and int(process.name) != os.getpid():
            with contextlib.suppress(OSError):
                status = (process / "ns/net").stat()
                if (status.st_dev, status.st_ino) in inodes:
                    pids.append(int(process.name))
    return pids
