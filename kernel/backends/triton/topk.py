"""Top-k of block scores.

Scores lie in groups of 16 blocks. The k best blocks of a row lie in the k best groups by maximum (ties by
lower
group, and lower groups hold lower ids), so for k up to 16 a row reads its maxima and 16 groups of 64 bytes,
whatever its length. Two kernels:

    many rows   a thread a row, sorting networks in registers: 16 maxima at a time are sorted and merged with
                the 16 best so far; then the same with the scores of each of those 16 groups
    few rows    a program a row, the whole row in registers, its maximum taken k times (also for k above 16)

Floor, H = 4, 8,192 queries, 131,072 keys: 8 MB of maxima and 34 MB of groups, 10 us at 4.3 TB/s. The networks
take about 1,000 instructions for 16 items of 32 rows: 20 of them are 650 a row, 25 us on 132 multiprocessors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernel.backends.base import Order
from kernel.backends.triton.networks import WIDTH, ascending, columns, merged

NETWORK_ROWS = 1024
"""Rows from which on a thread a row is faster than a program a row."""
_ROWS = 32
_LAST_ID = tl.constexpr(2**31 - 1)
_NO_KEY = tl.constexpr(-(2**63))


@triton.jit
def _cleaned(scores):
    """NaN counts as -inf, and -0.0 as +0.0."""
    return tl.where(scores == scores, scores, float("-inf")) + 0.0


@triton.jit
def _row_addresses(
    row,
    num_blocks_ptr,
    row_ids_ptr,
    total_q,
    head_stride,
    token_stride,
    H: tl.constexpr,
    GROUPED: tl.constexpr,
    valid,
):
    """A row's blocks, the offset of its first score, its head and its token."""
    if GROUPED:
        nb = tl.load(num_blocks_ptr + row, mask=valid, other=0)
        q_row = tl.load(row_ids_ptr + row, mask=valid, other=0)
        return nb, row.to(tl.int64) * 16, q_row % H, q_row // H
    head, token = row // total_q, row % total_q
    nb = tl.load(num_blocks_ptr + token, mask=valid, other=0)
    return nb, head.to(tl.int64) * head_stride + token.to(tl.int64) * token_stride, head, token


