"""A slow engine in plain numpy whose every step can be done wrong, to make files with exactly one fault.

It shares no code with the oracle or with what explains faults: E2M1 and E4M3 come from ``ml_dtypes``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from indexer.case import Case, EngineOrder, EngineRecord
from indexer.case.case import parts
from indexer.explain import MAX_FINDINGS, EngineJudge, EngineVerdict
from indexer.explain.engine import Naming
from indexer.oracle import run_oracle
from kernel.backends.base import SCORE_TOLERANCE

LENGTHS = ((1700, 30), (300, 20), (1100, 9), (1411, 1), (700, 20))
"""``(seq_len, query_len)``: contexts beyond k blocks, prefixes that end inside a block."""
TOPK = 4
Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]
Step = Callable[..., Any]
"""Of an engine: the engine itself, and the arguments of the method that it replaces."""


def engine_case(
    lengths: Sequence[tuple[int, int]] = LENGTHS,
    heads: int = 2,
    *,
    seed: int = 0,
    scales: tuple[int, int] = (0x28, 0x48),
    **options: Any,
) -> Case:
    """A case on permuted pages, unused columns of the table -1, tokens past a request's end large.

    Args:
        lengths: of the requests.
        heads: H.
        seed: of everything.
        scales: range of scale bytes.
        options: of the case, and ``page_ids`` and ``page_stride`` of its record.
    """
    random = np.random.default_rng(seed)
    query_lens = [query_len for _, query_len in lengths]
    blocks = [-(-seq_len // 128) for seq_len, _ in lengths]
    pages = random.integers(0, 256, (sum(blocks) + 3, 9216), dtype=np.uint8)
    pages[:, 8192:] = random.integers(*scales, (len(pages), 1024), dtype=np.uint8)
    # A drift over the block makes places differ: random keys alone are alike under many faults.
    pages[:, 8192:] += (np.arange(1024) // 256).astype(np.uint8)
    ids = random.permutation(len(pages))
    table = np.full((len(lengths), max(blocks) + 2), -1, dtype=np.int32)
    first = 0
    for row, count in enumerate(blocks):
        table[row, :count] = ids[first : first + count]
        first += count
    queries = random.normal(size=(sum(query_lens), heads, 128)).astype(ml_dtypes.bfloat16)
    record = {name: options.pop(name) for name in ("page_ids", "page_stride") if name in options}
    fields: dict[str, Any] = {"local_blocks": 0, "topk": TOPK, **options}
    return Case(
        index_q=queries,
        cu_seqlens_q=np.cumsum([0, *query_lens]).astype(np.int32),
        seq_lens=np.array([seq_len for seq_len, _ in lengths], dtype=np.int32),
        pages=pages,
        block_table=table,
        engine=EngineRecord(**record) if record else None,
        **fields,
    )


class Engine:
    """Computes a case by the contract; a fault replaces a step, in a subclass or by ``steps``.

    Args:
        case: paged.
        steps: functions of the engine and the step's arguments, by the method that they replace.
    """

    def __init__(self, case: Case, **steps: Step) -> None:
        assert case.pages is not None
        assert case.block_table is not None
        self.case, self.pages, self.table = case, case.pages, case.block_table
        for name, step in steps.items():
            setattr(self, name, partial(step, self))

    def run(self, record: str = "scores ids") -> Case:
        """The case with this engine's result: ``scores``, ``ids`` or both."""
        case = self.case
        scores = np.full((case.num_heads, case.total_q, case.num_score_blocks), -np.inf, dtype=np.float32)
        ids = np.full((case.num_heads, case.total_q, case.topk), -1, dtype=np.int32)
        for request in range(case.batch):
            first, end = (int(start) for start in case.cu_seqlens_q[request : request + 2])
            seq_len = int(case.seq_lens[request])
            keys = np.concatenate(
                [self.keys(self.page(request, block)) for block in range(-(-seq_len // 128))]
            )
            for token in range(first, end):
                position = self.position(request, token - first, seq_len - (end - first), seq_len)
                for head in range(case.num_heads):
                    row = self.row(keys, self.query(token, head), position, seq_len, request)
                    scores[head, token, : len(row)] = row
                    best = np.argsort(-row.astype(np.float32), kind="stable")[: case.topk]
                    ids[head, token, : len(best)] = best
        held_scores, held_ids = self.outputs(scores, ids)
        result = dataclasses.replace(
            case.engine or EngineRecord(),
            scores=held_scores if "scores" in record else None,
            block_ids=held_ids if "ids" in record else None,
            order="score",
        )
        return dataclasses.replace(case, engine=result)

    def row(self, keys: Floats, query: Floats, position: int, seq_len: int, request: int) -> Floats:
        """Scores of one row's blocks."""
        num_blocks = position // 128 + 1
        products = keys @ query
        last = self.last_key(position, seq_len)
        products = np.where(np.arange(len(products)) <= last, products, -np.inf)
        products = self.present(products, request)
        seen = products[: num_blocks * 128]
        row = np.where(np.isnan(seen), -np.inf, seen).reshape(-1, 128).max(axis=1)
        return self.forced(row, position, seq_len)

    def keys(self, page: Bytes) -> Floats:
        if vars(self).keys().isdisjoint(DECODING):
            return _keys(page.tobytes())
        return self.decoded(page)

    def decoded(self, page: Bytes) -> Floats:
        codes, scales = self.codes(page), self.scales(page)
        return self.values(codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64), scales)

    def codes(self, page: Bytes) -> Bytes:
        packed = page[:8192].reshape(128, 64)
        return np.stack([packed & 15, packed >> 4], axis=2).reshape(128, 128)

    def scales(self, page: Bytes) -> Bytes:
        """One for each dim, ``[128, 128]``."""
        return np.repeat(page[8192:].reshape(128, 8), 16, axis=1)

    def values(self, codes: Floats, scales: Bytes) -> Floats:
        factors = np.nan_to_num(scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64), nan=0.0)
        return self.cast(codes * factors)

    def cast(self, products: Floats) -> Floats:
        return products.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)

    def query(self, token: int, head: int) -> Floats:
        return np.asarray(self.queries[token, head])

    @cached_property
    def queries(self) -> Floats:
        return np.asarray(self.case.index_q.astype(ml_dtypes.float8_e4m3fn).astype(np.float64))

    def page(self, request: int, block: int) -> Bytes:
        return self.at(self.table[request, block])

    def at(self, place: int) -> Bytes:
        page: Bytes = self.pages[place]
        return page

    def position(self, request: int, query: int, prefix: int, seq_len: int) -> int:
        return prefix + query

    def last_key(self, position: int, seq_len: int) -> int:
        return position

    def present(self, products: Floats, request: int) -> Floats:
        return products

    def forced(self, row: Floats, position: int, seq_len: int) -> Floats:
        blocks = np.arange(len(row))
        row = np.where(blocks < self.case.init_blocks, 1e30, row)
        return np.where(blocks >= len(row) - self.case.local_blocks, 1e29, row)

    def outputs(
        self, scores: NDArray[np.float32], ids: NDArray[np.int32]
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        return scores, ids


DECODING = ("decoded", "codes", "scales", "values", "cast")
"""Steps of which keys are made."""


@cache
def _keys(page: bytes) -> Floats:
    """A page's keys by the contract: most faults leave them as they are, in the same few calls."""
    return Engine.__new__(Engine).decoded(np.frombuffer(page, dtype=np.uint8))


# An engine's result changed by hand and judged, without a search for causes.

JUDGED_LENGTHS = ((300, 2), (2600, 3))
"""``(seq_len, query_len)``: rows that see fewer blocks than they could pick, and rows that see more."""
JUDGED_TOPK = 6


def right_case() -> Case:
    """Two heads, five tokens; the first block and the last one are forced."""
    return Engine(engine_case(JUDGED_LENGTHS, topk=JUDGED_TOPK, init_blocks=1, local_blocks=1)).run()


def recorded(case: Case) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """Copies of the engine's scores and ids, to be changed."""
    assert case.engine is not None
    assert case.engine.scores is not None
    assert case.engine.block_ids is not None
    return case.engine.scores.copy(), case.engine.block_ids.copy()


def with_result(
    case: Case,
    scores: NDArray[np.float32] | None,
    ids: NDArray[np.int32] | None,
    order: EngineOrder = "score",
) -> Case:
    """The case with another result of the engine."""
    assert case.engine is not None
    record = dataclasses.replace(case.engine, scores=scores, block_ids=ids, order=order)
    return dataclasses.replace(case, engine=record)


def judged(
    case: Case, tolerance: float = SCORE_TOLERANCE["exact"], max_findings: int = MAX_FINDINGS
) -> EngineVerdict:
    """The verdict, without causes."""
    judge = EngineJudge(case, tolerance, max_findings)
    for part in parts(case, 1 << 22):
        judge.add(part, run_oracle(part.case))
    return judge.summary(Naming((), (), ()), None)
