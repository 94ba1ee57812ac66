"""Build hook: compile the Rust programs and put them into the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROGRAMS = ("aenv-edge", "aenv-envd")
TARGET = "x86_64-unknown-linux-gnu"


def build_programs(root: Path) -> list[Path]:
    """Compile every program in release mode and copy it to ``src/aenv/_bin``.

    Returns the copied files. Copies are replaced atomically, since a running program cannot be
    written to, and left alone when unchanged.
    """
    cargo = shutil.which("cargo")
    if cargo is None:
        raise SystemExit("cargo is missing: install Rust (`make setup` does it), then build again")
    if subprocess.run([cargo, "build", "--release", "--locked"], cwd=root, check=False).returncode != 0:
        raise SystemExit("the Rust programs did not compile; cargo says why above")
    target = Path(os.environ.get("CARGO_TARGET_DIR", root / "target")) / TARGET / "release"
    destination = root / "src" / "aenv" / "_bin"
    destination.mkdir(parents=True, exist_ok=True)
    copies = []
    for name in PROGRAMS:
        built, copy = target / name, destination / name
        if not (copy.exists() and copy.read_bytes() == built.read_bytes()):
            fresh = copy.with_suffix(".new")
            shutil.copy2(built, fresh)
            fresh.replace(copy)
        copies.append(copy)
    return copies


class ProgramsHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":  # a checkout builds them by itself, whenever they change
            build_programs(Path(self.root))
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"


if __name__ == "__main__":
    for program in build_programs(Path(__file__).parent):
        print(program)
