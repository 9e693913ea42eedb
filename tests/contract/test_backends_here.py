"""Which backends this suite ran on, and why it could not run on the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernel.backends import registry
from tests.contract import simulated


@pytest.mark.parametrize("name", registry.BACKEND_NAMES)
def test_backend_runs_the_contract(name: str) -> None:
    status = registry.status(name)
    if not status.usable:
        pytest.skip(f"no test of the contract ran on backend {name}: {status.reason}")
    assert registry.create(name).name == name


# The choice of tests for the simulated device follows the tests.

TESTS = "\n".join(path.read_text() for path in sorted(Path(__file__).parent.glob("test_*.py")))


@pytest.mark.parametrize("test", simulated.NIGHTLY)
def test_it_names_tests_that_exist(test: str) -> None:
    assert re.search(rf"^def {test}\(backend: Backend", TESTS, re.MULTILINE) or re.search(
        rf"^def {test}\(\n    backend: Backend", TESTS, re.MULTILINE
    )


def test_ids_are_matched_whole_wherever_the_backend_stands() -> None:
    assert simulated.is_nightly("test_rows_of_requests_left_out_stay_untouched", "flydsl-sim-kept1")
    assert not simulated.is_nightly("test_rows_of_requests_left_out_stay_untouched", "flydsl-sim-kept2")
    assert simulated.is_nightly("test_of_every_prefix_equal_the_oracle", "4-from 3-flydsl-sim")
    assert not simulated.is_nightly("test_of_every_prefix_equal_the_oracle", "flydsl-sim-1-from 0")
    assert not simulated.is_nightly("test_by_hand", "flydsl-sim-1")
