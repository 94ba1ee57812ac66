"""The node's memory: one SQLite file in the home.

Written before the effect it describes, with WAL and ``synchronous=NORMAL``: a record survives the death of this process
at any instant; the death of the machine ends the sandboxes anyway, and leaves the file consistent. Statements take
tens of microseconds, so they run in the event loop. One process writes sandboxes (the home is locked by ``serve``);
keys may be added by the command line at any time.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from aenv.errors import DiskFull, OperationFailed, SetupError
from aenv.model import Ended, Sandbox, new_api_key

SCHEMA_VERSION = 1
ENDED_KEPT = 10_000

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sandboxes (id TEXT PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ended (id TEXT PRIMARY KEY, at REAL NOT NULL, reason TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS ended_at ON ended (at);
CREATE TABLE IF NOT EXISTS keys (hash TEXT PRIMARY KEY, name TEXT NOT NULL, hint TEXT NOT NULL, at REAL NOT NULL)
    WITHOUT ROWID;
"""


class Key(msgspec.Struct, frozen=True):
    """An API key as stored: never the key itself, only its last four characters as a ``hint``."""

    name: str
    hint: str
    created_at: datetime


class Store:
    """Open with ``Store(path)``; close with ``close()``. Not for several threads."""

    def __init__(self, path: Path) -> None:
        self._accepted: set[str] = set()
        path.parent.mkdir(parents=True, exist_ok=True)
        with _translated(f"open {path}"):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(path, isolation_level=None, timeout=10)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version > SCHEMA_VERSION:
                raise SetupError(
                    f"{path} was written by a newer release (schema {version}, this one knows {SCHEMA_VERSION})",
                    remedy="upgrade AENV, or use another home",
                )
            if version < SCHEMA_VERSION:  # writes, and a node must start on a full disk too
                self._db.executescript(_SCHEMA)
                self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def close(self) -> None:
        self._db.close()

    # --- sandboxes ----------------------------------------------------------------------------------------------

    def save(self, record: Sandbox) -> None:
        with _translated(f"store sandbox {record.sandbox_id}"):
            self._db.execute(
                "INSERT OR REPLACE INTO sandboxes (id, record) VALUES (?, ?)",
                (record.sandbox_id, msgspec.json.encode(record)),
            )

    def load(self) -> list[Sandbox]:
        with _translated("read the sandboxes"):
            rows = self._db.execute("SELECT record FROM sandboxes ORDER BY id").fetchall()
            return [msgspec.json.decode(row[0], type=Sandbox) for row in rows]

    def end(self, ended: Ended) -> None:
        """Replace the record of a sandbox by the note of its end, in one transaction."""
        with _translated(f"forget sandbox {ended.sandbox_id}"), self._transaction():
            self._db.execute("DELETE FROM sandboxes WHERE id = ?", (ended.sandbox_id,))
            self._db.execute(
                "INSERT OR REPLACE INTO ended (id, at, reason) VALUES (?, ?, ?)",
                (ended.sandbox_id, ended.at.timestamp(), ended.reason[:4096]),
            )
            self._db.execute(
                "DELETE FROM ended WHERE at < (SELECT at FROM ended ORDER BY at DESC LIMIT 1 OFFSET ?)",
                (ENDED_KEPT,),
            )

    def ended(self, sandbox_id: str) -> Ended | None:
        with _translated("read an ended sandbox"):
            row = self._db.execute("SELECT id, at, reason FROM ended WHERE id = ?", (sandbox_id,)).fetchone()
            return Ended(row[0], row[2], datetime.fromtimestamp(row[1], UTC)) if row else None

    # --- keys ---------------------------------------------------------------------------------------------------

    def add_key(self, name: str, key: str | None = None) -> str:
        """Create a key and return it; only its hash is kept. Adding the same ``key`` again changes nothing."""
        key = key or new_api_key()
        with _translated("store an API key"):
            self._db.execute(
                "INSERT OR IGNORE INTO keys (hash, name, hint, at) VALUES (?, ?, ?, ?)",
                (_hash(key), name, key[-4:], datetime.now(UTC).timestamp()),
            )
        return key

    def accept(self, key: str) -> None:
        """Take ``key`` for one of ours until this store is closed, without keeping it."""
        self._accepted.add(_hash(key))

    def has_key(self, key: str) -> bool:
        if _hash(key) in self._accepted:
            return True
        with _translated("read the API keys"):
            return self._db.execute("SELECT 1 FROM keys WHERE hash = ?", (_hash(key),)).fetchone() is not None

    def list_keys(self) -> list[Key]:
        with _translated("read the API keys"):
            rows = self._db.execute("SELECT name, hint, at FROM keys ORDER BY at").fetchall()
            return [Key(name, hint, datetime.fromtimestamp(at, UTC)) for name, hint, at in rows]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        with self._db:  # commits, or rolls back what SQLite has not rolled back itself, a failed commit included
            yield


def _hash(key: str) -> str:
    # 160 random bits need no salt and no slow hash; equal keys being found by equality is the point.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


@contextmanager
def _translated(attempt: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        if "full" in str(error):
            raise DiskFull(f"cannot {attempt}: the disk is full", remedy="free space in the home") from error
        raise OperationFailed(f"cannot {attempt}: {error}") from error
    except OSError as error:
        raise SetupError(f"cannot {attempt}: {error.strerror}") from error