@triton.jit
def _maxima_kernel(
    scores_ptr,
    num_blocks_ptr,
    maxima_ptr,
    rows_total,
    total_q,
    head_stride,
    token_stride,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < rows_total
    head, token = row // total_q, row % total_q
    nb = tl.load(num_blocks_ptr + token, mask=valid, other=0)
    first = tl.program_id(1) * GROUPS * 16
    if first < tl.max(nb, 0):
        block = first + tl.arange(0, GROUPS * 16)
        start = scores_ptr + head.to(tl.int64) * head_stride + token.to(tl.int64) * token_stride
        seen = block[None, :] < nb[:, None]
        scores = _cleaned(tl.load(start[:, None] + block[None, :], mask=seen, other=float("-inf")))
        maxima = tl.max(scores.reshape(ROWS, GROUPS, 16), 2)
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        cells = maxima_ptr + group.to(tl.int64)[None, :] * rows_total + row[:, None]
        tl.store(cells, maxima, mask=valid[:, None] & (group * 16 < tl.max(nb, 0))[None, :])


@triton.jit
def _network_kernel(
    scores_ptr,
    maxima_ptr,
    num_blocks_ptr,
    row_ids_ptr,
    ids_ptr,
    rows_total,
    total_q,
    head_stride,
    token_stride,
    group_stride,
    ids_head_stride,
    ids_token_stride,
    ids_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    GROUPED: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < rows_total
    nb, start, head, token = _row_addresses(
        row, num_blocks_ptr, row_ids_ptr, total_q, head_stride, token_stride, H, GROUPED, valid
    )
    num_groups = (nb + 15) // 16
    none = (tl.full((ROWS,), float("-inf"), tl.float32),) * 16
    no_ids = (tl.full((ROWS,), _LAST_ID, tl.int32),) * 16

    best, best_ids = none, no_ids
    for group in tl.range(0, tl.max(num_groups, 0), 16):
        scores = ()
        ids = ()
        for j in tl.static_range(16):
            seen = group + j < num_groups
            cells = maxima_ptr + (group + j) * tl.cast(rows_total, tl.int64) + row
            scores = scores + (tl.load(cells, mask=seen, other=float("-inf")),)
            ids = ids + (tl.where(seen, group + j, _LAST_ID),)
        best, best_ids = merged(best, best_ids, scores, ids)

    groups = best_ids
    best, best_ids = none, no_ids
    slots = tl.arange(0, 16)
    for _ in tl.range(0, tl.minimum(tl.max(num_groups, 0), 16)):
        chosen = groups[0]
        groups = groups[1:] + (groups[0],)
        seen = (chosen != _LAST_ID)[:, None]
        block = chosen[:, None] * 16 + slots[None, :]
        cells = scores_ptr + start[:, None] + chosen.to(tl.int64)[:, None] * group_stride + slots[None, :]
        if not PADDED:
            seen = seen & (block < nb[:, None])
        scores = tl.load(cells, mask=seen, other=float("-inf"))
        if not GROUPED:
            scores = tl.where(block < nb[:, None], _cleaned(scores), float("-inf"))
        ids = tl.where(seen, block, _LAST_ID)
        best, best_ids = merged(best, best_ids, columns(scores, ROWS), columns(ids, ROWS))

    ids = ()
    for j in tl.static_range(16):
        ids = ids + (tl.where((best_ids[j] < nb) & (j < K), best_ids[j], _LAST_ID),)
    if BY_BLOCK:
        ids = ascending(ids)
    out = ids_ptr + head.to(tl.int64) * ids_head_stride + token.to(tl.int64) * ids_token_stride
    for j in tl.static_range(K):
        tl.store(out + j * ids_stride, tl.where(ids[j] == _LAST_ID, -1, ids[j]), mask=valid)


@triton.jit
def _row_kernel(
    scores_ptr,
    num_blocks_ptr,
    row_ids_ptr,
    ids_ptr,
    total_q,
    head_stride,
    token_stride,
    group_stride,
    ids_head_stride,
    ids_token_stride,
    ids_stride,
    k,
    H: tl.constexpr,
    BY_BLOCK: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCKS: tl.constexpr,
    PLACES: tl.constexpr,
):
    row = tl.program_id(0)
    nb, start, head, token = _row_addresses(
        row, num_blocks_ptr, row_ids_ptr, total_q, head_stride, token_stride, H, GROUPED, True
    )
    block = tl.arange(0, BLOCKS)
    cells = scores_ptr + start + (block // 16).to(tl.int64) * group_stride + block % 16
    scores = _cleaned(tl.load(cells, mask=block < nb, other=float("-inf")))
    # A float's bits as an integer that sorts like it, above the id's complement: one maximum finds both.
    bits = scores.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.to(tl.int64) << 32) | (block ^ _LAST_ID).to(tl.int64)
    keys = tl.where(block < nb, keys, _NO_KEY)
    place = tl.arange(0, PLACES)
    ids = tl.full((PLACES,), _LAST_ID, tl.int32)
    for i in range(tl.minimum(k, nb)):
        best = tl.max(keys, 0)
        keys = tl.where(keys == best, _NO_KEY, keys)
        ids = tl.where(place == i, (best & 0x7FFFFFFF).to(tl.int32) ^ _LAST_ID, ids)
    where = place
    if BY_BLOCK:
        before = (ids[None, :] < ids[:, None]) | (
            (ids[None, :] == ids[:, None]) & (place[None, :] < place[:, None])
        )
        where = tl.sum(before.to(tl.int32), 1)
    out = ids_ptr + head.to(tl.int64) * ids_head_stride + token.to(tl.int64) * ids_token_stride
    tl.store(out + where * ids_stride, tl.where(ids == _LAST_ID, -1, ids), mask=where < k)


def select_grouped(
    scores: torch.Tensor,
    maxima: torch.Tensor | None,
    num_blocks: torch.Tensor,
    row_ids: torch.Tensor,
    rows: int,
    block_ids: torch.Tensor,
    order: Order,
) -> None:
    """Select from scores in groups, as :func:`kernel.backends.triton.score_prefill.score_tiles` leaves them.

    Args:
        scores: ``[groups, rows, 16]`` float32, contiguous; ``-inf`` past a row's blocks.
        maxima: ``[groups, rows]`` float32, contiguous; None: a program a row, which needs none.
        num_blocks: ``[rows]`` int32.
        row_ids: ``[rows]`` int32, ``token * H + head`` of each row.
        rows: rows to select for.
        block_ids: ``[H, total_q, k]`` int32, the cells of those rows are written.
        order: see :data:`kernel.backends.base.Order`.
    """
    strides = (scores.stride(1), 0, scores.stride(0), *block_ids.stride())
    heads, _, k = block_ids.shape
    if maxima is not None and k <= WIDTH and rows >= NETWORK_ROWS:
        _network_kernel[(triton.cdiv(rows, _ROWS),)](
            scores,
            maxima,
            num_blocks,
            row_ids,
            block_ids,
            rows,
            1,
            *strides,
            H=heads,
            K=k,
            BY_BLOCK=order == "block",
            GROUPED=True,
            PADDED=True,
            ROWS=_ROWS,
            num_warps=1,
        )
    else:
        _launch_rows(
            rows, scores, num_blocks, row_ids, block_ids, 1, strides, scores.shape[0] * 16, order, True
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
    if k <= WIDTH and rows >= NETWORK_ROWS:
        groups = triton.cdiv(width, 16)
        maxima = torch.empty((groups, rows), dtype=torch.float32, device=scores.device)
        _maxima_kernel[(triton.cdiv(rows, 32), triton.cdiv(groups, 16))](
            scores, num_blocks, maxima, rows, total_q, *strides[:2], ROWS=32, GROUPS=16, num_warps=8
        )
        _network_kernel[(triton.cdiv(rows, _ROWS),)](
            scores,
            maxima,
            num_blocks,
            num_blocks,
            block_ids,
            rows,
            total_q,
            *strides,
            H=heads,
            K=k,
            BY_BLOCK=order == "block",
            GROUPED=False,
            PADDED=width % 16 == 0,
            ROWS=_ROWS,
            num_warps=1,
        )
    else:
        _launch_rows(rows, scores, num_blocks, num_blocks, block_ids, total_q, strides, width, order, False)


def _launch_rows(
    rows: int,
    scores: torch.Tensor,
    num_blocks: torch.Tensor,
    row_ids: torch.Tensor,
    block_ids: torch.Tensor,
    total_q: int,
    strides: tuple[int, ...],
    width: int,
    order: Order,
    grouped: bool,
) -> None:
    heads, _, k = block_ids.shape
    blocks = max(64, triton.next_power_of_2(width))
    _row_kernel[(rows,)](
        scores,
        num_blocks,
        row_ids,
        block_ids,
        total_q,
        *strides,
        k,
        H=heads,
        BY_BLOCK=order == "block",
        GROUPED=grouped,
        BLOCKS=blocks,
        PLACES=triton.next_power_of_2(k),
        num_warps=min(16, max(1, blocks // 256)),
    )
