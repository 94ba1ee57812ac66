"""An open network on a machine of its own, which every test has to leave as it was."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from aenv.config import Settings
from aenv.network import Network, Slot, namespace
from tests.integration.network.lab import Lab, reap, traces


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    lab = Lab()
    yield lab
    lab.close()


@pytest.fixture
def settings(lab: Lab, tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", runtime=tmp_path / "run")


@pytest.fixture(autouse=True)
def unmounted(tmp_path: Path) -> Iterator[None]:
    """Nothing stays mounted after a test that failed."""
    yield
    for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
        if line.split()[4].startswith(str(tmp_path)):
            namespace.umount(Path(line.split()[4]))


@pytest.fixture
async def network(settings: Settings) -> AsyncIterator[Network]:
    """An open network. The test destroys its slots itself, and then the machine is as it was."""
    settings.run.mkdir()
    before = traces(settings.run)
    network = Network(settings)
    await network.open()
    yield network
    await network.close()
    leftover = await reap(settings)
    assert (leftover, traces(settings.run)) == ([], before)


@pytest.fixture
async def slot(network: Network) -> AsyncIterator[Slot]:
    slot = await network.create()
    yield slot
    await network.destroy(slot)
