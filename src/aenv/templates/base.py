"""The template ``base``: a small Debian that feels complete to a person and to an agent.

Built by mmdebstrap from the mirror the machine itself uses. The result, a tar archive, stays in the cache of the
machine under a name made from the recipe, the exact versions of all packages, and its own digest; as long as none of
them changes, another home gets its template from there.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from aenv.config import Settings
from aenv.errors import NotFound, OperationFailed, SetupError
from aenv.model import KernelImage, MachineShape, Template
from aenv.programs import system_program
from aenv.templates import rootfs
from aenv.templates.imports import import_template
from aenv.templates.store import TemplateStore
from aenv.vmm import command, debian, durable
from aenv.vmm.durable import Progress

NAME = "base"

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

# Left out of the image, and of whatever is installed in a sandbox later.
_EXCLUDED = (
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/lintian/*",
)

# Runs on the host, with the new root as $1, after all packages are configured.
_CUSTOMIZE = r"""
set -eu
# pip is the first thing an agent reaches for, and the sandbox is disposable.
rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED
# Names and identities are given at the start of a sandbox.
rm -f "$1"/etc/hostname "$1"/etc/resolv.conf "$1"/etc/machine-id "$1"/var/lib/dbus/machine-id
rm -f "$1"/var/log/*.log "$1"/var/log/apt/* "$1"/var/cache/debconf/*-old "$1"/var/lib/dpkg/*-old
rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*
echo 'LANG=C.UTF-8' > "$1"/etc/default/locale
"""


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
        archive = debian_archive(settings, progress, packages)
        shape = MachineShape(settings.machine.vcpus, settings.machine.memory, settings.machine.disk)
        return import_template(settings, archive, NAME, shape, kernel, progress, replace=True)


def debian_archive(settings: Settings, progress: Progress, packages: Sequence[str] = ()) -> Path:
    """A tar archive, in the cache, of a Debian root file system with ``PACKAGES`` and ``packages``.

    Its release is that of the host if that is a Debian we know, else the oldest we know.
    """
    rootfs.require_root()
    for name in packages:
        if re.fullmatch(r"[a-z0-9][a-z0-9+.-]+", name) is None:
            raise SetupError(f"{name!r} is not the name of a Debian package")
    wanted = [*PACKAGES, *packages]
    host = debian.read_host()
    release = host.release or debian.FALLBACK_RELEASE
    suites = (release, f"{release}-updates", f"{release}-security")
    archive = debian.Archive(debian.sources(settings, suites, host), progress)
    program = system_program("mmdebstrap", "mmdebstrap")
    with durable.lock(archive.lock, lambda: progress("waiting for another process to fetch packages")):
        archive.update()
        versions = archive.closure([*wanted, "?essential", "?priority(required)"])
        recipe = "\n".join([release, *versions, *_EXCLUDED, _CUSTOMIZE, guest_sources(settings, release)])
        key = hashlib.sha256(recipe.encode()).hexdigest()[:16]
        directory = debian.cache_directory() / "base"
        cached = _cached(directory, key)
        if cached is not None:
            return cached
        progress(f"building a Debian {release} with {len(versions)} packages")
        with durable.staging(directory) as staging:
            made = _bootstrap(program, archive, release, wanted, settings, staging, progress)
            durable.sync(made)
            final = directory / f"{key}-{durable.sha256(made)}.tar"
            made.replace(final)
            durable.sync(directory)
        _forget(directory)
        return final


def _cached(directory: Path, key: str) -> Path | None:
    for path in directory.glob(f"{key}-*.tar"):
        if durable.sha256(path) == path.stem.partition("-")[2]:
            path.touch()
            return path
        path.unlink()
    return None


def _forget(directory: Path, keep: int = 3) -> None:
    """Remove all but the archives used last."""
    for path in sorted(directory.glob("*.tar"), key=lambda path: path.stat().st_mtime, reverse=True)[keep:]:
        path.unlink(missing_ok=True)


def _bootstrap(
    program: Path,
    archive: debian.Archive,
    release: str,
    packages: Sequence[str],
    settings: Settings,
    staging: Path,
    progress: Progress,
) -> Path:
    target = staging / "base.tar"
    staging.chmod(0o755)  # apt downloads as an unprivileged user
    hook = staging / "customize"
    lines = guest_sources(settings, release)
    hook.write_text(
        _CUSTOMIZE
        + 'rm -f "$1"/etc/apt/sources.list "$1"/etc/apt/sources.list.d/*\n'
        + f"cat > \"$1\"/etc/apt/sources.list.d/debian.sources <<'END'\n{lines}END\n"
    )
    argv: list[str | Path] = [program, "--mode=root", "--variant=minbase", "--format=tar", "--architectures=amd64"]
    argv += [f"--dpkgopt={line}" for line in _EXCLUDED]
    argv += ['--aptopt=Acquire::Languages "none"', '--aptopt=APT::Install-Recommends "false"']
    argv += [f"--include={','.join(packages)}", f'--customize-hook=sh {hook} "$1"']
    argv += [release, target, *(source.line() for source in archive.sources)]

    def report(line: str) -> None:
        if line.startswith(("I: downloading", "I: extracting", "I: installing", "I: creating")):
            progress(line.removeprefix("I: "))

    try:
        command.run(argv, "build the root file system", timeout=3600, environ={"TMPDIR": str(staging)}, on_line=report)
    except OperationFailed as error:
        raise SetupError(error.message, remedy="check the network and the package sources of this machine") from error
    return target


def guest_sources(settings: Settings, release: str) -> str:
    """What a sandbox installs packages from: the public mirror, since the host's may only be reachable by the host."""
    mirror = settings.debian_mirror.rstrip("/")
    keyring = "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
    text = f"Types: deb\nURIs: {mirror}\nSuites: {release} {release}-updates\nComponents: main\n{keyring}"
    if mirror.endswith("/debian"):
        text += f"\nTypes: deb\nURIs: {mirror}-security\nSuites: {release}-security\nComponents: main\n{keyring}"
    return text
