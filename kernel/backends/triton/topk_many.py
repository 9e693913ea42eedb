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

from kernel.contract import BLOCK_TOKENS

# ---- Sorting networks over 16 scores, or (score, id) items, in registers ----
#
# A comparator of items looks at the score first and at the id where scores are equal (the lower id is
# better), so the result does not depend on the order of steps: seven instructions. One of scores alone is a
# maximum and a minimum. Scores must not be NaN.

WIDTH = 16
"""Items of a list."""


def _odd_even_merge_sort(width: int) -> tuple[int, ...]:
    """Batcher's network, comparator by comparator: the places of the better and of the worse item."""
    pairs: list[int] = []
    p = 1
    while p < width:
        k = p
        while k >= 1:
            for j in range(k % p, width - k, 2 * k):
                for i in range(min(k, width - j - k)):
                    if (i + j) // (2 * p) == (i + j + k) // (2 * p):
                        pairs += [i + j, i + j + k]
            k //= 2
        p *= 2
    return tuple(pairs)


def _bitonic_merge(width: int) -> tuple[int, ...]:
    """The network that sorts a bitonic list."""
    pairs: list[int] = []
    distance = width // 2
    while distance:
        for i in range(width):
            if not i & distance:
                pairs += [i, i + distance]
        distance //= 2
    return tuple(pairs)


