from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from aenv.config import Settings
from aenv.errors import BadRequest, Conflict, NotFound, OperationFailed
from aenv.model import MachineShape, Template, new_template_id
from aenv.templates.store import TemplateStore

_START = datetime(2025, 1, 1, tzinfo=UTC)


@pytest.fixture
def store(tmp_path: Path) -> TemplateStore:
    return TemplateStore(Settings(home=tmp_path))


def template(*names: str, age: int = 0, template_id: str | None = None) -> Template:
    return Template(
        template_id=template_id or new_template_id(),
        build_id="00000000-0000-0000-0000-000000000000",
        names=names,
        shape=MachineShape(1, 512, 64),
        kernel="6.1.0-57-cloud-amd64",
        kernel_digest="ab" * 32,
        rootfs="rootfs.ext4",
        created_at=_START - timedelta(days=age),
    )


def add(store: TemplateStore, made: Template, *, content: bytes = b"disk", replace: bool = False) -> Template:
    with store.building() as directory:
        (directory / "rootfs.ext4").write_bytes(content)
        return store.add(directory, made, replace=replace)


def test_an_empty_home_has_no_templates(store: TemplateStore) -> None:
    assert store.list() == []
    with pytest.raises(NotFound, match="'base'"):
        store.get("base")


def test_found_by_id_name_and_tag(store: TemplateStore) -> None:
    one = add(store, template("base", "tools:v1.2"))
    assert store.get(one.template_id) == one
    for reference in ("base", "base:default", "BASE", "tools:v1.2"):
        assert store.get(reference) == one
    for reference in ("tools", "tools:v1", "base:v1", "../base", "", one.template_id[:-1]):
        with pytest.raises(NotFound):
            store.get(reference)
    assert store.rootfs(one).read_bytes() == b"disk"


def test_the_default_tag_is_the_name_itself(store: TemplateStore) -> None:
    assert add(store, template("base:default")).names == ("base",)
    with pytest.raises(Conflict, match="base"):
        add(store, template("base"))


def test_newest_first(store: TemplateStore) -> None:
    made = [add(store, template(f"n{age}", age=age)) for age in (2, 0, 1)]
    assert store.list() == [made[1], made[2], made[0]]


@pytest.mark.parametrize("name", ["", "Base", "a/b", "a:b:c", "a b", ":x", "name:", "ä", "a" * 129, "..", "a\n"])
def test_names_that_are_none_are_refused(store: TemplateStore, name: str) -> None:
    with pytest.raises(BadRequest, match="not a name"):
        add(store, template(name))
    with pytest.raises(BadRequest, match="not a name"):
        store.check_free((name,))
    assert store.list() == []


def test_a_taken_name_leaves_nothing(store: TemplateStore) -> None:
    one = add(store, template("base", "other"))
    with pytest.raises(Conflict, match="'base' exists already"):
        add(store, template("new", "base"))
    with pytest.raises(Conflict):
        store.check_free(("other",))
    assert store.list() == [one]
    assert _visible(store) == [one.template_id]


def test_replace_takes_the_name_over(store: TemplateStore) -> None:
    old = add(store, template("base", "stable", age=1))
    new = add(store, template("base"), replace=True)
    assert store.get("base") == new
    assert store.get("stable").template_id == old.template_id
    assert store.get(old.template_id).names == ("stable",)


def test_the_newer_one_wins_when_a_replacement_was_cut_short(store: TemplateStore) -> None:
    old = add(store, template("base", age=1))
    new = add(store, template("other"))
    record = store.directory / new.template_id / "template.json"
    record.write_bytes(msgspec.json.encode(msgspec.structs.replace(new, names=("base",))))
    assert store.get("base").template_id == new.template_id
    assert old in store.list()


def test_update(store: TemplateStore) -> None:
    one, two = add(store, template("one")), add(store, template("two"))
    store.update(msgspec.structs.replace(one, names=("uno", "uno:v1")))
    assert store.get("uno:v1").template_id == one.template_id
    with pytest.raises(NotFound):
        store.get("one")
    with pytest.raises(Conflict):
        store.update(msgspec.structs.replace(two, names=("uno",)))
    with pytest.raises(NotFound):
        store.update(template("three"))


