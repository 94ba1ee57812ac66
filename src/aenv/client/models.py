"""What the API sends, as typed plain data.

Field names follow Python; their names on the wire are those of the E2B API. Unknown fields are ignored, and times are
aware datetimes in UTC. Sizes are in MiB, durations in seconds.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec

SandboxState = Literal["running", "paused"]


class SandboxAccess(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to creating or connecting: how to reach the sandbox. ``access_token`` is a secret."""

    sandbox_id: str = msgspec.field(name="sandboxID")
    template_id: str = msgspec.field(name="templateID")
    envd_version: str = msgspec.field(name="envdVersion")
    alias: str | None = None
    access_token: str | None = msgspec.field(name="envdAccessToken", default=None)
    traffic_token: str | None = msgspec.field(name="trafficAccessToken", default=None)
    domain: str | None = None


class SandboxInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox as listed. ``end_at`` is when it is deleted unless its timeout is moved."""

    sandbox_id: str = msgspec.field(name="sandboxID")
    template_id: str = msgspec.field(name="templateID")
    state: SandboxState
    started_at: datetime = msgspec.field(name="startedAt")
    end_at: datetime = msgspec.field(name="endAt")
    cpus: int = msgspec.field(name="cpuCount")
    memory: int = msgspec.field(name="memoryMB")
    disk: int = msgspec.field(name="diskSizeMB")
    envd_version: str = msgspec.field(name="envdVersion")
    alias: str | None = None
    metadata: dict[str, str] | None = None


class SandboxDetail(SandboxInfo, frozen=True, kw_only=True):
    """A sandbox with what only its owner may know. ``internet`` None means that nothing was asked for."""

    access_token: str | None = msgspec.field(name="envdAccessToken", default=None)
    internet: bool | None = msgspec.field(name="allowInternetAccess", default=None)
    domain: str | None = None


class TemplateInfo(msgspec.Struct, frozen=True, kw_only=True):
    template_id: str = msgspec.field(name="templateID")
    build_id: str = msgspec.field(name="buildID")
    names: list[str] = msgspec.field(default_factory=list)
    aliases: list[str] = msgspec.field(default_factory=list)
    cpus: int = msgspec.field(name="cpuCount")
    memory: int = msgspec.field(name="memoryMB")
    disk: int = msgspec.field(name="diskSizeMB")
    created_at: datetime = msgspec.field(name="createdAt")
    updated_at: datetime | None = msgspec.field(name="updatedAt", default=None)
    spawn_count: int = msgspec.field(name="spawnCount", default=0)
    build_status: str = msgspec.field(name="buildStatus", default="ready")


class LogLine(msgspec.Struct, frozen=True):
    timestamp: datetime
    line: str


class Logs(msgspec.Struct, frozen=True):
    logs: list[LogLine]


class WrittenFile(msgspec.Struct, frozen=True):
    path: str
    name: str
    type: str


class Failure(msgspec.Struct, frozen=True):
    """Body of every refusal; ``code`` is a number from the API and a word from the process interface."""

    message: str = ""
    code: int | str | None = None
