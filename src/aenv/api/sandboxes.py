"""The sandbox calls of the E2B API."""

from __future__ import annotations

import hashlib
import re
import secrets
from datetime import UTC, datetime, timedelta

import msgspec
from aiohttp import web

from aenv.api import listing, wire
from aenv.api.app import NODE, SETTINGS, answer, body, failure
from aenv.errors import BadRequest, NotFound
from aenv.model import Sandbox, new_sandbox_id

routes = web.RouteTableDef()

_IDEMPOTENCY_KEY = re.compile(r"[a-z0-9-]{1,255}")
_ENV_NAME = re.compile(r"[^=\x00]{1,512}")
VARIABLE_LIMIT = 128 * 1024
"""Bytes of ``name=value`` and the zero behind it: Linux starts no program with a larger one (MAX_ARG_STRLEN)."""
ENV_LIMIT = 512 * 1024
"""Bytes of all variables; a quarter of what Linux allows arguments and environment together."""
CONSOLE_LIMIT = 256 * 1024
"""Bytes of the guest's console that one call returns at most."""
REFRESH_LIMIT = 3600


@routes.post("/v2/sandboxes")
async def create(request: web.Request) -> web.Response:
    return await _create(request, default_timeout=request.app[SETTINGS].sandbox.default_timeout, always_secure=True)


@routes.post("/sandboxes")
async def create_v1(request: web.Request) -> web.Response:
    return await _create(request, default_timeout=15, always_secure=False)


async def _create(request: web.Request, *, default_timeout: int, always_secure: bool) -> web.Response:
    settings, node = request.app[SETTINGS], request.app[NODE]
    wanted = await body(request, wire.CreateSandbox)
    _check_available(wanted)
    timeout = _timeout(request, wanted.timeout if wanted.timeout is not None else default_timeout)
    secure = always_secure or wanted.secure is not False
    private = wanted.network is not None and wanted.network.allow_public_traffic is False
    if private and not secure:
        raise BadRequest("allowPublicTraffic: false needs a secure sandbox", remedy="leave `secure` out, or set it")
    room = ENV_LIMIT
    for name, value in (wanted.env_vars or {}).items():
        if not _ENV_NAME.fullmatch(name) or "\x00" in value:
            raise BadRequest(f"envVars: {name[:100]!r} cannot be an environment variable")
        size = len(f"{name}={value}".encode()) + 1
        room -= size
        if size > VARIABLE_LIMIT or room < 0:
            limit = f"{VARIABLE_LIMIT} bytes" if size > VARIABLE_LIMIT else f"{ENV_LIMIT} bytes with the others"
            raise BadRequest(f"envVars: {name!r} is larger than {limit}", remedy="write it to a file of the sandbox")
    try:
        template = node.templates.get(wanted.template_id)
    except NotFound as error:
        raise NotFound(
            f"there is no template {wanted.template_id!r}", remedy="`aenv template ls` lists them"
        ) from error
    key = request.headers.get("Idempotency-Key")
    if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
        raise BadRequest("Idempotency-Key: 1 to 255 of a-z, 0-9 and -")
    now = datetime.now(UTC)
    record = await node.create(
        Sandbox(
            sandbox_id=new_sandbox_id(),
            template_id=template.template_id,
            build_id=template.build_id,
            name=template.names[0] if template.names else None,
            kernel=template.kernel,
            shape=template.shape,
            state="creating",
            started_at=now,
            end_at=now + timedelta(seconds=timeout),
            timeout=timeout,
            control_token=secrets.token_hex(32),
            access_token=secrets.token_hex(32) if secure else None,
            traffic_token=secrets.token_hex(32) if private else None,
            internet=wanted.allow_internet_access,
            metadata=wanted.metadata or {},
            env=wanted.env_vars or {},
            idempotency_key=key,
            fingerprint=hashlib.sha256(msgspec.json.encode(wanted, order="sorted")).hexdigest() if key else None,
        )
    )
    return answer(wire.sandbox_answer(record, settings.tag, settings.domain), 201)


def _check_available(wanted: wire.CreateSandbox) -> None:
    """Refuse what would silently not happen."""
    if wanted.auto_pause_memory is False and not wanted.auto_pause:
        raise BadRequest("autoPauseMemory: false needs autoPause")
    missing = {
        "autoPause": wanted.auto_pause,
        "autoResume": wanted.auto_resume is not None and wanted.auto_resume.enabled,
        "volumeMounts": wanted.volume_mounts,
        "iam": wanted.iam is not None and wanted.iam.get("tokens"),
        "allow_internet_access: false": wanted.allow_internet_access is False,
    }
    if wanted.network is not None:
        for field in msgspec.structs.fields(wire.NetworkRules):
            if field.name != "allow_public_traffic":
                missing[f"network.{field.encode_name}"] = bool(getattr(wanted.network, field.name))
    for name, is_wanted in missing.items():
        if is_wanted:
            raise BadRequest(f"{name} is not available in this release", remedy="leave it out")


