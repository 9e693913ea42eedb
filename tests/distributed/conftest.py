"""Four ranks that live as long as the tests: those of smaller worlds are the first of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from indexer import IndexerConfig, IndexScorer
from tests.support import process_group
from tests.support.process_group import RankPool

DIVISIONS = ((1, 1), (2, 1), (3, 1), (4, 1), (4, 2))
"""(ranks, head groups)."""
CONFIG = IndexerConfig(4, 256, topk_blocks=4, local_blocks=0, backend="cpu")


class Worlds:
    """For every division a scorer on its ranks, and the one scorer that all are compared with.

    Args:
        pool: of four ranks.
        config: of the scorers, ``num_pages`` that of each rank.
        divisions: (ranks, head groups) of each.
    """

    def __init__(
        self, pool: RankPool, config: IndexerConfig, divisions: tuple[tuple[int, int], ...] = DIVISIONS
    ) -> None:
        self.pool = pool
        self.single = IndexScorer(config)
        self.names = {division: f"{division} {config}" for division in divisions}
        for (ranks, groups), name in self.names.items():
            pool.run(process_group.make, name, config, ranks, groups, ranks=range(ranks))

    def check(self, script: list[process_group.Step]) -> None:
        """Play a script everywhere; every rank must give what the single scorer gives."""
        expected = process_group.played(self.single, script)
        for (ranks, groups), name in self.names.items():
            outcomes = self.pool.run(process_group.play, name, script, ranks=range(ranks))
            for rank, outcome in enumerate(outcomes):
                who = f"rank {rank} of {ranks}, {groups} head groups"
                process_group.assert_same_outcomes(outcome, expected, who)


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four ranks."""
    with RankPool(4) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def worlds(pool: RankPool) -> Worlds:
    """Scorers of four heads on every division."""
    return Worlds(pool, CONFIG)
