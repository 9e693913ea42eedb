"""Top-k of block scores: which kernel, and its launch.

Scores lie in groups of 16 blocks. The k best blocks of a row lie in the k best groups by maximum (ties by
lower group, and lower groups hold lower ids), so for k up to 16 a row reads its maxima and 16 groups of 64
bytes, whatever its length.

    many rows   :mod:`kernel.backends.triton.topk_many`: one thread per row
    few rows    :func:`few_rows_kernel`: one program per row (also for k above 16)

Floor, H = 4, 8,192 queries, 131,072 keys: 8 MB of maxima and 34 MB of groups, 10 us at 4.3 TB/s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernel.backends.base import Order
from kernel.backends.triton.launch import Launches
from kernel.backends.triton.topk_many import (
    LIST_ENTRIES,
    WIDTH,
    cleaned,
    many_rows_kernel,
    maxima_kernel,
    row_of_request,
)

# ---- Few rows: one program per row, the whole row in registers ----
#
# The k-th best of the maxima of the row's parts, 64 at most for k up to 16, is a lower bound of the k-th best
# score. Few scores reach it (18 to 25 for k = 16, unless many are equal): they are written to a list and
# ranked by counting those that are better. Where more reach it than the list holds, the row's maximum is
# taken k times.

NO_ID = tl.constexpr(2**31 - 1)
_NO_KEY = tl.constexpr(-(2**63))


@triton.jit
def _packed(scores, block):
    """One integer that sorts by score, equal scores by the lower block: the score's bits, ordered, above the
    block's complement."""
    bits = scores.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (block ^ NO_ID).to(tl.int64)


@triton.jit
def _block_of(keys):
    return (keys & 0x7FFFFFFF).to(tl.int32) ^ NO_ID


