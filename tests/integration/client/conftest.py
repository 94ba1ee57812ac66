from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from aenv.client import Client, Credentials, Sandbox
from tests.contract import KEY, Contract
from tests.one_guest import running_agent, running_edge

ADDRESS = "127.50.0.1"


@pytest.fixture(scope="session")
def agent() -> Iterator[str]:
    with running_agent(ADDRESS):
        yield ADDRESS


@pytest.fixture
def contract(agent: str, tmp_path: Path) -> Iterator[Contract]:
    contract = Contract()
    with running_edge(contract, tmp_path, agent):
        yield contract


@pytest.fixture
async def sandbox(contract: Contract) -> AsyncIterator[Sandbox]:
    async with Client(Credentials(contract.url, "the test", KEY, "the test")) as client:
        yield await client.create()
