"""Runs a test of the contract on every backend that this machine can run, and says why for the others."""

from __future__ import annotations

import os

import pytest

from kernel.backends import registry
from kernel.backends.base import Backend
from tests.contract import simulated

LEFT_OUT: dict[str, dict[str, str]] = {
    "backend": {},
    "product_backend": {
        simulated.NAME: simulated.NEVER,
        "reference": "it would be compared with itself, slowly",
    },
}
"""Backends that a fixture leaves out, and why."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise ``backend`` and ``product_backend`` over all backends.

    NVFP4_INDEXER_TEST_BACKENDS (names, comma-separated) narrows them.
    """
    wanted = os.environ.get("NVFP4_INDEXER_TEST_BACKENDS")
    names = wanted.split(",") if wanted else list(registry.BACKEND_NAMES)
    for fixture, left_out in LEFT_OUT.items():
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, [_parameter(name, left_out) for name in names], indirect=True)


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is nightly on the simulated device; see :mod:`tests.contract.simulated`."""
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        test, parameters = item.originalname, item.callspec
        if parameters.params.get("backend") == simulated.NAME and simulated.is_nightly(test, parameters.id):
            item.add_marker(pytest.mark.nightly)
            item.add_marker(pytest.mark.timeout(3600))


def _parameter(name: str, left_out: dict[str, str]) -> object:
    status = registry.status(name)
    if status.usable and name not in left_out:
        return pytest.param(name)
    reason = left_out[name] if status.usable else status.reason
    return pytest.param(name, marks=pytest.mark.skip(reason=f"backend {name}: {reason}"))


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> Backend:
    """A backend on its default device."""
    return registry.create(request.param)


@pytest.fixture(scope="session")
def product_backend(request: pytest.FixtureRequest) -> Backend:
    """A backend on a real device that is not the oracle."""
    return registry.create(request.param)
