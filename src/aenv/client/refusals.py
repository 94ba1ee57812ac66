"""From an answer that is not a success to an error of our tree."""

from __future__ import annotations

import msgspec

from aenv.client.models import Failure
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

_MAX_MESSAGE = 2000

_BY_STATUS: dict[int, type[AenvError]] = {
    401: Unauthorized,
    403: Unauthorized,
    404: NotFound,
    409: Conflict,
    429: TooManyRequests,
    502: Unavailable,
    503: Unavailable,
    504: Unavailable,
    507: DiskFull,
}

_BY_CODE: dict[str, type[AenvError]] = {
    "invalid_argument": BadRequest,
    "failed_precondition": BadRequest,
    "out_of_range": BadRequest,
    "unauthenticated": Unauthorized,
    "permission_denied": Unauthorized,
    "not_found": NotFound,
    "already_exists": Conflict,
    "aborted": Conflict,
    "resource_exhausted": TooManyRequests,
    "unavailable": Unavailable,
}
"""Connect's codes; what is missing here is an OperationFailed."""


def printable(text: str) -> str:
    """``text`` without control characters, so that nobody else's words can command the reader's terminal."""
    return "".join(char if char == "\t" or char.isprintable() else "\ufffd" for char in text)


def from_answer(status: int, body: bytes) -> AenvError:
    """The error that an HTTP answer stands for."""
    failure = _failure(body)
    text = _message(failure.message) if failure else ""
    if not text:
        text = f"the server answered {status} without saying why"
    if failure is not None and isinstance(failure.code, str):
        return _BY_CODE.get(failure.code, OperationFailed)(text)
    if status == 502 and "was not found" in text:
        return NotFound(text)
    return _BY_STATUS.get(status, BadRequest if 400 <= status < 500 else OperationFailed)(text)


def from_code(code: str, message: str) -> AenvError:
    """The error that ended a Connect stream."""
    return _BY_CODE.get(code, OperationFailed)(_message(message) or f"the agent answered {_message(code)!r}")


def _failure(body: bytes) -> Failure | None:
    try:
        return msgspec.json.decode(body, type=Failure)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _message(text: str) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= _MAX_MESSAGE else line[:_MAX_MESSAGE] + "…"
