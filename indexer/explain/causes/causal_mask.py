"""A row sees keys that it must not, or misses its own."""

from __future__ import annotations

from indexer.explain.evidence import Evidence, Ints
from indexer.explain.hypothesis import Hypothesis
from indexer.explain.prediction import by_steps
from indexer.explain.replica import Steps
from kernel.contract import BLOCK_TOKENS

FAMILY = "causal mask"


def hypotheses(_evidence: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    return [
        Hypothesis(
            "no causal mask in the row's own block",
            FAMILY,
            "Keys after the query's position, up to the request's end, count in the block that holds it.",
            by_steps(lambda e: Steps(last_key=_own_block_end(e).clip(max=e.seq_len - 1))),
        ),
        Hypothesis(
            "no causal mask, past the request's end too",
            FAMILY,
            "The whole page that holds the query counts, with whatever lies after the request's last key.",
            by_steps(lambda e: Steps(last_key=_own_block_end(e))),
        ),
        Hypothesis(
            "no causal mask at all",
            FAMILY,
            "Every query sees all keys of its request, so blocks of its future are scored and picked.",
            by_steps(lambda e: Steps(position=e.seq_len - 1)),
        ),
        Hypothesis(
            "the query's own key is masked",
            FAMILY,
            "The mask compares with < where it must with <=.",
            by_steps(lambda e: Steps(last_key=e.position - 1)),
        ),
        Hypothesis(
            "one key too many is visible",
            FAMILY,
            "The mask lets the key right after the query's position in.",
            by_steps(lambda e: Steps(last_key=e.position + 1)),
        ),
    ]


def _own_block_end(evidence: Evidence) -> Ints:
    return evidence.position // BLOCK_TOKENS * BLOCK_TOKENS + BLOCK_TOKENS - 1
