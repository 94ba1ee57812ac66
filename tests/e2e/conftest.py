from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node import TestNode


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestNode]:
    """A running node that the whole session shares. Tests leave it as they found it."""
    made = TestNode(tmp_path_factory.mktemp("node") / "home")
    made.start()
    yield made
    made.destroy()
