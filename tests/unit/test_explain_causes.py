"""Each fault that can be named, planted alone: the file is called wrong, and the fault by its name."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from indexer.case import Case, EngineRecord
from indexer.case.part import parts
from indexer.explain import EngineJudge, EngineVerdict
from indexer.oracle import run_oracle
from kernel.backends.base import SCORE_TOLERANCE
from tests.support.faulty_engine import Bytes, Engine, Floats, engine_case

BOTH, ONLY_SCORES, ONLY_IDS = "scores ids", "scores", "ids"
ALL = (BOTH, ONLY_SCORES, ONLY_IDS)
LONG = {"lengths": [(900, 300), (700, 10), (600, 200)]}
"""Chunks of more than one block."""
ANY_FORCED = {"init_blocks": 2, "local_blocks": 2}


class Planted(Engine):
    """A fault: its case, what names it, and what must be recorded for that."""

    name: ClassVar[str]
    family: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}
    records: ClassVar[tuple[str, ...]] = ALL

    @classmethod
    def made(cls) -> Case:
        return engine_case(**cls.options)


class NoMaskInTheBlock(Planted):
    name, family = "no causal mask in the row's own block", "causal mask"
    options: ClassVar[dict[str, Any]] = LONG

    def last_key(self, position: int, seq_len: int) -> int:
        return min(position // 128 * 128 + 127, seq_len - 1)


class NoMaskPastTheEnd(Planted):
    name, family = "no causal mask, past the request's end too", "causal mask"

    def last_key(self, position: int, seq_len: int) -> int:
        return position // 128 * 128 + 127


class NoMask(Planted):
    name, family = "no causal mask at all", "causal mask"
    options: ClassVar[dict[str, Any]] = {"lengths": [(900, 850), (600, 560)]}

    def position(self, request: int, query: int, prefix: int, seq_len: int) -> int:
        return seq_len - 1


class OwnKeyMasked(Planted):
    name, family = "the query's own key is masked", "causal mask"
    records = (BOTH, ONLY_SCORES)

    def last_key(self, position: int, seq_len: int) -> int:
        return position - 1


class OneKeyTooMany(Planted):
    name, family = "one key too many is visible", "causal mask"
    records = (BOTH, ONLY_SCORES)

    def last_key(self, position: int, seq_len: int) -> int:
        return position + 1


class NoPrefix(Planted):
    name, family = "the chunk's prefix is ignored", "chunk-start offset"

    def position(self, request: int, query: int, prefix: int, seq_len: int) -> int:
        return query


class PrefixTwice(Planted):
    name, family = "the chunk's prefix is counted twice", "chunk-start offset"
    options: ClassVar[dict[str, Any]] = {"lengths": [(900, 700), (600, 500)]}

    def position(self, request: int, query: int, prefix: int, seq_len: int) -> int:
        return min(2 * prefix + query, seq_len - 1)


class StartRoundedDown(Planted):
    name, family = "the chunk's start is rounded down to a block", "chunk-start offset"

    def position(self, request: int, query: int, prefix: int, seq_len: int) -> int:
        return prefix // 128 * 128 + query


class StartRoundedUp(Planted):
    name, family = "the chunk's start is rounded up to a block", "chunk-start offset"
    options: ClassVar[dict[str, Any]] = {"lengths": [(2600, 300), (1500, 290)]}

    def position(self, request: int, query: int, prefix: int, seq_len: int) -> int:
        return min(-(-prefix // 128) * 128 + query, seq_len - 1)


class FirstQuerysPosition(Planted):
    name, family = "every query has the position of the chunk's first", "chunk-start offset"
    options: ClassVar[dict[str, Any]] = LONG
    records = (BOTH, ONLY_SCORES)

    def position(self, request: int, query: int, prefix: int, seq_len: int) -> int:
        return prefix


class BatchOffset(Planted):
    name, family = "queries count from the batch's first", "chunk-start offset"
    options: ClassVar[dict[str, Any]] = {"lengths": [(600, 90), (2600, 400), (1500, 300)]}

    def position(self, request: int, query: int, prefix: int, seq_len: int) -> int:
        return min(prefix + int(self.case.cu_seqlens_q[request]) + query, seq_len - 1)


class NothingForced(Planted):
    name, family, options = "forced blocks are not forced", "sentinels", ANY_FORCED

    def forced(self, row: Floats, position: int, seq_len: int) -> Floats:
        return row


class InitOverLocal(Planted):
    name, family = "init wins over local", "sentinels"
    options: ClassVar[dict[str, Any]] = {**ANY_FORCED, "lengths": [(300, 290), (260, 200)]}
    records = (BOTH, ONLY_SCORES)

    def forced(self, row: Floats, position: int, seq_len: int) -> Floats:
        blocks = np.arange(len(row))
        row = np.where(blocks >= len(row) - self.case.local_blocks, 1e29, row)
        return np.where(blocks < self.case.init_blocks, 1e30, row)


class InitMissing(Planted):
    name, family, options = "init blocks are not forced", "sentinels", ANY_FORCED

    def forced(self, row: Floats, position: int, seq_len: int) -> Floats:
        return np.where(np.arange(len(row)) >= len(row) - self.case.local_blocks, 1e29, row)


class LocalMissing(Planted):
    name, family, options = "local blocks are not forced", "sentinels", ANY_FORCED

    def forced(self, row: Floats, position: int, seq_len: int) -> Floats:
        return np.where(np.arange(len(row)) < self.case.init_blocks, 1e30, row)


class SentinelsExchanged(Planted):
    name, family, options = "init and local sentinels are exchanged", "sentinels", ANY_FORCED
    records = (BOTH, ONLY_SCORES)

    def forced(self, row: Floats, position: int, seq_len: int) -> Floats:
        blocks = np.arange(len(row))
        row = np.where(blocks < self.case.init_blocks, 1e29, row)
        return np.where(blocks >= len(row) - self.case.local_blocks, 1e30, row)


class LocalFromTheEnd(Planted):
    name, family = "local blocks count from the request's end", "sentinels"
    options: ClassVar[dict[str, Any]] = {"local_blocks": 2, "lengths": [(2600, 300), (1500, 290)]}

    def forced(self, row: Floats, position: int, seq_len: int) -> Floats:
        return np.where(np.arange(len(row)) >= -(-seq_len // 128) - 2, 1e29, row)


class OneLocalFewer(Planted):
    name, family, options = "one local block too few", "sentinels", ANY_FORCED

    def forced(self, row: Floats, position: int, seq_len: int) -> Floats:
        blocks = np.arange(len(row))
        return np.where(blocks >= len(row) - 1, 1e29, np.where(blocks < 2, 1e30, row))


class OneLocalMore(Planted):
    name, family, options = "one local block too many", "sentinels", {"local_blocks": 1}

    def forced(self, row: Floats, position: int, seq_len: int) -> Floats:
        return np.where(np.arange(len(row)) >= len(row) - 2, 1e29, row)


def token_major(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array.transpose(1, 0, 2)).reshape(array.shape)


class TokenMajorIds(Planted):
    name, family = "ids are token-major in a buffer that is read head-major", "head/token layout"
    records = (BOTH,)

    def outputs(self, scores: Any, ids: Any) -> tuple[Any, Any]:
        return scores, token_major(ids)


class TokenMajorIdsAlone(TokenMajorIds):
    records = (ONLY_IDS,)


class TokenMajorScores(Planted):
    name, family = "scores are token-major in a buffer that is read head-major", "head/token layout"
    records = (BOTH, ONLY_SCORES)

    def outputs(self, scores: Any, ids: Any) -> tuple[Any, Any]:
        return token_major(scores), ids


class TokenMajorBoth(Planted):
    name, family = "ids and scores are token-major in a buffer that is read head-major", "head/token layout"
    records = (BOTH,)
    options: ClassVar[dict[str, Any]] = {"heads": 4}

    def outputs(self, scores: Any, ids: Any) -> tuple[Any, Any]:
        return token_major(scores), token_major(ids)


class HeadMajorIds(Planted):
    name, family = "ids are head-major in a buffer that is read token-major", "head/token layout"
    records = (BOTH, ONLY_IDS)

    def outputs(self, scores: Any, ids: Any) -> tuple[Any, Any]:
        heads, tokens, k = ids.shape
        return scores, ids.reshape(tokens, heads, k).transpose(1, 0, 2).copy()


class HeadMajorQueries(Planted):
    name, family = "queries are read head-major", "head/token layout"

    def query(self, token: int, head: int) -> Floats:
        flat = self.case.index_q.reshape(-1, 128)[head * self.case.total_q + token]
        return np.asarray(flat.astype(ml_dtypes.float8_e4m3fn).astype(np.float64))


class HeadZero(Planted):
    name, family = "every head is scored with head 0's queries", "head/token layout"

    def query(self, token: int, head: int) -> Floats:
        return super().query(token, 0)


class QueriesNotCast(Planted):
    name, family = "queries are not cast to E4M3", "saturation and rounding"

    def query(self, token: int, head: int) -> Floats:
        return np.asarray(self.case.index_q[token, head].astype(np.float64))


class NibblesSwapped(Planted):
    name, family = "nibbles are swapped", "nibble order"

    def codes(self, page: Bytes) -> Bytes:
        return super().codes((page >> 4 | page << 4).astype(np.uint8))


class NibblesPlanar(Planted):
    name, family = "nibbles are planar", "nibble order"

    def codes(self, page: Bytes) -> Bytes:
        packed = page[:8192].reshape(128, 64)
        codes: Bytes = np.concatenate([packed & 15, packed >> 4], axis=1)
        return codes


class NibblesPlanarInGroups(Planted):
    name, family = "nibbles are planar in each group", "nibble order"

    def codes(self, page: Bytes) -> Bytes:
        packed = page[:8192].reshape(128, 8, 8)
        codes: Bytes = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(128, 128)
        return codes


class ScalesInterleaved(Planted):
    name, family = "scales are read interleaved with codes", "scale order"

    def codes(self, page: Bytes) -> Bytes:
        rows = page.reshape(128, 72)[:, :64]
        return np.stack([rows & 15, rows >> 4], axis=2).reshape(128, 128)

    def scales(self, page: Bytes) -> Bytes:
        return np.repeat(page.reshape(128, 72)[:, 64:], 16, axis=1)


class ScalesGroupMajor(Planted):
    name, family = "scales are read group-major", "scale order"

    def scales(self, page: Bytes) -> Bytes:
        return np.repeat(page[8192:].reshape(8, 128).T, 16, axis=1)


class ScalesSwizzled(Planted):
    name, family = "scales are read swizzled", "scale order"

    def scales(self, page: Bytes) -> Bytes:
        tiles = page[8192:].reshape(2, 32, 4, 4)  # tile, row % 32, row // 32, column
        return np.repeat(tiles.transpose(2, 1, 0, 3).reshape(128, 8), 16, axis=1)


class ScalesFirst(Planted):
    name, family = "scales are read before the codes", "scale order"

    def codes(self, page: Bytes) -> Bytes:
        return super().codes(page[1024:])

    def scales(self, page: Bytes) -> Bytes:
        return np.repeat(page[:1024].reshape(128, 8), 16, axis=1)


class GroupsOf32(Planted):
    name, family = "groups have 32 dims", "scale group"

    def scales(self, page: Bytes) -> Bytes:
        return np.repeat(page[8192:].reshape(128, 8)[:, :4], 32, axis=1)


class NextGroup(Planted):
    name, family = "each group has the next group's scale", "scale group"

    def scales(self, page: Bytes) -> Bytes:
        return np.repeat(np.roll(page[8192:].reshape(128, 8), -1, axis=1), 16, axis=1)


class GroupBefore(Planted):
    name, family = "each group has the group's before", "scale group"

    def scales(self, page: Bytes) -> Bytes:
        return np.repeat(np.roll(page[8192:].reshape(128, 8), 1, axis=1), 16, axis=1)


class GroupsReversed(Planted):
    name, family = "groups are in reverse", "scale group"

    def scales(self, page: Bytes) -> Bytes:
        return np.repeat(page[8192:].reshape(128, 8)[:, ::-1], 16, axis=1)


class GroupPairs(Planted):
    name, family = "pairs of groups are exchanged", "scale group"

    def scales(self, page: Bytes) -> Bytes:
        return np.repeat(page[8192:].view("<u2").byteswap().view("u1").reshape(128, 8), 16, axis=1)


class GroupHalves(Planted):
    name, family = "halves of groups are exchanged", "scale group"

    def scales(self, page: Bytes) -> Bytes:
        return np.repeat(np.roll(page[8192:].reshape(128, 8), 4, axis=1), 16, axis=1)


class GroupsOf8(Planted):
    name, family = "groups have 8 dims", "scale group"

    def scales(self, page: Bytes) -> Bytes:
        return np.tile(np.repeat(page[8192:].reshape(128, 8), 8, axis=1), (1, 2))


class GroupsStrided(Planted):
    name, family = "groups are strided", "scale group"

    def scales(self, page: Bytes) -> Bytes:
        return np.tile(page[8192:].reshape(128, 8), (1, 16))


class OneScale(Planted):
    name, family = "one scale a token", "scale group"

    def scales(self, page: Bytes) -> Bytes:
        return np.repeat(page[8192:].reshape(128, 8)[:, :1], 128, axis=1)


class NextTokensScales(Planted):
    name, family = "each token has the next token's scales", "scale group"

    def scales(self, page: Bytes) -> Bytes:
        return np.roll(super().scales(page), -1, axis=0)


class PreviousTokensScales(Planted):
    name, family = "each token has the previous token's scales", "scale group"

    def scales(self, page: Bytes) -> Bytes:
        return np.roll(super().scales(page), 1, axis=0)


class Unsigned(Planted):
    name, family = "keys lose their sign", "sign"

    def keys(self, page: Bytes) -> Floats:
        return np.abs(super().keys(page))


class Negated(Planted):
    name, family = "keys have the other sign", "sign"

    def keys(self, page: Bytes) -> Floats:
        return -super().keys(page)


class SignInBit0(Planted):
    name, family = "the sign is taken from bit 0", "sign"

    def codes(self, page: Bytes) -> Bytes:
        codes = super().codes(page)
        return (codes // 2 + codes % 2 * 8).astype(np.uint8)


class ScaleSignLost(Planted):
    name, family = "the scale's sign is lost", "sign"

    @classmethod
    def made(cls) -> Case:
        case = engine_case()
        assert case.pages is not None
        pages = case.pages.copy()
        pages[:, 8192::3] |= 0x80
        return dataclasses.replace(case, pages=pages)

    def scales(self, page: Bytes) -> Bytes:
        return (super().scales(page) & 0x7F).astype(np.uint8)


LARGE = {"scales": (0x60, 0x74)}
"""Scales of 32 to 192: products reach 1,152."""


class Unsaturated(Planted):
    name, family, options = "keys are not saturated at 448", "saturation and rounding", LARGE

    def cast(self, products: Floats) -> Floats:
        small = super().cast(products / 4) * 4  # the same four significant bits, two octaves higher
        return np.where(np.abs(products) > 448, small, super().cast(products))


class OverflowToNaN(Planted):
    name, family, options = "keys beyond 448 become NaN", "saturation and rounding", LARGE

    def cast(self, products: Floats) -> Floats:
        return products.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


class OverflowToZero(Planted):
    name, family, options = "keys beyond 448 become 0", "saturation and rounding", LARGE

    def cast(self, products: Floats) -> Floats:
        return np.nan_to_num(products.astype(ml_dtypes.float8_e4m3fn).astype(np.float64), nan=0.0)


class Unrounded(Planted):
    name, family = "keys are not rounded to E4M3", "saturation and rounding"

    def cast(self, products: Floats) -> Floats:
        return products


class Clamped(Planted):
    name, family, options = "keys are saturated, not rounded", "saturation and rounding", LARGE

    def cast(self, products: Floats) -> Floats:
        return products.clip(-448, 448)


class NaNScales(Planted):
    name, family = "NaN scales are not zero", "saturation and rounding"

    @classmethod
    def made(cls) -> Case:
        case = engine_case()
        assert case.pages is not None
        pages = case.pages.copy()
        pages[::2, 8192::301] = 0x7F
        pages[1::2, 8193::301] = 0xFF
        return dataclasses.replace(case, pages=pages)

    def values(self, codes: Floats, scales: Bytes) -> Floats:
        factors = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        factors[scales == 0x7F], factors[scales == 0xFF] = 480, -480
        return self.cast(codes * factors)


class LogicalStride(Planted):
    name = "the block table's rows are taken to lie 14 entries apart"
    family = "block-table stride"

    def page(self, request: int, block: int) -> Bytes:
        return self.at(self.table.reshape(-1)[request * 14 + block])


class RowZero(Planted):
    name, family = "the block table's rows are taken to lie 0 entries apart", "block-table stride"

    def page(self, request: int, block: int) -> Bytes:
        return self.at(self.table[0, block])


class NextRow(Planted):
    name, family = "the next request's row of the block table is read", "block-table stride"
    options: ClassVar[dict[str, Any]] = {"lengths": [(900, 20), (1000, 10), (950, 5)]}

    def page(self, request: int, block: int) -> Bytes:
        return self.at(self.table[(request + 1) % 3, block])


class ColumnMajor(Planted):
    name, family = "the block table is read column-major", "block-table stride"
    options: ClassVar[dict[str, Any]] = {"lengths": [(900, 20), (1000, 10), (950, 5)]}

    @classmethod
    def made(cls) -> Case:
        case = super().made()
        assert case.block_table is not None
        return dataclasses.replace(case, block_table=case.block_table[:, :8].copy())

    def page(self, request: int, block: int) -> Bytes:
        return self.at(self.table.reshape(-1)[block * 3 + request])


class Unwritten(Planted):
    name, family = "pages are read as unwritten", "stale or unwritten page"

    def page(self, request: int, block: int) -> Bytes:
        page = super().page(request, block)
        return np.zeros_like(page) if (request, block) in ((0, 3), (4, 2), (0, 11)) else page


class StalePage(Planted):
    name, family = "pages hold another block's keys", "stale or unwritten page"
    records = (BOTH, ONLY_SCORES)

    def page(self, request: int, block: int) -> Bytes:
        return super().page(*{(0, 3): (4, 1), (2, 5): (2, 6)}.get((request, block), (request, block)))


class UnknownPage(Planted):
    name, family = "pages held something else", "stale or unwritten page"
    records = (BOTH, ONLY_SCORES)

    def page(self, request: int, block: int) -> Bytes:
        page = super().page(request, block)
        return page[::-1] if (request, block) in ((0, 3), (2, 5)) else page


class StepNotWritten(Planted):
    name, family = "this step's keys are not yet written, zeros are read", "stale or unwritten page"
    records = (BOTH, ONLY_SCORES)

    def present(self, products: Floats, request: int) -> Floats:
        prefix = int(self.case.seq_lens[request] - self.case.query_lens[request])
        return np.where(np.arange(len(products)) >= prefix, np.minimum(products, 0) * 0, products)


class StepLeftOut(Planted):
    name, family = "this step's keys are left out", "stale or unwritten page"
    options: ClassVar[dict[str, Any]] = LONG
    records = (BOTH, ONLY_SCORES)

    def present(self, products: Floats, request: int) -> Floats:
        prefix = int(self.case.seq_lens[request] - self.case.query_lens[request])
        return np.where(np.arange(len(products)) >= prefix, -np.inf, products)


def every_fault(kind: type[Planted] = Planted) -> list[type[Planted]]:
    return [fault for sub in kind.__subclasses__() for fault in (sub, *every_fault(sub))]


def _params() -> list[Any]:
    """Each fault with all that it can be recorded by; all but the first of a family's in the nightly run."""
    params, families = [], set()
    for fault in every_fault():
        for record in fault.records:
            slow = record != fault.records[0] and fault.family in families
            marks = [pytest.mark.nightly] if slow else []
            name = f"{fault.__name__}-{record.replace(' ', '+')}"
            params.append(pytest.param(fault, record, id=name, marks=marks))
        families.add(fault.family)
    return params


