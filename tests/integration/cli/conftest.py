from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command_line import CommandLine
from tests.contract import KEY, Contract
from tests.one_guest import running_agent, running_edge

ADDRESS = "127.50.0.2"


@pytest.fixture(scope="session")
def agent() -> Iterator[str]:
    with running_agent(ADDRESS):
        yield ADDRESS


@pytest.fixture
def contract(agent: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Contract]:
    contract = Contract()
    with running_edge(contract, tmp_path_factory.mktemp("edge"), agent):
        contract.add("i1")
        yield contract


@pytest.fixture
def aenv(contract: Contract, tmp_path: Path) -> CommandLine:
    """The command line of a user of that server, with the sandbox ``i1``."""
    return CommandLine(tmp_path, AENV_URL=contract.url, AENV_API_KEY=KEY)
