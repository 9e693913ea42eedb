"""Run a backend on a call from the host and bring the result back, watching what it must not touch."""

from __future__ import annotations

import torch

from kernel.backends.base import Backend, Order
from tests.support.call import Call, pages_on
from tests.support.compare import assert_same_bits

UNTOUCHED = -777.25
"""What score buffers hold before a call: no score of any test."""
UNTOUCHED_ID = -777
DECODE_QUERIES = 16
"""Most queries of a request that ``score_decode`` takes."""


def scores_of(backend: Backend, call: Call, columns: int | None = None) -> torch.Tensor:
    """The scores ``[H, total_q, columns]`` on the host, from prefill; decode must give the same bits.

    Rows of few queries are scored again by ``score_decode``, which must leave the others untouched.
    """
    batch = call.batch(backend.device)
    shape = (call.num_heads, call.total_q, batch.num_score_blocks if columns is None else columns)
    scores = torch.full(shape, UNTOUCHED, device=backend.device)
    backend.score_prefill(batch, scores)
    scores = scores.cpu()

    few = [request for request in batch.requests if request.query_len <= DECODE_QUERIES]
    decoded = torch.full(shape, UNTOUCHED, device=backend.device)
    backend.score_decode(batch.subset(few), decoded)
    expected = torch.full(shape, UNTOUCHED)
    for request in few:
        rows = slice(request.query_start, request.query_start + request.query_len)
        expected[:, rows] = scores[:, rows]
    assert_same_bits(decoded.cpu(), expected)
    return scores


def topk_of(
    backend: Backend, scores: torch.Tensor, num_blocks: torch.Tensor, topk: int, order: Order = "score"
) -> torch.Tensor:
    """Block ids ``[H, total_q, topk]`` on the host."""
    block_ids = torch.full((*scores.shape[:2], topk), UNTOUCHED_ID, dtype=torch.int32, device=backend.device)
    backend.topk(scores.to(backend.device), num_blocks.to(backend.device), block_ids, order)
    return block_ids.cpu()


def selection_of(backend: Backend, call: Call, topk: int, order: Order = "score") -> torch.Tensor:
    """Block ids ``[H, total_q, topk]`` on the host, without a score buffer."""
    block_ids = torch.full(
        (call.num_heads, call.total_q, topk), UNTOUCHED_ID, dtype=torch.int32, device=backend.device
    )
    backend.select(call.batch(backend.device), block_ids, order)
    return block_ids.cpu()


def inserted(backend: Backend, keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """What host pages become when keys are inserted: a copy ``[num_pages, 9216]`` on the host."""
    device_pages = pages_on(pages.clone(), backend.device)
    backend.insert(keys.to(backend.device), device_pages, slots.to(backend.device))
    return device_pages.cpu()
