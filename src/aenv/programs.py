"""Where the programs are that this package starts: its own Rust ones, and those of the system."""

from __future__ import annotations

import shutil
from pathlib import Path

from aenv.errors import SetupError

_OWN = Path(__file__).parent / "_bin"


def own_program(name: str) -> Path:
    """Path of one of our Rust programs (``aenv-edge``, ``aenv-envd``); SetupError if it was not built."""
    path = _OWN / name
    if not path.is_file():
        raise SetupError(f"{name} is not built", remedy="run `make setup` in a checkout, or reinstall the package")
    return path


def system_program(name: str, package: str) -> Path:
    """Path of a program of the distribution; SetupError names the ``package`` that brings it."""
    found = shutil.which(name, path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    if found is None:
        raise SetupError(f"the program {name} is missing", remedy=f"apt-get install {package}")
    return Path(found)
