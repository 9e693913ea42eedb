"""A scoring call on sequences, checked."""

from __future__ import annotations

from dataclasses import dataclass

from kernel.backends.base import Order
from kernel.batch import Request


@dataclass(frozen=True)
class ScoreCall:
    """What a call on sequences asks for, its defaults filled in.

    Attributes:
        sequences: ids, one for each request.
        requests: the rows of each of them.
        topk: blocks to select for a row.
        order: order of the block ids.
        init_blocks: blocks forced at a row's start.
        local_blocks: blocks forced at a row's end.
        return_scores: whether to give the scores back.
    """

    sequences: tuple[int, ...]
    requests: tuple[Request, ...]
    topk: int
    order: Order
    init_blocks: int
    local_blocks: int
    return_scores: bool

    @property
    def num_score_blocks(self) -> int:
        """Blocks of the longest request: ``S`` of the scores."""
        return max((request.num_blocks for request in self.requests), default=0)
