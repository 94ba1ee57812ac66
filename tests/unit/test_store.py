"""The node's database."""

from __future__ import annotations

import sqlite3
import stat
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from aenv.config import Settings
from aenv.errors import BadRequest, SetupError
from aenv.model import Ended, ProcessRecord
from aenv.node import keys
from aenv.node.store import Store
from tests.unit.test_lifecycle import record


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "aenv.db")


def test_records_come_back_as_they_were(store: Store, tmp_path: Path) -> None:
    full = record("running", slot=3, vmm=ProcessRecord("qemu", b"\x00{}"), env={"A": "ä"}, metadata={"m": "1"})
    store.save(full)
    store.save(msgspec.structs.replace(full, sandbox_id="i0"))
    store.close()
    again = Store(tmp_path / "aenv.db")
    assert again.load() == [msgspec.structs.replace(full, sandbox_id="i0"), full]


def test_an_end_replaces_the_record(store: Store) -> None:
    store.save(record())
    ended = Ended("i1", "its VMM ended: signal 9", datetime(2026, 1, 1, tzinfo=UTC))
    store.end(ended)
    assert store.load() == []
    assert store.ended("i1") == ended
    assert store.ended("i2") is None


def test_keys_are_kept_as_hashes_only(store: Store, tmp_path: Path) -> None:
    key = store.add_key("first")
    assert store.has_key(key)
    assert not store.has_key(key[:-1])
    assert [entry.hint for entry in store.list_keys()] == [key[-4:]]
    store.close()
    content = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert key.encode() not in content
    assert key[4:].encode() not in content


def test_a_key_made_by_another_process_is_known_at_once(store: Store, tmp_path: Path) -> None:
    key = Store(tmp_path / "aenv.db").add_key("cli")
    assert store.has_key(key)


def test_the_file_is_private(store: Store, tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / "aenv.db").stat().st_mode) == 0o600


def test_a_database_of_a_newer_release_is_left_alone(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "aenv.db")
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(SetupError, match="newer release"):
        Store(tmp_path / "aenv.db")


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "aenv.db").write_bytes(b"x" * 10_000)
    with pytest.raises(Exception, match=r"cannot open .*aenv\.db: file is not a database"):
        Store(tmp_path / "aenv.db")


def test_the_first_key_is_made_once(store: Store, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    key = keys.ensure_first_key(settings, store, None)
    assert key is not None
    assert (tmp_path / "admin.key").read_text() == key + "\n"
    assert stat.S_IMODE((tmp_path / "admin.key").stat().st_mode) == 0o600
    assert keys.ensure_first_key(settings, store, None) is None
    assert store.has_key(key)


def test_a_preset_key_is_taken_and_checked(store: Store, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    assert keys.ensure_first_key(settings, store, "e2b_" + "a" * 40) is None
    assert store.has_key("e2b_" + "a" * 40)
    assert not Store(tmp_path / "aenv.db").has_key("e2b_" + "a" * 40), "accepted by this process, not kept"
    with pytest.raises(BadRequest, match="AENV_API_KEY"):
        keys.ensure_first_key(settings, store, "secret")
