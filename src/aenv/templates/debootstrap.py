"""A Debian root file system, made by mmdebstrap from signed packages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aenv.config import Settings
from aenv.errors import OperationFailed, SetupError
from aenv.programs import system_program
from aenv.vmm import command, debian
from aenv.vmm.durable import Progress

# Left out of the image, and of whatever is installed in a sandbox later.
EXCLUDED = (
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/lintian/*",
)

# Runs on the host, with the new root as $1, after all packages are configured.
CUSTOMIZE = r"""
set -eu
# pip is the first thing an agent reaches for, and the sandbox is disposable.
rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED
# Names and identities are given at the start of a sandbox.
rm -f "$1"/etc/hostname "$1"/etc/resolv.conf "$1"/etc/machine-id "$1"/var/lib/dbus/machine-id
rm -f "$1"/var/log/*.log "$1"/var/log/apt/* "$1"/var/cache/debconf/*-old "$1"/var/lib/dpkg/*-old
rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*
echo 'LANG=C.UTF-8' > "$1"/etc/default/locale
"""


def bootstrap(
    settings: Settings,
    archive: debian.Archive,
    release: str,
    packages: Sequence[str],
    directory: Path,
    progress: Progress,
) -> Path:
    """Make a tar archive of ``release`` with ``packages`` in ``directory``, which apt's unprivileged user must be able
    to enter. SetupError if the mirror, a package or mmdebstrap is missing."""
    target = directory / "base.tar"
    hook = directory / "customize"
    lines = guest_sources(settings, release)
    hook.write_text(
        CUSTOMIZE
        + 'rm -f "$1"/etc/apt/sources.list "$1"/etc/apt/sources.list.d/*\n'
        + f"cat > \"$1\"/etc/apt/sources.list.d/debian.sources <<'END'\n{lines}END\n"
    )
    program = system_program("mmdebstrap", "mmdebstrap")
    argv: list[str | Path] = [program, "--mode=root", "--variant=minbase", "--format=tar", "--architectures=amd64"]
    argv += [f"--dpkgopt={line}" for line in EXCLUDED]
    argv += ['--aptopt=Acquire::Languages "none"', '--aptopt=APT::Install-Recommends "false"']
    argv += [f"--include={','.join(packages)}", f'--customize-hook=sh {hook} "$1"']
    argv += [release, target, *(source.line() for source in archive.sources)]

    def report(line: str) -> None:
        if line.startswith(("I: downloading", "I: extracting", "I: installing", "I: creating")):
            progress(line.removeprefix("I: "))

    # mmdebstrap does not look at the host's apt.conf.
    environ = debian.host_proxies() | {"TMPDIR": str(directory)}
    try:
        command.run(argv, "build the root file system", timeout=3600, environ=environ, on_line=report)
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
