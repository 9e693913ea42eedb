"""What a row sees: the mask, its position, the forced blocks."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from indexer.case import Case
from tests.support.faulty_engine import Engine, Floats
from tests.support.planted.fault import ANY_FORCED, BOTH, LONG, ONLY_IDS, ONLY_SCORES, Planted
from tests.support.planted.keys import NibblesSwapped
from tests.support.planted.results import Lowest

Scores = NDArray[np.float32]
Ids = NDArray[np.int32]


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
    options: ClassVar[dict[str, Any]] = {"lengths": [(520, 480), (390, 370)]}

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
    options: ClassVar[dict[str, Any]] = {"lengths": [(500, 380), (330, 250)]}

    def position(self, request: int, query: int, prefix: int, seq_len: int) -> int:
        return min(2 * prefix + query, seq_len - 1)


class StartRoundedDown(Planted):
    name, family = "the chunk's start is rounded down to a block", "chunk-start offset"

    def position(self, request: int, query: int, prefix: int, seq_len: int) -> int:
        return prefix // 128 * 128 + query


class StartRoundedUp(Planted):
    name, family = "the chunk's start is rounded up to a block", "chunk-start offset"
    options: ClassVar[dict[str, Any]] = {"lengths": [(2600, 110), (1500, 130)]}

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
    options: ClassVar[dict[str, Any]] = {"lengths": [(600, 90), (2600, 300), (1500, 160)]}

    def position(self, request: int, query: int, prefix: int, seq_len: int) -> int:
        return min(prefix + int(self.case.cu_seqlens_q[request]) + query, seq_len - 1)


class NothingForced(Planted):
    name, family, options = "forced blocks are not forced", "sentinels", ANY_FORCED

    def forced(self, row: Floats, position: int, seq_len: int) -> Floats:
        return row


class ForcedInSelection(Planted):
    name, family, options = "forced blocks are put into the selection only", "sentinels", ANY_FORCED
    records = (BOTH,)

    def outputs(self, scores: Scores, ids: Ids) -> tuple[Scores, Ids]:
        right = self.case.engine
        assert right is not None
        assert right.block_ids is not None
        return scores, right.block_ids

    def forced(self, row: Floats, position: int, seq_len: int) -> Floats:
        return row

    @classmethod
    def made(cls) -> Case:
        return Engine(super().made()).run()


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
    options: ClassVar[dict[str, Any]] = {"local_blocks": 2, "lengths": [(2600, 110), (1500, 130)]}

    def forced(self, row: Floats, position: int, seq_len: int) -> Floats:
        return np.where(np.arange(len(row)) >= -(-seq_len // 128) - 2, 1e29, row)


class OneLocalFewer(Planted):
    name, family, options = "1 local block is forced, not 2", "sentinels", ANY_FORCED

    def forced(self, row: Floats, position: int, seq_len: int) -> Floats:
        blocks = np.arange(len(row))
        return np.where(blocks >= len(row) - 1, 1e29, np.where(blocks < 2, 1e30, row))


class OneLocalMore(Planted):
    name, family, options = "2 local blocks are forced, not 1", "sentinels", {"local_blocks": 1}

    def forced(self, row: Floats, position: int, seq_len: int) -> Floats:
        return np.where(np.arange(len(row)) >= len(row) - 2, 1e29, row)


class Counted(Planted):
    """Other numbers of forced blocks than stated."""

    family = "sentinels"
    init: ClassVar[int] = 0
    local: ClassVar[int] = 0

    def forced(self, row: Floats, position: int, seq_len: int) -> Floats:
        blocks = np.arange(len(row))
        row = np.where(blocks < self.init, 1e30, row)
        return np.where(blocks >= len(row) - self.local, 1e29, row)


class ThreeLocalMore(Counted):
    name, local = "4 local blocks are forced, not 1", 4
    options: ClassVar[dict[str, Any]] = {"local_blocks": 1, "topk": 6}


class MoreLocalThanK(Counted):
    name, local = "7 local blocks are forced, not 1", 7
    options: ClassVar[dict[str, Any]] = {"local_blocks": 1, "lengths": [(1700, 30), (1500, 9)]}


class TwoInitFewer(Counted):
    name, init = "1 init block is forced, not 3", 1
    options: ClassVar[dict[str, Any]] = {"init_blocks": 3}


class InitUnasked(Counted):
    name, init, local = "3 init blocks are forced, not 0", 3, 1
    options: ClassVar[dict[str, Any]] = {"local_blocks": 1, "topk": 6}


class OtherCounts(Counted):
    name = "3 init blocks are forced, not 1 and 2 local blocks are forced, not 1"
    init, local = 3, 2
    options: ClassVar[dict[str, Any]] = {"init_blocks": 1, "local_blocks": 1, "topk": 7}


# Faults that some rows of a call have and the others do not.

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
