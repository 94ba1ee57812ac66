"""Debian packages, for guests: fetched and checked by apt, but never installed and never through the host's apt state.

The files come from the host's own mirror when the host is a Debian, else from ``Settings.debian_mirror``. apt verifies
every index against the archive keyring and every package against the index; there is no way to switch that off.

What was fetched stays in a cache shared by all homes of the machine (``AENV_CACHE``, default ``/var/cache/aenv``). A
file from the cache is used only if it has the digest that the signed index names.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from aenv.config import Settings
from aenv.errors import OperationFailed, SetupError
from aenv.programs import system_program
from aenv.vmm import command, durable
from aenv.vmm.durable import Progress

DEFAULT_CACHE = Path("/var/cache/aenv")
FALLBACK_RELEASE = "bookworm"
# Releases whose three suites (release, -updates, -security) are known to exist on mirrors.
RELEASES = ("bookworm", "trixie")

# Indexes older than this are refreshed before use, younger ones are used without a look at the network.
_INDEX_AGE = 24 * 3600
_KEYRINGS = (
    "/usr/share/keyrings/debian-archive-keyring.gpg",
    "/usr/share/keyrings/debian-archive-keyring.pgp",
)
_STABLE_NAMES = ("stable", "oldstable", "testing", "unstable", "sid")


class Source(msgspec.Struct, frozen=True):
    """One line of sources.list. ``signed_by`` is the path of a keyring; None means apt's own trusted keys."""

    uri: str
    suite: str
    components: tuple[str, ...]
    signed_by: str | None = None

    def line(self) -> str:
        options = f"[signed-by={self.signed_by}] " if self.signed_by else ""
        return f"deb {options}{self.uri} {self.suite} {' '.join(self.components)}"


def parse_list(text: str) -> list[Source]:
    """Binary sources of a file in the one-line format of sources.list(5); lines that are none are skipped."""
    sources = []
    for raw in text.splitlines():
        line = raw.split("#", 1)[0].strip()
        match = re.fullmatch(r"deb\s+(?:\[([^\]]*)\]\s*)?(\S+)\s+(\S+)(?:\s+(.*))?", line)
        if match is None:
            continue
        options, uri, suite, components = match.groups()
        given = dict(part.split("=", 1) for part in (options or "").split() if "=" in part)
        sources.append(Source(uri, suite, tuple((components or "").split()), _keyring(given.get("signed-by"))))
    return sources


def parse_deb822(text: str) -> list[Source]:
    """Binary sources of a file in deb822 format, one for every pair of URI and suite; disabled ones are skipped."""
    sources = []
    for fields in parse_stanzas(text):
        if fields.get("enabled", "yes").lower() in ("no", "false", "0", "off", "disable"):
            continue
        if "deb" not in fields.get("types", "").split():
            continue
        components = tuple(fields.get("components", "").split())
        keyring = _keyring(fields.get("signed-by"))
        for uri in fields.get("uris", "").split():
            sources += [Source(uri, suite, components, keyring) for suite in fields.get("suites", "").split()]
    return sources


def parse_stanzas(text: str) -> list[dict[str, str]]:
    """Paragraphs of RFC 822 style fields, names in lower case; continuation lines keep their line breaks."""
    stanzas: list[dict[str, str]] = [{}]
    name = ""
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        if not line.strip():
            stanzas.append({})
            name = ""
        elif line[0] in " \t":
            if name:
                stanzas[-1][name] += "\n" + line.strip()
        elif ":" in line:
            name, value = line.split(":", 1)
            name = name.strip().lower()
            stanzas[-1][name] = value.strip()
    return [stanza for stanza in stanzas if stanza]


def _keyring(signed_by: str | None) -> str | None:
    """The option may also hold fingerprints or a whole key; only a file can be handed on."""
    first = (signed_by or "").split(",")[0].split()
    return first[0] if len(first) == 1 and first[0].startswith("/") else None


class Host(msgspec.Struct, frozen=True):
    """What the machine says of itself: its Debian release (None if it is no Debian we know) and where its packages
    come from. ``security`` is None when the machine has no such source."""

    release: str | None
    main: Source | None
    security: Source | None


