"""The template ``base``: a small Debian that feels complete to a person and to an agent.

The finished image stays in the cache of the machine, under a name made from the recipe, the exact versions of all
packages, and its own digest. As long as none of them changes, other homes get it from there, without a copy where the
cache is on the same file system: an image is never written to.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from aenv.config import Settings
from aenv.errors import NotFound, SetupError
from aenv.model import KernelImage, MachineShape, Template
from aenv.programs import system_program
from aenv.templates import debootstrap, rootfs
from aenv.templates.imports import IMAGE, new_template
from aenv.templates.store import TemplateStore
from aenv.vmm import command, debian, durable
from aenv.vmm.durable import Progress

NAME = "base"

# A compiler would double the 300 MB, and Node.js add a third: both are one `apt-get install` away.
PACKAGES = (
    # a shell one can work in
    "bash",
    "coreutils",
    "util-linux",
    "ncurses-bin",
    "procps",
    "psmisc",
    "less",
    "nano",
    "vim-tiny",
    "file",
    "sudo",
    # network
    "ca-certificates",
    "curl",
    "wget",
    "iproute2",
    "iputils-ping",
    "netbase",
    "openssh-client",
    # files
    "git",
    "unzip",
    "zip",
    "xz-utils",
    "zstd",
    "patch",
    "jq",
    "e2fsprogs",
    "kmod",
    # Python
    "python3",
    "python-is-python3",
    "python3-pip",
    "python3-venv",
)

# Raised when images come out differently for another reason than the recipe.
_FORMAT = 2
# Images in the cache; those used least recently go.
_KEEP = 3


def ensure_base(
    settings: Settings,
    kernel: KernelImage,
    progress: Progress,
    *,
    packages: Sequence[str] = (),
    rebuild: bool = False,
) -> Template:
    """The template ``base``, built if it is not there or ``rebuild`` is true; ``packages`` are added to its own.

    An existing one only gets the identity of ``kernel``: its disk does not depend on the kernel. Blocks for a minute
    when everything has to be fetched, for some seconds when the cache has it. Raises SetupError (not root, tools or
    network missing), DiskFull, OperationFailed; nothing half-done stays.
    """
    store = TemplateStore(settings)
    with durable.lock(store.directory / ".base", lambda: progress("waiting for another process to build the template")):
        try:
            existing = None if rebuild else store.get(NAME)
        except NotFound:
            existing = None
        if existing is not None:
            if (existing.kernel, existing.kernel_digest) == (kernel.version, kernel.digest):
                return existing
            return store.update(msgspec.structs.replace(existing, kernel=kernel.version, kernel_digest=kernel.digest))
        rootfs.require_root()
        shape = MachineShape(settings.machine.vcpus, settings.machine.memory, settings.machine.disk)
        image = _cached_image(settings, [*PACKAGES, *packages], shape.disk, progress)
        with store.building() as directory:
            _share(image, directory / IMAGE)
            return store.add(directory, new_template(NAME, shape, kernel, user="user"), replace=True)


def _cached_image(settings: Settings, packages: Sequence[str], disk: int, progress: Progress) -> Path:
    """The image in the cache, made if it is not there. Its release is that of the host if that is a Debian we know,
    else the oldest we know."""
    for name in packages:
        if re.fullmatch(r"[a-z0-9][a-z0-9+.-]*[a-z0-9+.]", name) is None:
            raise SetupError(f"{name!r} is not the name of a Debian package")
    host = debian.read_host()
    release = host.release or debian.FALLBACK_RELEASE
    suites = (release, f"{release}-updates", f"{release}-security")
    archive = debian.Archive(debian.sources(settings, suites, host), progress)
    cache = debian.cache_directory() / "base"
    with durable.lock(archive.lock, lambda: progress("waiting for another process to fetch packages")):
        archive.update()
        versions = archive.closure([*packages, "?essential", "?priority(required)"])
        sources = debootstrap.guest_sources(settings, release)
        recipe = [str(_FORMAT), release, str(disk), *versions, *debootstrap.EXCLUDED, debootstrap.CUSTOMIZE, sources]
        key = hashlib.sha256("\n".join(recipe).encode()).hexdigest()[:16]
        found = find(cache, key)
        if found is not None:
            progress("taking the disk image from the cache")
            return found
        progress(f"building a Debian {release} with {len(versions)} packages")
        with durable.staging(cache) as staging:
            staging.chmod(0o755)
            tar = debootstrap.bootstrap(settings, archive, release, packages, staging, progress)
            work = staging / "work"
            work.mkdir(mode=0o700)
            rootfs.build(staging / IMAGE, tar, disk, progress, workspace=work, user=True)
            return keep(cache, key, staging / IMAGE)


def find(cache: Path, key: str) -> Path | None:
    """The image with this key, if it still has the digest in its name; one that has not is removed."""
    for path in cache.glob(f"{key}-*.ext4"):
        if durable.sparse_sha256(path) == path.stem.partition("-")[2]:
            os.utime(path)
            return path
        path.unlink(missing_ok=True)
    return None


def keep(cache: Path, key: str, image: Path) -> Path:
    """Move ``image`` into the cache, and forget those that were not used for longest."""
    durable.sync(image)
    final = cache / f"{key}-{durable.sparse_sha256(image)}.ext4"
    image.replace(final)
    durable.sync(cache)
    for path in sorted(cache.glob("*.ext4"), key=lambda path: path.stat().st_mtime, reverse=True)[_KEEP:]:
        path.unlink(missing_ok=True)
    return final


def _share(image: Path, copy: Path) -> None:
    try:
        copy.hardlink_to(image)
    except OSError:
        # Another file system, or one without links.
        argv: list[str | Path] = [system_program("cp", "coreutils"), "--sparse=always", "--reflink=auto", image, copy]
        command.run(argv, "copy the disk image out of the cache", timeout=600)
