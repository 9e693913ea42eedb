"""Top-k of few rows: a program a row, the whole row in registers.

The k-th best of the maxima of the row's parts, 64 at most for k up to 16, is a lower bound of the k-th best
score. Few scores reach it (18 to 25 for k = 16, unless many are equal): they are written to a list and ranked
by counting those that are better. Where more reach it than the list holds, the row's maximum is taken k
times.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernel.backends.triton.rows import cleaned, row_of_request

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
            row, num_blocks_ptr, query_ends_ptr, seq_lens_ptr, out_starts_ptr, batch, max_queries, H, BATCH
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
