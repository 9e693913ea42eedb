"""Holds one scoring call as arrays, checked against the contract. Imports no torch: remote clients use it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from indexer.case.container import DTYPES, Array, refuse, shown
from kernel.arguments import UNMASKED, as_int, has_shape, shape_remedy
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

# ---- Checks of one value ----


def check_array(name: str, array: object, dtypes: tuple[str, ...], shape: tuple[int | None, ...]) -> None:
    """Refuse an array of another dtype or shape; None in a shape is any size.

    Raises:
        CaseFileError: naming the tensor, its value, the limit and the remedy.
    """
    if not isinstance(array, np.ndarray):
        refuse(name, type(array).__name__, "must be a numpy array", "call numpy.asarray() on it")
    _check_unmasked(name, array)
    if not any(array.dtype == DTYPES[dtype] for dtype in dtypes):
        wide = "F32" if array.dtype == np.float64 else ""
        refuse(
            f"{name}.dtype",
            array.dtype,
            f"must be one of {', '.join(dtypes)}",
            f"call .astype({DTYPES[wide if wide in dtypes else dtypes[0]].name})",
        )
    if not has_shape(array.shape, shape):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        refuse(f"{name}.shape", list(array.shape), f"must be [{wanted}]", shape_remedy(array.shape, shape))


def _check_unmasked(name: str, array: object) -> None:
    if isinstance(array, np.ma.MaskedArray):
        refuse(name, "a masked array", *UNMASKED)


def _check_number(record: object, name: str, least: int, most: int) -> None:
    """Refuse a field that is no whole number from ``least`` to ``most``; others are stored as ``int``."""
    value = getattr(record, name)
    number = as_int(value)
    if number is None or not least <= number <= most:
        refuse(name, shown(value), f"must be a whole number from {least} to {most}", "choose one of them")
    object.__setattr__(record, name, number)


def _check_scores(name: str, scores: Array, heads: int, total_q: int, num_blocks: int) -> None:
    """Refuse scores that are not ``[heads, total_q, num_blocks or more]``."""
    check_array(name, scores, ("F32",), (heads, total_q, None))
    if scores.shape[2] < num_blocks:
        limit = f"must be at least {num_blocks}, the blocks of the longest request"
        refuse(f"{name}.shape[2]", scores.shape[2], limit, "write every block")


# ---- What an engine recorded of a call: its result, and where its pages lay ----

EngineOrder = Literal["score", "block", "any"]
"""Order that an engine writes a row's ids in; ``any``: only the set counts."""
MAX_STRIDE = 10**9 - 1
"""Largest distance of two pages, bytes."""
MAX_LAYER = 10**6 - 1
_KEY_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True, eq=False, kw_only=True)
class EngineRecord:
    """An engine's result of a call.

    Attributes:
        block_ids: ``[H, total_q, topk]`` int32, logical block ids; -1 is no block.
        scores: ``[H, total_q, S]`` float32; cells past a row's blocks may hold anything.
        order: the order of ``block_ids`` in a row.
        page_ids: ``[num_pages]`` int32: the engine's own id of each page of the case.
        page_stride: bytes from one page to the next in the engine's cache, at least 9,216.
        new_keys: ``[total_q, 128]`` bfloat16, float16 or float32: the keys the engine wrote for the query
            tokens in this step, before quantisation.
        layer: the model's layer, None if not known.
    """

    block_ids: Array | None = None
    scores: Array | None = None
    order: EngineOrder = "any"
    page_ids: Array | None = None
    page_stride: int = PAGE_BYTES
    new_keys: Array | None = None
    layer: int | None = None

    def check(self, *, shape: tuple[int, int, int], num_blocks: int, num_pages: int | None) -> None:
        """Refuse what does not fit the call.

        Args:
            shape: heads, query tokens and top-k of the case.
            num_blocks: the least columns of scores.
            num_pages: pages of the case; None where it holds keys.

        Raises:
            CaseFileError: naming the tensor or field, its value, the limit and the remedy.
        """
        heads, total_q, _ = shape
        if self.order not in get_args(EngineOrder):
            refuse("engine_order", shown(self.order), "must be score, block or any", "write one of them")
        _check_number(self, "page_stride", PAGE_BYTES, MAX_STRIDE)
        if self.layer is not None:
            _check_number(self, "layer", 0, MAX_LAYER)
        if self.block_ids is not None:
            check_array("engine_block_ids", self.block_ids, ("I32",), shape)
        if self.scores is not None:
            _check_scores("engine_scores", self.scores, heads, total_q, num_blocks)
        if self.new_keys is not None:
            check_array("new_keys", self.new_keys, _KEY_DTYPES, (total_q, HEAD_DIM))
        if self.page_ids is not None:
            if num_pages is None:
                refuse("page_ids", "given", "belong to pages, which the file has not", "leave them out")
            check_array("page_ids", self.page_ids, ("I32",), (num_pages,))
            for i in np.flatnonzero(self.page_ids < 0)[:1]:
                refuse(f"page_ids[{i}]", int(self.page_ids[i]), "must be 0 or more", "write the engine's ids")


