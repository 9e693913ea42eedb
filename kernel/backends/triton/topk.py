"""Top-k of block scores: which kernel, and its launch.

Scores lie in groups of 16 blocks. The k best blocks of a row lie in the k best groups by maximum (ties by
lower group, and lower groups hold lower ids), so for k up to 16 a row reads its maxima and 16 groups of 64
bytes, whatever its length.

    many rows   :mod:`kernel.backends.triton.topk_many`: a thread a row
    few rows    :mod:`kernel.backends.triton.topk_few`: a program a row (also for k above 16)

Floor, H = 4, 8,192 queries, 131,072 keys: 8 MB of maxima and 34 MB of groups, 10 us at 4.3 TB/s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from kernel.backends.base import Order
from kernel.backends.triton.networks import WIDTH
from kernel.backends.triton.topk_few import few_rows_kernel
from kernel.backends.triton.topk_many import LIST_ENTRIES, many_rows_kernel, maxima_kernel

MANY_ROWS = 1024
"""Rows from which on a thread a row is faster than a program a row."""
_ROWS = 32


@dataclass(frozen=True)
class DecodeRows:
    """Whose the rows of a decode step's scores are, each ``[n]`` int32; see
    :func:`kernel.backends.triton.score_decode.score_requests`. For rows of no request nothing is selected."""

    query_starts: torch.Tensor
    query_ends: torch.Tensor
    seq_lens: torch.Tensor
    out_starts: torch.Tensor
    max_queries: int


def select_grouped(
    scores: torch.Tensor,
    maxima: torch.Tensor,
    num_blocks: torch.Tensor,
    row_ids: torch.Tensor,
    rows: int,
    block_ids: torch.Tensor,
    order: Order,
) -> None:
    """Select from scores in groups, as :func:`kernel.backends.triton.score_prefill.score_tiles` leaves them.

    Args:
        scores: ``[groups, rows, 16]`` float32, contiguous; ``-inf`` past a row's blocks.
        maxima: ``[groups, rows]`` float32, contiguous.
        num_blocks: ``[rows]`` int32.
        row_ids: ``[rows]`` int32, ``token * H + head`` of each row.
        rows: rows to select for.
        block_ids: ``[H, total_q, k]`` int32, the cells of those rows are written.
        order: see :data:`kernel.backends.base.Order`.
    """
    strides = (scores.stride(1), 0, scores.stride(0), *block_ids.stride())
    if block_ids.shape[2] <= WIDTH and rows >= MANY_ROWS:
        _launch_many(rows, scores, maxima, num_blocks, row_ids, block_ids, 1, strides, order, True, True)
    else:
        width = scores.shape[0] * 16
        requests = (num_blocks, row_ids, row_ids, row_ids, row_ids)
        _launch_few(rows, scores, requests, block_ids, width, 1, strides, order, True)


def select_decoded(
    scores: torch.Tensor, rows: DecodeRows, block_ids: torch.Tensor, order: Order, *, pdl: bool
) -> None:
    """Select from scores in groups, as :mod:`kernel.backends.triton.score_decode` leaves them.

    Args:
        scores: ``[groups, rows, 16]`` float32, contiguous.
        rows: whose they are.
        block_ids: ``[H, total_q, k]`` int32, the cells of those rows are written.
        order: see :data:`kernel.backends.base.Order`.
        pdl: whether the device starts this kernel's programs while the previous kernel ends.
    """
    strides = (scores.stride(1), 0, scores.stride(0), *block_ids.stride())
    requests = (rows.query_starts, rows.query_starts, rows.query_ends, rows.seq_lens, rows.out_starts)
    _launch_few(
        scores.shape[1],
        scores,
        requests,
        block_ids,
        scores.shape[0] * 16,
        1,
        strides,
        order,
        True,
        max_queries=rows.max_queries,
        pdl=pdl,
    )


def select_scores(
    scores: torch.Tensor, num_blocks: torch.Tensor, block_ids: torch.Tensor, order: Order
) -> None:
    """Select from plain scores, see :meth:`kernel.backends.base.Backend.topk`."""
    heads, total_q, width = scores.shape
    k, rows = block_ids.shape[2], heads * total_q
    if not rows:
        return
    if not width:
        block_ids.fill_(-1)
        return
    strides = (scores.stride(0), scores.stride(1), 16, *block_ids.stride())
    if k <= WIDTH and rows >= MANY_ROWS:
        groups = triton.cdiv(width, 16)
        maxima = torch.empty((groups, rows), dtype=torch.float32, device=scores.device)
        maxima_kernel[(triton.cdiv(rows, 32), triton.cdiv(groups, 16))](
            scores, num_blocks, maxima, rows, total_q, *strides[:2], ROWS=32, GROUPS=16, num_warps=8
        )
        padded = width % 16 == 0
        _launch_many(
            rows, scores, maxima, num_blocks, num_blocks, block_ids, total_q, strides, order, False, padded
        )
    else:
        _launch_few(rows, scores, (num_blocks,) * 5, block_ids, width, total_q, strides, order, False)


def _launch_many(
    rows: int,
    scores: torch.Tensor,
    maxima: torch.Tensor,
    num_blocks: torch.Tensor,
    row_ids: torch.Tensor,
    block_ids: torch.Tensor,
    total_q: int,
    strides: tuple[int, ...],
    order: Order,
    grouped: bool,
    padded: bool,
) -> None:
    heads, _, k = block_ids.shape
    groups = torch.empty((WIDTH, rows), dtype=torch.int32, device=scores.device)
    entries = torch.empty((LIST_ENTRIES, rows), dtype=torch.int64, device=scores.device)
    many_rows_kernel[(triton.cdiv(rows, _ROWS),)](
        scores,
        maxima,
        num_blocks,
        row_ids,
        groups,
        entries,
        block_ids,
        rows,
        total_q,
        *strides,
        k,
        H=heads,
        BY_BLOCK=order == "block",
        GROUPED=grouped,
        PADDED=padded,
        ROWS=_ROWS,
        num_warps=1,
    )


def _launch_few(
    rows: int,
    scores: torch.Tensor,
    requests: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    block_ids: torch.Tensor,
    width: int,
    total_q: int,
    strides: tuple[int, ...],
    order: Order,
    grouped: bool,
    *,
    max_queries: int = 0,
    pdl: bool = False,
) -> None:
    heads, _, k = block_ids.shape
    groups = max(16, triton.next_power_of_2(triton.cdiv(width, 16)))
    listed = 64 if k <= WIDTH else 128
    entries = torch.empty((rows, listed), dtype=torch.int64, device=scores.device)
    batch = requests[4].shape[0] if max_queries else 0
    few_rows_kernel[(rows,)](
        scores,
        *requests,
        entries,
        block_ids,
        width,
        total_q,
        *strides,
        k,
        batch,
        max_queries,
        H=heads,
        BY_BLOCK=order == "block",
        GROUPED=grouped,
        BATCH=triton.next_power_of_2(batch) if batch else 0,
        GROUPS=groups,
        PARTS=min(groups, 64) if k <= WIDTH else groups,
        PLACES=triton.next_power_of_2(k),
        LISTED=listed,
        PDL=pdl,
        num_warps=4 if groups <= 64 else 8 if groups <= 256 else 16,
        **({"launch_pdl": True} if pdl else {}),
    )
