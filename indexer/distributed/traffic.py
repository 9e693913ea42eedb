"""What a call sends to each of the other ranks, in bytes.

    append, add, fork, free     HEADER_BYTES
    score                       HEADER_BYTES + rows * candidate_bytes(k)
    score with return_scores    HEADER_BYTES + rows * share_bytes(S, context ranks)

``rows`` are query tokens times the index heads of the rank. A rank receives as much from each other rank.
"""

from __future__ import annotations

HEADER_BYTES = 256
"""A rank's statement about a call: fingerprints, outcome, free pages, and a text for people."""


def candidate_bytes(topk: int) -> int:
    """A row's candidates: ``topk`` of 8 bytes, score and block id."""
    return 8 * topk


def share_bytes(num_score_blocks: int, context_ranks: int) -> int:
    """A row's scores of the blocks of one rank: 4 bytes each, as many as the rank with the most holds."""
    return 4 * -(-num_score_blocks // context_ranks)
