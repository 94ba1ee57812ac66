"""Unpack a tar archive that nobody vouches for. A program of its own, run as root, on the standard library alone.

It locks itself into the target directory with chroot(2) before it reads the first byte, so that the kernel resolves
every path and every link of the archive inside that directory. What remains is bounded: memory, number of files, bytes.

    python -I -S unpack.py '{"directory": "...", "max_bytes": N, "max_files": N, "user": true}' < archive.tar

The answer is one line of JSON: ``{"files": N, "bytes": N, "devices": N}``, or ``{"refused": "why"}`` when the archive
is at fault. Anything else is a failure of this program or of the machine.
"""

# Paths are strings here: those of an archive need not be text, and there are many of them.
# ruff: noqa: PTH101, PTH102, PTH103, PTH106, PTH108, PTH110, PTH112, PTH120, PTH208, PTH211

from __future__ import annotations

import errno
import json
import os
import resource
import stat
import sys
import tarfile
from typing import Any, BinaryIO

_CHUNK = 1 << 20
_BLOCK = 4096
# Owner, rights and content aside, these are what programs in a guest can see. Others (SELinux labels of the machine
# that made the archive, trusted.* of its overlay file systems) mean nothing there.
_XATTRS = ("user.", "security.capability", "system.posix_acl_")
_MEMORY = 1 << 30


class Refused(Exception):
    """The archive is at fault."""


class Counted:
    """A stream that ends in Refused when it gives more than ``limit`` bytes."""

    def __init__(self, stream: BinaryIO, limit: int) -> None:
        self._stream = stream
        self._limit = limit
        self._size = 0
        self._end = b""

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._size += len(data)
        self._end = (self._end + data)[-tarfile.BLOCKSIZE :]
        if self._size > self._limit:
            raise Refused("the archive is larger than the disk of the template")
        return data

    def finish(self) -> None:
        """Read on to the end, which has to be the empty block that ends an archive: tarfile takes an archive that was
        cut between two members for a whole one."""
        while self.read(_CHUNK):
            pass
        if self._size % tarfile.BLOCKSIZE or self._end != bytes(tarfile.BLOCKSIZE):
            raise Refused("the end of the archive is missing")


