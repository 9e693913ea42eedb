"""The run of one checked batch: score and select, each request by the operation made for its length."""

from __future__ import annotations

import torch

from indexer.out_of_memory import named_for_queries
from indexer.result import ScoreResult
from indexer.score_buffer import allocate_scores
from indexer.stages import StageTimes
from kernel.backends.base import Backend, Order
from kernel.batch import ScoreBatch

MAX_DECODE_QUERIES = 16
"""Queries of a request up to which reading its pages costs more than scoring them."""


def score_and_select(
    backend: Backend,
    batch: ScoreBatch,
    *,
    topk: int,
    order: Order,
    times: StageTimes,
    return_scores: bool,
    scores: torch.Tensor | None = None,
) -> ScoreResult:
    """Run a batch.

    Args:
        backend: runs it.
        batch: the call.
        topk: blocks to select for a row.
        order: order of the block ids.
        times: the call's stages so far; ``score`` and ``topk``, or ``select``, are added.
        return_scores: whether to give the scores back.
        scores: ``[H, total_q, S]`` float32 to write them to, checked; one is made when None.

    Raises:
        InvalidArgumentError: the scores, or what the backend needs beside them, do not fit in memory.
    """
    device = batch.pages.device
    if return_scores and scores is None:
        scores = allocate_scores((batch.num_heads, batch.total_q, batch.num_score_blocks), device)
    shape = (batch.num_heads, batch.total_q, topk)
    with named_for_queries(batch.q):
        num_blocks = batch.num_blocks_per_query().to(device)
        block_ids = torch.full(shape, -1, dtype=torch.int32, device=device)
        if scores is None:
            with times.stage("select"):
                backend.select(batch, block_ids, order)
        else:
            with times.stage("score"):
                score_requests(backend, batch, scores)
            with times.stage("topk"):
                backend.topk(scores, num_blocks, block_ids, order)
    return ScoreResult(
        block_ids=block_ids,
        scores=scores,
        num_blocks=num_blocks,
        backend=backend.name,
        precision=backend.precision,
        timings=times,
    )


def score_requests(backend: Backend, batch: ScoreBatch, scores: torch.Tensor) -> None:
    """Score a batch into ``[H, total_q, S]`` float32, each request by the operation made for its length."""
    decode = [request for request in batch.requests if 0 < request.query_len <= MAX_DECODE_QUERIES]
    prefill = [request for request in batch.requests if request.query_len > MAX_DECODE_QUERIES]
    if decode:
        backend.score_decode(batch.subset(decode), scores)
    if prefill:
        backend.score_prefill(batch.subset(prefill), scores)
