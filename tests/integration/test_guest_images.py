"""Guest kernels and templates, made from real packages and booted in real virtual machines."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import pytest

from aenv.config import Settings
from aenv.errors import DiskFull, NotFound, SetupError
from aenv.model import KernelImage, MachineShape, Template
from aenv.programs import own_program
from aenv.templates import base, minimal
from aenv.templates.store import TemplateStore
from aenv.vmm import cpio, debian, durable, kernel, modules, vmlinux
from aenv.vmm.interface import BootConfig, Disk
from aenv.vmm.qemu import QemuDriver

OLD_QEMU, NEW_QEMU = (7, 2), (10, 0)


def silent(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(home=tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def image(home: Settings) -> KernelImage:
    return kernel.ensure_kernel(home, OLD_QEMU, silent)


@pytest.fixture(scope="module")
def minimal_template(home: Settings, image: KernelImage) -> Template:
    return minimal.ensure_minimal(home, image, silent)


@pytest.fixture(scope="module")
def base_template(home: Settings, image: KernelImage) -> Template:
    return base.ensure_base(home, image, silent)


@pytest.fixture
def copy(home: Settings, image: KernelImage, tmp_path: Path) -> Settings:
    """Another home with the same kernel, which the test may change."""
    subprocess.run(["cp", "--archive", "--link", home.home / "kernels", tmp_path / "kernels"], check=True)
    return Settings(home=tmp_path)


def visible(directory: Path) -> list[str]:
    return (
        sorted(path.name for path in directory.iterdir() if not path.name.startswith(".")) if directory.exists() else []
    )


# --- kernel ----------------------------------------------------------------------------------------------------------


def test_the_kernel_is_complete(home: Settings, image: KernelImage) -> None:
    assert image.version.startswith("6.1.")
    assert "cloud" in image.version
    assert kernel.load_kernel(home, image.version) == image
    vmlinux.check(image.vmlinux.read_bytes()[:64])
    assert image.bzimage.read_bytes()[0x202:0x206] == b"HdrS"
    subprocess.run(["e2fsck", "-fn", image.modules], check=True, capture_output=True)
    listed = subprocess.run(
        ["cpio", "-it", "--quiet"], input=image.initramfs.read_bytes(), check=True, capture_output=True
    ).stdout.decode()
    assert {"init", "modules.list", "dev/console", "modules/virtio_blk.ko", "newroot"} <= set(listed.split())


def test_the_modules_image_is_one_that_modprobe_can_use(image: KernelImage) -> None:
    listed = subprocess.run(
        ["debugfs", "-R", f"ls -p /{image.version}", image.modules], check=True, capture_output=True
    ).stdout.decode()
    assert {"modules.dep.bin", "modules.alias.bin", "kernel"} <= {line.split("/")[5] for line in listed.split() if line}


def test_a_second_call_does_nothing(home: Settings, image: KernelImage) -> None:
    said: list[str] = []
    assert kernel.ensure_kernel(home, OLD_QEMU, said.append) == image
    assert said == []


def test_another_home_gets_the_same_kernel(image: KernelImage, tmp_path: Path) -> None:
    other = kernel.ensure_kernel(Settings(home=tmp_path), OLD_QEMU, silent)
    assert (other.version, other.digest) == (image.version, image.digest)


def test_newer_qemu_and_firecracker_get_a_newer_kernel(tmp_path: Path) -> None:
    image = kernel.ensure_kernel(Settings(home=tmp_path), NEW_QEMU, silent)
    assert image.version.startswith("6.12.")
    vmlinux.check(image.vmlinux.read_bytes()[:64])
    listed = subprocess.run(
        ["cpio", "-it", "--quiet"], input=image.initramfs.read_bytes(), check=True, capture_output=True
    ).stdout.decode()
    assert "modules/virtio_blk.ko" in listed.split()
    assert "modules/fuse.ko" not in listed.split(), "6.12 has it built in"


def test_a_new_agent_makes_a_new_initramfs_beside_the_old_one(
    copy: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = copy
    first = kernel.ensure_kernel(settings, OLD_QEMU, silent)
    agent = tmp_path / "agent"
    monkeypatch.setattr(kernel, "own_program", lambda name: agent)
    made = [first]
    for build in range(5):
        agent.write_bytes(own_program("aenv-envd").read_bytes() + bytes([build]))
        made.append(kernel.ensure_kernel(settings, OLD_QEMU, silent))
        assert made[-2].initramfs.exists(), "a machine may be about to start from it"
        assert kernel.load_kernel(settings, first.version) == made[-1]
    assert len({image.digest for image in made}) == 6
    assert sum(image.initramfs.exists() for image in made) == 3
    monkeypatch.undo()
    assert kernel.ensure_kernel(settings, OLD_QEMU, silent) == first


def test_an_unknown_kernel_is_not_found(home: Settings) -> None:
    for version in ("5.10.0-cloud-amd64", "..", "", "/etc"):
        with pytest.raises(NotFound):
            kernel.load_kernel(home, version)


def test_a_damaged_kernel_is_made_again(image: KernelImage, copy: Settings) -> None:
    settings = copy
    first = kernel.ensure_kernel(settings, OLD_QEMU, silent)
    first.bzimage.unlink()
    said: list[str] = []
    again = kernel.ensure_kernel(settings, OLD_QEMU, said.append)
    assert again.bzimage.exists()
    assert again.digest == image.digest
    assert any("damaged" in line for line in said)


def test_a_full_disk_leaves_nothing(image: KernelImage, tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60M", "tmpfs", mount], check=True)
    try:
        with pytest.raises(DiskFull, match="full"):
            kernel.ensure_kernel(Settings(home=mount), OLD_QEMU, silent)
        assert visible(mount / "kernels") == []
        assert not list((mount / "kernels").glob(".staging-*"))
    finally:
        subprocess.run(["umount", mount], check=True)


def test_a_missing_tool_is_named_and_leaves_nothing(
    image: KernelImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str, package: str) -> Path:
        raise SetupError(f"the program {name} is missing", remedy=f"apt-get install {package}")

    monkeypatch.setattr(modules, "system_program", missing)
    with pytest.raises(SetupError, match=r"depmod is missing.*apt-get install kmod"):
        kernel.ensure_kernel(Settings(home=tmp_path), OLD_QEMU, silent)
    assert visible(tmp_path / "kernels") == []
    assert not list((tmp_path / "kernels").glob(".staging-*"))


_ENSURE = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from aenv.config import Settings
    from aenv.vmm import kernel
    image = kernel.ensure_kernel(Settings(home=Path(sys.argv[1])), (7, 2), lambda line: print(line, flush=True))
    print("digest", image.digest)
    """
)


