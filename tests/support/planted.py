"""Engines with exactly one fault each: a table of what each does otherwise, and the cause that must be named.

A fault replaces steps of :class:`tests.support.faulty_engine.Engine`: functions of the engine and the step's
arguments.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pickle
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from indexer.case import Case, EngineOrder, EngineRecord
from indexer.case.case import parts
from indexer.explain import EngineJudge, EngineVerdict
from indexer.oracle import OracleResult, run_oracle
from kernel.backends.base import SCORE_TOLERANCE
from tests.support.faulty_engine import Bytes, Engine, Floats, Step, engine_case

BOTH, ONLY_SCORES, ONLY_IDS = "scores ids", "scores", "ids"
ALL = (BOTH, ONLY_SCORES, ONLY_IDS)
Scores = NDArray[np.float32]
Ids = NDArray[np.int32]

# Cases. LONG has chunks of more than one block, LARGE has scales of 32 to 192 whose products reach 1,152.
LONG: dict[str, Any] = {"lengths": [(900, 300), (700, 10), (600, 200)]}
LARGE: dict[str, Any] = {"scales": (0x60, 0x74)}
LONG_PREFIX: dict[str, Any] = {"lengths": [(2600, 110), (1500, 130)]}
TWO_REQUESTS: dict[str, Any] = {"lengths": [(1700, 60), (700, 20)]}
EQUAL_ROWS: dict[str, Any] = {"lengths": [(900, 20), (1000, 10), (950, 5)]}
DECODE: dict[str, Any] = {"lengths": [(1700, 8), (1411, 1), (900, 1), (1100, 1)]}
ANY_FORCED: dict[str, Any] = {"init_blocks": 2, "local_blocks": 2}
ONE_LOCAL: dict[str, Any] = {"local_blocks": 1}
FOUR_HEADS: dict[str, Any] = {"heads": 4}


@dataclasses.dataclass(frozen=True)
class Fault:
    """A row of the table.

    Args:
        key: of :data:`FAULTS`, and the test's id.
        name: cause that must be named.
        family: of the cause.
        records: what must be recorded for the name to be found.
        options: of :func:`engine_case`.
        prepare: what is changed in the case.
        only: part of the call that the cause is said to be in.
        part: which rows ``[H, total_q]`` are wrong, of head, request and position; all by default.
        order: that the file states.
        steps: of the engine, by name.
    """

    key: str
    name: str
    family: str
    records: tuple[str, ...]
    options: Mapping[str, Any]
    prepare: Callable[[Case], Case]
    only: str | None
    part: Callable[..., NDArray[np.bool_]] | None
    order: EngineOrder
    steps: Mapping[str, Step]

    def made(self) -> Case:
        """The case that shows the fault, without a result."""
        return self.prepare(engine_case(**self.options))

    def run(self, case: Case) -> Case:
        """A case with the faulty engine's scores and ids."""
        with np.errstate(invalid="ignore", over="ignore"):
            wrong = Engine(case, **self.steps).run()
        assert wrong.engine is not None
        if self.part is None:
            return dataclasses.replace(wrong, engine=dataclasses.replace(wrong.engine, order=self.order))
        right = Engine(case).run()
        assert right.engine is not None
        token = np.arange(case.total_q)
        request = np.searchsorted(case.cu_seqlens_q, token, side="right") - 1
        position = (case.seq_lens - case.query_lens)[request] + token - case.cu_seqlens_q[request]
        head, row = np.arange(case.num_heads)[:, None], np.zeros_like(token)[None]
        faulty = self.part(head + row, request + row, position + row)[:, :, None]
        mixed = {
            name: np.where(faulty, getattr(wrong.engine, name), getattr(right.engine, name))
            for name in ("scores", "block_ids")
        }
        return dataclasses.replace(right, engine=dataclasses.replace(right.engine, **mixed))


FAULTS: dict[str, Fault] = {}
"""Every fault by its key."""


def _fault(
    key: str,
    name: str,
    family: str,
    records: tuple[str, ...] = ALL,
    options: Mapping[str, Any] | None = None,
    *,
    prepare: Callable[[Case], Case] = lambda case: case,
    only: str | None = None,
    part: Callable[..., NDArray[np.bool_]] | None = None,
    order: EngineOrder = "score",
    **steps: Step,
) -> None:
    assert key not in FAULTS
    assert all(hasattr(Engine, step) for step in steps)
    FAULTS[key] = Fault(key, name, family, records, options or {}, prepare, only, part, order, steps)


@cache
def planted(key: str) -> Case:
    """A fault's file, with scores and ids; made once."""
    fault = FAULTS[key]
    return fault.run(fault.made())


def only(case: Case, record: str) -> Case:
    """The same with only what was recorded."""
    assert case.engine is not None
    engine = dataclasses.replace(
        case.engine,
        scores=case.engine.scores if "scores" in record else None,
        block_ids=case.engine.block_ids if "ids" in record else None,
    )
    return dataclasses.replace(case, engine=engine)


_ANSWERS: dict[bytes, OracleResult] = {}
"""Of the oracle: most faults are planted in the same call."""


