"""Filters and pages of sandbox lists."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from urllib.parse import quote, urlencode

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from aenv.api import listing
from aenv.errors import BadRequest
from aenv.model import Sandbox
from tests.unit.test_lifecycle import record

START = datetime(2026, 1, 1, tzinfo=UTC)


def sandbox(number: int, **changes: object) -> Sandbox:
    started = START + timedelta(microseconds=number)
    return msgspec.structs.replace(record("running"), sandbox_id=f"i{number}", started_at=started, **changes)


@given(
    moments=st.lists(st.integers(0, 5), max_size=12),
    limit=st.integers(1, 4),
    ascending=st.booleans(),
)
def test_pages_put_together_are_the_whole_list(moments: list[int], limit: int, ascending: bool) -> None:
    records = [msgspec.structs.replace(sandbox(moment), sandbox_id=f"i{index}") for index, moment in enumerate(moments)]
    whole = listing.select(records, listing.Query(ascending=ascending, limit=None))
    assert whole.next_token is None
    seen: list[Sandbox] = []
    query = {"limit": str(limit), "order": "asc" if ascending else "desc"}
    for _ in range(len(records) + 1):
        page = listing.select(records, listing.parse(query))
        assert len(page.records) <= limit
        seen += page.records
        if page.next_token is None:
            break
        query["nextToken"] = page.next_token
    assert seen == whole.records
    order = [(item.started_at, item.sandbox_id) for item in seen]
    assert order == sorted(order, reverse=not ascending)


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.text(max_size=8), max_size=4))
def test_metadata_survives_its_two_encodings(metadata: dict[str, str]) -> None:
    inner = urlencode({quote(key, safe=""): quote(value, safe="") for key, value in metadata.items()})
    assert listing.parse_metadata(inner) == metadata


def test_the_metadata_of_the_wire_example() -> None:
    # metadata=a%3Db%252520c%252526d, after the framework has decoded the query string once
    assert listing.parse_metadata("a=b%2520c%2526d") == {"a": "b c&d"}


def test_filters() -> None:
    records = [
        sandbox(1, metadata={"a": "1", "b": "2"}),
        sandbox(2, metadata={"a": "1"}, name="other"),
        sandbox(3, template_id="t2"),
    ]

    def found(**query: str) -> list[str]:
        return [item.sandbox_id for item in listing.select(records, listing.parse(query)).records]

    assert found() == ["i3", "i2", "i1"]
    assert found(metadata="a=1") == ["i2", "i1"]
    assert found(metadata="a=1&b=2") == ["i1"]
    assert found(metadata="a=2") == []
    assert found(state="paused") == []
    assert found(state="running,paused", order="asc") == ["i1", "i2", "i3"]
    assert found(template="other") == ["i2"]
    assert found(template="t2") == ["i3"]
    assert found(template="unknown") == []
    assert found(startedAfter="2026-01-01T00:00:00.000002Z") == ["i3", "i2"]


@pytest.mark.parametrize(
    "query",
    [
        {"state": "pausing"},
        {"order": "up"},
        {"limit": "0"},
        {"limit": "101"},
        {"limit": "1e1"},
        {"limit": "٣"},
        {"startedAfter": "yesterday"},
        {"startedAfter": "2026-01-01T00:00:00"},
        {"metadata": "a"},
        {"metadata": "=b"},
        {"nextToken": "!!!"},
        {"nextToken": "YXNjOjE"},
        {"nextToken": "Zm9vOmJhcjpiYXo"},
    ],
)
def test_bad_queries_are_refused_by_name(query: dict[str, str]) -> None:
    with pytest.raises(BadRequest, match=next(iter(query))):
        listing.parse(query)


def test_a_token_of_the_other_order_is_refused() -> None:
    page = listing.select([sandbox(1), sandbox(2)], listing.Query(limit=1))
    assert page.next_token is not None
    with pytest.raises(BadRequest, match="order"):
        listing.parse({"order": "asc", "nextToken": page.next_token})


@pytest.mark.parametrize("text", ["0", "101", "-1", "1.0", "x", "٣", "0000000000019999", "1" * 5000])
def test_numbers_out_of_range(text: str) -> None:
    with pytest.raises(BadRequest, match="limit: a number from 1 to 100"):
        listing.number(text, "limit", 100, 1, 100)
