"""Which pages of an engine's cache a call reads, and their numbers in its case file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from indexer.case.container import Array
from kernel.contract import BLOCK_TOKENS, PAGE_BYTES
from kernel.errors import InvalidArgumentError

WRAPS = (1 << 31, 1 << 32)
"""Bytes at which an offset of 32 bits wraps, signed and unsigned."""


@dataclass(frozen=True, eq=False)
class PagesInUse:
    """Pages of a call.

    Attributes:
        ids: ``[num_pages]`` int64 page ids of the engine that the call uses, ascending.
        table: ``[batch, max_blocks]`` int32, the block table by place in ``ids``; -1 in columns not in use.
    """

    ids: Array
    table: Array


def pages_in_use(block_table: Array, query_lens: Array, seq_lens: Array, num_pages: int) -> PagesInUse:
    """The pages of the requests that have queries.

    Raises:
        InvalidArgumentError: the table is too narrow, or a page id in use lies outside the cache.
    """
    blocks = np.where(query_lens > 0, -(-seq_lens.astype(np.int64) // BLOCK_TOKENS), 0)
    width = block_table.shape[1]
    if blocks.max(initial=0) > width:
        limit = f"must be at least {blocks.max()}, the blocks of the longest request"
        raise InvalidArgumentError("block_table.shape[1]", width, limit, "pass the whole table")
    used = np.arange(width) < blocks[:, None]
    outside = used & ((block_table < 0) | (block_table >= num_pages))
    for row, column in np.argwhere(outside)[:1]:
        raise InvalidArgumentError(
            f"block_table[{row}, {column}]",
            int(block_table[row, column]),
            f"must lie in [0, {num_pages}), the pages of the cache",
            "call it where the engine scores, after the table is set",
        )
    ids, places = np.unique(block_table[used].astype(np.int64), return_inverse=True)
    table = np.full(block_table.shape, -1, dtype=np.int32)
    table[used] = places.reshape(-1)
    return PagesInUse(ids, table)


def wrapped_page_ids(ids: Array, page_stride: int, num_pages: int) -> Array:
    """Ids of the other pages of a cache that offsets of 32 bits would read in place of ``ids``."""
    offsets = ids * page_stride
    found = [ids[:0]]
    for wrap in WRAPS:
        first = offsets[offsets >= wrap] % wrap
        found += [first // page_stride, (first + PAGE_BYTES - 1) // page_stride]
    others = np.setdiff1d(np.concatenate(found), ids)
    return others[others < num_pages]