def explained(case: Case) -> EngineVerdict:
    """As ``verify`` does it, without a backend of our own."""
    judge = EngineJudge(case, SCORE_TOLERANCE["exact"], max_findings=16)
    for part in parts(case, 1 << 22):
        asked = dataclasses.replace(part.case, engine=None)
        key = hashlib.sha256(pickle.dumps(asked)).digest()
        if key not in _ANSWERS:
            _ANSWERS[key] = run_oracle(asked)
        judge.add(part, _ANSWERS[key])
    return judge.verdict()


# Steps done wrong

_SWAPPED: Any = {"codes": lambda e, page: Engine.codes(e, (page >> 4 | page << 4).astype(np.uint8))}


def _split(pairs: Bytes, axis: int) -> Bytes:
    """Low and high nibbles, joined along an axis."""
    return np.concatenate([pairs & 15, pairs >> 4], axis=axis).reshape(128, 128)


def _regrouped(change: Callable[[Bytes], Bytes]) -> Step:
    """The step of scales whose groups ``[128, 8]`` are changed."""
    return lambda e, page: np.repeat(change(page[8192:].reshape(128, 8)), 16, axis=1)


def _changed_pages(change: Callable[[Bytes], None]) -> Callable[[Case], Case]:
    def prepare(case: Case) -> Case:
        assert case.pages is not None
        pages = case.pages.copy()
        change(pages)
        return dataclasses.replace(case, pages=pages)

    return prepare


