"""What scores are held in: a type of 16 bits, or a buffer that nobody wrote."""

from __future__ import annotations

from typing import Any, ClassVar

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from tests.support.planted.fault import ANY_FORCED, BOTH, ONLY_IDS, ONLY_SCORES, Planted
from tests.support.planted.selections import selected

Scores = NDArray[np.float32]
Ids = NDArray[np.int32]


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
