"""Top-k of many rows: a thread a row, sorting networks in registers.

    bound       the 16th best of the row's group maxima: a network of maxima and minima, which carries no ids
    groups      those 16 groups: what lies above the bound, and of what equals it the lowest
    scores      those of the 16 groups that reach the bound, 18 to 25 of 256, go to a list
    order       the list, 16 entries at a time, by a network that carries ids

A thread appends to its row's lists alone, so that they need no barrier. Lists lie a row's entries apart by the
number of rows: what the threads of a warp append lies side by side.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel.backends.triton.networks import COLUMN, ascending, best_scores, columns, merged
from kernel.backends.triton.rows import cleaned

LIST_ENTRIES = 96
"""Entries of a row's list of scores."""
_NO_ID = tl.constexpr(2**31 - 1)
_NO_ENTRY = tl.constexpr((0xFF800000 << 32 | 0x7FFFFFFF) - (1 << 64))  # a score of -inf, no id
_FULL = tl.constexpr(LIST_ENTRIES - 64)


@triton.jit
def maxima_kernel(
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
        scores = cleaned(tl.load(start[:, None] + block[None, :], mask=seen, other=float("-inf")))
        maxima = tl.max(scores.reshape(ROWS, GROUPS, 16), 2)
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        cells = maxima_ptr + group.to(tl.int64)[None, :] * rows_total + row[:, None]
        tl.store(cells, maxima, mask=valid[:, None] & (group * 16 < tl.max(nb, 0))[None, :])


@triton.jit
def _sixteen_maxima(maxima_ptr, rows_total, row, group, num_groups):
    maxima = ()
    for j in tl.static_range(16):
        cells = maxima_ptr + (group + j) * tl.cast(rows_total, tl.int64) + row
        maxima = maxima + (tl.load(cells, mask=group + j < num_groups, other=float("-inf")),)
    return maxima


@triton.jit
def _group_scores(scores_ptr, start, group, group_stride, nb, GROUPED: tl.constexpr, PADDED: tl.constexpr):
    """The 16 scores ``[ROWS, 16]`` of a group of each row; ``-inf`` for group -1."""
    slots = tl.arange(0, 16)
    seen = (group >= 0)[:, None]
    if not PADDED:
        seen = seen & (group[:, None] * 16 + slots[None, :] < nb[:, None])
    cells = scores_ptr + start[:, None] + group.to(tl.int64)[:, None] * group_stride + slots[None, :]
    scores = tl.load(cells, mask=seen, other=float("-inf"))
    return scores if GROUPED else cleaned(scores)


@triton.jit
def _merged_entries(best, best_ids, list_ptr, row, rows_total, next_entry, longest):
    """The 16 best of a sorted list and of the entries of each row before ``next_entry``."""
    for first in tl.range(0, longest, 16 * rows_total):
        scores = ()
        ids = ()
        for j in tl.static_range(16):
            cell = row + first + j * rows_total
            entry = tl.load(list_ptr + cell, mask=cell < next_entry, other=_NO_ENTRY)
            scores = scores + ((entry >> 32).to(tl.int32).to(tl.float32, bitcast=True),)
            ids = ids + (entry.to(tl.int32),)
        best, best_ids = merged(best, best_ids, scores, ids)
    return best, best_ids


@triton.jit
def many_rows_kernel(
    scores_ptr,
    maxima_ptr,
    num_blocks_ptr,
    row_ids_ptr,
    groups_ptr,
    list_ptr,
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
    if GROUPED:
        nb = tl.load(num_blocks_ptr + row, mask=valid, other=0)
        q_row = tl.load(row_ids_ptr + row, mask=valid, other=0)
        start, head, token = row.to(tl.int64) * 16, q_row % H, q_row // H
    else:
        head, token = row // total_q, row % total_q
        nb = tl.load(num_blocks_ptr + token, mask=valid, other=0)
        start = head.to(tl.int64) * head_stride + token.to(tl.int64) * token_stride
    num_groups = (nb + 15) // 16
    most_groups = tl.max(num_groups, 0)
    none = (tl.full((ROWS,), float("-inf"), tl.float32),) * 16

    best = none
    for group in tl.range(0, most_groups, 16):
        best = best_scores(best, _sixteen_maxima(maxima_ptr, rows_total, row, group, num_groups))
    bound = best[15]
    equals = tl.full((ROWS,), 16, tl.int32)
    for j in tl.static_range(16):
        equals -= (best[j] > bound).to(tl.int32)

    # Offsets of the next entries: 96 times the rows of a call stay far below 2^31.
    next_group = row
    for group in tl.range(0, most_groups, 16):
        maxima = _sixteen_maxima(maxima_ptr, rows_total, row, group, num_groups)
        for j in tl.static_range(16):
            equal = (maxima[j] == bound) & (equals > 0)
            taken = (group + j < num_groups) & ((maxima[j] > bound) | equal)
            tl.store(groups_ptr + next_group, tl.full((ROWS,), group + j, tl.int32), mask=taken)
            next_group += tl.where(taken, rows_total, 0)
            equals -= (taken & equal).to(tl.int32)

    best, best_ids = none, (tl.full((ROWS,), _NO_ID, tl.int32),) * 16
    next_entry = row
    most_chosen = tl.minimum(most_groups, 16)
    for i in tl.range(0, most_chosen, 4):
        chosen = ()
        tiles = ()
        for t in tl.static_range(4):
            cell = row + (i + t) * rows_total
            chosen = chosen + (tl.load(groups_ptr + cell, mask=cell < next_group, other=-1),)
        for t in tl.static_range(4):
            tiles = tiles + (_group_scores(scores_ptr, start, chosen[t], group_stride, nb, GROUPED, PADDED),)
        for t in tl.static_range(4):
            group_scores = columns(tiles[t], ROWS)
            visible = tl.where(chosen[t] >= 0, nb - chosen[t] * 16, 0)
            for j in tl.static_range(16):
                reaches = (group_scores[j] >= bound) & (visible > COLUMN[j])
                bits = group_scores[j].to(tl.int32, bitcast=True).to(tl.int64)
                entry = (bits << 32) | (chosen[t] * 16 + COLUMN[j]).to(tl.int64)
                tl.store(list_ptr + next_entry, entry, mask=reaches)
                next_entry += tl.where(reaches, rows_total, 0)
        longest = tl.max(next_entry - row, 0)
        if (longest > _FULL * rows_total) | (i + 4 >= most_chosen):
            best, best_ids = _merged_entries(best, best_ids, list_ptr, row, rows_total, next_entry, longest)
            next_entry = row

    ids = ()
    for j in tl.static_range(16):
        ids = ids + (best_ids[j] if j < K else tl.full((ROWS,), _NO_ID, tl.int32),)
    if BY_BLOCK:
        ids = ascending(ids)
    out = ids_ptr + head.to(tl.int64) * ids_head_stride + token.to(tl.int64) * ids_token_stride
    for j in tl.static_range(K):
        tl.store(out + j * ids_stride, tl.where(ids[j] == _NO_ID, -1, ids[j]), mask=valid)
