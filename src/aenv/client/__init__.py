"""Python client of the API and of the agent inside sandboxes.

::

    async with Client() as client:
        sandbox = await client.create("base")
        result = await sandbox.processes.run("echo hello")
        await sandbox.delete()
"""

from __future__ import annotations

from aenv.client.client import Client
from aenv.client.credentials import Credentials, resolve
from aenv.client.http import Busy, ConnectionLost
from aenv.client.models import LogLine, SandboxDetail, SandboxInfo, TemplateInfo
from aenv.client.processes import Exit, Output, Process, Processes, Result, Size
from aenv.client.sandbox import Sandbox

__all__ = [
    "Busy",
    "Client",
    "ConnectionLost",
    "Credentials",
    "Exit",
    "LogLine",
    "Output",
    "Process",
    "Processes",
    "Result",
    "Sandbox",
    "SandboxDetail",
    "SandboxInfo",
    "Size",
    "TemplateInfo",
    "resolve",
]
