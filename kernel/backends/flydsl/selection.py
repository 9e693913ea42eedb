"""Top-k through the maxima of 16-block groups, in torch, in bounded memory.

A row's k best blocks lie in its k best groups, groups ordered by maximum and then by lower id: a block of any
other group is beaten by the greatest block of each of those k, which has a greater score, or the same one and
a lower id. So only the maxima and 16 k scores of a row are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from kernel.backends.base import Order
from kernel.backends.cpu.topk import best, pack, pack_blocks, select_topk, unpack
from kernel.batch import Request, ScoreBatch
from kernel.plan import MAXIMA_BLOCKS

_CELLS = 1 << 26
"""Score cells of a piece: 256 MiB."""
_GATHERED_CELLS = 1 << 20
"""Scores gathered at a time: 8 MiB of packed keys."""


def pieces(batch: ScoreBatch) -> Iterator[tuple[slice, ScoreBatch]]:
    """Cut a batch so that the scores of each piece take ``_CELLS`` cells at most, or are one query's.

    Returns:
        For each piece the rows of the batch's ``q`` that it holds, none of which belong to requests outside
        the batch, and the batch of these rows alone.
    """
    run: list[Request] = []
    for request in _short_requests(batch):
        together = [*run, request]
        rows = sum(other.query_len for other in together)
        cells = batch.num_heads * rows * max(other.num_blocks for other in together)
        follows = not run or run[-1].query_start + run[-1].query_len == request.query_start
        if run and (cells > _CELLS or not follows):
            yield _piece(batch, run)
            together = [request]
        run = together
    if run:
        yield _piece(batch, run)


def select_from_maxima(
    scores: torch.Tensor,
    maxima: torch.Tensor,
    num_blocks: torch.Tensor,
    block_ids: torch.Tensor,
    order: Order,
) -> None:
    """The block ids that :meth:`kernel.backends.base.Backend.topk` gives, from far fewer cells.

    Args:
        scores: ``[H, total_q, S]`` float32.
        maxima: ``[H, total_q, ceil(S / 16)]`` float32, the greatest score of each 16 blocks below ``nb``.
        num_blocks: ``[total_q]`` int32.
        block_ids: ``[H, total_q, k]`` int32, written.
        order: see :data:`kernel.backends.base.Order`.
    """
    heads, tokens, columns = scores.shape
    k = block_ids.shape[2]
    if columns <= 2 * k * MAXIMA_BLOCKS:
        select_topk(scores, num_blocks, block_ids, order)
        return
    within = torch.arange(MAXIMA_BLOCKS, dtype=torch.int64, device=scores.device)
    step = max(_GATHERED_CELLS // (k * MAXIMA_BLOCKS), 1)
    for first in range(0, tokens, step):
        rows = slice(first, first + step)
        limits = num_blocks[rows]
        for head in range(heads):
            groups = pack(maxima[head, rows], 0, -(-limits // MAXIMA_BLOCKS))
            group_ids = unpack(best(groups, k), "block").long()
            ids = group_ids[:, :, None] * MAXIMA_BLOCKS + within
            # An absent group's cells count as past the row's end.
            ids = ids.masked_fill_(group_ids[:, :, None] < 0, columns).flatten(1)
            cells = scores[head, rows].gather(1, ids.clamp(max=columns - 1))
            block_ids[head, rows] = unpack(best(pack_blocks(cells, ids, limits), k), order)


def _short_requests(batch: ScoreBatch) -> Iterator[Request]:
    """The requests with queries, cut so that the scores of each take ``_CELLS`` cells at most."""
    for request in batch.requests:
        step = max(_CELLS // (batch.num_heads * max(request.num_blocks, 1)), 1)
        for first in range(0, request.query_len, step):
            queries = min(step, request.query_len - first)
            yield replace(
                request,
                query_start=request.query_start + first,
                query_len=queries,
                seq_len=request.prefix_len + first + queries,
            )


def _piece(batch: ScoreBatch, requests: list[Request]) -> tuple[slice, ScoreBatch]:
    start, last = requests[0].query_start, requests[-1]
    rows = slice(start, last.query_start + last.query_len)
    moved = tuple(replace(request, query_start=request.query_start - start) for request in requests)
    return rows, replace(batch, q=batch.q[rows], requests=moved)