def test_remove(store: TemplateStore) -> None:
    one = add(store, template("base"))
    with store.rootfs(one).open("rb") as image:
        store.remove(one.template_id)
        assert image.read() == b"disk"
    assert store.list() == []
    assert _visible(store) == []
    for wrong in (one.template_id, "", "..", "/etc", "base"):
        with pytest.raises(NotFound):
            store.remove(wrong)


def test_an_id_cannot_be_used_twice_or_leave_the_store(store: TemplateStore) -> None:
    one = add(store, template("one"))
    with pytest.raises(Conflict):
        add(store, template("two", template_id=one.template_id))
    with pytest.raises(BadRequest):
        add(store, template("two", template_id="../../etc"))
    assert store.rootfs(one).read_bytes() == b"disk"


def test_a_directory_with_anything_else_is_not_taken(store: TemplateStore) -> None:
    with pytest.raises(OperationFailed), store.building() as directory:
        (directory / "rootfs.ext4").write_bytes(b"")
        (directory / "work").mkdir()
        store.add(directory, template("base"))
    assert store.list() == []


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"template_id": "other"}'])
def test_a_damaged_record_hides_only_itself(
    store: TemplateStore, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = add(store, template("good")), add(store, template("bad"))
    (store.directory / bad.template_id / "template.json").write_bytes(damage)
    assert store.list() == [good]
    assert bad.template_id in caplog.text
    with pytest.raises(OperationFailed, match="damaged"):
        store.get(bad.template_id)


def test_threads_that_want_one_name(store: TemplateStore) -> None:
    results: list[str] = []
    barrier = threading.Barrier(8)

    def build() -> None:
        barrier.wait()
        try:
            results.append(add(store, template("base")).template_id)
        except Conflict:
            results.append("")

    threads = [threading.Thread(target=build) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [result for result in results if result]
    assert len(results) == 8
    assert [made.template_id for made in store.list()] == winners
    assert len(winners) == 1


@pytest.mark.parametrize("after", range(12))
def test_killed_at_any_step_it_is_there_as_a_whole_or_not_at_all(tmp_path: Path, after: int) -> None:
    """Another process adds a template and kills itself after a number of system calls that change what is seen."""
    made = template("base")
    script = textwrap.dedent(
        """
        import os, signal, sys, pathlib, msgspec
        from aenv.config import Settings
        from aenv.model import Template
        from aenv.templates.store import TemplateStore

        left = int(sys.argv[1])
        def counted(function):
            def call(*arguments, **options):
                global left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return function(*arguments, **options)
            return call
        os.fsync, os.rename, os.replace, os.fchmod = map(counted, (os.fsync, os.rename, os.replace, os.fchmod))
        pathlib.Path.rename, pathlib.Path.replace = counted(pathlib.Path.rename), counted(pathlib.Path.replace)

        store = TemplateStore(Settings(home=pathlib.Path(sys.argv[2])))
        with store.building() as directory:
            (directory / "rootfs.ext4").write_bytes(b"disk")
            store.add(directory, msgspec.json.decode(sys.argv[3], type=Template))
        print("finished")
        """
    )
    argv = [sys.executable, "-c", script, str(after), str(tmp_path), msgspec.json.encode(made).decode()]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    store = TemplateStore(Settings(home=tmp_path))
    if done.returncode == -signal.SIGKILL:
        assert store.list() in ([], [made])
    else:
        assert done.stdout == "finished\n", done.stderr
        assert store.list() == [made]
    if store.list():
        assert store.rootfs(made).read_bytes() == b"disk"
    # Whatever it left does not stand in the way of the next one, and is swept.
    again = add(store, template("base"), replace=True)
    assert store.get("base") == again
    assert not list(store.directory.glob(".staging-*"))


def test_the_kills_of_the_test_above_reach_both_outcomes(tmp_path: Path) -> None:
    """Steps of ``add``: three syncs and two renames at least, so that some of the kills hit before it is visible."""
    store = TemplateStore(Settings(home=tmp_path))
    steps = 0
    original = os.fsync

    def count(descriptor: int) -> None:
        nonlocal steps
        steps += 1
        original(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", count)
        add(store, template("base"))
    assert 4 <= steps <= 10


def _visible(store: TemplateStore) -> list[str]:
    return [path.name for path in store.directory.iterdir() if not path.name.startswith(".")]
