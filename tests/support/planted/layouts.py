"""Where queries are read and results are written."""

from __future__ import annotations

from typing import Any, ClassVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.support.faulty_engine import Floats
from tests.support.planted.fault import BOTH, ONLY_IDS, ONLY_SCORES, Planted


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
