"""What a node needs before its first sandbox: a guest kernel and the template ``base``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aenv.config import Settings
from aenv.model import KernelImage, Template
from aenv.templates.base import ensure_base
from aenv.vmm.kernel import ensure_kernel
from aenv.vmm.qemu import QemuDriver


def prepare(
    settings: Settings, progress: Callable[[str], None], *, refresh: bool = False, rebuild: bool = False
) -> tuple[KernelImage, Template]:
    """Build what is missing: minutes in an empty home, nothing otherwise. ``refresh`` looks for a newer kernel,
    ``rebuild`` makes the template anew. Blocks; not for use inside an event loop."""
    driver = asyncio.run(QemuDriver.open(settings.vmm, settings.home))
    kernel = ensure_kernel(settings, driver.version_numbers, progress, refresh=refresh)
    return kernel, ensure_base(settings, kernel, progress, rebuild=rebuild)
