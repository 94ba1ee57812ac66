from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aenv.model import KernelImage
from aenv.vmm.interface import Driver
from tests.conformance.machines import DRIVERS, Lab, build_guest, open_driver


@pytest.fixture(scope="session")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> KernelImage:
    return build_guest(tmp_path_factory.mktemp("guest"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("probe")


@pytest.fixture(scope="session", params=DRIVERS)
async def driver(request: pytest.FixtureRequest, cache: Path) -> Driver:
    return await open_driver(request.param, cache)


@pytest.fixture
async def lab(driver: Driver, kernel: KernelImage, tmp_path: Path) -> AsyncIterator[Lab]:
    lab = Lab(driver, kernel, tmp_path)
    yield lab
    await lab.close()