def _sign_in_bit_0(e: Engine, page: Bytes) -> Bytes:
    codes = Engine.codes(e, page)
    return (codes // 2 + codes % 2 * 8).astype(np.uint8)


def _minus_zero(pages: Bytes) -> None:
    pages[:, 8192::3] |= 0x80


def _nan_scales(pages: Bytes) -> None:
    pages[::2, 8192::301] = 0x7F
    pages[1::2, 8193::301] = 0xFF


def _nan_as_480(e: Engine, codes: Floats, scales: Bytes) -> Floats:
    factors = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    factors[scales == 0x7F], factors[scales == 0xFF] = 480, -480
    return e.cast(codes * factors)


def _e4m3(products: Floats) -> Floats:
    return products.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


def _rotated(query: NDArray[Any]) -> Floats:
    """The fast Hadamard transform, orthonormal."""
    values = query.astype(np.float64).reshape((2,) * 7)
    for axis in range(7):
        low, high = np.split(values, 2, axis)
        values = np.concatenate([low + high, low - high], axis)
    return np.asarray(values.reshape(128) / np.sqrt(128))


def _unsaturated(e: Engine, products: Floats) -> Floats:
    small = Engine.cast(e, products / 4) * 4  # the same four significant bits, two octaves higher
    return np.where(np.abs(products) > 448, small, Engine.cast(e, products))


def _eight_columns(case: Case) -> Case:
    assert case.block_table is not None
    return dataclasses.replace(case, block_table=case.block_table[:, :8].copy())


def _with_page_ids(case: Case, count: int, seed: int) -> Case:
    assert case.pages is not None
    ids = np.random.default_rng(seed).choice(count, len(case.pages), replace=False).astype(np.int32)
    return dataclasses.replace(case, engine=EngineRecord(page_ids=ids))


def _page_ids(e: Engine) -> Ids:
    assert e.case.engine is not None
    assert e.case.engine.page_ids is not None
    return e.case.engine.page_ids


def _id_of_8_bits(e: Engine, request: int, block: int) -> Bytes:
    held = _page_ids(e)
    (found,) = np.nonzero(held == int(held[e.table[request, block]]) % 256)
    return e.at(int(found[0])) if len(found) else Engine.page(e, request, block)[::-1]


def _other_page(other: dict[tuple[int, int], tuple[int, int]]) -> Step:
    return lambda e, request, block: Engine.page(e, *other.get((request, block), (request, block)))


def _turned_page(*where: tuple[int, int]) -> Step:
    return lambda e, request, block: Engine.page(e, request, block)[:: -1 if (request, block) in where else 1]


def _unwritten(e: Engine, request: int, block: int) -> Bytes:
    page = Engine.page(e, request, block)
    return np.zeros_like(page) if (request, block) in ((0, 3), (4, 2), (0, 11)) else page


def _this_step(change: Callable[[Floats], Any]) -> Step:
    """Products of the keys of the request's own queries, changed."""

    def present(e: Engine, products: Floats, request: int) -> Floats:
        prefix = int(e.case.seq_lens[request] - e.case.query_lens[request])
        return np.where(np.arange(len(products)) >= prefix, change(products), products)

    return present


_zeros_read = _this_step(lambda products: np.minimum(products, 0) * 0)


def _large_behind_the_end(case: Case) -> Case:
    """Behind a request's last key lie the largest keys that there are: they are read by nobody."""
    assert case.pages is not None
    assert case.block_table is not None
    pages = case.pages.copy()
    for request, seq_len in enumerate(case.seq_lens.tolist()):
        page = pages[case.block_table[request, (seq_len - 1) // 128]]
        end = (seq_len - 1) % 128 + 1
        page[end * 64 : 8192], page[8192 + end * 8 :] = 0x77, 0x7E
    return dataclasses.replace(case, pages=pages)


def _selected(scores: Scores, topk: int) -> Ids:
    """The best blocks of each row; -1 behind them."""
    best = np.argsort(-scores, axis=2, kind="stable")[:, :, :topk]
    seen = np.take_along_axis(scores, best, axis=2) > -np.inf
    ids = np.full((*scores.shape[:2], topk), -1, dtype=np.int32)
    ids[:, :, : best.shape[2]] = np.where(seen, best, -1)
    return ids


def _ids(change: Step) -> Step:
    """Right scores, and ids that are changed: a function of the engine, scores and ids."""
    return lambda e, scores, ids: (scores, np.asarray(change(e, scores, ids)).astype(np.int32))


def _scores(change: Callable[[Scores], Any]) -> Step:
    """Changed scores, and right ids."""
    return lambda e, scores, ids: (np.asarray(change(scores)).astype(np.float32), ids)


def _reselected(change: Callable[[Scores], Any]) -> Step:
    """Changed scores, and the ids that they give."""

    def outputs(e: Engine, scores: Scores, ids: Ids) -> tuple[Scores, Ids]:
        changed = np.asarray(change(scores)).astype(np.float32)
        return changed, _selected(changed, e.case.topk)

    return outputs


def _seen_as(read: Callable[[Scores], Any]) -> Step:
    """Right scores, and ids that others give."""
    return _ids(lambda e, scores, ids: _selected(read(scores), e.case.topk))


def _of_all_heads(reduce: Callable[[Scores], Any]) -> Step:
    def change(scores: Scores) -> Scores:
        return np.stack([np.where(scores[0] >= 1e29, scores[0], reduce(scores))] * len(scores))

    return _reselected(change)


def _requests(case: Case) -> NDArray[np.int64]:
    return np.repeat(np.arange(case.batch), case.query_lens)[:, None]


def _blocks_before(case: Case) -> NDArray[np.int64]:
    blocks = -(-case.seq_lens // 128)
    return np.repeat([blocks[:r].sum() for r in range(len(blocks))], case.query_lens)[:, None]


def _cache_ids(e: Engine, ids: Ids) -> Ids:
    return _page_ids(e)[e.table[_requests(e.case), ids]]


def _widened(scores: Scores) -> Scores:
    """In a wider buffer, as an engine's is."""
    return np.pad(scores, ((0, 0), (0, 0), (0, 2)), constant_values=-np.inf)


def _fill_last(ids: Ids) -> Ids:
    return np.take_along_axis(ids, np.argsort(ids < 0, axis=2, kind="stable"), axis=2)


_LOWEST: Any = {"outputs": _seen_as(lambda scores: np.where(scores == -np.inf, scores, -scores))}

_SEVENTEEN_BLOCKS: dict[str, Any] = {"topk": 24, "lengths": [(5100, 40), (4700, 20)]}


def _in(dtype: Any) -> Callable[[Scores], Scores]:
    return lambda scores: scores.astype(dtype).astype(np.float32)


_bf16, _fp16 = _in(ml_dtypes.bfloat16), _in(np.float16)


def _zeros(scores: Scores) -> Scores:
    """What equal scores are: zero in every block that a row sees."""
    return np.where(scores == -np.inf, scores, np.float32(0))


def _written(value: float) -> Step:
    return lambda e, scores, ids: (np.full_like(scores, value), _selected(_zeros(scores), e.case.topk))


def _from_the_end(e: Engine, scores: Scores, ids: Ids) -> Ids:
    last = scores.shape[2] - 1
    turned = _selected(_zeros(scores)[:, :, ::-1], e.case.topk)
    return np.where(turned < 0, turned, last - turned).astype(np.int32)


def _token_major(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array.transpose(1, 0, 2)).reshape(array.shape)


def _head_major(e: Engine, scores: Scores, ids: Ids) -> Ids:
    heads, tokens, k = ids.shape
    return np.asarray(ids.reshape(tokens, heads, k).transpose(1, 0, 2).copy())


def _flat_query(e: Engine, token: int, head: int) -> Floats:
    return _e4m3(e.case.index_q.reshape(-1, 128)[head * e.case.total_q + token])


_ids_token_major = _ids(lambda e, scores, ids: _token_major(ids))

_NO_PREFIX: Any = {"position": lambda e, request, query, prefix, seq_len: query}


def _forcing(init: int | None = None, local: int | None = None) -> Step:
    """Other numbers of forced blocks than stated; None is what is stated."""

    def forced(e: Engine, row: Floats, position: int, seq_len: int) -> Floats:
        blocks = np.arange(len(row))
        row = np.where(blocks < (e.case.init_blocks if init is None else init), 1e30, row)
        return np.where(blocks >= len(row) - (e.case.local_blocks if local is None else local), 1e29, row)

    return forced


def _init_over_local(e: Engine, row: Floats, position: int, seq_len: int) -> Floats:
    blocks = np.arange(len(row))
    row = np.where(blocks >= len(row) - e.case.local_blocks, 1e29, row)
    return np.where(blocks < e.case.init_blocks, 1e30, row)


def _exchanged(e: Engine, row: Floats, position: int, seq_len: int) -> Floats:
    blocks = np.arange(len(row))
    row = np.where(blocks < e.case.init_blocks, 1e29, row)
    return np.where(blocks >= len(row) - e.case.local_blocks, 1e30, row)


def _ids_of_the_file(e: Engine, scores: Scores, ids: Ids) -> Ids:
    assert e.case.engine is not None
    assert e.case.engine.block_ids is not None
    return e.case.engine.block_ids


# fmt: off
# How a page becomes keys.
_FAMILY = "nibble order"
_fault("NibblesSwapped", "nibbles are swapped", _FAMILY, **_SWAPPED)
_fault("NibblesPlanar", "nibbles are planar", _FAMILY,
       codes=lambda e, page: _split(page[:8192].reshape(128, 64), 1))
_fault("NibblesPlanarInGroups", "nibbles are planar in each group", _FAMILY,
       codes=lambda e, page: _split(page[:8192].reshape(128, 8, 8), 2))

_FAMILY = "scale order"
_fault("ScalesInterleaved", "scales are read interleaved with codes", _FAMILY,
       codes=lambda e, page: _split(page.reshape(128, 72)[:, :64, None], 2),
       scales=lambda e, page: np.repeat(page.reshape(128, 72)[:, 64:], 16, axis=1))
_fault("ScalesGroupMajor", "scales are read group-major", _FAMILY,
       scales=_regrouped(lambda groups: groups.reshape(8, 128).T))
# Tile, row % 32, row // 32, column:
_fault("ScalesSwizzled", "scales are read swizzled", _FAMILY,
       scales=_regrouped(lambda groups: groups.reshape(2, 32, 4, 4).transpose(2, 1, 0, 3).reshape(128, 8)))
_fault("SwizzledByToken", "swizzled scales are read by token", _FAMILY,
       scales=_regrouped(lambda groups: groups.reshape(4, 32, 2, 4).transpose(2, 1, 0, 3).reshape(128, 8)))
_fault("ScalesFirst", "scales are read before the codes", _FAMILY,
       codes=lambda e, page: Engine.codes(e, page[1024:]),
       scales=lambda e, page: np.repeat(page[:1024].reshape(128, 8), 16, axis=1))

_FAMILY = "scale group"
for _key, _name, _change in (
    ("GroupsOf32", "groups have 32 dims", lambda groups: np.repeat(groups[:, :4], 2, axis=1)),
    ("NextGroup", "each group has the next group's scale", lambda groups: np.roll(groups, -1, axis=1)),
    ("GroupBefore", "each group has the group's before", lambda groups: np.roll(groups, 1, axis=1)),
    ("GroupsReversed", "groups are in reverse", lambda groups: groups[:, ::-1]),
    ("GroupPairs", "pairs of groups are exchanged", lambda groups: groups[:, [1, 0, 3, 2, 5, 4, 7, 6]]),
    ("GroupHalves", "halves of groups are exchanged", lambda groups: np.roll(groups, 4, axis=1)),
    ("OneScale", "one scale a token", lambda groups: np.repeat(groups[:, :1], 8, axis=1)),
    ("NextTokensScales", "each token has the next token's scales",
     lambda groups: np.roll(groups, -1, axis=0)),
    ("PreviousTokensScales", "each token has the previous token's scales",
     lambda groups: np.roll(groups, 1, axis=0)),
):
    _fault(_key, _name, _FAMILY, scales=_regrouped(_change))
_fault("GroupsOf8", "groups have 8 dims", _FAMILY,
       scales=lambda e, page: np.tile(np.repeat(page[8192:].reshape(128, 8), 8, axis=1), (1, 2)))
_fault("GroupsStrided", "groups are strided", _FAMILY,
       scales=lambda e, page: np.tile(page[8192:].reshape(128, 8), (1, 16)))

_FAMILY = "sign"
_fault("Unsigned", "keys lose their sign", _FAMILY, keys=lambda e, page: np.abs(Engine.keys(e, page)))
_fault("Negated", "keys have the other sign", _FAMILY, keys=lambda e, page: -Engine.keys(e, page))
_fault("SignInBit0", "the sign is taken from bit 0", _FAMILY, codes=_sign_in_bit_0)
_fault("ScaleSignLost", "the scale's sign is lost", _FAMILY, prepare=_changed_pages(_minus_zero),
       scales=lambda e, page: (Engine.scales(e, page) & 0x7F).astype(np.uint8))

_FAMILY = "saturation and rounding"
_fault("Unsaturated", "keys are not saturated at 448", _FAMILY, options=LARGE, cast=_unsaturated)
_fault("KeptBeyond", "keys beyond 448 are kept as they are", _FAMILY, options=LARGE,
       cast=lambda e, products: np.where(np.abs(products) > 448, products, Engine.cast(e, products)))
_fault("OverflowToNaN", "keys beyond 448 become NaN", _FAMILY, options=LARGE,
       cast=lambda e, products: _e4m3(products))
_fault("OverflowToZero", "keys beyond 448 become 0", _FAMILY, options=LARGE,
       cast=lambda e, products: np.nan_to_num(_e4m3(products), nan=0.0))
_fault("Unrounded", "keys are not rounded to E4M3", _FAMILY, options=LARGE,
       cast=lambda e, products: products)
_fault("Clamped", "keys are saturated, not rounded", _FAMILY, options=LARGE,
       cast=lambda e, products: products.clip(-448, 448))
_fault("NaNScales", "NaN scales are not zero", _FAMILY, prepare=_changed_pages(_nan_scales),
       values=_nan_as_480)
_fault("QueriesNotCast", "queries are not cast to E4M3", _FAMILY,
       query=lambda e, token, head: e.case.index_q[token, head].astype(np.float64))

_FAMILY = "query rotation"
_fault("QueriesRotated", "queries are rotated, keys are not", _FAMILY,
       query=lambda e, token, head: _e4m3(_rotated(e.case.index_q[token, head])))
_fault("QueriesRotatedIn16Bits", "queries are rotated in 16 bits, keys are not", _FAMILY,
       query=lambda e, token, head: _e4m3(_rotated(e.case.index_q[token, head]).astype(ml_dtypes.bfloat16)))

# Which page is read, and what it holds then.
_FAMILY = "block-table stride"
_fault("LogicalStride", "the block table's rows are taken to lie 14 entries apart", _FAMILY,
       page=lambda e, request, block: e.at(e.table.reshape(-1)[request * 14 + block]))
_fault("RowZero", "the block table's rows are taken to lie 0 entries apart", _FAMILY,
       page=lambda e, request, block: e.at(e.table[0, block]))
_fault("NextRow", "the next request's row of the block table is read", _FAMILY, options=EQUAL_ROWS,
       page=lambda e, request, block: e.at(e.table[(request + 1) % 3, block]))
_fault("ColumnMajor", "the block table is read column-major", _FAMILY, options=EQUAL_ROWS,
       prepare=_eight_columns, page=lambda e, request, block: e.at(e.table.reshape(-1)[block * 3 + request]))
# Some of what is read instead lies outside the file:
_fault("IdsOf8Bits", "page ids are kept in 8 bits", "page id wrap", (BOTH, ONLY_SCORES),
       prepare=lambda case: _with_page_ids(case, 400, seed=3), page=_id_of_8_bits)

_FAMILY = "stale or unwritten page"

_STALE, _HELD_ELSE = "pages hold another block's keys", "pages held something else"

_NOT_WRITTEN = "this step's keys are not yet written, zeros are read"
_fault("Unwritten", "pages are read as unwritten", _FAMILY, page=_unwritten)
_fault("StalePage", _STALE, _FAMILY, (BOTH, ONLY_SCORES), page=_other_page({(0, 3): (4, 1), (2, 5): (2, 6)}))
_fault("UnknownPage", _HELD_ELSE, _FAMILY, (BOTH, ONLY_SCORES), page=_turned_page((0, 3), (2, 5)))
_fault("StalePageByIds", _STALE, _FAMILY, (ONLY_IDS,), TWO_REQUESTS, page=_other_page({(0, 3): (1, 3)}))
_fault("UnknownPageByIds", _HELD_ELSE, _FAMILY, (ONLY_IDS,), TWO_REQUESTS, page=_turned_page((0, 3)))
_fault("StepNotWritten", _NOT_WRITTEN, _FAMILY, (BOTH, ONLY_SCORES), LONG, present=_zeros_read)
_fault("GarbageTail", _NOT_WRITTEN, _FAMILY, (BOTH, ONLY_SCORES), {"scales": (0x08, 0x18)},
       prepare=_large_behind_the_end, present=_zeros_read)
_fault("StepLeftOut", "this step's keys are left out", _FAMILY, (BOTH, ONLY_SCORES), LONG,
       present=_this_step(lambda products: -np.inf))

# How scores become ids, and what is written as scores and ids.
_FAMILY, _IDS = "selection", (BOTH, ONLY_IDS)

_LARGEST, _MEAN = "by the largest of the heads' scores", "by the sum or mean of the heads' scores"
_fault("SharedByLargest", f"one selection is shared by all heads: {_LARGEST}", _FAMILY, _IDS,
       outputs=_seen_as(lambda scores: np.stack([scores.max(axis=0)] * 2)))
_fault("SharedByMean", f"one selection is shared by all heads: {_MEAN}", _FAMILY, _IDS,
       {**FOUR_HEADS, **ONE_LOCAL}, outputs=_seen_as(lambda scores: np.stack([scores.mean(axis=0)] * 4)))
for _key, _name, _reduce in (
    ("LargestOfHeads", "largest", lambda scores: scores.max(axis=0)),
    ("SumOfHeads", "sum", lambda scores: scores.sum(axis=0)),
    ("MeanOfHeads", "mean", lambda scores: scores.mean(axis=0)),
):
    _fault(_key, f"all heads have the same scores: the {_name} of the heads' scores", _FAMILY,
           (BOTH, ONLY_SCORES), {**FOUR_HEADS, **ONE_LOCAL}, outputs=_of_all_heads(_reduce))
_fault("Lowest", "the lowest scores are picked", _FAMILY, _IDS, **_LOWEST)
_fault("LowestWithMasked", "the lowest scores are picked, masked blocks first", _FAMILY, _IDS,
       outputs=_ids(lambda e, scores, ids: np.argsort(scores, axis=2, kind="stable")[:, :, : e.case.topk]))
_fault("LowestBesideForced", "the lowest scores are picked beside the forced blocks", _FAMILY, _IDS,
       ONE_LOCAL,
       outputs=_seen_as(lambda scores: np.where((scores == -np.inf) | (scores > 1e28), scores, -scores)))
_fault("FewerIds", "3 blocks are selected where 4 are stated", _FAMILY, _IDS,
       outputs=_ids(lambda e, scores, ids: np.where(np.arange(4) < 3, ids, -1)))
_fault("OneId", "1 block is selected where 4 are stated", _FAMILY, _IDS,
       outputs=_ids(lambda e, scores, ids: np.where(np.arange(4) < 1, ids, -1)))
_fault("FewerIdsOverZeros", "4 blocks are selected where 7 are stated, and 0 is written behind them",
       _FAMILY, _IDS, {"topk": 7}, outputs=_ids(lambda e, scores, ids: np.where(np.arange(7) < 4, ids, 0)))
_fault("BestLeftOut", "the best block is left out", _FAMILY, _IDS,
       outputs=_ids(lambda e, scores, ids: _selected(scores, e.case.topk + 1)[:, :, 1:]))

_FAMILY = "meaning of ids"
for _key, _name, _meaning in (
    ("OneTooHigh", "ids are one too high", lambda e, ids: ids + 1),
    ("OffByFive", "ids are 5 too high", lambda e, ids: ids + 5),
    ("FirstTokens", "ids are first tokens of blocks", lambda e, ids: ids * 128),
    ("OfTheBatch", "ids count on over the requests of the batch",
     lambda e, ids: ids + _blocks_before(e.case)),
    ("PagesOfTheFile", "ids are page ids of the file", lambda e, ids: e.table[_requests(e.case), ids]),
):
    _fault(_key, _name, _FAMILY, _IDS,
           outputs=_ids(lambda e, scores, ids, _of=_meaning: np.where(ids < 0, ids, _of(e, ids))))
_fault("PagesOfTheCache", "ids are page ids of the engine's cache", _FAMILY, _IDS,
       prepare=lambda case: _with_page_ids(case, 100_000, seed=7),
       outputs=_ids(lambda e, scores, ids: np.where(ids < 0, ids, _cache_ids(e, ids))))
_fault("OneTooLow", "ids are one too low", _FAMILY, _IDS, outputs=_ids(lambda e, scores, ids: ids - 1))
_fault("FilledWithZero", "0 stands behind the ids for -1", _FAMILY, _IDS, {"topk": 8},
       outputs=_ids(lambda e, scores, ids: np.where(ids < 0, 0, ids)))

_FAMILY = "order of ids"
_fault("SortedByBlock", "ids are sorted by block, not by score", _FAMILY, _IDS,
       outputs=_ids(lambda e, scores, ids: _fill_last(np.sort(ids, axis=2))))
_fault("SortedByScore", "ids are sorted by score, not by block", _FAMILY, _IDS, order="block")
_fault("LowestScoreFirst", "ids are sorted from the lowest score up, not by score", _FAMILY, _IDS,
       outputs=_ids(lambda e, scores, ids: _fill_last(ids[:, :, ::-1])))
_fault("LastBlockFirst", "ids are sorted from the last block down, not by block", _FAMILY, _IDS,
       order="block", outputs=_ids(lambda e, scores, ids: -np.sort(-ids, axis=2)))
_fault("FillingFirst", "-1 stands before the ids", _FAMILY, _IDS, {"topk": 12},
       outputs=_ids(lambda e, scores, ids: _fill_last(ids[:, :, ::-1])[:, :, ::-1]))
_fault("NoOrder", "ids are not in the order stated", _FAMILY, _IDS, {"topk": 6},
       outputs=_ids(lambda e, scores, ids: _fill_last(ids[:, :, [3, 1, 4, 0, 5, 2]])))

_FAMILY, _COLUMNS = "score columns", "score columns are shifted by one: block b stands in column"
_fault("ColumnsLater", f"{_COLUMNS} b + 1", _FAMILY, (BOTH, ONLY_SCORES),
       outputs=_scores(lambda scores: np.roll(_widened(scores), 1, axis=2)))
_fault("ColumnsEarlier", f"{_COLUMNS} b - 1", _FAMILY, (BOTH, ONLY_SCORES),
       outputs=_scores(lambda scores: np.roll(scores, -1, axis=2)))

_FAMILY = "scale of scores"
_fault("SoftmaxScale", "scores are multiplied by 0.0883883 (1/sqrt(128), the softmax scale)", _FAMILY,
       (BOTH, ONLY_SCORES), ONE_LOCAL,
       outputs=_scores(lambda scores: np.where(scores >= 1e29, scores, scores * np.float32(128**-0.5))))
_fault("OddScale", "scores are multiplied by 3.7", _FAMILY, (BOTH, ONLY_SCORES), ONE_LOCAL,
       outputs=_scores(lambda scores: scores * np.float32(3.7)))

# What scores are held in: a type of 16 bits, or a buffer that nobody wrote.
_FAMILY = "rounding of scores"
for _key, _type, _when, _round in (
    ("BfloatAfter", "bfloat16", " after the selection", _bf16),
    ("BfloatAlone", "bfloat16", "", _bf16),
    ("BfloatButSentinels", "bfloat16", " after the selection",
     lambda scores: np.where(scores >= 1e29, scores, _bf16(scores))),
    ("HalfAfter", "float16", " after the selection", _fp16),
    ("HalfAlone", "float16", "", _fp16),
    # Sentinels at the largest finite value:
    ("HalfCapped", "float16", " after the selection",
     lambda scores: _fp16(np.where(scores >= 1e29, np.float32(65504), scores))),
):
    _fault(_key, f"scores are rounded to {_type}{_when}", _FAMILY, (BOTH if _when else ONLY_SCORES,),
           ANY_FORCED, outputs=_scores(_round))
_fault("BfloatBefore", "scores are rounded to bfloat16 before the selection", _FAMILY, _IDS,
       _SEVENTEEN_BLOCKS, outputs=_reselected(_bf16))
_fault("HalfBefore", "scores are rounded to float16 before the selection", _FAMILY, (BOTH,),
       _SEVENTEEN_BLOCKS, outputs=_reselected(_fp16))

_FAMILY, _EQUAL = "scores never computed", "the selection saw equal scores: the"
_fault("Equal", f"{_EQUAL} lowest ids", _FAMILY, (BOTH,), outputs=_seen_as(_zeros))
_fault("EqualFromTheEnd", f"{_EQUAL} highest ids", _FAMILY, (BOTH,), outputs=_ids(_from_the_end))
# A forced init block would stand before a local one:
_fault("EqualBesideForced", f"{_EQUAL} lowest ids beside the forced blocks", _FAMILY, _IDS, ONE_LOCAL,
       outputs=_seen_as(lambda scores: np.where(scores >= 1e29, scores, _zeros(scores))))
_fault("AllZero", "scores are all zero", _FAMILY, (BOTH, ONLY_SCORES), outputs=_written(0.0))
_fault("AllNan", "scores are all NaN", _FAMILY, (BOTH, ONLY_SCORES), ONE_LOCAL, outputs=_written(np.nan))
_fault("AllMinusInfinity", "scores are all -inf", _FAMILY, (BOTH, ONLY_SCORES), outputs=_written(-np.inf))
# The buffer that is written is not the one that ids are selected by:
_fault("ZeroButSentinels", "scores are all zero", _FAMILY, (BOTH, ONLY_SCORES), ANY_FORCED,
       outputs=_scores(lambda scores: np.where(np.abs(scores) < 1e29, np.float32(0), scores)))

# Where queries are read and results are written.
_FAMILY, _IN_HEAD_MAJOR = "head/token layout", "token-major in a buffer that is read head-major"
_fault("TokenMajorIds", f"ids are {_IN_HEAD_MAJOR}", _FAMILY, (BOTH,), outputs=_ids_token_major)
_fault("TokenMajorIdsAlone", f"ids are {_IN_HEAD_MAJOR}", _FAMILY, (ONLY_IDS,), outputs=_ids_token_major)
_fault("TokenMajorScores", f"scores are {_IN_HEAD_MAJOR}", _FAMILY, (BOTH, ONLY_SCORES),
       outputs=_scores(_token_major))
_fault("TokenMajorBoth", f"ids and scores are {_IN_HEAD_MAJOR}", _FAMILY, (BOTH,), FOUR_HEADS,
       outputs=lambda e, scores, ids: (_token_major(scores), _token_major(ids)))
_fault("HeadMajorIds", "ids are head-major in a buffer that is read token-major", _FAMILY, _IDS,
       outputs=_ids(_head_major))
_fault("HeadMajorQueries", "queries are read head-major", _FAMILY, query=_flat_query)
_fault("HeadZero", "every head is scored with head 0's queries", _FAMILY,
       query=lambda e, token, head: Engine.query(e, token, 0))
_fault("HeadsExchanged", "heads are permuted: ids and scores of heads 0 to 1 are those of 1, 0", _FAMILY,
       (BOTH,), outputs=lambda e, scores, ids: (scores[::-1].copy(), ids[::-1].copy()))
_fault("HeadsRotatedIds", "heads are permuted: ids of heads 0 to 3 are those of 1, 2, 3, 0", _FAMILY, _IDS,
       FOUR_HEADS, outputs=_ids(lambda e, scores, ids: np.roll(ids, -1, axis=0)))
_fault("HeadsReversedScores", "heads are permuted: scores of heads 0 to 3 are those of 3, 2, 1, 0", _FAMILY,
       (BOTH, ONLY_SCORES), FOUR_HEADS, outputs=_scores(lambda scores: scores[::-1].copy()))
_fault("HeadsMixedUp", "heads are mixed up: ids and scores of heads 0 to 3 are those of 0, 0, 2, 2", _FAMILY,
       (BOTH,), FOUR_HEADS, query=lambda e, token, head: Engine.query(e, token, head // 2 * 2))
_fault("HeadOnesIds", "every head has head 1's ids", _FAMILY, _IDS,
       outputs=_ids(lambda e, scores, ids: np.stack([ids[1]] * 2)))
_fault("HeadZerosIds", "every head has head 0's ids", _FAMILY, (BOTH,),
       outputs=_ids(lambda e, scores, ids: np.stack([ids[0]] * 2)))
_fault("ResultsShifted", "results are those of 3 rows earlier", _FAMILY,
       outputs=lambda e, scores, ids: (np.roll(scores, 3, axis=1), np.roll(ids, 3, axis=1)))
_fault("QueriesShifted", "queries are those of 1 row later", _FAMILY,
       query=lambda e, token, head: Engine.query(e, (token + 1) % e.case.total_q, head))

# What a row sees: the mask, its position, the forced blocks.
_FAMILY = "causal mask"
_fault("NoMaskInTheBlock", "no causal mask in the row's own block", _FAMILY, options=LONG,
       last_key=lambda e, position, seq_len: min(position // 128 * 128 + 127, seq_len - 1))
_fault("NoMaskPastTheEnd", "no causal mask, past the request's end too", _FAMILY,
       last_key=lambda e, position, seq_len: position // 128 * 128 + 127)
_fault("NoMask", "no causal mask at all", _FAMILY, options={"lengths": [(520, 480), (390, 370)]},
       position=lambda e, request, query, prefix, seq_len: seq_len - 1)
_fault("OwnKeyMasked", "the query's own key is masked", _FAMILY, (BOTH, ONLY_SCORES),
       last_key=lambda e, position, seq_len: position - 1)
_fault("OneKeyTooMany", "one key too many is visible", _FAMILY, (BOTH, ONLY_SCORES),
       last_key=lambda e, position, seq_len: position + 1)

_FAMILY = "chunk-start offset"
_fault("NoPrefix", "the chunk's prefix is ignored", _FAMILY, **_NO_PREFIX)
_fault("PrefixTwice", "the chunk's prefix is counted twice", _FAMILY,
       options={"lengths": [(500, 380), (330, 250)]},
       position=lambda e, request, query, prefix, seq_len: min(2 * prefix + query, seq_len - 1))
_fault("StartRoundedDown", "the chunk's start is rounded down to a block", _FAMILY,
       position=lambda e, request, query, prefix, seq_len: prefix // 128 * 128 + query)
_fault("StartRoundedUp", "the chunk's start is rounded up to a block", _FAMILY, options=LONG_PREFIX,
       position=lambda e, request, query, prefix, seq_len: min(-(-prefix // 128) * 128 + query, seq_len - 1))
_fault("FirstQuerysPosition", "every query has the position of the chunk's first", _FAMILY,
       (BOTH, ONLY_SCORES), LONG, position=lambda e, request, query, prefix, seq_len: prefix)
_fault("BatchOffset", "queries count from the batch's first", _FAMILY,
       options={"lengths": [(600, 90), (2600, 300), (1500, 160)]},
       position=lambda e, request, query, prefix, seq_len: min(
           prefix + int(e.case.cu_seqlens_q[request]) + query, seq_len - 1))

_FAMILY = "sentinels"
_fault("NothingForced", "forced blocks are not forced", _FAMILY, options=ANY_FORCED, forced=_forcing(0, 0))
_fault("ForcedInSelection", "forced blocks are put into the selection only", _FAMILY, (BOTH,), ANY_FORCED,
       prepare=lambda case: Engine(case).run(), forced=_forcing(0, 0), outputs=_ids(_ids_of_the_file))
_fault("InitOverLocal", "init wins over local", _FAMILY, (BOTH, ONLY_SCORES),
       {**ANY_FORCED, "lengths": [(300, 290), (260, 200)]}, forced=_init_over_local)
_fault("InitMissing", "init blocks are not forced", _FAMILY, options=ANY_FORCED, forced=_forcing(init=0))
_fault("LocalMissing", "local blocks are not forced", _FAMILY, options=ANY_FORCED, forced=_forcing(local=0))
_fault("SentinelsExchanged", "init and local sentinels are exchanged", _FAMILY, (BOTH, ONLY_SCORES),
       ANY_FORCED, forced=_exchanged)
_fault("LocalFromTheEnd", "local blocks count from the request's end", _FAMILY,
       options={"local_blocks": 2, **LONG_PREFIX},
       forced=lambda e, row, position, seq_len: np.where(
           np.arange(len(row)) >= -(-seq_len // 128) - 2, 1e29, row))
for _key, _name, _counts, _stated in (
    ("OneLocalFewer", "1 local block is forced, not 2", {"local": 1}, ANY_FORCED),
    ("OneLocalMore", "2 local blocks are forced, not 1", {"local": 2}, ONE_LOCAL),
    ("ThreeLocalMore", "4 local blocks are forced, not 1", {"local": 4}, {"local_blocks": 1, "topk": 6}),
    ("MoreLocalThanK", "7 local blocks are forced, not 1", {"local": 7},
     {"local_blocks": 1, "lengths": [(1700, 30), (1500, 9)]}),
    ("TwoInitFewer", "1 init block is forced, not 3", {"init": 1}, {"init_blocks": 3}),
    ("InitUnasked", "3 init blocks are forced, not 0", {"init": 3}, {"local_blocks": 1, "topk": 6}),
    ("OtherCounts", "3 init blocks are forced, not 1 and 2 local blocks are forced, not 1",
     {"init": 3, "local": 2}, {"init_blocks": 1, "local_blocks": 1, "topk": 7}),
):
    _fault(_key, _name, _FAMILY, options=_stated, forced=_forcing(**_counts))

# Faults that some rows of a call have and the others do not.
for _key, _where, _wrong_rows, _stated in (
    ("InOneHead", "in head 1", lambda head, request, position: head == 1, {}),
    ("InOneRequest", "in request 2", lambda head, request, position: request == 2, {}),
    ("InDecodeRows", "in decode rows", lambda head, request, position: request > 0, DECODE),
):
    _fault(_key, "nibbles are swapped", "nibble order", options=_stated, only=_where, part=_wrong_rows,
           **_SWAPPED)
_fault("FromAPosition", "the lowest scores are picked", "selection", _IDS, only="from position 1,410 on",
       part=lambda head, request, position: position >= 1280, **_LOWEST)
