"""Which backends this suite ran on, and why it could not run on the others."""

from __future__ import annotations

import pytest

from kernel.backends import registry


@pytest.mark.parametrize("name", registry.BACKEND_NAMES)
def test_backend_runs_the_contract(name: str) -> None:
    status = registry.status(name)
    if not status.usable:
        pytest.skip(f"no test of the contract ran on backend {name}: {status.reason}")
    assert registry.create(name).name == name
