"""Root file systems: from a directory or a tar archive to an ext4 image."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from aenv.errors import BadRequest, SetupError
from aenv.programs import system_program
from aenv.templates import unpack
from aenv.vmm import command, ext4
from aenv.vmm.durable import Progress

# First bytes → program and package that undo the compression. The name of a file says nothing.
_COMPRESSIONS = (
    (b"\x1f\x8b", ("gzip", "gzip"), ("-dc",)),
    (b"\xfd7zXZ\0", ("xz", "xz-utils"), ("-dc", "--memlimit-decompress=256MiB")),
    (b"\x28\xb5\x2f\xfd", ("zstd", "zstd"), ("-dc", "--memory=256MB")),
)
_TIMEOUT = 3600.0


class Unpacked(msgspec.Struct, frozen=True):
    files: int = 0
    bytes: int = 0
    devices: int = 0
    refused: str | None = None


def require_root() -> None:
    """Owners and rights of a root file system can be kept by root only."""
    if os.geteuid() != 0:
        raise SetupError("building a template needs root: files in it belong to many users", remedy="run it with sudo")


def build(image: Path, source: Path, disk: int, progress: Progress, *, workspace: Path, user: bool) -> None:
    """Make ``image``, an ext4 file system of ``disk`` MiB, from ``source``: a directory, or a tar archive that may be
    compressed with gzip, xz or zstd.

    Owners (as numbers), rights, links and extended attributes are kept; device nodes are left out. ``user`` adds the
    account ``user``, if it is missing. ``workspace`` is a private directory for the unpacked files, which are removed
    again. BadRequest if the archive is damaged, hostile or too large for the disk.
    """
    require_root()
    tree = workspace / "tree"
    tree.mkdir(mode=0o755)
    with open_archive(source) as stream:
        progress(f"unpacking {source.name}")
        done = _unpack(stream, tree, disk, user=user)
    if done.devices:
        progress(f"left out {done.devices} device nodes: a guest has its own /dev")
    progress(f"writing the disk image ({done.files} files, {done.bytes / 1e6:.0f} MB)")
    ext4.writable_image(image, tree, disk, "aenv-root")
    image.chmod(0o444)


def _unpack(stream: IO[bytes], tree: Path, disk: int, *, user: bool) -> Unpacked:
    size = disk * ext4.MIB
    request = {"directory": str(tree), "max_bytes": size, "max_files": max(size // 16384, 16), "user": user}
    argv = [sys.executable, "-I", "-S", unpack.__file__, msgspec.json.encode(request).decode()]
    answer = command.run(argv, "unpack the root file system", timeout=_TIMEOUT, stdin=stream)
    done = msgspec.json.decode(answer, type=Unpacked)
    if done.refused is not None:
        raise BadRequest(f"the root file system was refused: {done.refused}")
    return done


@contextlib.contextmanager
def open_archive(source: Path) -> Iterator[IO[bytes]]:
    """The uncompressed tar stream of a directory or an archive. BadRequest if it is neither, or turns out damaged."""
    try:
        if source.is_dir():
            argv: list[str | Path] = [system_program("tar", "tar"), "--create", "--format=pax", "--numeric-owner"]
            argv += ["--xattrs", "--xattrs-include=*", "--one-file-system", "--warning=no-file-ignored"]
            argv += ["--directory", source, "."]
            with _piped(argv, None, f"cannot read the directory {source}") as stream:
                yield stream
            return
        if source.exists() and not source.is_file():
            raise BadRequest(f"{source} is neither a directory nor a file")
        # Unbuffered: another process goes on reading from where the descriptor stands.
        with source.open("rb", buffering=0) as file:
            magic = file.read(8)
            file.seek(0)
            for start, (name, package), options in _COMPRESSIONS:
                if magic.startswith(start):
                    with _piped([system_program(name, package), *options], file, f"{source} is damaged") as stream:
                        yield stream
                    return
            yield file
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        if error.filename is not None and Path(error.filename) == source:
            raise BadRequest(f"cannot read {source}: {error.strerror}") from error
        raise


@contextlib.contextmanager
def _piped(argv: list[str | Path], stdin: IO[bytes] | None, complaint: str) -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            argv, stdin=stdin or subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, env={"LC_ALL": "C.UTF-8"}
        )
        assert process.stdout is not None
        try:
            yield process.stdout
            process.stdout.close()
            if process.wait() != 0:
                stderr.seek(0)
                said = stderr.read(1000).decode(errors="replace").strip()
                raise BadRequest(f"{complaint}: {said or process.returncode}")
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
