"""Runs a test of the contract on every backend that can run here; `test_backends_here` names the others."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import pytest

from kernel.backends import registry
from kernel.backends.base import Backend
from tests.contract import simulated
from tests.gfx950.scorers import device_with
from tests.support.calls import RAGGED, Lengths

LEFT_OUT: dict[str, dict[str, str]] = {
    "backend": {},
    "product_backend": {
        simulated.NAME: simulated.NEVER,
        "reference": "it would be compared with itself, slowly",
    },
}
"""Backends that a fixture leaves out, and why."""
REPEATS_THE_ORACLE = (
    "test_of_every_prefix_equal_the_oracle",
    "test_prefills_across_many_blocks_equal_the_oracle",
    "test_of_a_prefill_of_thousands_of_rows",
)
"""Tests in which the reference, the slowest backend, is compared with itself: nightly there."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise ``backend`` and ``product_backend`` over the backends that can run here.

    NVFP4_INDEXER_TEST_BACKENDS (names, comma-separated) narrows them; each it names must be able to run.
    """
    wanted = os.environ.get("NVFP4_INDEXER_TEST_BACKENDS")
    names = [registry.resolve(name) for name in wanted.split(",")] if wanted else _usable()
    for fixture, left_out in LEFT_OUT.items():
        if fixture in metafunc.fixturenames:
            chosen: list[Any] = [name for name in names if name not in left_out]
            if not chosen:
                chosen = [pytest.param(name, marks=pytest.mark.skip(reason=left_out[name])) for name in names]
            metafunc.parametrize(fixture, chosen, indirect=True)


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is nightly on a slow backend; see :mod:`tests.contract.simulated`."""
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        test, parameters = item.originalname, item.callspec
        backend = parameters.params.get("backend")
        if backend == "reference" and test in REPEATS_THE_ORACLE:
            item.add_marker(pytest.mark.nightly)
        if backend == simulated.NAME and simulated.is_nightly(test, parameters.id):
            item.add_marker(pytest.mark.nightly)
            item.add_marker(pytest.mark.timeout(3600))


@functools.cache
def _usable() -> list[str]:
    return [status.name for status in registry.statuses() if status.usable]


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> Backend:
    """A backend on its default device."""
    return registry.create(request.param)


@pytest.fixture(scope="session")
def product_backend(request: pytest.FixtureRequest) -> Backend:
    """A backend on a real device that is not the oracle."""
    return registry.create(request.param)


@pytest.fixture(autouse=True)
def _smaller_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fewer compute units of the simulated device, whichever test runs it; nightly it has all of them."""
    with device_with(256 if _is_nightly(request) else simulated.COMPUTE_UNITS):
        yield


@pytest.fixture
def ragged(request: pytest.FixtureRequest, backend: Backend) -> Lengths:
    """Prefill and decode, requests without queries or keys; see :data:`tests.support.calls.RAGGED`."""
    return simulated.RAGGED if backend.name == simulated.NAME and not _is_nightly(request) else RAGGED


def _is_nightly(request: pytest.FixtureRequest) -> bool:
    return request.node.get_closest_marker("nightly") is not None
