"""Settings of a node: a TOML file, then ``AENV_*`` environment variables, then command-line flags.

Every setting is one field below; ``docs/configuration.md`` is the reference. The environment name of a
field is ``AENV_`` + its path in capitals (``[network] subnet`` is ``AENV_NETWORK_SUBNET``).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from aenv.errors import SetupError

DEFAULT_HOME = Path("/var/lib/aenv")

Positive = Annotated[int, msgspec.Meta(ge=1)]


class NetworkSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``subnet``: IPv4 range of the links between namespaces and host, two addresses a sandbox.
    ``dns``: resolvers written into the guest."""

    subnet: str = "10.11.0.0/16"
    dns: tuple[str, ...] = ("1.1.1.1", "8.8.8.8")


class SandboxSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits and defaults of sandboxes. Times in seconds. ``concurrent_starts``: boots at the same time; more wait.
    ``on_stop``: what a stopping server does with running sandboxes; those kept are taken over by the next start."""

    default_timeout: Positive = 300
    max_timeout: Positive = 24 * 3600
    boot_timeout: Positive = 60
    max_running: Positive = 256
    on_stop: Literal["keep", "kill"] = "keep"
    concurrent_starts: Positive = msgspec.field(default_factory=lambda: 2 * (os.cpu_count() or 1))


class MachineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape of the machines of a template, unless it says otherwise. Sizes in MiB."""

    vcpus: Positive = 1
    memory: Positive = 512
    disk: Positive = 4096


class VmmSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``accelerator``: ``auto`` probes; ``kvm`` or ``tcg`` force. ``user``: the unprivileged accounts VMMs run as: a
    number is the first of 1024, one for each (none needs an entry in /etc/passwd), a name is one that all share."""

    accelerator: Literal["auto", "kvm", "tcg"] = "auto"
    user: str = "61380"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``listen``: address of the only port. ``domain``: wildcard domain under which sandboxes are reachable as
    ``<port>-<id>.<domain>``, returned to SDKs. ``debian_mirror``: where the guest kernel comes from when the
    machine's own package sources are not Debian's."""

    home: Path = DEFAULT_HOME
    runtime: Path | None = None
    listen: str = "127.0.0.1:8000"
    domain: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    debian_mirror: str = "http://deb.debian.org/debian"
    network: NetworkSettings = NetworkSettings()
    sandbox: SandboxSettings = SandboxSettings()
    machine: MachineSettings = MachineSettings()
    vmm: VmmSettings = VmmSettings()

    @property
    def tag(self) -> str:
        """Eight hex digits that tell this home from others on the same machine."""
        return hashlib.sha256(os.fsencode(self.home)).hexdigest()[:8]

    @property
    def run(self) -> Path:
        """Directory of sockets and namespaces; gone after a reboot, short enough for socket paths."""
        if self.runtime is not None:
            return self.runtime
        return Path("/run/aenv") if self.home == DEFAULT_HOME else Path(f"/run/aenv-{self.tag}")


def load(
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Settings:
    """Read the settings. ``file`` defaults to ``AENV_CONFIG``, then ``<home>/config.toml`` if that exists.

    Raises SetupError that names the source and the field at fault.
    """
    environ = os.environ if environ is None else environ
    values = {name: value for name, value in (overrides or {}).items() if value is not None}
    home = Path(str(values.get("home") or environ.get("AENV_HOME") or DEFAULT_HOME)).absolute()
    chosen = file or (Path(environ["AENV_CONFIG"]) if environ.get("AENV_CONFIG") else None)
    if chosen is None and os.access(home / "config.toml", os.F_OK):
        chosen = home / "config.toml"
    merged: dict[str, Any] = {"home": str(home)}
    if chosen is not None:
        try:
            merged |= msgspec.toml.decode(chosen.read_bytes())
        except OSError as error:
            raise SetupError(f"cannot read the configuration {chosen}: {error.strerror}") from error
        except msgspec.DecodeError as error:
            raise SetupError(f"the configuration {chosen} is not TOML: {error}") from error
    _merge_environment(merged, environ)
    merged |= values
    merged["home"] = str(Path(str(merged["home"])).absolute())
    try:
        settings = msgspec.convert(merged, Settings, strict=False, dec_hook=_path)
        if settings.sandbox.default_timeout > settings.sandbox.max_timeout:
            raise msgspec.ValidationError("sandbox.default_timeout is larger than sandbox.max_timeout")
        return settings
    except msgspec.ValidationError as error:
        raise SetupError(f"a setting is wrong: {error}", remedy="docs/configuration.md lists every setting") from error


def _merge_environment(merged: dict[str, Any], environ: Mapping[str, str]) -> None:
    for field in msgspec.structs.fields(Settings):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            for inner in msgspec.structs.fields(field.type):
                name = f"AENV_{field.name}_{inner.name}".upper()
                if environ.get(name):
                    section = merged.setdefault(field.name, {})
                    if isinstance(section, dict):
                        section[inner.name] = _value(environ[name], inner.default)
        elif environ.get(f"AENV_{field.name}".upper()):
            merged[field.name] = environ[f"AENV_{field.name}".upper()]


def _path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise TypeError(f"no value of type {kind.__name__}")


def _value(text: str, default: object) -> object:
    return [part.strip() for part in text.split(",")] if isinstance(default, tuple) else text
