from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node import TestNode


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestNode]:
    """A running node that the whole session shares. Tests leave it as they found it."""
    made = TestNode(tmp_path_factory.mktemp("node") / "home")
    made.start()
    yield made
    made.destroy()


@pytest.fixture
def own(node: TestNode, tmp_path: Path) -> Iterator[TestNode]:
    """A node that a test may kill."""
    made = TestNode(share_images(node.home, tmp_path / "home"))
    made.start()
    yield made
    made.destroy()


def share_images(home: Path, to: Path) -> Path:
    """A new home with the kernels and templates of another one; their files are never written to again."""
    to.mkdir()
    for part in ("kernels", "templates"):
        subprocess.run(["cp", "-al", home / part, to / part], check=True)
    return to
