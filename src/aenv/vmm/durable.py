"""Files and directories that are either whole or absent, also after a crash.

A *staging directory* lives beside what it will become, is named ``.staging-…``, and is locked by the process that
fills it. When that process is gone so is the lock, and the next one to stage anything there sweeps the rest away.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from aenv.errors import DiskFull, OperationFailed, SetupError

Progress = Callable[[str], None]

_PREFIX = ".staging-"


@contextlib.contextmanager
def lock(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold ``path`` exclusively among all processes and threads; ``waiting`` is called once if that takes a wait.

    SetupError if its directory cannot be written to."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(path.parent) from error
        raise SetupError(
            f"cannot write to {path.parent}: {error.strerror}", remedy="run as its owner, or name another directory"
        ) from error
    try:
        if not _try_lock(descriptor):
            if waiting is not None:
                waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def staging(parent: Path) -> Iterator[Path]:
    """A private directory (0700) inside ``parent`` that is removed at the end, unless ``publish`` made it permanent.

    A full disk inside the block is reported as DiskFull.
    """
    with lock(parent / ".lock"):
        _sweep(parent)
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield path
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(parent) from error
        raise
    finally:
        try:
            remove_tree(path)
        finally:
            os.close(descriptor)


def disk_full(path: Path) -> DiskFull:
    return DiskFull(f"the disk of {path} is full", remedy="free some space, then try again")


def _sweep(parent: Path) -> None:
    for path in parent.glob(_PREFIX + "*"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            if _try_lock(descriptor):
                # A program that the dead process had started may still be writing there; then it is for the next one.
                with contextlib.suppress(OSError):
                    remove_tree(path)
        finally:
            os.close(descriptor)


def remove_tree(path: Path) -> None:
    """Remove a directory, if it exists. Refuses when something is mounted below it: that would be emptied too."""
    prefix = os.fsencode(path.absolute()) + b"/"
    with Path("/proc/self/mountinfo").open("rb") as mounts:
        for line in mounts:
            if line.split()[4].startswith(prefix):
                raise OperationFailed(f"cannot remove {path}: {os.fsdecode(line.split()[4])} is mounted in it")
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def publish(directory: Path, final: Path) -> None:
    """Make a staging directory permanent under the name ``final``, which must not exist. Files first, name last:
    after a crash there is either all of it or none."""
    for child in sorted(directory.rglob("*")):
        if child.is_dir() or (child.is_file() and not child.is_symlink()):
            sync(child)
    sync(directory)
    directory.rename(final)
    sync(final.parent)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace ``path`` by ``data``: readers see the old content or the new, never a part."""
    descriptor, name = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(path.parent) from error
        raise
    sync(path.parent)


def sparse_sha256(path: Path) -> str:
    """A digest of a large file with holes, in the time its data takes. It does not depend on where the holes are."""
    digest = hashlib.sha256()
    chunk = 1 << 20
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        offset = 0
        while offset < size:
            try:
                offset = max(offset, os.lseek(file.fileno(), offset, os.SEEK_DATA) // chunk * chunk)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but a hole up to the end
                    break
                raise
            data = os.pread(file.fileno(), chunk, offset)
            if data.strip(b"\0"):
                digest.update(offset.to_bytes(8, "little") + data)
            offset += chunk
    return digest.hexdigest()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
