"""Faults that some rows of a call have and the others do not."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from indexer.case import Case
from tests.support.faulty_engine import Engine
from tests.support.planted.fault import BOTH, ONLY_IDS, Planted
from tests.support.planted.keys import NibblesSwapped
from tests.support.planted.selections import Lowest

DECODE: dict[str, Any] = {"lengths": [(1700, 8), (1411, 1), (900, 1), (1100, 1)]}


class InPart(Planted):
    """Rows of another fault in a part of the call, right ones in the rest."""

    fault: ClassVar[type[Planted]]

    def run(self, record: str = "scores ids") -> Case:
        right, wrong = Engine(self.case).run(record), self.fault(self.case).run(record)
        assert right.engine is not None
        assert wrong.engine is not None
        assert right.engine.scores is not None
        assert wrong.engine.scores is not None
        assert right.engine.block_ids is not None
        assert wrong.engine.block_ids is not None
        token = np.arange(self.case.total_q)
        request = np.searchsorted(self.case.cu_seqlens_q, token, side="right") - 1
        prefix = self.case.seq_lens - self.case.query_lens
        position = prefix[request] + token - self.case.cu_seqlens_q[request]
        part = self.part(np.arange(self.case.num_heads)[:, None], request, position)[:, :, None]
        engine = dataclasses.replace(
            right.engine,
            scores=np.where(part, wrong.engine.scores, right.engine.scores),
            block_ids=np.where(part, wrong.engine.block_ids, right.engine.block_ids),
        )
        return dataclasses.replace(right, engine=engine)

    def part(
        self, head: NDArray[np.int64], request: NDArray[np.int64], position: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Which rows ``[H, total_q]`` are wrong."""
        raise NotImplementedError


class InOneHead(InPart):
    name, family, only, fault = "nibbles are swapped", "nibble order", "in head 1", NibblesSwapped

    def part(
        self, head: NDArray[np.int64], request: NDArray[np.int64], position: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        return np.asarray((head == 1) & (request >= 0))


class InOneRequest(InPart):
    name, family, only, fault = "nibbles are swapped", "nibble order", "in request 2", NibblesSwapped

    def part(
        self, head: NDArray[np.int64], request: NDArray[np.int64], position: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        return np.asarray((head >= 0) & (request == 2))


class InDecodeRows(InPart):
    name, family, only, fault = "nibbles are swapped", "nibble order", "in decode rows", NibblesSwapped
    options: ClassVar[dict[str, Any]] = DECODE

    def part(
        self, head: NDArray[np.int64], request: NDArray[np.int64], position: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        return np.asarray((head >= 0) & (request > 0))


class FromAPosition(InPart):
    name, family, fault = "the lowest scores are picked", "selection", Lowest
    only = "from position 1,410 on"
    records = (BOTH, ONLY_IDS)

    def part(
        self, head: NDArray[np.int64], request: NDArray[np.int64], position: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        return np.asarray((head >= 0) & (position >= 1280))
