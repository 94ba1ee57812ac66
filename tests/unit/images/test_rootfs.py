"""Import of root file systems, hostile ones above all. Images are read back with debugfs, without mounting."""

from __future__ import annotations

import io
import lzma
import os
import re
import stat
import subprocess
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from aenv.config import Settings
from aenv.errors import BadRequest, SetupError
from aenv.model import KernelImage, MachineShape
from aenv.templates import rootfs
from aenv.templates.imports import import_template
from aenv.templates.store import TemplateStore

DISK = 32
KERNEL = KernelImage("6.1.0-57-cloud-amd64", "ab" * 32, *(Path("/nowhere"),) * 4)
Member = tuple[tarfile.TarInfo, bytes]


def member(name: str, data: bytes = b"", *, kind: bytes = tarfile.REGTYPE, **fields: object) -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(data)
    info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def tar(members: Iterable[Member]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


class Build:
    """Builds an image from an archive below a directory that a hostile archive must not leave."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.workspace = directory / "workspace"
        self.image = directory / "rootfs.ext4"
        self.source = directory / "source"
        self.said: list[str] = []
        directory.chmod(0o700)

    def __call__(self, source: bytes | Path, *, user: bool = False, disk: int = DISK) -> Build:
        if isinstance(source, bytes):
            self.source.write_bytes(source)
            source = self.source
        self.workspace.mkdir()
        rootfs.build(self.image, source, disk, self.said.append, workspace=self.workspace, user=user)
        subprocess.run(["e2fsck", "-fn", self.image], check=True, capture_output=True)
        return self

    def refused(self, source: bytes | Path, cause: str, *, user: bool = False, disk: int = DISK) -> None:
        with pytest.raises(BadRequest, match=cause):
            self(source, user=user, disk=disk)
        assert not self.image.exists()
        outside = {path.name for path in self.directory.iterdir()}
        assert outside <= {"workspace", "source"}, outside

    def _debugfs(self, request: str) -> bytes:
        return subprocess.run(["debugfs", "-R", request, self.image], check=True, capture_output=True).stdout

    def read(self, path: str) -> bytes:
        return self._debugfs(f"cat {path}")

    def stat(self, path: str) -> dict[str, str]:
        text = self._debugfs(f"stat {path}").decode()
        found = re.search(r"Type: (.+?)\s+Mode:\s+(\d+)[\s\S]*User:\s+(\d+)\s+Group:\s+(\d+)", text)
        assert found is not None, text
        times = re.search(r"mtime: (0x[0-9a-f]+)", text)
        links = re.search(r"Links: (\d+)", text)
        blocks = re.search(r"Blockcount: (\d+)", text)
        link = re.search(r'Fast link dest: "(.*)"', text)
        assert times is not None
        assert links is not None
        assert blocks is not None
        return {
            "type": found.group(1),
            "mode": found.group(2),
            "owner": f"{found.group(3)}:{found.group(4)}",
            "mtime": str(int(times.group(1), 16)),
            "links": links.group(1),
            "blocks": blocks.group(1),
            "target": link.group(1) if link else "",
        }

    def exists(self, path: str) -> bool:
        return (
            b"not found"
            not in subprocess.run(["debugfs", "-R", f"stat {path}", self.image], check=True, capture_output=True).stderr
        )


@pytest.fixture
def build(tmp_path: Path) -> Build:
    return Build(tmp_path)


PLAIN = [
    member("etc", kind=tarfile.DIRTYPE),
    member("etc/conf", b"value\n", uid=1234, gid=70000, mode=0o4751, mtime=1_000_000_000),
    member("etc/same", kind=tarfile.LNKTYPE, linkname="etc/conf"),
    member("bin", kind=tarfile.SYMTYPE, linkname="usr/bin"),
    member("./deep/er/file", b"x" * 10000),
    member("pipe", kind=tarfile.FIFOTYPE),
]


def test_everything_of_a_file_is_kept(build: Build) -> None:
    build(tar(PLAIN))
    assert build.read("/etc/conf") == b"value\n"
    kept = build.stat("/etc/conf")
    assert (kept["type"], kept["mode"], kept["owner"]) == ("regular", "04751", "1234:70000")
    assert (kept["mtime"], kept["links"]) == ("1000000000", "2")
    assert build.stat("/bin")["target"] == "usr/bin"
    assert build.read("/deep/er/file") == b"x" * 10000
    assert build.stat("/pipe")["type"] == "FIFO"


def _xz(data: bytes) -> bytes:
    return lzma.compress(data)


def _tool(*argv: str) -> Callable[[bytes], bytes]:
    return lambda data: subprocess.run(argv, input=data, capture_output=True, check=True).stdout


@pytest.mark.parametrize("pack", [_tool("gzip", "-c"), _xz, _tool("zstd", "-c", "-q")], ids=["gzip", "xz", "zstd"])
def test_compressed_archives(build: Build, pack: Callable[[bytes], bytes]) -> None:
    packed = pack(tar(PLAIN))
    build(packed)
    assert build.read("/etc/conf") == b"value\n"


@pytest.mark.parametrize("pack", [_tool("gzip", "-c"), _xz, _tool("zstd", "-c", "-q")], ids=["gzip", "xz", "zstd"])
def test_a_compressed_archive_that_was_cut(build: Build, pack: Callable[[bytes], bytes]) -> None:
    packed = pack(tar([*PLAIN, member("random", os.urandom(100_000))]))
    build.refused(packed[: len(packed) // 2], "damaged|ends within|end of the archive")


@pytest.mark.parametrize("size", [0, 100, 511, 1024 + 512, 1024 + 600, 4096])
def test_an_archive_that_was_cut(build: Build, size: int) -> None:
    data = tar([member("one", b"1" * 600), member("two", b"2" * 600), member("three", b"3" * 600)])
    build.refused(data[:size], "damaged|ends within|end of the archive")


@pytest.mark.parametrize("junk", [b"#!/bin/sh\necho hello\n" * 100, os.urandom(5000), b"\x1f\x8b" + bytes(3000)])
def test_something_else_is_refused(build: Build, junk: bytes) -> None:
    build.refused(junk, "not a tar archive|damaged|end of the archive")


def test_extended_attributes_and_capabilities(build: Build, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "ping").write_bytes(b"\x7fELF")
    os.setxattr(tree / "ping", "user.origin", b"\x00\xff=binary\n")
    subprocess.run(["setcap", "cap_net_raw=ep", tree / "ping"], check=True)
    packed = subprocess.run(
        ["tar", "-C", tree, "--xattrs", "--xattrs-include=*", "-c", "."], check=True, capture_output=True
    ).stdout
    build(packed)
    listed = build._debugfs("ea_list /ping").decode()
    assert "user.origin" in listed
    assert "security.capability" in listed
    out = tmp_path / "value"
    build._debugfs(f"ea_get -f {out} /ping user.origin")
    assert out.read_bytes() == b"\x00\xff=binary\n"


def test_a_directory_is_imported_with_its_owners(build: Build, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub/file").write_text("hello")
    os.chown(tree / "sub/file", 4321, 5432)
    (tree / "dangling").symlink_to("/no/where")
    build(tree)
    assert build.stat("/sub/file")["owner"] == "4321:5432"
    assert build.stat("/dangling")["target"] == "/no/where"


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "..", "a/.."])
def test_paths_that_leave_the_archive(build: Build, name: str) -> None:
    build.refused(tar([member(name, b"evil")]), "leaves the archive")


def test_an_absolute_path_stays_inside(build: Build) -> None:
    evil = f"{build.directory}/evil"
    build(tar([member(evil, b"evil")]))
    assert build.read(evil) == b"evil"
    assert not Path(evil).exists()


@pytest.mark.parametrize("target", ["/", "../../../../..", "{outside}"])
def test_a_link_cannot_be_used_to_write_outside(build: Build, target: str) -> None:
    """The kernel resolves it inside the new root: the file lands there, or nowhere."""
    target = target.format(outside=build.directory)
    build.source.write_bytes(tar([member("out", kind=tarfile.SYMTYPE, linkname=target), member("out/evil", b"evil")]))
    build.workspace.mkdir()
    try:
        rootfs.build(build.image, build.source, DISK, build.said.append, workspace=build.workspace, user=False)
    except BadRequest as error:
        assert "cannot unpack" in str(error)
    else:
        assert build.read("/evil") == b"evil"
    assert not (build.directory / "evil").exists()
    assert not Path("/evil").exists()


def test_a_file_replaces_a_link_instead_of_following_it(build: Build) -> None:
    victim = build.directory / "victim"
    victim.write_text("precious")
    build(tar([member("link", kind=tarfile.SYMTYPE, linkname=str(victim)), member("link", b"new")]))
    assert victim.read_text() == "precious"
    assert build.read("/link") == b"new"


@pytest.mark.parametrize("target", ["/etc/shadow", "../../../../etc/shadow", "no/where"])
def test_a_hard_link_to_the_outside(build: Build, target: str) -> None:
    build.refused(tar([member("steal", kind=tarfile.LNKTYPE, linkname=target)]), "cannot unpack|leaves the archive")


def test_accounts_of_the_archive_are_never_those_of_the_host(build: Build) -> None:
    before = Path("/etc/passwd").read_bytes()
    links = [
        member("etc/passwd", kind=tarfile.SYMTYPE, linkname="/../../../../../../etc/passwd"),
        member("etc/group", kind=tarfile.SYMTYPE, linkname="/proc/1/root/etc/group"),
    ]
    build.refused(tar(links), "cannot add the account", user=True)
    assert Path("/etc/passwd").read_bytes() == before


def test_devices_are_left_out(build: Build) -> None:
    devices = [
        member("dev/sda", kind=tarfile.BLKTYPE, devmajor=8, devminor=0),
        member("dev/mem", kind=tarfile.CHRTYPE, devmajor=1, devminor=1),
    ]
    build(tar([*devices, member("file", b"x")]))
    assert not build.exists("/dev/sda")
    assert not build.exists("/dev/mem")
    assert build.exists("/file")
    assert any("2 device nodes" in line for line in build.said)


def test_a_sparse_file_stays_sparse(build: Build) -> None:
    build(tar([member("big", bytes(20 << 20))]))
    assert int(build.stat("/big")["blocks"]) <= 16


def test_a_file_larger_than_the_disk(build: Build) -> None:
    info, _ = member("huge")
    info.size = 1 << 40
    build.refused(info.tobuf(tarfile.PAX_FORMAT) + bytes(4096), "larger than the disk|not a tar archive, or a damaged")


def test_content_larger_than_the_disk(build: Build) -> None:
    chunk = os.urandom(1 << 20)
    build.refused(tar([member(f"f{n}", chunk) for n in range(DISK + 1)]), "larger than the disk")


def test_content_that_fits_only_without_the_tables_of_the_file_system(build: Build) -> None:
    chunk = os.urandom(1 << 20)
    build.refused(tar([member(f"f{n}", chunk) for n in range(DISK - 1)]), "needs about 31 MiB.*has 32 MiB")


def test_too_many_files(build: Build) -> None:
    build.refused(tar([member(f"f{n}") for n in range(DISK * 64 + 10)]), "more than 2048 files")


def test_a_bomb_is_stopped_by_what_comes_out(build: Build) -> None:
    bomb = subprocess.run("head -c 3000000000 /dev/zero | zstd -c -q", shell=True, capture_output=True, check=True)
    assert len(bomb.stdout) < 1 << 20
    build.refused(bomb.stdout, "larger than the disk|damaged")


def test_headers_without_end(build: Build) -> None:
    info, _ = member("x")
    info.pax_headers = {"comment": "A" * (8 << 20)}
    many = info.tobuf(tarfile.PAX_FORMAT) * 8
    build.refused(many + bytes(1024), "larger than the disk")


@pytest.mark.parametrize(
    "info",
    [
        member("x", uid=2**32 - 1),
        member("x", gid=2**33),
        member("y" * 300),
        member("/".join(["d" * 200] * 30)),
        member("x", b"", pax_headers={"SCHILY.xattr.user.big": "v" * 100_000}),
        member("nul\0byte", b""),
        member("x", b"", kind=b"Z"),
    ],
    ids=["uid", "gid", "name", "path", "xattr", "nul", "kind"],
)
def test_odd_members_are_refused_or_harmless(build: Build, info: Member) -> None:
    build.source.write_bytes(tar([info]))
    build.workspace.mkdir()
    try:
        rootfs.build(build.image, build.source, DISK, build.said.append, workspace=build.workspace, user=False)
    except BadRequest as error:
        assert len(str(error)) > 20
        assert not build.image.exists()
    else:
        subprocess.run(["e2fsck", "-fn", build.image], check=True, capture_output=True)


def test_a_parent_that_is_a_file(build: Build) -> None:
    build.refused(tar([member("a", b"file"), member("a/b", b"below")]), "cannot unpack 'a/b'")


def test_a_directory_with_content_is_not_replaced_by_a_file(build: Build) -> None:
    build.refused(tar([member("a/b", b""), member("a", b"file")]), "cannot unpack 'a'")


# --- the account -----------------------------------------------------------------------------------------------------

ACCOUNTS = [
    member("etc/passwd", b"root:x:0:0:root:/root:/bin/bash\ndaemon:x:1:1::/:/bin/false"),
    member("etc/group", b"root:x:0:\n"),
    member("etc/shadow", b"root:*:19000:0:99999:7:::\n", mode=0o640),
    member("etc/skel/.bashrc", b"# hello\n"),
    member("bin/bash", b"\x7fELF", mode=0o755),
    member("usr/bin/sudo", b"\x7fELF", mode=0o4755),
]


def test_the_account_is_added(build: Build) -> None:
    build(tar(ACCOUNTS), user=True)
    assert build.read("/etc/passwd").decode().splitlines()[1:] == [
        "daemon:x:1:1::/:/bin/false",
        "user:x:1000:1000::/home/user:/bin/bash",
    ]
    assert build.read("/etc/group").decode().splitlines()[-1] == "user:x:1000:"
    assert build.read("/etc/shadow").decode().splitlines()[-1].startswith("user:!:")
    assert build.read("/etc/sudoers.d/90-user") == b"user ALL=(ALL:ALL) NOPASSWD:ALL\n"
    assert build.stat("/etc/sudoers.d/90-user")["mode"] == "0440"
    assert build.stat("/home/user")["owner"] == "1000:1000"
    assert build.stat("/home/user/.bashrc")["owner"] == "1000:1000"


def test_an_account_with_that_number_is_left_alone(build: Build) -> None:
    other = [member("etc/passwd", b"node:x:1000:1000::/home/node:/bin/sh\n"), member("etc/group", b"node:x:1000:\n")]
    build(tar(other), user=True)
    assert build.read("/etc/passwd").decode().splitlines() == [
        "node:x:1000:1000::/home/node:/bin/sh",
        "user:*:1001:1001::/home/user:/bin/sh",
    ]


def test_an_existing_account_is_kept(build: Build) -> None:
    passwd = b"user:x:500:600::/srv/user:/bin/zsh\n"
    build(tar([member("etc/passwd", passwd), member("etc/group", b"user:x:600:\n")]), user=True)
    assert build.read("/etc/passwd") == passwd
    assert build.stat("/srv/user")["owner"] == "500:600"


def test_an_archive_without_accounts(build: Build) -> None:
    build(tar([member("bin/sh", b"\x7fELF", mode=0o755)]), user=True)
    assert build.read("/etc/passwd").decode().splitlines() == [
        "root:x:0:0:root:/root:/bin/sh",
        "user:*:1000:1000::/home/user:/bin/sh",
    ]
    assert not build.exists("/etc/sudoers.d")


def test_no_account_unless_asked(build: Build) -> None:
    build(tar(ACCOUNTS))
    assert b"user:" not in build.read("/etc/passwd")
    assert not build.exists("/home/user")


@pytest.mark.parametrize(
    "accounts",
    [
        [member("etc/passwd", kind=tarfile.FIFOTYPE)],
        [member("etc/passwd", b"x" * (2 << 20))],
        [member("etc", b"a file")],
        [member("etc/passwd", b"user:x:abc:def:::\n")],
        [member("etc/passwd", kind=tarfile.DIRTYPE)],
    ],
    ids=["fifo", "huge", "no directory", "no numbers", "directory"],
)
def test_hostile_accounts(build: Build, accounts: list[Member]) -> None:
    build.refused(tar(accounts), "account|/etc/passwd", user=True)


# --- import ----------------------------------------------------------------------------------------------------------


def test_an_import_becomes_a_template(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    source = tmp_path / "rootfs.tar"
    source.write_bytes(tar(ACCOUNTS))
    said: list[str] = []
    shape = MachineShape(2, 256, DISK)
    made = import_template(settings, source, "mine:v1", shape, KERNEL, said.append, env={"A": "b"}, workdir="/srv")
    store = TemplateStore(settings)
    assert store.get("mine:v1") == made
    assert (made.shape, made.user, made.workdir, made.env) == (shape, "user", "/srv", {"A": "b"})
    assert (made.kernel, made.kernel_digest) == (KERNEL.version, KERNEL.digest)
    image = store.rootfs(made)
    assert image.stat().st_size == DISK << 20
    assert image.stat().st_blocks * 512 < 2 << 20
    assert stat.S_IMODE(image.stat().st_mode) & 0o022 == 0
    assert said


def test_a_failed_import_leaves_nothing(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    source = tmp_path / "rootfs.tar"
    source.write_bytes(tar([member("../x")]))
    with pytest.raises(BadRequest):
        import_template(settings, source, "mine", MachineShape(1, 256, DISK), KERNEL, lambda _: None)
    assert [path.name for path in (settings.home / "templates").iterdir()] == [".lock"]


def test_a_large_disk_costs_neither_the_host_nor_the_guest(build: Build) -> None:
    """The guest's kernel would clear every inode table that is not marked as zeroed."""
    build(tar(ACCOUNTS), disk=8192)
    assert build.image.stat().st_blocks * 512 < 8 << 20
    listed = subprocess.run(["dumpe2fs", build.image], check=True, capture_output=True).stdout.decode()
    groups = re.findall(r"^Group \d+: .*", listed, re.MULTILINE)
    assert len(groups) == 64
    assert all("ITABLE_ZEROED" in group for group in groups)


@pytest.mark.parametrize(("name", "disk"), [("Not A Name", DISK), ("mine", 3)])
def test_an_import_is_checked_before_it_starts(tmp_path: Path, name: str, disk: int) -> None:
    settings = Settings(home=tmp_path / "home")
    said: list[str] = []
    with pytest.raises(BadRequest):
        import_template(settings, tmp_path, name, MachineShape(1, 256, disk), KERNEL, said.append)
    assert said == []


@pytest.mark.parametrize("source", ["missing.tar", "/dev/zero"])
def test_a_source_that_is_none(tmp_path: Path, source: str) -> None:
    with pytest.raises(BadRequest, match=Path(source).name):
        import_template(
            Settings(home=tmp_path), tmp_path / source, "mine", MachineShape(1, 256, DISK), KERNEL, lambda _: None
        )


def test_without_root_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SetupError, match="root"):
        import_template(Settings(home=tmp_path), tmp_path, "mine", MachineShape(1, 256, DISK), KERNEL, lambda _: None)
