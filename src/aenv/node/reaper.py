"""Removing what no record owns: left behind by a crash between an effect and its record."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Iterable

from aenv.config import Settings
from aenv.model import Sandbox
from aenv.network import Network
from aenv.node.resources import kill_strays

log = logging.getLogger(__name__)


class Reaper:
    """Runs at start-up, before the first request."""

    def __init__(self, settings: Settings, network: Network) -> None:
        self._settings = settings
        self._network = network

    async def reap(self, owned: Iterable[Sandbox]) -> None:
        """Remove VMMs, slots and directories of this home that none of ``owned`` names."""
        owned = list(owned)
        names = {record.sandbox_id for record in owned}
        directories = self._settings.home / "sandboxes"
        await asyncio.to_thread(kill_strays, directories, names)
        slots = {record.slot for record in owned if record.slot is not None}
        for index in await self._network.reap(slots):
            log.warning("removed network slot %d: no sandbox owns it", index)
        if directories.is_dir():
            for directory in directories.iterdir():
                if directory.name not in names:
                    log.warning("removing %s: no sandbox owns it", directory)
                    await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
