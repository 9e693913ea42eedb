"""Generators of scoring calls. All are seeded; lengths are ``(seq_len, query_len)`` pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from kernel.page import blocks_of
from tests.support.call import Call, cumulative
from tests.support.page_bytes import (
    EVERY_BYTE,
    LARGEST,
    MODERATE_SCALES,
    NAN,
    ODD_SCALES,
    ONE,
    PAGE,
    pack_page,
    poison_tokens,
    random_page,
)

Values = Literal["exact", "bytes", "inexact"]
"""Which queries and scale bytes a call has.

``exact``: queries are multiples of 1/2 up to 4, scales +-2^-2 to 3.75 with some zero and NaN ones.
``bytes``: queries are 32 values of +-1 among zeros, scale bytes are any byte.
``inexact``: any byte everywhere, but NaN in queries.
In the first two every partial sum is a multiple of 2^-9 below 2^14, so fp32 holds it exactly.
"""
RAGGED: tuple[tuple[int, int], ...] = (
    (300, 45),
    (0, 0),
    (129, 1),
    (128, 128),
    (517, 0),
    (1, 1),
    (2305, 3),
    (640, 17),
    (0, 0),
    (127, 2),
)
"""Prefill and decode, requests without queries or keys, a context of more than 16 blocks."""


def random_call(
    lengths: Sequence[tuple[int, int]] = RAGGED,
    heads: int = 4,
    *,
    seed: int = 0,
    values: Values = "exact",
    page_stride: int = PAGE,
    padding_columns: int = 3,
) -> Call:
    """A ragged call on permuted pages of a cache more than twice as large as it needs.

    Pages that no request uses, bytes past a request's last key and table columns past its blocks are poison:
    keys that would win, and ids that are negative, too large or of a poisoned page.
    """
    random = np.random.default_rng(seed)
    query_lens = [query_len for _, query_len in lengths]
    queries = _query_bytes(random, (sum(query_lens), heads, 128), values)
    blocks = [blocks_of(seq_len) for seq_len, _ in lengths]
    num_pages = 2 * sum(blocks) + 3
    page_ids = random.permutation(num_pages)[: sum(blocks)]
    pages = strided_pages(num_pages, page_stride)
    page_bytes = pages.numpy()
    page_bytes[:] = random_page(random, np.array([LARGEST], dtype=np.uint8))

    block_table = _padding(random, (len(lengths), max(blocks, default=0) + padding_columns), num_pages)
    first_query, first_block = 0, 0
    for row, (seq_len, query_len) in enumerate(lengths):
        used = page_ids[first_block : first_block + blocks[row]]
        block_table[row, : blocks[row]] = used
        for page_id in used:
            page_bytes[page_id] = random_page(random, _scales(values))
        if seq_len % 128:
            own_queries = queries[first_query : first_query + query_len].reshape(-1, 128)
            poison_tokens(page_bytes[used[-1]], seq_len % 128, own_queries)
        first_query += query_len
        first_block += blocks[row]
    return Call(
        q=torch.from_numpy(queries).view(torch.float8_e4m3fn),
        pages=pages,
        block_table=torch.from_numpy(block_table),
        cu_seqlens_q=cumulative(query_lens),
        seq_lens=torch.tensor([seq_len for seq_len, _ in lengths], dtype=torch.int32),
    )


def staircase_call(lengths: Sequence[tuple[int, int]], heads: int = 1) -> Call:
    """A call whose scores can be told by hand: ``q . k`` of the key at token t of its block is t.

    So a block wholly before a row's position scores 127, and the row's own block its position modulo 128: one
    key too many or too few shows in every row.
    """
    tokens = np.arange(128)
    codes = np.zeros((128, 128), dtype=np.uint8)
    for bit in range(7):
        codes[:, 16 * bit] = np.where(tokens >> bit & 1, 2, 0)  # code 2 is 1.0, group `bit` has scale 2^bit
    scales = np.tile(np.array([*(ONE + 8 * bit for bit in range(7)), ONE], dtype=np.uint8), (128, 1))
    page = pack_page(codes, scales)
    queries = np.zeros((sum(query_len for _, query_len in lengths), heads, 128), dtype=np.uint8)
    queries[:, :, ::16] = ONE
    blocks = max((blocks_of(seq_len) for seq_len, _ in lengths), default=0)
    return Call(
        q=torch.from_numpy(queries).view(torch.float8_e4m3fn),
        pages=torch.from_numpy(page[None].copy()),
        block_table=torch.zeros(len(lengths), blocks, dtype=torch.int32),
        cu_seqlens_q=cumulative([query_len for _, query_len in lengths]),
        seq_lens=torch.tensor([seq_len for seq_len, _ in lengths], dtype=torch.int32),
    )


def strided_pages(num_pages: int, page_stride: int) -> torch.Tensor:
    """Zeroed pages ``[num_pages, 9216]`` that lie ``page_stride`` bytes apart; the gaps hold 0xA5."""
    slab = torch.full((num_pages, page_stride), 0xA5, dtype=torch.uint8)
    pages = slab[:, :PAGE]
    pages.zero_()
    return pages


def _query_bytes(
    random: np.random.Generator, shape: tuple[int, int, int], values: Values
) -> NDArray[np.uint8]:
    magnitudes = {
        "exact": np.array([0x00, 0x30, 0x38, 0x3C, 0x40, 0x42, 0x44, 0x46, 0x48]),  # 0, .5 to 4 by halves
        "bytes": np.array([ONE]),
        "inexact": np.arange(NAN),
    }[values]
    queries = random.choice(np.concatenate([magnitudes, magnitudes | 0x80]), shape).astype(np.uint8)
    if values == "bytes":
        kept = random.permuted(np.broadcast_to(np.arange(128) < 32, shape), axis=-1)
        queries = np.where(kept, queries, 0).astype(np.uint8)
    return queries


def _scales(values: Values) -> NDArray[np.uint8]:
    if values == "exact":
        return np.concatenate([MODERATE_SCALES, ODD_SCALES])
    return EVERY_BYTE


def _padding(random: np.random.Generator, shape: tuple[int, int], num_pages: int) -> NDArray[np.int32]:
    garbage = np.array([-1, -(2**31), 2**31 - 1, num_pages, 0], dtype=np.int32)
    return random.choice(garbage, shape).astype(np.int32)