_SORT = tl.constexpr(_odd_even_merge_sort(WIDTH))
_SORT_SIZE = tl.constexpr(len(_SORT.value) // 2)
_MERGE = tl.constexpr(_bitonic_merge(WIDTH))
_MERGE_SIZE = tl.constexpr(len(_MERGE.value) // 2)
COLUMN = tl.constexpr((0, 8, 2, 10, 4, 12, 6, 14, 1, 9, 3, 11, 5, 13, 7, 15))
"""The columns that :func:`columns` returns, in its order."""


@triton.jit
def _exchange(scores, ids, I: tl.constexpr, J: tl.constexpr):
    """Put the better of two items at place I and the other at J."""
    swap = (scores[J] > scores[I]) | ((scores[J] == scores[I]) & (ids[J] < ids[I]))
    better, worse = tl.where(swap, scores[J], scores[I]), tl.where(swap, scores[I], scores[J])
    better_id, worse_id = tl.where(swap, ids[J], ids[I]), tl.where(swap, ids[I], ids[J])
    scores = scores[:I] + (better,) + scores[I + 1 : J] + (worse,) + scores[J + 1 :]
    ids = ids[:I] + (better_id,) + ids[I + 1 : J] + (worse_id,) + ids[J + 1 :]
    return scores, ids


@triton.jit
def merged(best, best_ids, scores, ids):
    """The 16 best of a sorted list and an unsorted one, sorted."""
    for c in tl.static_range(_SORT_SIZE):
        scores, ids = _exchange(scores, ids, _SORT[2 * c], _SORT[2 * c + 1])
    for i in tl.static_range(16):
        swap = (scores[15 - i] > best[i]) | ((scores[15 - i] == best[i]) & (ids[15 - i] < best_ids[i]))
        best = best[:i] + (tl.where(swap, scores[15 - i], best[i]),) + best[i + 1 :]
        best_ids = best_ids[:i] + (tl.where(swap, ids[15 - i], best_ids[i]),) + best_ids[i + 1 :]
    for c in tl.static_range(_MERGE_SIZE):
        best, best_ids = _exchange(best, best_ids, _MERGE[2 * c], _MERGE[2 * c + 1])
    return best, best_ids


@triton.jit
def _exchange_scores(scores, I: tl.constexpr, J: tl.constexpr):
    """Put the higher of two scores at place I and the other at J."""
    higher, lower = tl.maximum(scores[I], scores[J]), tl.minimum(scores[I], scores[J])
    return scores[:I] + (higher,) + scores[I + 1 : J] + (lower,) + scores[J + 1 :]


@triton.jit
def best_scores(best, scores):
    """The 16 highest of a sorted list and an unsorted one, sorted."""
    for c in tl.static_range(_SORT_SIZE):
        scores = _exchange_scores(scores, _SORT[2 * c], _SORT[2 * c + 1])
    for i in tl.static_range(16):
        best = best[:i] + (tl.maximum(best[i], scores[15 - i]),) + best[i + 1 :]
    for c in tl.static_range(_MERGE_SIZE):
        best = _exchange_scores(best, _MERGE[2 * c], _MERGE[2 * c + 1])
    return best


@triton.jit
def columns(tile, ROWS: tl.constexpr):
    """The 16 columns ``[ROWS]`` of ``[ROWS, 16]``, in the order in which halving the last dim leaves them."""
    a, b = tl.split(tile.reshape(ROWS, 8, 2))
    a0, a1 = tl.split(a.reshape(ROWS, 4, 2))
    b0, b1 = tl.split(b.reshape(ROWS, 4, 2))
    a00, a01 = tl.split(a0.reshape(ROWS, 2, 2))
    a10, a11 = tl.split(a1.reshape(ROWS, 2, 2))
    b00, b01 = tl.split(b0.reshape(ROWS, 2, 2))
    b10, b11 = tl.split(b1.reshape(ROWS, 2, 2))
    return (
        tl.split(a00)
        + tl.split(a10)
        + tl.split(a01)
        + tl.split(a11)
        + tl.split(b00)
        + tl.split(b10)
        + tl.split(b01)
        + tl.split(b11)
    )


@triton.jit
def ascending(ids):
    """16 ids, the lowest first."""
    equal = (ids[0] * 0,) * 16
    for c in tl.static_range(_SORT_SIZE):
        equal, ids = _exchange(equal, ids, _SORT[2 * c], _SORT[2 * c + 1])
    return ids


_TOKENS = tl.constexpr(BLOCK_TOKENS)

# ---- Shared by the top-k kernels: score order, row-to-request map ----


@triton.jit
def cleaned(scores):
    """NaN counts as -inf, and -0.0 as +0.0."""
    return tl.where(scores == scores, scores, float("-inf")) + 0.0


@triton.jit
def clamped(value, most):
    """0 to ``most``: lengths and offsets of a captured launch were not checked."""
    return tl.minimum(tl.maximum(value, 0), most)


@triton.jit
def num_queries(start, end, total_q, max_queries):
    """Queries of a request from its first row and the row after its last, both clamped to ``q``."""
    return tl.minimum(tl.maximum(clamped(end, total_q) - clamped(start, total_q), 0), max_queries)


@triton.jit
def row_of_request(
    row,
    query_starts_ptr,
    query_ends_ptr,
    seq_lens_ptr,
    out_starts_ptr,
    width,
    total_q,
    batch,
    max_queries,
    H: tl.constexpr,
    BATCH: tl.constexpr,
):
    """A row of the output of :mod:`kernel.backends.triton.decode`: its ``nb``, 0 where it is no
    request's, and its number in ``q``."""
    token = row // H
    request = tl.arange(0, BATCH)
    listed = request < batch
    starts = tl.load(query_starts_ptr + request, mask=listed, other=0)
    ends = tl.load(query_ends_ptr + request, mask=listed, other=0)
    out_starts = clamped(tl.load(out_starts_ptr + request, mask=listed, other=0), total_q)
    queries = num_queries(starts, ends, total_q, max_queries)
    owner = tl.max(tl.where((out_starts <= token) & (token < out_starts + queries), request, -1), 0)
    found = owner >= 0
    query = token - clamped(tl.load(out_starts_ptr + owner, mask=found, other=0), total_q)
    start = tl.load(query_starts_ptr + owner, mask=found, other=0)
    length = num_queries(start, tl.load(query_ends_ptr + owner, mask=found, other=0), total_q, max_queries)
    start = clamped(start, total_q)
    keys = clamped(tl.load(seq_lens_ptr + owner, mask=found, other=0), width * _TOKENS)
    position = keys - length + query
    nb = tl.where(found & (position >= 0), position // _TOKENS + 1, 0)
    return nb, tl.where(found, (start + query) * H + row % H, row)


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
    group_stride,
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
        cells = (block // 16).to(tl.int64) * group_stride + block % 16
        scores = cleaned(tl.load(start[:, None] + cells[None, :], mask=seen, other=float("-inf")))
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
        scores = columns(tile if GROUPED and PADDED else cleaned(tile), ROWS)
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
