from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from aenv.errors import DiskFull, SetupError
from aenv.vmm import durable


def test_a_staging_directory_is_private_and_goes(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), durable.staging(tmp_path) as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
        (directory / "deep").mkdir()
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_published_directory_stays(tmp_path: Path) -> None:
    with durable.staging(tmp_path) as directory:
        (directory / "file").write_text("content")
        durable.publish(directory, tmp_path / "final")
    assert (tmp_path / "final/file").read_text() == "content"
    assert not list(tmp_path.glob(".staging-*"))


def test_what_a_killed_process_leaves_is_swept_and_what_a_live_one_has_is_not(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from aenv.vmm import durable
        with durable.staging(Path(sys.argv[1])) as directory:
            (directory / "half").write_text("x")
            print(directory, flush=True)
            sys.stdin.read()
        """
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None
        half = Path(other.stdout.readline().strip())
        with durable.staging(tmp_path):
            assert (half / "half").exists()
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert half.exists()
        with durable.staging(tmp_path):
            assert not half.exists()


def test_a_full_disk_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(DiskFull, match=str(tmp_path)), durable.staging(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_lock_excludes_threads_too(tmp_path: Path) -> None:
    waited = threading.Event()
    got = threading.Event()

    def other() -> None:
        with durable.lock(tmp_path / "lock", waited.set):
            got.set()

    thread = threading.Thread(target=other)
    with durable.lock(tmp_path / "lock"):
        thread.start()
        assert waited.wait(10)
        assert not got.is_set()
    assert got.wait(10)
    thread.join()


def test_a_directory_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(SetupError, match=f"cannot write to {tmp_path}/file/below"),
        durable.lock(tmp_path / "file/below/lock"),
    ):
        pass


def test_write_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    durable.write(tmp_path / "file", b"one")
    durable.write(tmp_path / "file", b"two", mode=0o600)
    assert (tmp_path / "file").read_bytes() == b"two"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    assert len(list(tmp_path.iterdir())) == 1


def test_the_digest_of_a_sparse_file_is_that_of_its_content(tmp_path: Path) -> None:
    data = bytearray(5 << 20)
    data[100:105] = b"hello"
    data[(3 << 20) + 7 : (3 << 20) + 12] = b"world"
    dense, sparse = tmp_path / "dense", tmp_path / "sparse"
    dense.write_bytes(data)
    with sparse.open("wb") as file:
        for offset in (100, (3 << 20) + 7):
            file.seek(offset)
            file.write(data[offset : offset + 5])
        file.truncate(len(data))
    assert sparse.stat().st_blocks < dense.stat().st_blocks
    digest = durable.sparse_sha256(dense)
    assert durable.sparse_sha256(sparse) == digest
    for change in (
        lambda file: file.truncate(len(data) + 1),
        lambda file: file.truncate(len(data) - 1),
        lambda file: os.pwrite(file.fileno(), b"H", 100),
        lambda file: os.pwrite(file.fileno(), b"x", 2 << 20),
    ):
        dense.write_bytes(data)
        with dense.open("r+b", buffering=0) as opened:
            change(opened)
        assert durable.sparse_sha256(dense) != digest
    (tmp_path / "hole").touch()
    os.truncate(tmp_path / "hole", 1 << 40)
    assert durable.sparse_sha256(tmp_path / "hole") != digest


def test_a_tree_with_a_mount_is_not_removed(tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        set -e
        mkdir -p {tmp_path}/tree/mnt {tmp_path}/precious
        touch {tmp_path}/precious/file
        mount --bind {tmp_path}/precious {tmp_path}/tree/mnt
        {sys.executable} -c "
        from pathlib import Path
        from aenv.vmm import durable
        durable.remove_tree(Path('{tmp_path}/tree'))
        "
        """
    ).replace("\n        ", "\n")
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=False)
    assert "is mounted in it" in done.stderr
    assert (tmp_path / "precious/file").exists()
