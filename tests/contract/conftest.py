"""Runs a test of the contract on every backend that this machine can run, and says why for the others."""

from __future__ import annotations

import os

import pytest

from kernel.backends import registry
from kernel.backends.base import Backend

SIMULATED = ("flydsl-sim",)
"""Backends that execute every instruction of a kernel in software: too slow for tests of large calls."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise ``backend`` and ``native_backend`` over all backends.

    NVFP4_INDEXER_TEST_BACKENDS (names, comma-separated) narrows them.
    """
    wanted = os.environ.get("NVFP4_INDEXER_TEST_BACKENDS")
    names = wanted.split(",") if wanted else list(registry.BACKEND_NAMES)
    for fixture in ("backend", "native_backend"):
        if fixture in metafunc.fixturenames:
            parameters = [_parameter(name, native=fixture == "native_backend") for name in names]
            metafunc.parametrize(fixture, parameters, indirect=True)


def _parameter(name: str, native: bool) -> object:
    status = registry.status(name)
    reason = status.reason
    if status.usable and native and name in SIMULATED:
        reason = "a simulated device is too slow for this size"
    elif status.usable:
        return pytest.param(name)
    return pytest.param(name, marks=pytest.mark.skip(reason=f"backend {name}: {reason}"))


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> Backend:
    """A backend on its default device."""
    return registry.create(request.param)


@pytest.fixture(scope="session")
def native_backend(request: pytest.FixtureRequest) -> Backend:
    """A backend on a real device."""
    return registry.create(request.param)
