from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv.vmm import cpio

_name = st.text("abcXYZ019._-+", min_size=1, max_size=12).filter(lambda name: name not in (".", ".."))
_trees = st.dictionaries(
    st.lists(_name, min_size=1, max_size=4).map("/".join),
    st.tuples(st.binary(max_size=3000), st.booleans()),
    max_size=8,
)


def _entries(tree: dict[str, tuple[bytes, bool]]) -> list[cpio.Entry]:
    """Files of ``tree``, where none of them is a parent of another, and all directories they need."""
    files = {path: value for path, value in tree.items() if not any(other.startswith(path + "/") for other in tree)}
    parents = {"/".join(path.split("/")[:depth]) for path in files for depth in range(1, path.count("/") + 1)}
    made = [cpio.directory(path) for path in parents]
    return made + [cpio.file(path, data, 0o755 if run else 0o644) for path, (data, run) in files.items()]


@settings(max_examples=60, deadline=None)
@given(_trees)
def test_cpio_reads_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, tuple[bytes, bool]]
) -> None:
    target = tmp_path_factory.mktemp("tree")
    entries = _entries(tree)
    data = cpio.archive(entries)
    listed = subprocess.run(["cpio", "-it", "--quiet"], input=data, capture_output=True, check=True)
    assert listed.stderr == b""
    assert sorted(listed.stdout.decode().split()) == sorted(entry.path for entry in entries)
    subprocess.run(["cpio", "-idm", "--quiet"], input=data, cwd=target, check=True)
    for entry in entries:
        path = target / entry.path
        assert path.stat().st_mode == entry.mode
        if stat.S_ISREG(entry.mode):
            assert path.read_bytes() == entry.data
            assert path.stat().st_mtime == 0


@settings(max_examples=30, deadline=None)
@given(_trees, st.randoms())
def test_the_order_of_entries_does_not_matter(tree: dict[str, tuple[bytes, bool]], random: object) -> None:
    entries = _entries(tree)
    shuffled = list(entries)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert cpio.archive(shuffled) == cpio.archive(entries)


def test_a_directory_comes_before_its_content() -> None:
    entries = [cpio.file("a/b", b""), cpio.directory("a"), cpio.file("a.c", b""), cpio.file("a-c", b"")]
    listed = subprocess.run(["cpio", "-it", "--quiet"], input=cpio.archive(entries), capture_output=True, check=True)
    names = listed.stdout.decode().split()
    assert names.index("a") < names.index("a/b")


def test_device_nodes(tmp_path: Path) -> None:
    data = cpio.archive([cpio.directory("dev"), cpio.character_device("dev/console", 5, 1)])
    listed = subprocess.run(["cpio", "-itv", "--quiet"], input=data, capture_output=True, check=True).stdout.decode()
    assert [line.split()[:6] for line in listed.splitlines() if "console" in line] == [
        ["crw-------", "1", "root", "root", "5,", "1"]
    ]


@pytest.mark.parametrize("path", ["/etc", "../x", "a//b", "a/./b", "", "a/", "x\0y", "TRAILER!!!"])
def test_paths_that_leave_the_archive_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match="not a path"):
        cpio.archive([cpio.file(path, b"")])


def test_a_path_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        cpio.archive([cpio.file("a", b"1"), cpio.file("a", b"2")])
