"""Generators of scoring calls. All are seeded; lengths are ``(seq_len, query_len)`` pairs."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from kernel.backends.reference.quantizer import magnitude_lut
from kernel.batch import ScoreBatch
from kernel.checks import checked_batch
from kernel.page import blocks_of

# A scoring call as an engine makes it, kept on the host until a backend needs it on its device.

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Call:
    """The arguments of :func:`kernel.checks.checked_batch`, on the host."""

    q: torch.Tensor
    """``[total_q, H, 128]`` float8_e4m3fn."""
    pages: torch.Tensor
    """``[num_pages, 9216]`` uint8, any page stride."""
    block_table: torch.Tensor
    """``[batch, max_blocks]`` int32."""
    cu_seqlens_q: torch.Tensor
    """``[batch + 1]`` int32."""
    seq_lens: torch.Tensor
    """``[batch]`` int32."""
    init_blocks: int = 0
    local_blocks: int = 0

    @property
    def total_q(self) -> int:
        return self.q.shape[0]

    @property
    def num_heads(self) -> int:
        return self.q.shape[1]

    def forcing(self, init_blocks: int, local_blocks: int) -> Call:
        """The same call with other forced blocks."""
        return replace(self, init_blocks=init_blocks, local_blocks=local_blocks)

    def batch(self, device: torch.device = CPU) -> ScoreBatch:
        """The checked call on a device; on the CPU it shares memory with this one."""
        return checked_batch(
            self.q.to(device),
            pages_on(self.pages, device),
            self.block_table.to(device),
            self.cu_seqlens_q.to(device),
            self.seq_lens.to(device),
            lut=torch.from_numpy(magnitude_lut()).to(device),
            num_heads=self.num_heads,
            init_blocks=self.init_blocks,
            local_blocks=self.local_blocks,
        )


def pages_on(pages: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Pages on a device with the stride they have; themselves where they are there already."""
    if pages.device == device:
        return pages
    copy = torch.empty_strided(pages.shape, pages.stride(), dtype=pages.dtype, device=device)
    return copy.copy_(pages)


