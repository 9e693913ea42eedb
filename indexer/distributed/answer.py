"""The two answers a call may want: block ids alone, or all scores. Each has one message and one merge.

Both are made before the ranks agree about the call, with the memory they need, so that every rank hears of a
refusal; then the payload is sent to all, and every rank merges what all have sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from indexer.distributed.division import Division
from indexer.distributed.merge import best_candidates, merge_candidates, merge_scores, write_share
from indexer.distributed.share import HeldRequest, ShareScorer
from indexer.score_buffer import allocate_scores
from indexer.score_call import ScoreCall
from indexer.stages import StageTimes
from kernel.backends.base import Backend
from kernel.batch import causal_blocks


class Answer(Protocol):
    """A call whose share of this rank is scored."""

    payload: torch.Tensor
    """What this rank tells all others: of one shape and dtype on all ranks."""
    gathered: torch.Tensor
    """Room for every rank's payload, ``[ranks, *payload.shape]``."""

    def merged(self, times: StageTimes) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Block ids ``[H, total_q, k]`` int32 and scores ``[H, total_q, S]`` float32 from what was
        gathered."""
        ...


class BlockIds:
    """The best blocks of every row.

    Args:
        backend: selects.
        scorer: scores this rank's blocks.
        division: this rank's place.
        q: ``[total_q, heads, 128]`` float8_e4m3fn of its heads.
        requests: with what it holds.
        call: the call.
        times: the call's stages; ``select`` is added.
    """

    def __init__(
        self,
        backend: Backend,
        scorer: ShareScorer,
        division: Division,
        q: torch.Tensor,
        requests: Sequence[HeldRequest],
        call: ScoreCall,
        times: StageTimes,
    ) -> None:
        self._division = division
        self._order = call.order
        with times.stage("select"):
            pieces = scorer.pieces(q, requests, call)
            shape = (q.shape[1], q.shape[0], call.topk)
            self.payload = best_candidates(backend, pieces, shape, division.context_ranks)
        self.gathered = torch.empty((division.ranks, *shape), dtype=torch.int64, device=backend.device)

    def merged(self, times: StageTimes) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :class:`Answer`."""
        with times.stage("merge"):
            return merge_candidates(self.gathered, self._division.head_groups, self._order), None


class Scores:
    """The scores of every row, and the selection from them. Arguments as of :class:`BlockIds`."""

    def __init__(
        self,
        backend: Backend,
        scorer: ShareScorer,
        division: Division,
        q: torch.Tensor,
        requests: Sequence[HeldRequest],
        call: ScoreCall,
        times: StageTimes,
    ) -> None:
        self._backend = backend
        self._division = division
        self._requests = requests
        self._call = call
        device = backend.device
        total_q, heads = q.shape[:2]
        columns = -(-call.num_score_blocks // division.context_ranks)
        all_heads = heads * division.head_groups
        self._scores = allocate_scores((all_heads, total_q, call.num_score_blocks), device)
        self._block_ids = torch.full((all_heads, total_q, call.topk), -1, dtype=torch.int32, device=device)
        self.payload = allocate_scores((heads, total_q, columns), device)
        gathered = allocate_scores((division.ranks * heads, total_q, columns), device)
        self.gathered = gathered.view(division.ranks, heads, total_q, columns)
        with times.stage("score"):
            write_share(scorer.pieces(q, requests, call), self.payload)

    def merged(self, times: StageTimes) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :class:`Answer`."""
        groups, ranks = self._division.head_groups, self._division.context_ranks
        with times.stage("merge"):
            shares = self.gathered.view(groups, ranks, *self.payload.shape)
            merge_scores(shares, self._requests, self._scores)
        with times.stage("topk"):
            requests = [held.request for held in self._requests]
            num_blocks = causal_blocks(requests, self._scores.shape[1]).to(self._backend.device)
            self._backend.topk(self._scores, num_blocks, self._block_ids, self._call.order)
        return self._block_ids, self._scores