_MADE: dict[str, Case] = {}


def planted(fault: type[Planted]) -> Case:
    """The fault's file, with scores and ids; made once."""
    if fault.__name__ not in _MADE:
        with np.errstate(invalid="ignore", over="ignore"):
            _MADE[fault.__name__] = fault(fault.made()).run()
    return _MADE[fault.__name__]


def only(case: Case, record: str) -> Case:
    """The same with only what was recorded."""
    assert case.engine is not None
    engine = dataclasses.replace(
        case.engine,
        scores=case.engine.scores if "scores" in record else None,
        block_ids=case.engine.block_ids if "ids" in record else None,
    )
    return dataclasses.replace(case, engine=engine)


def explained(case: Case) -> EngineVerdict:
    """As ``verify`` does it, without a backend of our own."""
    judge = EngineJudge(case, SCORE_TOLERANCE["exact"])
    for part in parts(case, 1 << 22):
        judge.add(part, run_oracle(part.case))
    return judge.verdict()


@pytest.mark.parametrize(("fault", "record"), _params())
def test_a_planted_fault_is_named(fault: type[Planted], record: str) -> None:
    verdict = explained(only(planted(fault), record))
    assert not verdict.ok
    assert verdict.fault_rows > 0
    assert [(cause.name, cause.family) for cause in verdict.causes] == [(fault.name, fault.family)]
    cause = verdict.causes[0]
    assert cause.explained == cause.faulty
    assert cause.kept == cause.right


