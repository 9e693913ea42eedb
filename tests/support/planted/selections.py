"""How scores become ids, and what is written as scores and ids."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from indexer.case import Case, EngineRecord
from tests.support.faulty_engine import engine_case
from tests.support.planted.fault import BOTH, ONLY_IDS, ONLY_SCORES, Planted

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
