"""The shapes of the E2B control API. Fields that are unset stay away from the wire: a null would crash some SDKs."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import msgspec

from aenv.model import Sandbox, Template

ENVD_VERSION = "0.6.13"
"""The E2B agent whose interface ours speaks; SDKs switch features by it."""


class _Request(msgspec.Struct, rename="camel"):
    pass


class _Answer(msgspec.Struct, rename="camel", omit_defaults=True):
    pass


# --- requests -------------------------------------------------------------------------------------------------------


class AutoResume(_Request):
    enabled: bool = False


class NetworkRules(_Request):
    allow_out: list[str] | None = None
    deny_out: list[str] | None = None
    dns_servers: list[str] | None = None
    egress_proxy: dict[str, Any] | None = None
    rules: dict[str, Any] | None = None
    allow_public_traffic: bool | None = None
    mask_request_host: str | None = None
    https_ports: list[int] | None = None


class CreateSandbox(_Request):
    template_id: str = msgspec.field(name="templateID")
    timeout: int | None = None
    metadata: dict[str, str] | None = None
    env_vars: dict[str, str] | None = None
    auto_pause: bool | None = None
    auto_pause_memory: bool | None = None
    auto_resume: AutoResume | None = None
    allow_internet_access: bool | None = msgspec.field(name="allow_internet_access", default=None)
    network: NetworkRules | None = None
    mcp: dict[str, Any] | None = None
    iam: dict[str, Any] | None = None
    volume_mounts: list[dict[str, Any]] | None = None
    secure: bool | None = None


class ConnectSandbox(_Request):
    timeout: int | None = None
    memory: bool | None = None


class SetTimeout(_Request):
    timeout: int


class Refresh(_Request):
    duration: int | None = None


# --- answers --------------------------------------------------------------------------------------------------------


class SandboxAnswer(_Answer):
    template_id: str = msgspec.field(name="templateID")
    sandbox_id: str = msgspec.field(name="sandboxID")
    client_id: str = msgspec.field(name="clientID")
    envd_version: str
    alias: str | None = None
    envd_access_token: str | None = None
    traffic_access_token: str | None = None
    domain: str | None = None


class Lifecycle(_Answer):
    auto_resume: bool = msgspec.field()
    on_timeout: Literal["kill", "pause"] = msgspec.field()


class ListedSandbox(_Answer):
    template_id: str = msgspec.field(name="templateID")
    sandbox_id: str = msgspec.field(name="sandboxID")
    client_id: str = msgspec.field(name="clientID")
    started_at: datetime
    end_at: datetime
    cpu_count: int
    memory_mb: int = msgspec.field(name="memoryMB")
    disk_size_mb: int = msgspec.field(name="diskSizeMB")
    state: Literal["running", "paused"]
    envd_version: str
    metadata: dict[str, str]
    alias: str | None = None


class SandboxDetail(ListedSandbox):
    envd_access_token: str | None = None
    allow_internet_access: bool | None = None
    domain: str | None = None
    lifecycle: Lifecycle | None = None


class LogLine(_Answer):
    timestamp: datetime
    line: str


class LogEntry(_Answer):
    timestamp: datetime
    message: str
    level: str
    fields: dict[str, str]


class Logs(_Answer):
    logs: list[LogLine]
    log_entries: list[LogEntry]


class TemplateAnswer(msgspec.Struct, rename="camel"):
    """Every field is required by the SDKs, nulls included."""

    template_id: str = msgspec.field(name="templateID")
    build_id: str = msgspec.field(name="buildID")
    cpu_count: int
    memory_mb: int = msgspec.field(name="memoryMB")
    disk_size_mb: int = msgspec.field(name="diskSizeMB")
    public: bool
    aliases: list[str]
    names: list[str]
    created_at: datetime
    updated_at: datetime
    created_by: None
    last_spawned_at: datetime | None
    spawn_count: int
    build_count: int
    envd_version: str
    build_status: str


def sandbox_answer(record: Sandbox, client_id: str, domain: str | None) -> SandboxAnswer:
    return SandboxAnswer(
        template_id=record.template_id,
        sandbox_id=record.sandbox_id,
        client_id=client_id,
        envd_version=ENVD_VERSION,
        alias=record.name,
        envd_access_token=record.access_token,
        traffic_access_token=record.traffic_token,
        domain=domain,
    )


def listed(record: Sandbox, client_id: str) -> ListedSandbox:
    return ListedSandbox(**_common(record, client_id))


def detail(record: Sandbox, client_id: str, domain: str | None) -> SandboxDetail:
    return SandboxDetail(
        **_common(record, client_id),
        envd_access_token=record.access_token,
        allow_internet_access=record.internet,
        domain=domain,
        lifecycle=Lifecycle(auto_resume=False, on_timeout="kill"),
    )


def template_answer(template: Template) -> TemplateAnswer:
    return TemplateAnswer(
        template_id=template.template_id,
        build_id=template.build_id,
        cpu_count=template.shape.vcpus,
        memory_mb=template.shape.memory,
        disk_size_mb=template.shape.disk,
        public=False,
        aliases=list(template.names),
        names=list(template.names),
        created_at=template.created_at,
        updated_at=template.created_at,
        created_by=None,
        last_spawned_at=None,
        spawn_count=0,
        build_count=1,
        envd_version=ENVD_VERSION,
        build_status="ready",
    )


def _common(record: Sandbox, client_id: str) -> dict[str, Any]:
    return {
        "template_id": record.template_id,
        "sandbox_id": record.sandbox_id,
        "client_id": client_id,
        "started_at": record.started_at,
        "end_at": record.end_at,
        "cpu_count": record.shape.vcpus,
        "memory_mb": record.shape.memory,
        "disk_size_mb": record.shape.disk,
        "state": "running",
        "envd_version": ENVD_VERSION,
        "metadata": record.metadata,
        "alias": record.name,
    }
