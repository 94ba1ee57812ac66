"""Filters and pages of a list of sandboxes: pure functions of the records and the query."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from urllib.parse import unquote_plus

import msgspec

from aenv.errors import BadRequest
from aenv.model import Sandbox

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Query(msgspec.Struct, frozen=True):
    """``after`` is the position behind which a page starts. ``limit`` None: everything."""

    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    states: frozenset[str] = frozenset({"running", "paused"})
    ascending: bool = False
    started_after: datetime | None = None
    template: str | None = None
    limit: int | None = 100
    after: tuple[int, str] | None = None


class Page(msgspec.Struct, frozen=True):
    records: list[Sandbox]
    next_token: str | None


def parse(query: Mapping[str, str]) -> Query:
    """BadRequest names the parameter at fault."""
    states = frozenset(part for part in query.get("state", "running,paused").split(",") if part)
    if not states <= {"running", "paused"}:
        raise BadRequest(f"state: running or paused, not {query['state']!r}")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequest(f"order: asc or desc, not {order!r}")
    started_after = None
    if query.get("startedAfter"):
        try:
            started_after = msgspec.convert(query["startedAfter"], datetime)
        except msgspec.ValidationError as error:
            raise BadRequest(f"startedAfter: {query['startedAfter']!r} is not an RFC 3339 time") from error
        if started_after.tzinfo is None:
            raise BadRequest("startedAfter: the time needs a zone, such as Z")
    return Query(
        metadata=parse_metadata(query.get("metadata")),
        states=states or frozenset({"running", "paused"}),
        ascending=order == "asc",
        started_after=started_after,
        template=query.get("template") or None,
        limit=number(query.get("limit"), "limit", 100, 1, 100),
        after=_parse_token(query["nextToken"], order) if query.get("nextToken") else None,
    )


def parse_metadata(text: str | None) -> dict[str, str]:
    """The metadata filter is form-encoded twice inside the query value, which the framework has decoded once."""
    pairs: dict[str, str] = {}
    for part in unquote_plus(text or "").split("&"):
        if part:
            key, equals, value = part.partition("=")
            if not equals or not key:
                raise BadRequest(f"metadata: {part!r} is not key=value")
            pairs[unquote_plus(key)] = unquote_plus(value)
    return pairs


def number(text: str | None, name: str, default: int, least: int, most: int) -> int:
    if not text:
        return default
    if not (re.fullmatch(r"[0-9]{1,12}", text) and least <= int(text) <= most):
        raise BadRequest(f"{name}: a number from {least} to {most}, not {text[:50]!r}")
    return int(text)


def select(records: Iterable[Sandbox], query: Query) -> Page:
    """One page, ordered by start time and then id."""
    found = sorted(
        (record for record in records if _matches(record, query)), key=_position, reverse=not query.ascending
    )
    if query.after is not None:
        after = query.after
        found = [
            record for record in found if (_position(record) > after) == query.ascending and _position(record) != after
        ]
    if query.limit is None or len(found) <= query.limit:
        return Page(found, None)
    page = found[: query.limit]
    return Page(page, _token(page[-1], query))


def _matches(record: Sandbox, query: Query) -> bool:
    return (
        "running" in query.states
        and (query.template is None or query.template in (record.template_id, record.name))
        and (query.started_after is None or record.started_at >= query.started_after)
        and query.metadata.items() <= record.metadata.items()
    )


def _position(record: Sandbox) -> tuple[int, str]:
    return (record.started_at - _EPOCH) // timedelta(microseconds=1), record.sandbox_id


def _token(record: Sandbox, query: Query) -> str:
    micros, sandbox_id = _position(record)
    text = f"{'asc' if query.ascending else 'desc'}:{micros}:{sandbox_id}"
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _parse_token(token: str, order: str) -> tuple[int, str]:
    try:
        text = base64.urlsafe_b64decode(token[:200] + "=" * (-len(token[:200]) % 4)).decode("ascii")
        made_for, micros, sandbox_id = text.split(":")
        position = int(micros), sandbox_id
    except (ValueError, binascii.Error) as error:
        raise BadRequest("nextToken: not one that this server gave") from error
    if made_for != order:
        raise BadRequest(f"nextToken: made for the order {made_for[:10]!r}, not {order}")
    return position