@routes.get("/v2/sandboxes")
async def list_sandboxes(request: web.Request) -> web.Response:
    settings, node = request.app[SETTINGS], request.app[NODE]
    query = listing.parse(request.query)
    page = listing.select(node.list(), query)
    headers = {"X-Total-Running": str(len(node.list()))}
    if page.next_token is not None:
        headers["X-Next-Token"] = page.next_token
    return answer([wire.listed(record, settings.tag) for record in page.records], headers=headers)


@routes.get("/sandboxes")
async def list_sandboxes_v1(request: web.Request) -> web.Response:
    settings, node = request.app[SETTINGS], request.app[NODE]
    query = listing.Query(metadata=listing.parse_metadata(request.query.get("metadata")), limit=None)
    page = listing.select(node.list(), query)
    return answer([wire.listed(record, settings.tag) for record in page.records])


@routes.get("/sandboxes/{id}")
async def get(request: web.Request) -> web.Response:
    settings = request.app[SETTINGS]
    record = request.app[NODE].get(request.match_info["id"])
    return answer(wire.detail(record, settings.tag, settings.domain))


@routes.delete("/sandboxes/{id}")
async def kill(request: web.Request) -> web.Response:
    await request.app[NODE].kill(request.match_info["id"])
    return web.Response(status=204)


@routes.post("/sandboxes/{id}/timeout")
async def set_timeout(request: web.Request) -> web.Response:
    wanted = await body(request, wire.SetTimeout)
    seconds = _timeout(request, wanted.timeout, zero=True)
    request.app[NODE].set_timeout(request.match_info["id"], seconds)
    return web.Response(status=204)


@routes.post("/sandboxes/{id}/refreshes")
async def refresh(request: web.Request) -> web.Response:
    wanted = await body(request, wire.Refresh)
    duration = 15 if wanted.duration is None else wanted.duration
    if not 0 <= duration <= REFRESH_LIMIT:
        raise BadRequest(f"duration: 0 to {REFRESH_LIMIT} seconds, not {duration}")
    request.app[NODE].extend(request.match_info["id"], duration)
    return web.Response(status=204)


@routes.post("/v2/sandboxes/{id}/connect")
@routes.post("/sandboxes/{id}/connect")
async def connect(request: web.Request) -> web.Response:
    settings = request.app[SETTINGS]
    wanted = await body(request, wire.ConnectSandbox)
    default = settings.sandbox.default_timeout
    seconds = _timeout(request, wanted.timeout if wanted.timeout is not None else default, zero=True)
    record = request.app[NODE].extend(request.match_info["id"], seconds)
    return answer(wire.sandbox_answer(record, settings.tag, settings.domain))


@routes.get("/sandboxes/{id}/logs")
async def logs(request: web.Request) -> web.Response:
    """The guest's console. Its lines carry no times of their own: all get the time of the call."""
    limit = listing.number(request.query.get("limit"), "limit", 1000, 1, 100_000)
    text = request.app[NODE].serial_tail(request.match_info["id"], CONSOLE_LIMIT)
    now = datetime.now(UTC)
    lines = text.splitlines()[-limit:]
    return answer(
        wire.Logs(
            logs=[wire.LogLine(now, line) for line in lines],
            log_entries=[wire.LogEntry(now, line, "info", {}) for line in lines],
        )
    )


async def unavailable(request: web.Request) -> web.Response:
    request.app[NODE].get(request.match_info["id"])
    return failure(501, f"{request.path.rsplit('/', 1)[1]} is not available in this release")


for _call in ("pause", "resume", "snapshots", "fork"):
    routes.post(f"/sandboxes/{{id}}/{_call}")(unavailable)
routes.put("/sandboxes/{id}/network")(unavailable)
routes.get("/sandboxes/{id}/metrics")(unavailable)


def _timeout(request: web.Request, seconds: int, *, zero: bool = False) -> int:
    longest = request.app[SETTINGS].sandbox.max_timeout
    if seconds < (0 if zero else 1):
        raise BadRequest("Timeout must be greater than 0" if not zero else "timeout cannot be negative")
    if seconds > longest:
        raise BadRequest(f"timeout: {seconds} s is more than this node allows, {longest} s")
    return seconds
