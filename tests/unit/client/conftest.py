from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from aenv.client import Client, Credentials
from tests.contract import KEY, Contract


@pytest.fixture
def contract() -> Iterator[Contract]:
    contract = Contract()
    with contract.serve():
        yield contract


@pytest.fixture
async def client(contract: Contract) -> AsyncIterator[Client]:
    async with Client(Credentials(contract.url, "the test", KEY, "the test")) as client:
        yield client