@triton.jit
def few_rows_kernel(
    scores_ptr,
    num_blocks_ptr,
    row_ids_ptr,
    query_ends_ptr,
    seq_lens_ptr,
    out_starts_ptr,
    list_ptr,
    ids_ptr,
    width,
    total_q,
    head_stride,
    token_stride,
    group_stride,
    ids_head_stride,
    ids_token_stride,
    ids_stride,
    k,
    batch,
    max_queries,
    H: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    GROUPED: tl.constexpr,
    BATCH: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    PLACES: tl.constexpr,
    LISTED: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    if BATCH:
        # What are a row's number and blocks elsewhere are the starts of the requests' queries here.
        nb, q_row = row_of_request(
            row,
            num_blocks_ptr,
            query_ends_ptr,
            seq_lens_ptr,
            out_starts_ptr,
            width,
            total_q,
            batch,
            max_queries,
            H,
            BATCH,
        )
        start, head, token = row.to(tl.int64) * 16, q_row % H, q_row // H
    elif GROUPED:
        nb, q_row = tl.load(num_blocks_ptr + row), tl.load(row_ids_ptr + row)
        start, head, token = row.to(tl.int64) * 16, q_row % H, q_row // H
    else:
        head, token = row // total_q, row % total_q
        nb = tl.load(num_blocks_ptr + token)
        start = head.to(tl.int64) * head_stride + token.to(tl.int64) * token_stride
    nb = tl.minimum(nb, width)
    if PDL:
        tl.extra.cuda.gdc_wait()  # for the scores; nothing that was read before is written by their kernel

    group, slot = tl.arange(0, GROUPS), tl.arange(0, 16)
    block = group[:, None] * 16 + slot[None, :]
    cells = scores_ptr + start + group.to(tl.int64)[:, None] * group_stride + slot[None, :]
    scores = cleaned(tl.load(cells, mask=block < nb, other=float("-inf")))
    maxima = tl.max(tl.max(scores, 1).reshape(PARTS, GROUPS // PARTS), 1)
    part = tl.arange(0, PARTS)
    equal = (maxima[None, :] == maxima[:, None]) & (part[None, :] < part[:, None])
    rank = tl.sum(((maxima[None, :] > maxima[:, None]) | equal).to(tl.int32), 1)
    bound = tl.max(tl.where(rank >= k - 1, maxima, float("-inf")), 0)
    reaches = ((scores >= bound) & (block < nb)).to(tl.int32)
    in_group = tl.sum(reaches, 1)
    count = tl.sum(in_group, 0)
    keys = _packed(scores, block)

    place = tl.arange(0, PLACES)
    out = ids_ptr + head.to(tl.int64) * ids_head_stride + token.to(tl.int64) * ids_token_stride
    if count <= LISTED:
        own_list = list_ptr + row.to(tl.int64) * LISTED
        entry_of = (tl.cumsum(in_group, 0) - in_group)[:, None] + tl.cumsum(reaches, 1) - reaches
        tl.store(own_list + entry_of, keys, mask=reaches != 0)
        tl.debug_barrier()  # other threads read it
        entry = tl.arange(0, LISTED)
        listed = tl.load(own_list + entry, mask=entry < count, other=_NO_KEY)
        better = tl.sum((listed[None, :] > listed[:, None]).to(tl.int32), 1)
        chosen = (entry < count) & (better < k)
        listed_ids = _block_of(listed)
        if BY_BLOCK:
            better = tl.sum((chosen[None, :] & (listed_ids[None, :] < listed_ids[:, None])).to(tl.int32), 1)
        tl.store(out + better * ids_stride, listed_ids, mask=chosen)
        empty = (place >= count) & (place < k)
        tl.store(out + place * ids_stride, tl.full((PLACES,), -1, tl.int32), mask=empty)
    else:
        keys = tl.where(block < nb, keys, _NO_KEY)
        ids = tl.full((PLACES,), NO_ID, tl.int32)
        for i in range(tl.minimum(k, nb)):
            best = tl.max(tl.max(keys, 1), 0)
            keys = tl.where(keys == best, _NO_KEY, keys)
            ids = tl.where(place == i, _block_of(best), ids)
        where = place
        if BY_BLOCK:
            before = (ids[None, :] < ids[:, None]) | (
                (ids[None, :] == ids[:, None]) & (place[None, :] < place[:, None])
            )
            where = tl.sum(before.to(tl.int32), 1)
        tl.store(out + where * ids_stride, tl.where(ids == NO_ID, -1, ids), mask=where < k)


MANY_ROWS = 1024
"""Rows from which on a thread a row is faster than a program a row."""
MANY_DECODED_ROWS = 4096
"""The same for decode, where a thread a row needs a launch more, for the maxima."""
_ROWS = 32


@dataclass(frozen=True)
class DecodeRows:
    """The requests of a decode step and their rows, each ``[n]`` int32 on the device.

    Rows of no request are selected no block.
    """

    table_rows: torch.Tensor
    """Row of the block table."""
    query_starts: torch.Tensor
    query_ends: torch.Tensor
    seq_lens: torch.Tensor
    out_starts: torch.Tensor
    """First token in the scores."""
    max_queries: int
    """Most queries of a request."""
    num_blocks: int
    """Most blocks of a request."""
    total_blocks: int
    """Blocks of all requests together, at most."""
    tokens: int
    """Tokens of the scores."""
    row_info: torch.Tensor | None = None
    """``[2, rows]`` int32 of ``MANY_DECODED_ROWS`` or more: each row's ``nb``, and its number in ``q``."""


def select_grouped(
    launches: Launches,
    scores: torch.Tensor,
    maxima: torch.Tensor,
    num_blocks: torch.Tensor,
    row_ids: torch.Tensor,
    rows: int,
    block_ids: torch.Tensor,
    by_block: bool,
) -> None:
    """Select from scores in groups, as :func:`kernel.backends.triton.prefill.score_tiles` leaves them.

    Args:
        launches: to add to.
        scores: ``[groups, rows, 16]`` float32, contiguous; ``-inf`` past a row's blocks.
        maxima: ``[groups, rows]`` float32, contiguous.
        num_blocks: ``[rows]`` int32.
        row_ids: ``[rows]`` int32, ``token * H + head`` of each row.
        rows: rows to select for.
        block_ids: ``[H, total_q, k]`` int32, the cells of those rows are written.
        by_block: whether ids ascend.
    """
    strides = (scores.stride(1), 0, scores.stride(0), *block_ids.stride())
    if block_ids.shape[2] <= WIDTH and rows >= MANY_ROWS:
        of_rows = (maxima, num_blocks, row_ids)
        _add_many(launches, rows, scores, of_rows, block_ids, 1, strides, by_block, True, True)
    else:
        width = scores.shape[0] * 16
        requests = (num_blocks, row_ids, row_ids, row_ids, row_ids)
        _add_few(launches, rows, scores, requests, block_ids, width, 1, strides, by_block, True)


def select_decoded(
    launches: Launches,
    scores: torch.Tensor,
    rows: DecodeRows,
    block_ids: torch.Tensor,
    by_block: bool,
    *,
    pdl: bool,
) -> None:
    """Select from scores in groups, as :mod:`kernel.backends.triton.decode` leaves them.

    Args:
        launches: to add to.
        scores: ``[groups, rows, 16]`` float32, contiguous.
        rows: whose they are.
        block_ids: ``[H, total_q, k]`` int32, the cells of those rows are written.
        by_block: whether ids ascend.
        pdl: whether the device starts this kernel's programs while the previous kernel ends.
    """
    strides = (scores.stride(1), 0, scores.stride(0), *block_ids.stride())
    if block_ids.shape[2] <= WIDTH and rows.row_info is not None and rows.row_info.shape[1]:
        num_blocks, row_ids = rows.row_info.unbind()
        groups, count, _ = scores.shape
        of_scores = (0, scores.stride(1), scores.stride(0))
        maxima = _add_maxima(launches, groups, count, scores, num_blocks, count, of_scores)
        of_rows = (maxima, num_blocks, row_ids)
        _add_many(launches, count, scores, of_rows, block_ids, 1, strides, by_block, True, False)
        return
    requests = (rows.query_starts, rows.query_starts, rows.query_ends, rows.seq_lens, rows.out_starts)
    _add_few(
        launches,
        scores.shape[1],
        scores,
        requests,
        block_ids,
        rows.num_blocks,
        block_ids.shape[1],
        strides,
        by_block,
        True,
        max_queries=rows.max_queries,
        pdl=pdl,
    )


def select_scores(
    launches: Launches,
    scores: torch.Tensor,
    num_blocks: torch.Tensor,
    block_ids: torch.Tensor,
    order: Order,
) -> None:
    """Select from plain scores, not empty; see :meth:`kernel.backends.base.Backend.topk`."""
    heads, total_q, width = scores.shape
    k, rows, by_block = block_ids.shape[2], heads * total_q, order == "block"
    strides = (scores.stride(0), scores.stride(1), 16, *block_ids.stride())
    if k <= WIDTH and rows >= MANY_ROWS:
        groups = triton.cdiv(width, 16)
        maxima = _add_maxima(launches, groups, rows, scores, num_blocks, total_q, strides[:3])
        padded = width % 16 == 0
        of_rows = (maxima, num_blocks, num_blocks)
        _add_many(launches, rows, scores, of_rows, block_ids, total_q, strides, by_block, False, padded)
    else:
        requests = (num_blocks,) * 5
        _add_few(launches, rows, scores, requests, block_ids, width, total_q, strides, by_block, False)


def _add_maxima(
    launches: Launches,
    groups: int,
    rows: int,
    scores: torch.Tensor,
    num_blocks: torch.Tensor,
    total_q: int,
    strides: tuple[int, ...],
) -> torch.Tensor:
    """The maxima ``[groups, rows]`` of each 16 blocks; ``strides`` are those of a head, a token, a group."""
    maxima = launches.empty((groups, rows))
    launches.add(
        maxima_kernel,
        (triton.cdiv(rows, 32), triton.cdiv(groups, 16)),
        scores,
        num_blocks,
        maxima,
        rows,
        total_q,
        *strides,
        ROWS=32,
        GROUPS=16,
        num_warps=8,
    )
    return maxima


def _add_many(
    launches: Launches,
    rows: int,
    scores: torch.Tensor,
    of_rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    block_ids: torch.Tensor,
    total_q: int,
    strides: tuple[int, ...],
    by_block: bool,
    grouped: bool,
    padded: bool,
) -> None:
    heads, _, k = block_ids.shape
    groups = launches.empty((WIDTH, rows), torch.int32)
    entries = launches.empty((LIST_ENTRIES, rows), torch.int64)
    launches.add(
        many_rows_kernel,
        (triton.cdiv(rows, _ROWS),),
        scores,
        *of_rows,
        groups,
        entries,
        block_ids,
        rows,
        total_q,
        *strides,
        k,
        H=heads,
        BY_BLOCK=by_block,
        GROUPED=grouped,
        PADDED=padded,
        ROWS=_ROWS,
        num_warps=1,
    )


def _add_few(
    launches: Launches,
    rows: int,
    scores: torch.Tensor,
    requests: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    block_ids: torch.Tensor,
    width: int,
    total_q: int,
    strides: tuple[int, ...],
    by_block: bool,
    grouped: bool,
    *,
    max_queries: int = 0,
    pdl: bool = False,
) -> None:
    heads, _, k = block_ids.shape
    groups = max(16, triton.next_power_of_2(triton.cdiv(width, 16)))
    listed = 64 if k <= WIDTH else 128
    entries = launches.empty((rows, listed), torch.int64)
    batch = requests[4].shape[0] if max_queries else 0
    launches.add(
        few_rows_kernel,
        (rows,),
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
        BY_BLOCK=by_block,
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
