"""How scores become ids, and what is written as scores and ids."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from indexer.case import Case, EngineRecord
from tests.support.faulty_engine import Floats, engine_case
from tests.support.planted.fault import ANY_FORCED, BOTH, ONLY_IDS, ONLY_SCORES, Planted

Scores = NDArray[np.float32]
Ids = NDArray[np.int32]


def selected(scores: Scores, topk: int) -> Ids:
    """The best blocks of each row; -1 behind them."""
    best = np.argsort(-scores, axis=2, kind="stable")[:, :, :topk]
    seen = np.take_along_axis(scores, best, axis=2) > -np.inf
    ids = np.full((*scores.shape[:2], topk), -1, dtype=np.int32)
    ids[:, :, : best.shape[2]] = np.where(seen, best, -1)
    return ids


class Selecting(Planted):
    """A fault that leaves the scores right."""

    family = "selection"
    records = (BOTH, ONLY_IDS)

    def outputs(self, scores: Scores, ids: Ids) -> tuple[Scores, Ids]:
        return scores, self.ids(scores, ids)

    def ids(self, scores: Scores, ids: Ids) -> Ids:
        raise NotImplementedError


class SharedByLargest(Selecting):
    name = "one selection is shared by all heads: by the largest of the heads' scores"

    def ids(self, scores: Scores, ids: Ids) -> Ids:
        return selected(np.stack([scores.max(axis=0)] * 2), self.case.topk)


class SharedByMean(Selecting):
    name = "one selection is shared by all heads: by the sum or mean of the heads' scores"
    options: ClassVar[dict[str, Any]] = {"heads": 4, "local_blocks": 1}

    def ids(self, scores: Scores, ids: Ids) -> Ids:
        return selected(np.stack([scores.mean(axis=0)] * 4), self.case.topk)


class Reduced(Planted):
    family = "selection"
    records = (BOTH, ONLY_SCORES)
    options: ClassVar[dict[str, Any]] = {"heads": 4, "local_blocks": 1}

    def outputs(self, scores: Scores, ids: Ids) -> tuple[Scores, Ids]:
        reduced = np.where(scores[0] >= 1e29, scores[0], self.reduce(scores)).astype(np.float32)
        reduced = np.stack([reduced] * len(scores))
        return reduced, selected(reduced, self.case.topk)

    def reduce(self, scores: Scores) -> Scores:
        raise NotImplementedError


class LargestOfHeads(Reduced):
    name = "all heads have the same scores: the largest of the heads' scores"

    def reduce(self, scores: Scores) -> Scores:
        return np.asarray(scores.max(axis=0))


class SumOfHeads(Reduced):
    name = "all heads have the same scores: the sum of the heads' scores"

    def reduce(self, scores: Scores) -> Scores:
        return np.asarray(scores.sum(axis=0))


class MeanOfHeads(Reduced):
    name = "all heads have the same scores: the mean of the heads' scores"

    def reduce(self, scores: Scores) -> Scores:
        return np.asarray(scores.mean(axis=0))


class Lowest(Selecting):
    name = "the lowest scores are picked"

    def ids(self, scores: Scores, ids: Ids) -> Ids:
        return selected(np.where(scores == -np.inf, scores, -scores), self.case.topk)


class LowestWithMasked(Selecting):
    name = "the lowest scores are picked, masked blocks first"

    def ids(self, scores: Scores, ids: Ids) -> Ids:
        return np.argsort(scores, axis=2, kind="stable")[:, :, : self.case.topk].astype(np.int32)


class LowestBesideForced(Selecting):
    name = "the lowest scores are picked beside the forced blocks"
    options: ClassVar[dict[str, Any]] = {"local_blocks": 1}

    def ids(self, scores: Scores, ids: Ids) -> Ids:
        return selected(np.where((scores == -np.inf) | (scores > 1e28), scores, -scores), self.case.topk)


class FewerIds(Selecting):
    name = "3 blocks are selected where 4 are stated"

    def ids(self, scores: Scores, ids: Ids) -> Ids:
        return np.where(np.arange(4) < 3, ids, -1).astype(np.int32)


class OneId(Selecting):
    name = "1 block is selected where 4 are stated"

    def ids(self, scores: Scores, ids: Ids) -> Ids:
        return np.where(np.arange(4) < 1, ids, -1).astype(np.int32)


class FewerIdsOverZeros(Selecting):
    name = "4 blocks are selected where 7 are stated, and 0 is written behind them"
    options: ClassVar[dict[str, Any]] = {"topk": 7}

    def ids(self, scores: Scores, ids: Ids) -> Ids:
        return np.where(np.arange(7) < 4, ids, 0).astype(np.int32)


class OneTooHigh(Selecting):
    name, family = "ids are one too high", "meaning of ids"

    def ids(self, scores: Scores, ids: Ids) -> Ids:
        return np.where(ids < 0, ids, ids + 1)


class OneTooLow(Selecting):
    name, family = "ids are one too low", "meaning of ids"

    def ids(self, scores: Scores, ids: Ids) -> Ids:
        return ids - 1


class FirstTokens(Selecting):
    name, family = "ids are first tokens of blocks", "meaning of ids"

    def ids(self, scores: Scores, ids: Ids) -> Ids:
        return np.where(ids < 0, ids, ids * 128)


class OfTheBatch(Selecting):
    name, family = "ids count on over the requests of the batch", "meaning of ids"

    def ids(self, scores: Scores, ids: Ids) -> Ids:
        blocks = -(-self.case.seq_lens // 128)
        before = np.repeat([blocks[:r].sum() for r in range(len(blocks))], self.case.query_lens)
        return np.where(ids < 0, ids, ids + before[:, None]).astype(np.int32)


class OffByFive(Selecting):
    name, family = "ids are 5 too high", "meaning of ids"

    def ids(self, scores: Scores, ids: Ids) -> Ids:
        return np.where(ids < 0, ids, ids + 5)


class FilledWithZero(Selecting):
    name, family = "0 stands behind the ids for -1", "meaning of ids"
    options: ClassVar[dict[str, Any]] = {"topk": 8}

    def ids(self, scores: Scores, ids: Ids) -> Ids:
        return np.where(ids < 0, 0, ids).astype(np.int32)


class BestLeftOut(Selecting):
    name = "the best block is left out"

    def ids(self, scores: Scores, ids: Ids) -> Ids:
        return selected(scores, self.case.topk + 1)[:, :, 1:]


class PagesOfTheFile(Selecting):
    name, family = "ids are page ids of the file", "meaning of ids"

    def ids(self, scores: Scores, ids: Ids) -> Ids:
        request = np.repeat(np.arange(self.case.batch), self.case.query_lens)
        return np.where(ids < 0, ids, self.table[request[:, None], ids])


class PagesOfTheCache(Selecting):
    name, family = "ids are page ids of the engine's cache", "meaning of ids"

    @classmethod
    def made(cls) -> Case:
        case = engine_case()
        assert case.pages is not None
        own = np.random.default_rng(7).choice(100_000, len(case.pages), replace=False).astype(np.int32)
        return dataclasses.replace(case, engine=EngineRecord(page_ids=own))

    def ids(self, scores: Scores, ids: Ids) -> Ids:
        request = np.repeat(np.arange(self.case.batch), self.case.query_lens)
        assert self.case.engine is not None
        assert self.case.engine.page_ids is not None
        pages = self.case.engine.page_ids[self.table[request[:, None], ids]]
        return np.where(ids < 0, ids, pages).astype(np.int32)


class Ordered(Selecting):
    """The right ids in an order that is not the one stated."""

    family = "order of ids"
    stated: ClassVar[Literal["score", "block"]] = "score"

    def run(self, record: str = "scores ids") -> Case:
        case = super().run(record)
        assert case.engine is not None
        return dataclasses.replace(case, engine=dataclasses.replace(case.engine, order=self.stated))


class SortedByBlock(Ordered):
    name = "ids are sorted by block, not by score"

    def ids(self, scores: Scores, ids: Ids) -> Ids:
        ascending = np.sort(np.where(ids < 0, 1 << 30, ids), axis=2)
        return np.where(ascending == 1 << 30, -1, ascending).astype(np.int32)


class SortedByScore(Ordered):
    name, stated = "ids are sorted by score, not by block", "block"

    def ids(self, scores: Scores, ids: Ids) -> Ids:
        return ids


class LowestScoreFirst(Ordered):
    name = "ids are sorted from the lowest score up, not by score"

    def ids(self, scores: Scores, ids: Ids) -> Ids:
        upward = ids[:, :, ::-1]
        return np.take_along_axis(upward, np.argsort(upward < 0, axis=2, kind="stable"), axis=2)


class LastBlockFirst(Ordered):
    name, stated = "ids are sorted from the last block down, not by block", "block"

    def ids(self, scores: Scores, ids: Ids) -> Ids:
        return np.asarray(-np.sort(-ids, axis=2))


class FillingFirst(Ordered):
    name = "-1 stands before the ids"
    options: ClassVar[dict[str, Any]] = {"topk": 12}

    def ids(self, scores: Scores, ids: Ids) -> Ids:
        return np.take_along_axis(ids, np.argsort(ids >= 0, axis=2, kind="stable"), axis=2)


class NoOrder(Ordered):
    name = "ids are not in the order stated"
    options: ClassVar[dict[str, Any]] = {"topk": 6}

    def ids(self, scores: Scores, ids: Ids) -> Ids:
        turned = ids[:, :, [3, 1, 4, 0, 5, 2]]
        return np.take_along_axis(turned, np.argsort(turned < 0, axis=2, kind="stable"), axis=2)


class ColumnsLater(Planted):
    name, family = "score columns are shifted by one: block b stands in column b + 1", "score columns"
    records = (BOTH, ONLY_SCORES)

    def outputs(self, scores: Scores, ids: Ids) -> tuple[Scores, Ids]:
        wide = np.pad(scores, ((0, 0), (0, 0), (0, 2)), constant_values=-np.inf)  # as an engine's buffer is
        return np.roll(wide, 1, axis=2), ids


class ColumnsEarlier(Planted):
    name, family = "score columns are shifted by one: block b stands in column b - 1", "score columns"
    records = (BOTH, ONLY_SCORES)

    def outputs(self, scores: Scores, ids: Ids) -> tuple[Scores, Ids]:
        return np.roll(scores, -1, axis=2), ids


class Scaled(Planted):
    family = "scale of scores"
    records = (BOTH, ONLY_SCORES)
    options: ClassVar[dict[str, Any]] = {"local_blocks": 1}
    factor: ClassVar[float]

    def outputs(self, scores: Scores, ids: Ids) -> tuple[Scores, Ids]:
        scaled = np.where(scores >= 1e29, scores, scores * np.float32(self.factor))
        return scaled.astype(np.float32), ids


class SoftmaxScale(Scaled):
    name, factor = "scores are multiplied by 0.0883883 (1/sqrt(128), the softmax scale)", 128**-0.5


class OddScale(Scaled):
    name, factor = "scores are multiplied by 3.7", 3.7

    def outputs(self, scores: Scores, ids: Ids) -> tuple[Scores, Ids]:
        return scores * np.float32(self.factor), ids


# What scores are held in: a type of 16 bits, or a buffer that nobody wrote.


class Rounded(Planted):
    """Scores in 16 bits, and the right ids."""

    family = "rounding of scores"
    options: ClassVar[dict[str, Any]] = ANY_FORCED
    dtype: ClassVar[DTypeLike] = ml_dtypes.bfloat16

    def outputs(self, scores: Scores, ids: Ids) -> tuple[Scores, Ids]:
        return self.rounded(scores), ids

    def rounded(self, scores: Scores) -> Scores:
        return scores.astype(self.dtype).astype(np.float32)


class BfloatAfter(Rounded):
    name, records = "scores are rounded to bfloat16 after the selection", (BOTH,)


class BfloatAlone(Rounded):
    name, records = "scores are rounded to bfloat16", (ONLY_SCORES,)


class BfloatButSentinels(BfloatAfter):
    def rounded(self, scores: Scores) -> Scores:
        return np.where(scores >= 1e29, scores, super().rounded(scores))


class HalfAfter(BfloatAfter):
    name, dtype = "scores are rounded to float16 after the selection", np.float16


class HalfAlone(BfloatAlone):
    name, dtype = "scores are rounded to float16", np.float16


class HalfCapped(HalfAfter):
    """Sentinels at the largest finite value."""

    def rounded(self, scores: Scores) -> Scores:
        return super().rounded(np.where(scores >= 1e29, np.float32(65504), scores))


class BfloatBefore(Rounded):
    name = "scores are rounded to bfloat16 before the selection"
    records: ClassVar[tuple[str, ...]] = (BOTH, ONLY_IDS)
    options: ClassVar[dict[str, Any]] = {"topk": 24, "lengths": [(5100, 40), (4700, 20)]}

    def outputs(self, scores: Scores, ids: Ids) -> tuple[Scores, Ids]:
        rounded = self.rounded(scores)
        return rounded, selected(rounded, self.case.topk)


class HalfBefore(BfloatBefore):
    name, dtype = "scores are rounded to float16 before the selection", np.float16
    records: ClassVar[tuple[str, ...]] = (BOTH,)


class Equal(Planted):
    """The top-k reads zeros; the scores that are written are right."""

    family = "scores never computed"
    name = "the selection saw equal scores: the lowest ids"
    records: ClassVar[tuple[str, ...]] = (BOTH,)

    def outputs(self, scores: Scores, ids: Ids) -> tuple[Scores, Ids]:
        return scores, selected(self.read(scores), self.case.topk)

    def read(self, scores: Scores) -> Scores:
        return np.where(scores == -np.inf, scores, np.float32(0))


class EqualFromTheEnd(Equal):
    name = "the selection saw equal scores: the highest ids"

    def outputs(self, scores: Scores, ids: Ids) -> tuple[Scores, Ids]:
        last = scores.shape[2] - 1
        turned = selected(self.read(scores)[:, :, ::-1], self.case.topk)
        return scores, np.where(turned < 0, turned, last - turned).astype(np.int32)


class EqualBesideForced(Equal):
    name = "the selection saw equal scores: the lowest ids beside the forced blocks"
    records = (BOTH, ONLY_IDS)  # a forced init block would stand before a local one
    options: ClassVar[dict[str, Any]] = {"local_blocks": 1}

    def read(self, scores: Scores) -> Scores:
        return np.where(scores >= 1e29, scores, super().read(scores))


class AllZero(Planted):
    """Nothing was computed, and the lowest ids are picked."""

    name, family, value = "scores are all zero", "scores never computed", 0.0
    records = (BOTH, ONLY_SCORES)

    def outputs(self, scores: Scores, ids: Ids) -> tuple[Scores, Ids]:
        written = np.full_like(scores, self.value)
        return written, selected(np.where(scores == -np.inf, scores, np.float32(0)), self.case.topk)


class AllNan(AllZero):
    name, value = "scores are all NaN", np.nan
    options: ClassVar[dict[str, Any]] = {"local_blocks": 1}


class AllMinusInfinity(AllZero):
    name, value = "scores are all -inf", -np.inf


class ZeroButSentinels(AllZero):
    """The buffer that is written is not the one that ids are selected by."""

    options: ClassVar[dict[str, Any]] = ANY_FORCED

    def outputs(self, scores: Scores, ids: Ids) -> tuple[Scores, Ids]:
        return np.where(np.abs(scores) < 1e29, np.float32(0), scores), ids


# Where queries are read and results are written.


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


class HeadsExchanged(Planted):
    name, family = "heads are permuted: ids and scores of heads 0 to 1 are those of 1, 0", "head/token layout"
    records = (BOTH,)

    def outputs(self, scores: Any, ids: Any) -> tuple[Any, Any]:
        return scores[::-1].copy(), ids[::-1].copy()


class HeadsRotatedIds(Planted):
    name, family = "heads are permuted: ids of heads 0 to 3 are those of 1, 2, 3, 0", "head/token layout"
    options: ClassVar[dict[str, Any]] = {"heads": 4}
    records = (BOTH, ONLY_IDS)

    def outputs(self, scores: Any, ids: Any) -> tuple[Any, Any]:
        return scores, np.roll(ids, -1, axis=0)


class HeadsReversedScores(Planted):
    name, family = "heads are permuted: scores of heads 0 to 3 are those of 3, 2, 1, 0", "head/token layout"
    options: ClassVar[dict[str, Any]] = {"heads": 4}
    records = (BOTH, ONLY_SCORES)

    def outputs(self, scores: Any, ids: Any) -> tuple[Any, Any]:
        return scores[::-1].copy(), ids


class HeadsMixedUp(Planted):
    name = "heads are mixed up: ids and scores of heads 0 to 3 are those of 0, 0, 2, 2"
    family = "head/token layout"
    options: ClassVar[dict[str, Any]] = {"heads": 4}
    records = (BOTH,)

    def query(self, token: int, head: int) -> Floats:
        return super().query(token, head // 2 * 2)


class HeadOnesIds(Planted):
    name, family = "every head has head 1's ids", "head/token layout"
    records = (BOTH, ONLY_IDS)

    def outputs(self, scores: Any, ids: Any) -> tuple[Any, Any]:
        return scores, np.stack([ids[1]] * 2)


class HeadZerosIds(Planted):
    name, family = "every head has head 0's ids", "head/token layout"
    records = (BOTH,)

    def outputs(self, scores: Any, ids: Any) -> tuple[Any, Any]:
        return scores, np.stack([ids[0]] * 2)


class ResultsShifted(Planted):
    name, family = "results are those of 3 rows earlier", "head/token layout"

    def outputs(self, scores: Any, ids: Any) -> tuple[Any, Any]:
        return np.roll(scores, 3, axis=1), np.roll(ids, 3, axis=1)


class QueriesShifted(Planted):
    name, family = "queries are those of 1 row later", "head/token layout"

    def query(self, token: int, head: int) -> Floats:
        return super().query((token + 1) % self.case.total_q, head)