def cumulative(lengths: list[int]) -> torch.Tensor:
    """Exclusive prefix sums as int32, ``[len + 1]``."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)


# Raw page bytes by hand: no quantiser is involved, so a test knows every code and scale it scores.

CODES_END = 8192
PAGE = 9216
ONE = 0x38
"""E4M3 byte of 1.0."""
LARGEST = 0x7E
"""E4M3 byte of 448, the largest value."""
NAN = 0x7F
EVERY_BYTE = np.arange(256, dtype=np.uint8)
MODERATE_SCALES = np.concatenate([np.arange(0x28, 0x48), np.arange(0xA8, 0xC8)]).astype(np.uint8)
"""Scales of magnitude 2^-2 up to 3.75, every mantissa, both signs."""
ODD_SCALES = np.array([0x00, 0x80, 0x7F, 0xFF], dtype=np.uint8)
"""Zero and NaN scales: they all read as magnitude 0."""


def pack_page(codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A page ``[9216]`` of codes ``[128, 128]`` (token, dim) and scale bytes ``[128, 8]`` (token, group)."""
    page = np.empty(PAGE, dtype=np.uint8)
    page[:CODES_END] = (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(-1)
    page[CODES_END:] = scales.reshape(-1)
    return page


def random_page(random: np.random.Generator, scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A page of random codes whose scale bytes are drawn from ``scales``."""
    page = random.integers(0, 256, PAGE, dtype=np.uint8)
    page[CODES_END:] = random.choice(scales, PAGE - CODES_END)
    return page


def poison_tokens(page: NDArray[np.uint8], first_token: int, queries: NDArray[np.uint8]) -> None:
    """Fill a page from a token on with keys that would win: 448 with the signs of the queries, in turn.

    Args:
        page: ``[9216]``, written.
        first_token: 0 to 128.
        queries: ``[n, 128]`` E4M3 bytes; without any, all signs are plus.
    """
    tokens = np.arange(first_token, 128)
    plus = np.zeros((len(tokens), 128), dtype=np.uint8)
    signs = queries[tokens % len(queries)] >> 7 if len(queries) else plus
    codes = (signs << 3 | 7).astype(np.uint8)
    page[first_token * 64 : CODES_END] = (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(-1)
    page[CODES_END + first_token * 8 :] = LARGEST


Values = Literal["exact", "bytes", "inexact"]
"""Which queries and scale bytes a call has.

``exact``: queries are multiples of 1/2 up to 4, scales +-2^-2 to 3.75 with some zero and NaN ones.
``bytes``: queries are 32 values of +-1 among zeros, scale bytes are any byte.
``inexact``: any byte everywhere, but NaN in queries.
In the first two every partial sum is a multiple of 2^-9 below 2^14, so fp32 holds it exactly.
"""
Lengths = Sequence[tuple[int, int]]
RAGGED: Lengths = (
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
    lengths: Lengths = RAGGED,
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


def staircase_call(lengths: Lengths, heads: int = 1) -> Call:
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


# Gigabytes of which a test touches a few pages.

MAP_NORESERVE = 0x4000
"""Linux: take no swap for it. Python's mmap names it from 3.13 on."""


def sparse_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    """``[num_bytes]`` uint8 zeros: on the CPU only what is touched takes memory."""
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.uint8)


def sparse_pages(num_pages: int, page_stride: int, device: torch.device) -> torch.Tensor:
    """``[num_pages, 9216]`` uint8 zeros, ``page_stride`` bytes apart; the cache ends with its last page."""
    storage = sparse_bytes((num_pages - 1) * page_stride + 9216, device)
    return storage.as_strided((num_pages, 9216), (page_stride, 1))


def sparse_scores(shape: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    """``[H, tokens, cells]`` fp32 zeros."""
    return sparse_bytes(4 * math.prod(shape), device).view(torch.float32).view(shape)


# Decode steps of one shape whose lengths change, and the buffers that one launch or graph serves.

STEPS: list[list[tuple[int, int]]] = [
    [(2305, 1), (128, 1), (129, 1), (4000, 1), (1, 1)],
    [(2306, 1), (0, 0), (130, 2), (17, 1), (700, 1)],
    [(40, 1), (4001, 2), (0, 0), (700, 0), (256, 2)],
    [(3072, 1), (3073, 1), (3074, 1), (3075, 1), (3076, 1)],
]
"""(seq_len, query_len) of five requests in consecutive steps; some pad the batch."""
ROWS, COLUMNS = 6, 32


class StepBuffers:
    """What a step is captured with: room for any of ``calls``, which have one batch size and H."""

    def __init__(self, calls: Sequence[Call], device: torch.device) -> None:
        num_pages = max(call.pages.shape[0] for call in calls)
        heads, batch = calls[0].num_heads, calls[0].seq_lens.shape[0]
        self.q = torch.zeros(ROWS, heads, 128, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        self.pages = torch.zeros(num_pages, 9216, dtype=torch.uint8, device=device)
        self.block_table = torch.zeros(batch, COLUMNS, dtype=torch.int32, device=device)
        self.cu_seqlens_q = torch.zeros(batch + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=device)

    def write(self, call: Call) -> None:
        """Fill the buffers with a call, in place."""
        self.q.view(torch.uint8).zero_()
        self.q.view(torch.uint8)[: call.total_q] = call.q.view(torch.uint8).to(self.q.device)
        self.pages[: call.pages.shape[0]] = call.pages.to(self.pages.device)
        width = min(COLUMNS, call.block_table.shape[1])
        self.block_table[:, :width] = call.block_table[:, :width].to(self.q.device)
        self.cu_seqlens_q.copy_(call.cu_seqlens_q)
        self.seq_lens.copy_(call.seq_lens)
