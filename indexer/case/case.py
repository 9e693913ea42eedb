"""One scoring call as arrays, checked against the contract. No torch, so that a remote client can use it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from indexer.case.array import check_array
from indexer.case.container import Array, refuse, shown
from indexer.case.engine import EngineRecord
from kernel.contract import (
    BLOCK_TOKENS,
    GROUPS,
    HEAD_DIM,
    MAX_SEQ_LEN,
    MAX_TOPK,
    PAGE_BYTES,
    SUPPORTED_HEADS,
    TOKEN_CODE_BYTES,
)
from kernel.scalars import as_int

PAGE_SHAPES = ((PAGE_BYTES,), (BLOCK_TOKENS, TOKEN_CODE_BYTES + GROUPS))
"""Shapes of one page: flat, or as serving engines shape it."""
MAX_FORCED_BLOCKS = 10**9 - 1
"""Most init or local blocks, far above the blocks of the longest context."""
_KEY_DTYPES = ("BF16", "F16", "F32")
_QUERY_DTYPES = ("BF16", "F16", "F32", "F8_E4M3")


@dataclass(frozen=True, eq=False, kw_only=True)
class Case:
    """One scoring call: the queries, the keys in one of two forms, and optionally what must come out.

    Construction checks everything the contract asks for but the finiteness of keys and queries, which the
    scorer refuses where they enter.

    Attributes:
        index_q: ``[total_q, H, 128]`` bfloat16, float16, float32 or float8_e4m3fn.
        cu_seqlens_q: ``[batch + 1]`` int32, exclusive prefix sum of the query lengths.
        seq_lens: ``[batch]`` int32, keys of each request, the queries' own included.
        index_k: ``[total_k, 128]`` bfloat16, float16 or float32: the requests' keys one after another.
        pages: ``[num_pages, 9216]`` or ``[num_pages, 128, 72]`` uint8, with ``block_table`` in place of
            ``index_k``.
        block_table: ``[batch, max_blocks]`` int32; columns past a request's blocks may hold anything.
        init_blocks: blocks forced at a row's start, 0 or more.
        local_blocks: blocks forced at a row's end, 0 or more.
        topk: blocks a row selects, 1 to 64.
        source: where the call comes from, for people.
        expected_scores: ``[H, total_q, S]`` float32, ``S`` at least the blocks of the longest request.
        expected_block_ids: ``[H, total_q, topk]`` int32.
        engine: what an engine made of the call; it is judged, never taken for right.

    Raises:
        CaseFileError: naming the tensor or field, its value, the limit and the remedy.
    """

    index_q: Array
    cu_seqlens_q: Array
    seq_lens: Array
    index_k: Array | None = None
    pages: Array | None = None
    block_table: Array | None = None
    init_blocks: int = 0
    local_blocks: int = 1
    topk: int = 16
    source: str = ""
    expected_scores: Array | None = None
    expected_block_ids: Array | None = None
    engine: EngineRecord | None = None

    def __post_init__(self) -> None:
        self._check_field("init_blocks", 0, MAX_FORCED_BLOCKS)
        self._check_field("local_blocks", 0, MAX_FORCED_BLOCKS)
        self._check_field("topk", 1, MAX_TOPK)
        if not all(char.isprintable() or char in "\n\t" for char in self.source):
            refuse("source", shown(self.source), "must be printable text", "leave control characters out")
        check_array("index_q", self.index_q, _QUERY_DTYPES, (None, None, HEAD_DIM))
        if self.num_heads not in SUPPORTED_HEADS:
            refuse("index_q.shape[1]", self.num_heads, f"must be one of {SUPPORTED_HEADS}", "split the heads")
        self._check_lengths()
        if self.index_k is not None and self.pages is None and self.block_table is None:
            self._check_keys(self.index_k)
        elif self.index_k is None and self.pages is not None and self.block_table is not None:
            self._check_pages(self.pages, self.block_table)
        else:
            names = [n for n in ("index_k", "pages", "block_table") if getattr(self, n) is not None]
            refuse(
                "keys",
                " + ".join(names) or "none",
                "must be either index_k or pages + block_table",
                "give one form",
            )
        self._check_expected()
        if self.engine is not None:
            self.engine.check(
                shape=(self.num_heads, self.total_q, self.topk),
                num_blocks=self.num_score_blocks,
                num_pages=None if self.pages is None else len(self.pages),
            )

    @property
    def num_heads(self) -> int:
        """H, index heads."""
        return int(self.index_q.shape[1])

    @property
    def total_q(self) -> int:
        """Query tokens of all requests."""
        return int(self.index_q.shape[0])

    @property
    def batch(self) -> int:
        """Requests."""
        return int(self.seq_lens.shape[0])

    @property
    def rows(self) -> int:
        """Rows, one per query token and head."""
        return self.total_q * self.num_heads

    @property
    def query_lens(self) -> Array:
        """``[batch]`` int64, queries of each request."""
        return np.diff(self.cu_seqlens_q.astype(np.int64))

    @property
    def total_k(self) -> int:
        """Keys of all requests."""
        return int(self.seq_lens.sum(dtype=np.int64))

    @property
    def num_score_blocks(self) -> int:
        """Blocks of the longest request that has queries: the least ``S`` of its scores."""
        return int(self._blocks().max(initial=0))

    def num_blocks_per_query(self) -> Array:
        """``nb`` of every query token, ``pos // 128 + 1``: ``[total_q]`` int32."""
        lengths = self.query_lens
        prefix = self.seq_lens.astype(np.int64) - lengths - self.cu_seqlens_q[:-1]
        positions = np.arange(self.total_q, dtype=np.int64) + np.repeat(prefix, lengths)
        return (positions // BLOCK_TOKENS + 1).astype(np.int32)

    def _blocks(self) -> Array:
        blocks = -(-self.seq_lens.astype(np.int64) // BLOCK_TOKENS)
        return np.where(self.query_lens > 0, blocks, 0)

    def _check_field(self, name: str, least: int, most: int) -> None:
        value = getattr(self, name)
        number = as_int(value)
        if number is None or not least <= number <= most:
            refuse(name, shown(value), f"must be a whole number from {least} to {most}", "choose one of them")
        object.__setattr__(self, name, number)

    def _check_lengths(self) -> None:
        check_array("seq_lens", self.seq_lens, ("I32",), (None,))
        check_array("cu_seqlens_q", self.cu_seqlens_q, ("I32",), (self.batch + 1,))
        starts = self.cu_seqlens_q
        if starts[0] != 0:
            refuse("cu_seqlens_q[0]", int(starts[0]), "must be 0", "write exclusive prefix sums")
        lengths = self.query_lens
        for i in np.flatnonzero(lengths < 0)[:1]:
            limit = f"must be at least cu_seqlens_q[{i}] = {starts[i]}"
            refuse(f"cu_seqlens_q[{i + 1}]", int(starts[i + 1]), limit, "write exclusive prefix sums")
        if starts[-1] != self.total_q:
            limit = f"must be {self.total_q}, the queries of index_q"
            refuse("cu_seqlens_q[-1]", int(starts[-1]), limit, "write all queries")
        for i in np.flatnonzero((self.seq_lens < lengths) | (self.seq_lens > MAX_SEQ_LEN))[:1]:
            limit = f"must be {lengths[i]} (the request's queries) to {MAX_SEQ_LEN}"
            refuse(f"seq_lens[{i}]", int(self.seq_lens[i]), limit, "count the queries' own keys in")

    def _check_keys(self, index_k: Array) -> None:
        check_array("index_k", index_k, _KEY_DTYPES, (None, HEAD_DIM))
        if index_k.shape[0] != self.total_k:
            limit = f"must be {self.total_k}, the sum of seq_lens"
            refuse("index_k.shape[0]", index_k.shape[0], limit, "write every request's keys, prefix included")

    def _check_pages(self, pages: Array, block_table: Array) -> None:
        if pages.dtype != np.uint8 or pages.shape[1:] not in PAGE_SHAPES:
            limit = f"must be U8 [num_pages, {PAGE_BYTES}] or [num_pages, 128, 72]"
            refuse("pages", f"{pages.dtype} {list(pages.shape)}", limit, "write one page a row")
        check_array("block_table", block_table, ("I32",), (self.batch, None))
        blocks = self._blocks()
        for i in np.flatnonzero(blocks > block_table.shape[1])[:1]:
            limit = f"must be at least {blocks[i]}, the blocks of seq_lens[{i}] = {self.seq_lens[i]}"
            refuse("block_table.shape[1]", block_table.shape[1], limit, "write the whole table")
        used = np.arange(block_table.shape[1]) < blocks[:, None]
        outside = used & ((block_table < 0) | (block_table >= pages.shape[0]))
        for i, column in np.argwhere(outside)[:1]:
            limit = f"must lie in [0, {pages.shape[0]}), the pages of the file"
            refuse(
                f"block_table[{i}, {column}]", int(block_table[i, column]), limit, "write every page in use"
            )

    def _check_expected(self) -> None:
        if self.expected_scores is not None:
            check_array(
                "expected_scores", self.expected_scores, ("F32",), (self.num_heads, self.total_q, None)
            )
            if self.expected_scores.shape[2] < self.num_score_blocks:
                limit = f"must be at least {self.num_score_blocks}, the blocks of the longest request"
                refuse("expected_scores.shape[2]", self.expected_scores.shape[2], limit, "write every block")
        if self.expected_block_ids is not None:
            shape = (self.num_heads, self.total_q, self.topk)
            check_array("expected_block_ids", self.expected_block_ids, ("I32",), shape)
