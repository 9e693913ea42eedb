"""The position of a chunk's first query is wrong, and with it the mask and the local blocks of all."""

from __future__ import annotations

from collections.abc import Callable

from indexer.explain.evidence import Evidence, Ints
from indexer.explain.hypothesis import Hypothesis
from indexer.explain.prediction import by_steps
from indexer.explain.replica import Steps
from kernel.contract import BLOCK_TOKENS

FAMILY = "chunk-start offset"


def hypotheses(evidence: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    if not evidence.prefix.any():
        return []
    return [
        _starts(
            "the chunk's prefix is ignored",
            "The first query of a chunk is taken to stand at position 0.",
            lambda e: e.query,
        ),
        _starts(
            "the chunk's prefix is counted twice",
            "The prefix is added to positions that hold it already.",
            lambda e: (2 * e.prefix + e.query).clip(max=e.seq_len - 1),
        ),
        _starts(
            "the chunk's start is rounded down to a block",
            "A prefix that ends inside a block loses its last tokens.",
            lambda e: e.prefix // BLOCK_TOKENS * BLOCK_TOKENS + e.query,
        ),
        _starts(
            "the chunk's start is rounded up to a block",
            "A prefix that ends inside a block is taken for a whole number of blocks.",
            lambda e: (-(-e.prefix // BLOCK_TOKENS) * BLOCK_TOKENS + e.query).clip(max=e.seq_len - 1),
        ),
        _starts(
            "every query has the position of the chunk's first",
            "The query's own offset in the chunk is left out.",
            lambda e: e.prefix,
        ),
        _starts(
            "queries count from the batch's first",
            "The query's offset in the batch is added where its offset in the request must be.",
            lambda e: (e.prefix + e.token).clip(max=e.seq_len - 1),
        ),
    ]


def _starts(name: str, says: str, position: Callable[[Evidence], Ints]) -> Hypothesis:
    return Hypothesis(name, FAMILY, says, by_steps(lambda e: Steps(position=position(e))))