def read_host(root: Path = Path("/")) -> Host:
    """Read ``/etc/os-release`` and the package sources below ``root``. Unreadable files count as absent."""
    release = dict(_os_release(_read(root / "etc/os-release")))
    if release.get("ID") != "debian":
        return Host(None, None, None)
    codename = release.get("VERSION_CODENAME", "")
    sources = parse_list(_read(root / "etc/apt/sources.list"))
    parts = root / "etc/apt/sources.list.d"
    for path in sorted(parts.iterdir()) if parts.is_dir() else []:
        if path.suffix == ".list":
            sources += parse_list(_read(path))
        elif path.suffix == ".sources":
            sources += parse_deb822(_read(path))
    sources = [source for source in sources if "main" in source.components and not source.uri.startswith("cdrom:")]
    # Vendors also call their suites after the release and their component "main"; what has a key of its own comes last.
    sources.sort(key=lambda source: source.signed_by is not None and "debian-archive" not in source.signed_by)
    names = (codename, *_STABLE_NAMES) if codename else _STABLE_NAMES
    main = next((source for source in sources if source.suite in names), None)
    security = next((s for s in sources if s.suite in [f"{name}-security" for name in names]), None)
    return Host(codename if codename in RELEASES else None, main, security)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _os_release(text: str) -> Iterable[tuple[str, str]]:
    for line in text.splitlines():
        name, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            words = shlex.split(value) if value.count('"') % 2 == 0 and value.count("'") % 2 == 0 else []
            yield name.strip(), words[0] if words else ""


def sources(settings: Settings, suites: Sequence[str], host: Host | None = None) -> list[Source]:
    """Sources of ``suites`` (``trixie``, ``trixie-security``, …) on the mirror that this machine uses. A security suite
    is left out when the machine is a Debian that has none."""
    host = host or read_host()
    keyring = next((path for path in _KEYRINGS if Path(path).is_file()), None)
    if host.main is not None:
        main, security = host.main, host.security
    else:
        if keyring is None:
            raise SetupError(
                "the keys that sign Debian packages are missing", remedy="apt-get install debian-archive-keyring"
            )
        mirror = settings.debian_mirror.rstrip("/")
        main = Source(mirror, "", ("main",), keyring)
        security = Source(mirror + "-security", "", ("main",), keyring) if mirror.endswith("/debian") else None
    found = []
    for suite in suites:
        origin = security if suite.endswith("-security") else main
        if origin is not None:
            found.append(Source(origin.uri, suite, ("main",), origin.signed_by or keyring))
    return found


def cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    """The cache of this machine, made if absent. SetupError if others could write to it."""
    environ = os.environ if environ is None else environ
    path = Path(environ.get("AENV_CACHE") or DEFAULT_CACHE).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o755)
        status = path.stat()
    except OSError as error:
        raise SetupError(
            f"cannot use the cache {path}: {error.strerror}", remedy="name another directory in AENV_CACHE"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise SetupError(f"no right to write to the cache {path}", remedy="name another directory in AENV_CACHE")
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SetupError(f"other users can write to the cache {path}", remedy=f"chown root {path} && chmod 755 {path}")
    return path


class Archive:
    """Some suites, with indexes and downloads of their own. One process at a time: hold ``lock`` around the calls."""

    def __init__(self, sources: Sequence[Source], progress: Progress, cache: Path | None = None) -> None:
        self.sources = tuple(sources)
        self._progress = progress
        self._text = "".join(source.line() + "\n" for source in sources)
        key = hashlib.sha256(self._text.encode()).hexdigest()[:16]
        self._cache = cache if cache is not None else cache_directory()
        self._directory = self._cache / "apt" / key

    @property
    def lock(self) -> Path:
        return self._directory / "lock"

    def update(self, *, force: bool = False) -> None:
        """Fetch the indexes, unless they are younger than a day and ``force`` is false."""
        stamp = self._directory / "fetched"
        if not force and stamp.is_file() and 0 <= time.time() - stamp.stat().st_mtime < _INDEX_AGE:
            return
        for part in ("state/lists/partial", "cache/archives/partial"):
            (self._directory / part).mkdir(parents=True, exist_ok=True)
        (self._directory / "status").write_bytes(b"")
        (self._directory / "sources.list").write_text(self._text)
        # Hooks of the host are about the host's packages.
        hooks = ("Update::Pre-Invoke", "Update::Post-Invoke", "Update::Post-Invoke-Success")
        (self._directory / "apt.conf").write_text("".join(f"#clear APT::{hook};\n" for hook in hooks))
        self._progress(f"fetching package indexes of {', '.join(source.suite for source in self.sources)}")
        self._apt("apt-get", ["update", "-q"], "fetch the package indexes", timeout=600)
        stamp.write_bytes(b"")

    def candidate(self, package: str) -> dict[str, str]:
        """Index entry of the newest version of ``package``; SetupError if there is none."""
        text = self._apt("apt-cache", ["show", "--no-all-versions", package], f"find the package {package}", timeout=60)
        stanzas = parse_stanzas(text.decode(errors="replace"))
        if not stanzas or not {"package", "version"} <= stanzas[0].keys():
            raise SetupError(f"the package {package} is not on the mirror")
        return stanzas[0]

    def closure(self, packages: Sequence[str]) -> list[str]:
        """``name version`` of everything that an installation of ``packages`` into an empty system would bring."""
        text = self._apt(
            "apt-get",
            ["install", "--simulate", "-q", "--no-install-recommends", *packages],
            "resolve the packages of the guest",
            timeout=120,
        )
        found = re.findall(r"^Inst (\S+) (?:\[\S+\] )?\((\S+) ", text.decode(errors="replace"), re.MULTILINE)
        return sorted(f"{name} {version}" for name, version in found)

    def download(self, package: str, version: str) -> Path:
        """The .deb of one version of one package, in the cache, with the digest of the signed index."""
        described = self._apt(
            "apt-get",
            ["download", "--print-uris", "-q", f"{package}={version}"],
            f"find {package} {version}",
            timeout=60,
        )
        match = re.search(rb"^'([^']*)' (\S+) (\d+) SHA256:([0-9a-f]{64})\s*$", described, re.MULTILINE)
        if match is None or b"/" in match.group(2):
            raise SetupError(f"the index of the mirror has no SHA-256 of {package} {version}")
        name, size, digest = match.group(2).decode(), int(match.group(3)), match.group(4).decode()
        packages = self._cache / "packages"
        final = packages / name
        if final.is_file() and durable.sha256(final) == digest:
            return final
        self._progress(f"downloading {package} {version} ({size / 1e6:.0f} MB)")
        with durable.staging(packages) as directory:
            directory.chmod(0o755)
            self._apt(
                "apt-get",
                ["download", "-q", f"{package}={version}"],
                f"download {package}",
                timeout=3600,
                cwd=directory,
            )
            fetched = directory / name
            if not fetched.is_file() or durable.sha256(fetched) != digest:
                raise OperationFailed(f"{package} {version} does not have the digest of the signed index")
            durable.sync(fetched)
            fetched.replace(final)
        return final

    def _apt(
        self, program: str, arguments: Sequence[str], what: str, *, timeout: float, cwd: Path | None = None
    ) -> bytes:
        options = {
            "Dir::State": self._directory / "state",
            "Dir::State::status": self._directory / "status",
            "Dir::Cache": self._directory / "cache",
            "Dir::Etc::SourceList": self._directory / "sources.list",
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::Etc::Preferences": "/dev/null",
            "Dir::Etc::PreferencesParts": "/dev/null",
            "APT::Default-Release": "",
            "APT::Architecture": "amd64",
            "APT::Architectures": "amd64",
            "APT::Update::Error-Mode": "any",
            "APT::Get::AllowUnauthenticated": "false",
            "Acquire::AllowInsecureRepositories": "false",
            "Acquire::AllowWeakRepositories": "false",
            "Acquire::AllowDowngradeToInsecureRepositories": "false",
            "Acquire::Languages": "none",
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled": "false",
            "Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled": "false",
            "Acquire::Retries": "3",
            "Acquire::http::Timeout": "30",
            "Acquire::https::Timeout": "30",
        }
        argv: list[str | Path] = [system_program(program, "apt"), "-c", self._directory / "apt.conf"]
        for name, value in options.items():
            argv += ["-o", f"{name}={value}"]
        try:
            return command.run([*argv, *arguments], what, timeout=timeout, cwd=cwd)
        except OperationFailed as error:
            mirrors = ", ".join(sorted({source.uri for source in self.sources}))
            raise SetupError(
                error.message, remedy=f"check the network and the mirror {mirrors} (setting debian_mirror)"
            ) from error


def host_proxies() -> dict[str, str]:
    """The proxies of the host's apt, as the environment variables that any apt understands."""
    argv: list[str | Path] = [system_program("apt-config", "apt"), "shell"]
    for scheme in ("http", "https"):
        argv += [f"{scheme}_proxy", f"Acquire::{scheme}::Proxy"]
    text = command.run(argv, "read the configuration of apt", timeout=30).decode(errors="replace")
    pairs = (word.partition("=") for word in shlex.split(text))
    return {name: value for name, _, value in pairs if value and value != "DIRECT"}


def unpack(package: Path, directory: Path) -> None:
    """Unpack the files of a .deb below ``directory``, without running anything of it."""
    program = system_program("dpkg-deb", "dpkg")
    command.run([program, "-x", package, directory], f"unpack {package.name}", timeout=600)