def test_two_processes_at_once_build_it_once(image: KernelImage, tmp_path: Path) -> None:
    both = [
        subprocess.Popen([sys.executable, "-c", _ENSURE, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert all(f"digest {image.digest}" in text for text in said)
    assert sum("preparing" in text for text in said) == 1


def test_a_killed_build_does_not_stand_in_the_way(image: KernelImage, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", _ENSURE, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("preparing"):
                break
        deadline = time.monotonic() + 60
        while not list((tmp_path / "kernels").glob(".staging-*/package")):
            assert time.monotonic() < deadline
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert visible(tmp_path / "kernels") == []
    assert kernel.ensure_kernel(Settings(home=tmp_path), OLD_QEMU, silent).digest == image.digest
    # The dpkg-deb of the killed process may have gone on for a while.
    while list((tmp_path / "kernels").glob(".staging-*")):
        assert time.monotonic() < deadline
        with durable.staging(tmp_path / "kernels"):
            pass


def test_a_spoilt_package_in_the_cache_is_fetched_again(
    image: KernelImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = debian.cache_directory()
    cache = tmp_path / "cache"
    (cache / "packages").mkdir(parents=True)
    (cache / "apt").symlink_to(real / "apt")
    spoilt = []
    for path in (real / "packages").glob("linux-image-*.deb"):
        copy = cache / "packages" / path.name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        copy.write_bytes(data)
        spoilt.append(copy)
    monkeypatch.setenv("AENV_CACHE", str(cache))
    said: list[str] = []
    assert kernel.ensure_kernel(Settings(home=tmp_path / "home"), OLD_QEMU, said.append).digest == image.digest
    assert spoilt
    assert any("downloading linux-image" in line for line in said)


# --- templates -------------------------------------------------------------------------------------------------------


def test_base_is_built_once_and_follows_the_kernel(home: Settings, image: KernelImage, base_template: Template) -> None:
    said: list[str] = []
    assert base.ensure_base(home, image, said.append) == base_template
    newer = msgspec.structs.replace(image, digest="cd" * 32)
    updated = base.ensure_base(home, newer, said.append)
    assert (updated.template_id, updated.kernel_digest) == (base_template.template_id, newer.digest)
    assert base.ensure_base(home, image, said.append) == base_template
    assert said == []
    assert TemplateStore(home).get("base") == base_template


def test_another_home_gets_base_from_the_cache(image: KernelImage, base_template: Template, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    said: list[str] = []
    made = base.ensure_base(settings, image, said.append)
    assert said == ["taking the disk image from the cache"]
    assert TemplateStore(settings).rootfs(made).stat().st_size == settings.machine.disk << 20
    subprocess.run(["e2fsck", "-fn", TemplateStore(settings).rootfs(made)], check=True, capture_output=True)


# --- boot ------------------------------------------------------------------------------------------------------------


class Guest:
    def __init__(self, console: str, seconds: float) -> None:
        self.console = console
        self.seconds = seconds


async def boot(settings: Settings, image: KernelImage, root: Path, directory: Path, until: str) -> Guest:
    """Boot a copy of ``root`` and wait for a line on the console that contains ``until``."""
    disk = directory / "disk.img"
    subprocess.run(["cp", "--sparse=always", root, disk], check=True)
    driver = await QemuDriver.open(settings.vmm, directory)
    config = BootConfig(
        name="test",
        shape=MachineShape(1, 512, 64),
        kernel=image,
        disks=(Disk(disk, "raw", False), Disk(image.modules, "raw", True)),
        directory=directory,
        tap_fd=None,
        mac="02:00:00:00:00:01",
        netns=None,
        arguments=("aenv.root=/dev/vda", "aenv.modules=/dev/vdb"),
    )
    started = time.monotonic()
    machine = await driver.boot(config)
    try:
        async with asyncio.timeout(120):
            while until not in (console := machine.serial_tail(1 << 16)):
                assert await machine.status() == "running", console
                await asyncio.sleep(0.01)
        return Guest(console, time.monotonic() - started)
    finally:
        await machine.kill()
        await machine.close()


@pytest.mark.parametrize("name", ["minimal", "base"])
async def test_the_agent_comes_up(
    home: Settings, image: KernelImage, name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    template: Template = request.getfixturevalue(f"{name}_template")
    guest = await boot(home, image, TemplateStore(home).rootfs(template), tmp_path, "aenv-envd: ")
    assert "aenv-envd: ready" in guest.console
    print(f"{name}: {guest.seconds:.2f} s from start to ready")


_INIT = r"""#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
for module in $($b cat /modules.list); do $b insmod $module || echo "cannot load $module"; done
$b mount -t ext4 -o noatime /dev/vda /newroot
$b mkdir -p /newroot/lib/modules
$b mount -t ext4 -o ro,noload /dev/vdb /newroot/lib/modules
$b mount -t proc proc /newroot/proc
$b mount -t devtmpfs dev /newroot/dev
$b cp /check /newroot/tmp/check
PATH=/usr/sbin:/usr/bin:/sbin:/bin $b chroot /newroot su user -c 'sh /tmp/check' 2>&1
echo "checked: $?"
$b sync
$b poweroff -f
"""

# What commands of a sandbox, and the test suites of the SDKs, expect of the guest.
_CHECK = r"""
set -eu
test "$(id -u)" != 0
test "$(id -gn)" = user
test "$HOME" = /home/user
test "$(umask)" = 0022
cd
touch file
test "$(stat -c %U:%G file)" = user:user
test "$(sudo id -u)" = 0
test "$(bash -l -c 'echo $0')" = bash
python -c 'import sys, ssl, sqlite3, venv; assert sys.version_info >= (3, 11)'
python3 -m pip --version
python3 -c 'import os; os.setxattr("file", "user.origin", b"1"); assert os.getxattr("file", "user.origin") == b"1"'
git --version
test -x "$(git --exec-path)/git-daemon"
git init -q repository
curl --version
TERM=xterm tput cols
realpath .
ping -V
LC_ALL=C.UTF-8 locale 2>&1 | grep -q C.UTF-8
sudo modprobe nf_tables
sudo modprobe bridge
sudo modprobe veth
grep -q nf_tables /proc/modules
test -z "$(git config --global --list 2>/dev/null)"
sudo apt-config dump >/dev/null
echo all is there
"""


async def test_base_has_what_commands_expect(
    home: Settings, image: KernelImage, base_template: Template, tmp_path: Path
) -> None:
    (tmp_path / "busybox").mkdir()
    tree = minimal.busybox_tree(home, tmp_path / "busybox", silent)
    early = [
        (path.name, path.read_bytes())
        for name in msgspec.json.decode((image.bzimage.parent / "manifest.json").read_bytes())["early"]
        for path in [image.bzimage.parent / "early" / name]
    ]
    entries = [cpio.directory(name) for name in ("bin", "dev", "proc", "sys", "newroot", "modules")]
    entries += [cpio.character_device("dev/console", 5, 1)]
    entries += [cpio.file("bin/busybox", (tree / "bin/busybox").read_bytes(), 0o755)]
    entries += [cpio.file("init", _INIT.encode(), 0o755), cpio.file("check", f"set -x\n{_CHECK}".encode())]
    entries += [cpio.file("modules.list", "".join(f"/modules/{name}\n" for name, _ in early).encode())]
    entries += [cpio.file(f"modules/{name}", data) for name, data in early]
    initramfs = tmp_path / "initramfs"
    initramfs.write_bytes(cpio.archive(entries))
    checking = msgspec.structs.replace(image, initramfs=initramfs)
    guest = await boot(home, checking, TemplateStore(home).rootfs(base_template), tmp_path, "checked: ")
    assert "checked: 0" in guest.console, guest.console
    assert "all is there" in guest.console
    assert "cannot load" not in guest.console