class FarPages(Planted):
    """Pages that lie on both sides of 2^31 and 2^32 bytes in the engine's cache."""

    family = "page id wrap"
    limit: ClassVar[int]
    stride = 9216 + 64


def far_case(held: bool) -> Case:
    """Page ids of a cache of 5 GB; the pages that a wrapped offset reads are in the file if ``held``."""
    case = engine_case()
    assert case.pages is not None
    count, stride = len(case.pages), FarPages.stride
    random = np.random.default_rng(5)
    ids = np.sort(random.choice((5 << 30) // stride, count, replace=False)).astype(np.int64)
    ids = random.permutation(ids)
    pages, all_ids = case.pages, ids
    if held:
        others = {
            int(i * stride % limit) // stride + n for i in ids for limit in (1 << 31, 1 << 32) for n in (0, 1)
        }
        extra = np.array(sorted(others - set(ids.tolist())), dtype=np.int64)
        all_ids = np.concatenate([ids, extra])
        more = random.integers(0, 256, (len(extra), 9216), dtype=np.uint8)
        more[:, 8192:] = random.integers(0x28, 0x48, (len(extra), 1024), dtype=np.uint8)
        pages = np.concatenate([pages, more])
    record = {"page_ids": all_ids.astype(np.int32), "page_stride": stride}
    return dataclasses.replace(case, pages=pages, engine=EngineRecord(**record))  # type: ignore[arg-type]


class Wrapping(Engine):
    """Reads a flat cache, of which only the file's pages are there, at an offset of 32 bits."""

    limit: int
    zero = False

    def page(self, request: int, block: int) -> Bytes:
        record = self.case.engine
        assert record is not None
        assert record.page_ids is not None
        place = int(self.table[request, block])
        offset = int(record.page_ids[place]) * record.page_stride
        if offset < self.limit:
            return self.at(place)
        if self.zero:
            return np.zeros(9216, dtype=np.uint8)
        start = offset % self.limit
        cache = {int(i) * record.page_stride: page for i, page in zip(record.page_ids, self.pages)}
        found = np.zeros(9216, dtype=np.uint8)
        for byte, page in cache.items():
            low, high = max(byte, start), min(byte + 9216, start + 9216)
            if low < high:
                found[low - start : high - start] = page[low - byte : high - byte]
        return found


@pytest.mark.parametrize("record", ALL)
@pytest.mark.parametrize("power", [31, 32])
@pytest.mark.parametrize("what", ["wraps", "zero", "unknown"])
def test_page_offsets_of_32_bits_are_named(power: int, what: str, record: str) -> None:
    engine = Wrapping(far_case(held=what == "wraps"))
    engine.limit, engine.zero = 1 << power, what == "zero"
    case = engine.run(record)
    if what == "unknown":
        # What was read is not in the file: here the page's own bytes, backwards.
        class Elsewhere(Wrapping):
            def page(self, request: int, block: int) -> Bytes:
                page = Engine.page(self, request, block)
                record = self.case.engine
                assert record is not None
                assert record.page_ids is not None
                place = int(self.table[request, block])
                return page[::-1] if int(record.page_ids[place]) * record.page_stride >= 1 << power else page

        case = Elsewhere(far_case(held=False)).run(record)
    verdict = explained(case)
    name = {
        "wraps": f"page offsets wrap at 2^{power}",
        "zero": f"pages past 2^{power} bytes are read as zero",
        "unknown": f"pages past 2^{power} bytes are read from somewhere else",
    }[what]
    if what == "unknown" and record == ONLY_IDS:
        names = [cause.name for cause in (*verdict.causes, *verdict.candidates)]
        assert name in names
        return
    assert [(cause.name, cause.family) for cause in verdict.causes] == [(name, "page id wrap")]


def test_two_faults_at_once_are_not_called_one() -> None:
    class Both(NibblesSwapped, NoPrefix):
        pass

    verdict = explained(Both(engine_case()).run())
    assert verdict.causes == ()


def test_random_ids_have_no_cause() -> None:
    case = Engine(engine_case()).run(ONLY_IDS)
    assert case.engine is not None
    assert case.engine.block_ids is not None
    random = np.random.default_rng(0)
    ids = case.engine.block_ids.copy()
    for head, token in np.ndindex(ids.shape[:2]):
        nb = int(case.num_blocks_per_query()[token])
        count = min(nb, case.topk)
        ids[head, token, :count] = random.permutation(nb)[:count]
    verdict = explained(dataclasses.replace(case, engine=dataclasses.replace(case.engine, block_ids=ids)))
    assert verdict.causes == ()


@pytest.mark.parametrize("local_blocks", [0, 1])
@pytest.mark.parametrize("record", ALL)
def test_rows_read_from_outside_the_file_name_no_stride(record: str, local_blocks: int) -> None:
    """Only request 1 is wrong: a stride that reads it past the table agrees with anything but sentinels."""
    case = Engine(engine_case([(1700, 12), (1500, 12)], local_blocks=local_blocks)).run()
    assert case.engine is not None
    assert case.engine.scores is not None
    assert case.engine.block_ids is not None
    scores, ids = case.engine.scores.copy(), case.engine.block_ids.copy()
    random = np.random.default_rng(3)
    for head, token in np.ndindex(2, 12):
        blocks = int(case.num_blocks_per_query()[12 + token])
        scores[head, 12 + token, : blocks - local_blocks] = random.normal(size=blocks - local_blocks)
        ids[head, 12 + token] = random.permutation(blocks)[: case.topk]
    engine = dataclasses.replace(case.engine, scores=scores, block_ids=ids)
    verdict = explained(only(dataclasses.replace(case, engine=engine), record))
    assert verdict.fault_rows > 0
    assert "block-table stride" not in [cause.family for cause in (*verdict.causes, *verdict.candidates)]
