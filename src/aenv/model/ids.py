"""Identifiers. They appear in host names, so they are lower-case letters and digits only."""

from __future__ import annotations

import re
import secrets
import string

_ALPHABET = string.ascii_lowercase + string.digits
_ID = re.compile(r"[a-z0-9]{1,64}")


def _random(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


def new_sandbox_id() -> str:
    """``i`` + 20 characters: 103 bits, never guessed and never reused."""
    return "i" + _random(20)


def new_template_id() -> str:
    return "t" + _random(20)


def new_api_key() -> str:
    """``e2b_`` + 40 hex digits, the only shape that every generation of the E2B SDKs accepts."""
    return "e2b_" + secrets.token_hex(20)


def is_sandbox_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None
