"""Which server to talk to, and with which key.

The first source that has a value wins, for each of the two:

========================================  ==========================================================
URL                                       key
========================================  ==========================================================
argument                                  argument
``AENV_URL``, ``E2B_API_URL``             ``AENV_API_KEY``, ``E2B_API_KEY``
credentials file (``aenv auth login``)    credentials file, if it was stored for this very URL
this machine, at the node's ``listen``    ``<home>/admin.key`` of the node, if the URL is this machine
========================================  ==========================================================

A stored key is only ever sent to the server it was stored for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from aenv import config
from aenv.errors import AenvError, BadRequest, SetupError

_KEY = re.compile(r"[!-~]{1,512}")
_MAX_FILE = 64 << 10


class Credentials(msgspec.Struct, frozen=True):
    """``url`` has no trailing slash. The sources say in words where each value is from; ``key`` None: none found."""

    url: str
    url_source: str
    key: str | None
    key_source: str

    def __repr__(self) -> str:
        return f"Credentials(url={self.url!r}, key from {self.key_source})"


class Stored(msgspec.Struct, frozen=True):
    """Content of the credentials file."""

    url: str
    api_key: str

    def __repr__(self) -> str:
        return f"Stored(url={self.url!r})"


def credentials_file(environ: Mapping[str, str] | None = None) -> Path:
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_CONFIG_HOME", "")
    root = Path(base) if base.startswith("/") else Path(environ.get("HOME") or Path.home()) / ".config"
    return root / "aenv" / "credentials"


def resolve(url: str | None = None, key: str | None = None, environ: Mapping[str, str] | None = None) -> Credentials:
    """Find URL and key as the table above says. Raises BadRequest or SetupError that names the source at fault."""
    environ = os.environ if environ is None else environ
    stored = read_stored(environ)
    chosen, url_source = _first(url, environ, ("AENV_URL", "E2B_API_URL"))
    if chosen is None and stored is not None:
        chosen, url_source = stored.url, str(credentials_file(environ))
    if chosen is None:
        chosen, url_source = local_url(environ), "this machine"
    chosen = check_url(chosen, url_source)

    found, key_source = _first(key, environ, ("AENV_API_KEY", "E2B_API_KEY"))
    if found is None and stored is not None and stored.url == chosen:
        found, key_source = stored.api_key, str(credentials_file(environ))
    if found is None and is_local(chosen):
        found, key_source = _admin_key(environ)
    if found is not None:
        found = check_key(found, key_source)
    return Credentials(chosen, url_source, found, key_source)


def check_url(url: str, source: str) -> str:
    """``url`` without trailing slashes; BadRequest if it is not the address of a server."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise BadRequest(f"{url!r} (from {source}) is not a URL", remedy="it looks like http://127.0.0.1:8000")
    if parts.username is not None or parts.query or parts.fragment:
        raise BadRequest(f"the URL from {source} has more than scheme, host, port and path")
    return url.rstrip("/")


def check_key(key: str, source: str) -> str:
    """``key`` without surrounding white space; BadRequest if it cannot be sent in a header."""
    key = key.strip()
    if not _KEY.fullmatch(key):
        raise BadRequest(f"the API key from {source} is not a key: empty, too long, or not plain ASCII")
    return key


def is_local(url: str) -> bool:
    """Whether ``url`` can only be this machine."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def local_url(environ: Mapping[str, str]) -> str:
    """Where a node with this machine's settings listens, as seen from this machine."""
    host, port = local_address(_settings(environ).listen)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def local_address(listen: str) -> tuple[str, int]:
    """Host and port under which what listens at ``listen`` is reached from the same machine."""
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise SetupError(f"the setting listen is {listen!r}, not an address and a port", remedy="e.g. 127.0.0.1:8000")
    return {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), int(port)


def read_stored(environ: Mapping[str, str] | None = None) -> Stored | None:
    """The credentials file; None if there is none, SetupError if it cannot be used."""
    file = credentials_file(environ)
    try:
        with file.open("rb") as stream:
            content = stream.read(_MAX_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SetupError(f"cannot read {file}: {error.strerror}") from error
    try:
        return msgspec.json.decode(content, type=Stored)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SetupError(f"{file} is damaged: {error}", remedy="`aenv auth login` writes it anew") from error


def write_stored(stored: Stored, environ: Mapping[str, str] | None = None) -> Path:
    """Replace the credentials file as a whole; nobody but its owner can read it at any instant."""
    file = credentials_file(environ)
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh.unlink(missing_ok=True)
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(msgspec.json.format(msgspec.json.encode(stored)) + b"\n")
        fresh.replace(file)
    except OSError as error:
        raise SetupError(f"cannot write {file}: {error.strerror}") from error
    return file


def delete_stored(environ: Mapping[str, str] | None = None) -> bool:
    """Delete the credentials file; False if there was none."""
    file = credentials_file(environ)
    try:
        file.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise SetupError(f"cannot delete {file}: {error.strerror}") from error
    return True


def _first(argument: str | None, environ: Mapping[str, str], names: tuple[str, ...]) -> tuple[str | None, str]:
    if argument is not None:
        return argument, "the command line"
    for name in names:
        if environ.get(name):
            return environ[name], name
    return None, "nowhere"


def _settings(environ: Mapping[str, str]) -> config.Settings:
    """The node's settings as far as this user may read them. A client must work without."""
    try:
        return config.load(environ=environ)
    except (AenvError, OSError):
        return config.Settings(home=Path(environ.get("AENV_HOME") or config.DEFAULT_HOME))


def _admin_key(environ: Mapping[str, str]) -> tuple[str | None, str]:
    file = _settings(environ).home / "admin.key"
    try:
        with file.open() as stream:
            return stream.read(1024), str(file)
    except (OSError, UnicodeDecodeError):
        return None, "nowhere"
