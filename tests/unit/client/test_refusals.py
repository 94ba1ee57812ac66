from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.client.refusals import from_answer, from_code, printable
from aenv.errors import (
    AenvError,
    BadRequest,
    Conflict,
    DiskFull,
    NotFound,
    OperationFailed,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BadRequest),
        (401, Unauthorized),
        (403, Unauthorized),
        (404, NotFound),
        (409, Conflict),
        (418, BadRequest),
        (429, TooManyRequests),
        (500, OperationFailed),
        (501, OperationFailed),
        (502, Unavailable),
        (503, Unavailable),
        (504, Unavailable),
        (507, DiskFull),
    ],
)
def test_an_answer_of_the_api(status: int, kind: type[AenvError]) -> None:
    error = from_answer(status, b'{"code": %d, "message": "why"}' % status)
    assert type(error) is kind
    assert str(error) == "why"


def test_a_dead_sandbox_is_not_found() -> None:
    body = b'{"sandboxId": "i1", "message": "The sandbox was not found", "code": 502}'
    assert isinstance(from_answer(502, body), NotFound)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("invalid_argument", BadRequest),
        ("unauthenticated", Unauthorized),
        ("not_found", NotFound),
        ("already_exists", Conflict),
        ("resource_exhausted", TooManyRequests),
        ("unavailable", Unavailable),
        ("internal", OperationFailed),
        ("deadline_exceeded", OperationFailed),
        ("invented", OperationFailed),
    ],
)
def test_a_code_of_the_agent_counts_more_than_the_status(code: str, kind: type[AenvError]) -> None:
    assert type(from_answer(400, b'{"code": "%s", "message": "why"}' % code.encode())) is kind
    assert type(from_code(code, "why")) is kind


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"message": 1}', b"\xff\xfe", b'{"message": ""}'])
def test_a_refusal_without_a_reason_still_names_the_status(body: bytes) -> None:
    assert str(from_answer(503, body)) == "the server answered 503 without saying why"


def test_a_reason_cannot_command_the_terminal_or_fill_it() -> None:
    text = str(from_answer(400, b'{"code": 400, "message": "a\\u001b[2J\\nb %s"}' % (b"x" * 9000)))
    assert text.startswith("a\ufffd[2J b xxx")
    assert len(text) == 2001


@given(st.text())
def test_printable_text_has_no_control_characters(text: str) -> None:
    assert all(char == "\t" or char.isprintable() for char in printable(text))


@given(st.integers(400, 599), st.binary(max_size=200))
def test_any_answer_is_an_error_of_the_tree(status: int, body: bytes) -> None:
    assert str(from_answer(status, body))