class Unpacking:
    def __init__(self, max_bytes: int, max_files: int) -> None:
        self._max_bytes = max_bytes
        self._max_files = max_files
        self.files = 0
        self.bytes = 0
        self.devices = 0
        self._directories: dict[str, tarfile.TarInfo] = {}

    def run(self, stream: BinaryIO) -> None:
        """Unpack everything into the current root."""
        # Room for headers: a block for the member, and some for what extends it.
        counted = Counted(stream, self._max_bytes + self._max_files * 8192 + _CHUNK)
        with tarfile.open(fileobj=counted, mode="r|", encoding="utf-8", errors="surrogateescape") as tar:  # type: ignore[call-overload]
            while (member := tar.next()) is not None:
                tar.members = []  # a stream never goes back, so nothing needs to be remembered
                try:
                    self._member(tar, member)
                except (OSError, ValueError, OverflowError) as error:
                    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                        raise
                    raise Refused(f"cannot unpack {member.name!r}: {error}") from error
        counted.finish()
        for path, member in sorted(self._directories.items(), reverse=True):
            _dates(path, member)

    def _member(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        path = _inside(member.name)
        self.files += 1
        if self.files > self._max_files:
            raise Refused(f"the archive has more than {self._max_files} files, too many for the disk of the template")
        if path == "/":
            if member.isdir():
                _rights(path, member)
            return
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if member.isdir():
            if not _is(path, stat.S_ISDIR):
                _remove(path)
                os.mkdir(path, 0o700)
            self._directories[path] = member
            _rights(path, member)
        elif member.isreg():
            self.bytes += -(-member.size // _BLOCK) * _BLOCK
            if self.bytes > self._max_bytes:
                raise Refused("the content of the archive is larger than the disk of the template")
            _remove(path)
            self._file(tar, member, path)
        elif member.issym():
            _remove(path)
            os.symlink(member.linkname, path)
            os.lchown(path, *_owner(member))
            _dates(path, member)
        elif member.islnk():
            target = _inside(member.linkname)
            if target != path:
                _remove(path)
                os.link(target, path, follow_symlinks=False)
        elif member.isfifo():
            _remove(path)
            os.mkfifo(path, 0o600)
            _rights(path, member)
            _dates(path, member)
        elif member.ischr() or member.isblk():
            self.devices += 1  # the guest has its own /dev, and a device elsewhere is a way out of rights
        else:
            raise Refused(f"{member.name!r} is of an unknown kind ({member.type!r})")

    def _file(self, tar: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        content = tar.extractfile(member)
        assert content is not None
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            left = member.size
            while left > 0:
                chunk = content.read(min(left, _CHUNK))
                if not chunk:
                    raise Refused(f"the archive ends within {member.name!r}")
                left -= len(chunk)
                if len(chunk) >= _BLOCK and not chunk.strip(b"\0"):
                    file.seek(len(chunk), os.SEEK_CUR)
                else:
                    file.write(chunk)
            file.truncate(member.size)
            _rights(file.fileno(), member)
        _dates(path, member)


def _inside(name: str) -> str:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise Refused(f"the path {name!r} leaves the archive")
    return "/" + "/".join(parts)


def _is(path: str, kind: Any) -> bool:
    try:
        return bool(kind(os.lstat(path).st_mode))
    except FileNotFoundError:
        return False


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        os.rmdir(path)


def _owner(member: tarfile.TarInfo) -> tuple[int, int]:
    for number in (member.uid, member.gid):
        if not 0 <= number < 2**32 - 1:
            raise ValueError(f"{number} is not a user or group")
    return member.uid, member.gid


def _rights(path: str | int, member: tarfile.TarInfo) -> None:
    # In this order: a change of owner drops set-uid bits and capabilities.
    os.chown(path, *_owner(member))
    os.chmod(path, member.mode & 0o7777)
    for key, value in member.pax_headers.items():
        name = key.removeprefix("SCHILY.xattr.")
        if name != key and name.startswith(_XATTRS):
            os.setxattr(path, name, value.encode("utf-8", "surrogateescape"))


def _dates(path: str, member: tarfile.TarInfo) -> None:
    seconds = min(max(float(member.mtime), 0.0), float(2**33))
    os.utime(path, (seconds, seconds), follow_symlinks=False)


# --- the user that commands run as ----------------------------------------------------------------------------------

_USER = "user"
_ID = 1000
_MAX_ACCOUNTS = 1 << 20


def add_user() -> None:
    """Make sure that the account ``user`` exists, has a home, and may use sudo where there is sudo."""
    os.makedirs("/etc", exist_ok=True)
    accounts = _read_table("/etc/passwd")
    groups = _read_table("/etc/group")
    if not accounts:
        _append("/etc/passwd", "root:x:0:0:root:/root:" + _shell())
    if not groups:
        _append("/etc/group", "root:x:0:")
    account = next((fields for fields in accounts if fields[0] == _USER and len(fields) >= 7), None)
    if account is not None:
        uid, gid, home = int(account[2]), int(account[3]), account[5]
    else:
        group = next((fields for fields in groups if fields[0] == _USER and len(fields) >= 3), None)
        uid = _free({fields[2] for fields in accounts if len(fields) >= 3})
        if group is not None:
            gid = int(group[2])
        else:
            gid = _free({fields[2] for fields in groups if len(fields) >= 3})
            _append("/etc/group", f"{_USER}:x:{gid}:")
            if os.path.exists("/etc/gshadow"):
                _append("/etc/gshadow", f"{_USER}:!::")
        home = f"/home/{_USER}"
        shadow = os.path.exists("/etc/shadow")
        _append("/etc/passwd", f"{_USER}:{'x' if shadow else '*'}:{uid}:{gid}::{home}:{_shell()}")
        if shadow:
            _append("/etc/shadow", f"{_USER}:!::0:99999:7:::")
    if not os.path.isdir(home):
        os.makedirs(os.path.dirname(home), exist_ok=True)
        os.mkdir(home, 0o755)
        os.chown(home, uid, gid)
        _copy_skeleton(home, uid, gid)
    if any(os.path.exists(path) for path in ("/usr/bin/sudo", "/bin/sudo", "/usr/local/bin/sudo")):
        os.makedirs("/etc/sudoers.d", mode=0o750, exist_ok=True)
        rule = f"/etc/sudoers.d/90-{_USER}"
        _remove(rule)
        _write_new(rule, f"{_USER} ALL=(ALL:ALL) NOPASSWD:ALL\n".encode(), 0o440)


def _shell() -> str:
    return "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"


def _free(taken: set[str]) -> int:
    return next(number for number in range(_ID, 60000) if str(number) not in taken)


def _read_table(path: str) -> list[list[str]]:
    data = _read_file(path)
    return [line.split(":") for line in data.decode("utf-8", "surrogateescape").splitlines() if line]


def _read_file(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return b""
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise Refused(f"{path} of the archive is not a file")
        data = file.read(_MAX_ACCOUNTS + 1)
    if len(data) > _MAX_ACCOUNTS:
        raise Refused(f"{path} of the archive is larger than {_MAX_ACCOUNTS} bytes")
    return data


def _append(path: str, line: str) -> None:
    data = _read_file(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640 if "shadow" in path else 0o644)
    with os.fdopen(descriptor, "wb") as file:
        if data and not data.endswith(b"\n"):
            file.write(b"\n")
        file.write(line.encode("utf-8", "surrogateescape") + b"\n")


def _copy_skeleton(home: str, uid: int, gid: int) -> None:
    if not os.path.isdir("/etc/skel"):
        return
    for name in os.listdir("/etc/skel"):
        if _is(f"/etc/skel/{name}", stat.S_ISREG):
            _write_new(f"{home}/{name}", _read_file(f"/etc/skel/{name}"), 0o644)
            os.chown(f"{home}/{name}", uid, gid)


def _write_new(path: str, data: bytes, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(data)


def main() -> None:
    request = json.loads(sys.argv[1])
    os.umask(0o022)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chroot(request["directory"])
    os.chdir("/")
    unpacking = Unpacking(request["max_bytes"], request["max_files"])
    answer: dict[str, object]
    try:
        unpacking.run(sys.stdin.buffer)
        if request["user"]:
            try:
                add_user()
            except (OSError, ValueError, StopIteration) as error:
                raise Refused(f"cannot add the account {_USER!r} to the archive's /etc: {error}") from error
        answer = {"files": unpacking.files, "bytes": unpacking.bytes, "devices": unpacking.devices}
    except Refused as error:
        answer = {"refused": str(error)}
    except tarfile.TarError as error:
        answer = {"refused": f"not a tar archive, or a damaged one: {error}"}
    except (MemoryError, RecursionError):
        answer = {"refused": "the headers of the archive are too large"}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
