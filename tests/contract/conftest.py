"""Runs a test of the contract on every backend that this machine can run, and says why for the others."""

from __future__ import annotations

import os

import pytest

from kernel.backends import registry
from kernel.backends.base import Backend

_SIMULATED = {"flydsl-sim": "every instruction is executed in software, too slow for this size"}
_ORACLE = {"reference": "it would be compared with itself, slowly"}
LEFT_OUT: dict[str, dict[str, str]] = {
    "backend": {},
    "native_backend": _SIMULATED,
    "product_backend": _SIMULATED | _ORACLE,
}
"""Backends that a fixture leaves out, and why."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise ``backend``, ``native_backend`` and ``product_backend`` over all backends.

    NVFP4_INDEXER_TEST_BACKENDS (names, comma-separated) narrows them.
    """
    wanted = os.environ.get("NVFP4_INDEXER_TEST_BACKENDS")
    names = wanted.split(",") if wanted else list(registry.BACKEND_NAMES)
    for fixture, left_out in LEFT_OUT.items():
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, [_parameter(name, left_out) for name in names], indirect=True)


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
def native_backend(request: pytest.FixtureRequest) -> Backend:
    """A backend on a real device."""
    return registry.create(request.param)


@pytest.fixture(scope="session")
def product_backend(request: pytest.FixtureRequest) -> Backend:
    """A backend on a real device that is not the oracle."""
    return registry.create(request.param)
