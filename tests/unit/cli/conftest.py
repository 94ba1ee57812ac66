from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command_line import CommandLine
from tests.contract import KEY, Contract


@pytest.fixture
def contract() -> Iterator[Contract]:
    contract = Contract()
    with contract.serve():
        yield contract


@pytest.fixture
def aenv(contract: Contract, tmp_path: Path) -> CommandLine:
    """The command line of a user of that server."""
    return CommandLine(tmp_path, AENV_URL=contract.url, AENV_API_KEY=KEY)
