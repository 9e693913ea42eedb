"""Top-k of many rows: a thread a row, sorting networks in registers.

    bound       the 16th best of the row's group maxima: a network of maxima and minima, which carries no ids
    groups      those 16 groups: what lies above the bound, and of what equals it the lowest
    scores      those of the 16 groups that reach the bound, 18 to 25 of 256, go to a list
    order       the list, 16 entries at a time, by a network that carries ids

The entries of a row's list lie apart by the number of rows: what a warp appends lies side by side.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel.backends.triton.networks import COLUMN, ascending, best_scores, columns, merged
from kernel.backends.triton.rows import cleaned

LIST_ENTRIES = 48
"""Entries of a row's list of scores."""
_NO_ID = tl.constexpr(2**31 - 1)
_NO_ENTRY = tl.constexpr((0xFF800000 << 32 | 0x7FFFFFFF) - (1 << 64))  # a score of -inf, no id
_FULL = tl.constexpr(LIST_ENTRIES - 16)


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
def _maxima_tile(maxima_ptr, rows_total, row, group, num_groups):
    """``[ROWS, 16]``: the maxima of the 16 groups from ``group`` on."""
    slots = tl.arange(0, 16)
    first = maxima_ptr + group * tl.cast(rows_total, tl.int64)
    present = (group + slots)[None, :] < num_groups[:, None]
    return tl.load(first + (slots[None, :] * rows_total + row[:, None]), mask=present, other=float("-inf"))


@triton.jit
def _chosen_group(groups_ptr, rows_total, row, count, i):
    """The i-th group of each row, -1 past the last."""
    return tl.load(groups_ptr + i * rows_total + row, mask=i < count, other=-1)


@triton.jit
def _group_scores(scores_ptr, start, group, group_stride, nb, PADDED: tl.constexpr):
    """The scores ``[ROWS, 16]`` of a group of each row, ``-inf`` of group -1."""
    slots = tl.arange(0, 16)
    seen = (group >= 0)[:, None]
    if not PADDED:
        seen = seen & (group[:, None] * 16 + slots[None, :] < nb[:, None])
    cells = scores_ptr + start[:, None] + group.to(tl.int64)[:, None] * group_stride + slots[None, :]
    return tl.load(cells, mask=seen, other=float("-inf"))


@triton.jit
def _merged_entries(
    best, best_ids, entries_ptr, row, rows_total, next_entry, longest, slots, ROWS: tl.constexpr
):
    """The 16 best of a sorted list and of the entries of each row before ``next_entry``."""
    for first in tl.range(0, longest, 16 * rows_total):
        cells = first + slots[None, :] * rows_total + row[:, None]
        entries = tl.load(entries_ptr + cells, mask=cells < next_entry[:, None], other=_NO_ENTRY)
        scores = (entries >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        best, best_ids = merged(best, best_ids, columns(scores, ROWS), columns(entries.to(tl.int32), ROWS))
    return best, best_ids


@triton.jit
def many_rows_kernel(
    scores_ptr,
    maxima_ptr,
    num_blocks_ptr,
    row_ids_ptr,
    groups_ptr,
    entries_ptr,
    ids_ptr,
    rows_total,
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
    following = _maxima_tile(maxima_ptr, rows_total, row, 0, num_groups)
    for group in tl.range(0, most_groups, 16):
        maxima = following
        following = _maxima_tile(maxima_ptr, rows_total, row, group + 16, num_groups)
        best = best_scores(best, columns(maxima, ROWS))
    bound = best[15]
    equals = tl.full((ROWS,), 16, tl.int32)
    for j in tl.static_range(16):
        equals -= (best[j] > bound).to(tl.int32)

    slots = tl.arange(0, 16)
    count = tl.zeros((ROWS,), tl.int32)
    following = _maxima_tile(maxima_ptr, rows_total, row, 0, num_groups)
    for group in tl.range(0, most_groups, 16):
        maxima = following
        following = _maxima_tile(maxima_ptr, rows_total, row, group + 16, num_groups)
        groups = (group + slots)[None, :]
        present = groups < num_groups[:, None]
        equal = (present & (maxima == bound[:, None])).to(tl.int32)
        taken = (present & (maxima > bound[:, None])) | (
            (equal > 0) & (tl.cumsum(equal, 1) <= equals[:, None])
        )
        place = count[:, None] + tl.cumsum(taken.to(tl.int32), 1) - 1
        cells = groups_ptr + (place * rows_total + row[:, None])
        tl.store(cells, tl.broadcast_to(groups, (ROWS, 16)), mask=taken)
        count += tl.sum(taken.to(tl.int32), 1)
        equals -= tl.sum(equal, 1)

    best, best_ids = none, (tl.full((ROWS,), _NO_ID, tl.int32),) * 16
    next_entry = row  # offset of a row's next entry: 48 times the rows of a call stay far below 2^31
    most_chosen = tl.minimum(most_groups, 16)
    tl.debug_barrier()  # other threads read the groups
    # Two loads follow one another, the group's number and its scores: each is asked for a group ahead.
    chosen = _chosen_group(groups_ptr, rows_total, row, count, 0)
    tile = _group_scores(scores_ptr, start, chosen, group_stride, nb, PADDED)
    following_group = _chosen_group(groups_ptr, rows_total, row, count, 1)
    for i in tl.range(0, most_chosen):
        scores = columns(tile if GROUPED else cleaned(tile), ROWS)
        first_block = chosen * 16
        visible = tl.where(chosen >= 0, nb - first_block, 0)
        chosen = following_group
        tile = _group_scores(scores_ptr, start, chosen, group_stride, nb, PADDED)
        following_group = _chosen_group(groups_ptr, rows_total, row, count, i + 2)
        for j in tl.static_range(16):
            reaches = (scores[j] >= bound) & (visible > COLUMN[j])
            bits = scores[j].to(tl.int32, bitcast=True).to(tl.int64)
            entry = (bits << 32) | (first_block + COLUMN[j]).to(tl.int64)
            tl.store(entries_ptr + next_entry, entry, mask=reaches)
            next_entry += tl.where(reaches, rows_total, 0)
        longest = tl.max(next_entry - row, 0)
        if (longest > _FULL * rows_total) | (i + 1 == most_chosen):
            tl.debug_barrier()  # other threads read the entries
            best, best_ids = _merged_entries(
                best, best_ids, entries_ptr, row, rows_total, next_entry, longest, slots, ROWS
            )
            next_entry = row

    ids = ()
    for j in tl.static_range(16):
        ids = ids + (tl.where(j < k, best_ids[j], _NO_ID),)
    if BY_BLOCK:
        ids = ascending(ids)
    out = ids_ptr + head.to(tl.int64) * ids_head_stride + token.to(tl.int64) * ids_token_stride
    for j in tl.static_range(16):
        tl.store(out + j * ids_stride, tl.where(ids[j] == _NO_ID, -1, ids[j]), mask=valid & (j < k))