# ---- The call ----

PAGE_SHAPES = ((PAGE_BYTES,), (BLOCK_TOKENS, TOKEN_CODE_BYTES + GROUPS))
"""Shapes of one page: flat, or as serving engines shape it."""
MAX_FORCED_BLOCKS = 10**9 - 1
"""Most init or local blocks, far above the blocks of the longest context."""
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
        topk: blocks a row selects, 1 to ``MAX_TOPK``.
        source: where the call comes from, human-readable.
        expected_scores: ``[H, total_q, S]`` float32, ``S`` at least the blocks of the longest request.
        expected_block_ids: ``[H, total_q, topk]`` int32.
        engine: an engine's result of the call; it is judged, never trusted.

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
        _check_number(self, "init_blocks", 0, MAX_FORCED_BLOCKS)
        _check_number(self, "local_blocks", 0, MAX_FORCED_BLOCKS)
        _check_number(self, "topk", 1, MAX_TOPK)
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
            limit = "must be either index_k or pages + block_table"
            refuse("keys", " + ".join(names) or "none", limit, "give one form")
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
        return (self.positions() // BLOCK_TOKENS + 1).astype(np.int32)

    def positions(self) -> Array:
        """Position of every query token in its request: ``[total_q]`` int64."""
        prefix = self.seq_lens.astype(np.int64) - self.query_lens - self.cu_seqlens_q[:-1]
        return np.arange(self.total_q, dtype=np.int64) + np.repeat(prefix, self.query_lens)

    def requests_of(self, tokens: Array | int) -> Array:
        """Request of each of the query tokens, int64."""
        return np.searchsorted(self.cu_seqlens_q, tokens, side="right").astype(np.int64) - 1

    def _blocks(self) -> Array:
        blocks = -(-self.seq_lens.astype(np.int64) // BLOCK_TOKENS)
        return np.where(self.query_lens > 0, blocks, 0)

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
        _check_unmasked("pages", pages)
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
            found = int(block_table[i, column])
            refuse(f"block_table[{i}, {column}]", found, limit, "write every page in use")

    def _check_expected(self) -> None:
        if self.expected_scores is not None:
            scores, blocks = self.expected_scores, self.num_score_blocks
            _check_scores("expected_scores", scores, self.num_heads, self.total_q, blocks)
        if self.expected_block_ids is not None:
            shape = (self.num_heads, self.total_q, self.topk)
            check_array("expected_block_ids", self.expected_block_ids, ("I32",), shape)


# ---- Parts of a call ----


@dataclass(frozen=True, eq=False)
class Part:
    """Some query tokens of one request; its rows have the bits that they have in the whole call.

    Attributes:
        case: the part; its arrays are views where they can be.
        request: the request in the whole case.
        first: its first query token in the whole case.
    """

    case: Case
    request: int
    first: int


def parts(case: Case, max_cells: int) -> Iterator[Part]:
    """A case in parts of at most ``max_cells`` (row, block) cells, or of one query token, in order.

    Requests without queries have no part.
    """
    for request in range(case.batch):
        start, end = (int(offset) for offset in case.cu_seqlens_q[request : request + 2])
        blocks = -(-int(case.seq_lens[request]) // BLOCK_TOKENS)
        step = max(1, max_cells // max(1, blocks * case.num_heads))
        for first in range(start, end, step):
            yield Part(part_of(case, request, first, min(first + step, end)), request, first)


def part_of(case: Case, request: int, first: int, last: int) -> Case:
    """Query tokens ``first`` to ``last - 1`` of the whole call, all of one request; not empty."""
    end = int(case.cu_seqlens_q[request + 1])
    length = int(case.seq_lens[request]) - (end - last)
    tokens = slice(first, last)
    table = None if case.block_table is None else case.block_table[request : request + 1]
    keys = None
    if case.index_k is not None:
        first_key = int(case.seq_lens[:request].sum(dtype=np.int64))
        keys = case.index_k[first_key : first_key + length]
    engine = case.engine
    if engine is not None:
        engine = dataclasses.replace(
            engine,
            block_ids=None if engine.block_ids is None else engine.block_ids[:, tokens],
            scores=None if engine.scores is None else engine.scores[:, tokens],
            new_keys=None if engine.new_keys is None else engine.new_keys[tokens],
        )
    return dataclasses.replace(
        case,
        index_q=case.index_q[tokens],
        cu_seqlens_q=np.array([0, last - first], dtype=np.int32),
        seq_lens=np.array([length], dtype=np.int32),
        index_k=keys,
        block_table=table,
        expected_scores=None if case.expected_scores is None else case.expected_scores[:, tokens],
        expected_block_ids=None if case.expected_block_ids is None else case.expected_block_ids[:, tokens],
        engine=engine,
    )
