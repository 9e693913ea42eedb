"""Sorting networks over 16 scores, or (score, id) items, that lie in registers, one of every row at a time.

A comparator of items looks at the score first and at the id where scores are equal (the lower id is better),
so the result does not depend on the order of steps: seven instructions. One of scores alone is a maximum and
a minimum. Scores must not be NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
