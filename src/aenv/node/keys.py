"""API keys, for the command line on the node itself."""

from __future__ import annotations

import os
import re
from pathlib import Path

from aenv.config import Settings
from aenv.errors import BadRequest, SetupError
from aenv.model import new_api_key
from aenv.node.store import Key, Store

_SHAPE = re.compile(r"e2b_[0-9a-f]{32,128}")


def database(settings: Settings) -> Path:
    return settings.home / "aenv.db"


def admin_key_file(settings: Settings) -> Path:
    """The first key of a home, readable by its owner only, so that the command line on the node just works."""
    return settings.home / "admin.key"


def create_key(settings: Settings, name: str) -> str:
    """Create an API key in the home and return it; it is shown once, only its hash is kept."""
    store = Store(database(settings))
    try:
        return store.add_key(name)
    finally:
        store.close()


def list_keys(settings: Settings) -> list[Key]:
    store = Store(database(settings))
    try:
        return store.list_keys()
    finally:
        store.close()


def ensure_first_key(settings: Settings, store: Store, preset: str | None) -> str | None:
    """On the first start of a home create its first key, unless there is ``preset`` (``AENV_API_KEY``): that one is
    accepted as long as this process lives, and no longer.

    Returns a key that was newly created here, to be shown once; None if there was nothing to do.
    """
    if preset is not None:
        if not _SHAPE.fullmatch(preset):
            raise BadRequest(
                "AENV_API_KEY is not a key", remedy="it has the shape e2b_ + 32 to 128 lower-case hex digits"
            )
        store.accept(preset)
    if preset is not None or store.list_keys():
        return None
    # The file first: a key that is in the database and that nobody was told would be of no use.
    key = new_api_key()
    file = admin_key_file(settings)
    fresh = file.with_suffix(".new")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            stream.write(key + "\n")
        fresh.replace(file)
    except OSError as error:
        raise SetupError(f"cannot write the first API key to {file}: {error.strerror}") from error
    return store.add_key("first", key)
