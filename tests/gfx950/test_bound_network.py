"""The bound's networks: exact, and the chosen rows tell of every exchange that could be missing."""

from __future__ import annotations

import numpy as np
import pytest

from kernel.backends.flydsl.geometry import CLASSES
from tests.gfx950.bound_network import Network, exact, random_keys, telling_keys


@pytest.mark.parametrize("best", CLASSES)
def test_a_network_finds_the_bound_exactly(best: int) -> None:
    """Of 0 and 1, which suffices for a network, and of random keys."""
    random = np.random.default_rng(best)
    for high in (best - 1, best, min(best + 1, 64)):
        keys = random_keys(random, best, high, 1000)
        np.testing.assert_array_equal(Network(best).bound(keys), exact(keys, best))
    keys = np.sort(random.integers(-200, 200, (2000, 64, 2)))[..., ::-1]
    np.testing.assert_array_equal(Network(best).bound(keys), exact(keys, best))


@pytest.mark.parametrize("best", CLASSES)
def test_a_missing_exchange_is_too_low_and_told(best: int) -> None:
    """Never too high, which would lose a column; each of them is told by one of the chosen keys."""
    random = np.random.default_rng(best)
    keys = np.sort(random.integers(-200, 200, (500, 64, 2)))[..., ::-1]
    whole = Network(best)
    right = whole.bound(keys)
    chosen = np.stack([np.stack([counts > 0, counts > 1], -1) for counts in telling_keys(best)]).astype(
        np.int64
    )
    assert (Network(best).bound(chosen) == 1).all()
    for missing in range(whole.exchanges):
        without = Network(best, missing)
        assert (without.bound(keys) <= right).all()
        assert (Network(best, missing).bound(chosen) < 1).any(), f"exchange {missing} of {whole.exchanges}"
