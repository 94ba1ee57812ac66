"""The official SDKs, unmodified, each with an interpreter of its own; ``tools/test.sh`` prepares them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.node import TestNode

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "tests/sdk"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", ["2.63.0", "2.45.1"])
def test_python_sdk(node: TestNode, version: str) -> None:
    python = ROOT / f".cache/sdk-{version}/bin/python"
    run(node, [str(python), "-m", "pytest", "-q"], SUITE / "python")


@pytest.mark.timeout(600)
def test_javascript_sdk(node: TestNode) -> None:
    program = ROOT / ".cache/sdk-js/node"
    run(node, [str(program), "--test"], SUITE / "js")


def run(node: TestNode, command: list[str], directory: Path) -> None:
    result = subprocess.run(
        command, cwd=directory, env=dict(node.sdk_environment), capture_output=True, text=True, check=False
    )
    print(result.stdout)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}\n--- server ---\n{node.log_tail()}"
