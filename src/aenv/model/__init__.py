"""Plain data that the whole product shares. No behaviour, no input or output."""

from __future__ import annotations

from aenv.model.ids import is_sandbox_id, new_api_key, new_sandbox_id, new_template_id
from aenv.model.machine import KernelImage, MachineShape
from aenv.model.sandbox import Ended, ProcessRecord, Sandbox, State
from aenv.model.template import Template

__all__ = [
    "Ended",
    "KernelImage",
    "MachineShape",
    "ProcessRecord",
    "Sandbox",
    "State",
    "Template",
    "is_sandbox_id",
    "new_api_key",
    "new_sandbox_id",
    "new_template_id",
]
