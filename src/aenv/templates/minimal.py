"""The template ``minimal``: BusyBox and nothing else, two megabytes. For tests, and to measure a machine alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from aenv.config import Settings
from aenv.errors import NotFound
from aenv.model import KernelImage, MachineShape, Template
from aenv.templates import rootfs
from aenv.templates.imports import import_template
from aenv.templates.store import TemplateStore
from aenv.vmm import command, debian, durable
from aenv.vmm.durable import Progress

NAME = "minimal"
DISK = 64


def ensure_minimal(settings: Settings, kernel: KernelImage, progress: Progress) -> Template:
    """The template ``minimal``, built if it is not there; else as ``ensure_base``."""
    store = TemplateStore(settings)
    with durable.lock(store.directory / f".{NAME}"):
        try:
            existing = store.get(NAME)
        except NotFound:
            with durable.staging(store.directory) as staging:
                tree = busybox_tree(settings, staging, progress)
                shape = MachineShape(settings.machine.vcpus, settings.machine.memory, DISK)
                return import_template(settings, tree, NAME, shape, kernel, progress)
        if (existing.kernel, existing.kernel_digest) == (kernel.version, kernel.digest):
            return existing
        return store.update(msgspec.structs.replace(existing, kernel=kernel.version, kernel_digest=kernel.digest))


def busybox_tree(settings: Settings, directory: Path, progress: Progress) -> Path:
    """A root file system below ``directory`` with a static BusyBox under all of its names."""
    rootfs.require_root()
    release = debian.read_host().release or debian.FALLBACK_RELEASE
    archive = debian.Archive(debian.sources(settings, (release, f"{release}-security")), progress)
    with durable.lock(archive.lock):
        archive.update()
        deb = archive.download("busybox-static", archive.candidate("busybox-static")["version"])
    package = directory / "package"
    package.mkdir()
    debian.unpack(deb, package)
    tree = directory / NAME
    binaries = tree / "bin"
    binaries.mkdir(parents=True)
    busybox = next(path for path in (package / "bin/busybox", package / "usr/bin/busybox") if path.is_file())
    shutil.copy(busybox, binaries / "busybox")
    for name in command.run([busybox, "--list"], "list the programs of BusyBox", timeout=10).decode().split():
        if name != "busybox":
            (binaries / name).symlink_to("busybox")
    # Agents and SDKs start commands with `bash -l -c`; a plain shell takes these options too.
    bash = binaries / "bash"
    bash.write_text('#!/bin/sh\nexec /bin/sh "$@"\n')
    bash.chmod(0o755)
    for name in ("etc", "root", "home", "tmp", "var", "usr"):
        (tree / name).mkdir()
    (tree / "tmp").chmod(0o1777)
    (tree / "usr" / "bin").symlink_to("../bin")
    return tree
