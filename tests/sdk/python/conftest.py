"""Sandboxes for the smoke tests: one, shared, since every test cleans up after itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from e2b import AsyncSandbox, Sandbox


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    created = Sandbox.create(timeout=240, metadata={"suite": "sync"}, envs={"FROM_CREATE": "yes"})
    yield created
    created.kill()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def async_sandbox() -> AsyncIterator[AsyncSandbox]:
    created = await AsyncSandbox.create(timeout=240, metadata={"suite": "async"}, envs={"FROM_CREATE": "yes"})
    yield created
    await created.kill()
