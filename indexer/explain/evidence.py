"""A sample of rows, faulty and right, with what the engine made of each: hypotheses are held against it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from indexer.case import Case, EngineOrder
from kernel.contract import BLOCK_TOKENS, PAGE_BYTES

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

FAULTY_ROWS, RIGHT_ROWS = 32, 16
"""Rows of a sample, at most."""
MAX_PAGES = 1024
"""Pages after which a sample takes no further request."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """Rows of a sample, sorted by request.

    Attributes:
        case: the whole call, its keys in pages.
        request: ``[R]``, of the batch.
        head: ``[R]``.
        token: ``[R]`` query token in the whole call.
        faulty: ``[R]`` whether the engine is wrong there.
        scores: ``[R, S]`` the engine's; None if not recorded.
        block_ids: ``[R, k]`` the engine's; None if not recorded.
        tolerance: in units of ``sum_i |q_i k_i|``.
        blocks: ascending score columns that predictions compute; all when None.
    """

    case: Case
    request: Ints
    head: Ints
    token: Ints
    faulty: NDArray[np.bool_]
    scores: Floats | None
    block_ids: NDArray[np.int32] | None
    tolerance: float
    blocks: Ints | None = None

    @property
    def prefix(self) -> Ints:
        """``[R]`` keys before the first query of each row's request."""
        lens = self.case.seq_lens.astype(np.int64) - self.case.query_lens
        return np.asarray(lens[self.request], dtype=np.int64)

    @property
    def query(self) -> Ints:
        """``[R]`` each row's query, counted in its request."""
        return np.asarray(self.token - self.case.cu_seqlens_q[self.request], dtype=np.int64)

    @property
    def position(self) -> Ints:
        """``[R]`` positions by the contract."""
        return self.prefix + self.query

    @property
    def seq_len(self) -> Ints:
        """``[R]`` keys of each row's request."""
        return np.asarray(self.case.seq_lens[self.request], dtype=np.int64)

    @property
    def num_score_blocks(self) -> int:
        """Blocks of the longest request of the call."""
        return self.case.num_score_blocks

    @property
    def num_blocks(self) -> Ints:
        """``[R]`` blocks that each row sees."""
        return np.asarray(self.position // BLOCK_TOKENS + 1, dtype=np.int64)

    @property
    def order(self) -> EngineOrder:
        """The order that the engine's ids are stated in."""
        return "any" if self.case.engine is None else self.case.engine.order

    @property
    def pages(self) -> NDArray[np.uint8]:
        """``[num_pages, 9216]``."""
        if self.case.pages is None:
            raise AssertionError("evidence is made with pages")
        return self.case.pages.reshape(-1, PAGE_BYTES)

    @property
    def table(self) -> NDArray[np.int32]:
        """``[batch, max_blocks]``."""
        if self.case.block_table is None:
            raise AssertionError("evidence is made with pages")
        return self.case.block_table

    def subset(self, rows: Ints) -> Evidence:
        """Some of these rows."""
        return replace(
            self,
            request=self.request[rows],
            head=self.head[rows],
            token=self.token[rows],
            faulty=self.faulty[rows],
            scores=None if self.scores is None else self.scores[rows],
            block_ids=None if self.block_ids is None else self.block_ids[rows],
        )

    def narrowed(self, blocks: Ints) -> Evidence:
        """The same rows, to be computed in some columns only."""
        return replace(self, blocks=blocks)

    def at(self, head: Ints, token: Ints) -> Evidence:
        """Other rows of the call, as many, in place of these; without the engine's result."""
        request = np.searchsorted(self.case.cu_seqlens_q, token, side="right") - 1
        return replace(
            self,
            request=request.astype(np.int64),
            head=head,
            token=token,
            scores=None,
            block_ids=None,
        )


def gather_evidence(case: Case, grades: NDArray[np.int8], fault: int, tolerance: float) -> Evidence:
    """Sample a judged case.

    Args:
        case: with an engine's result, its keys in pages.
        grades: ``[H, total_q]`` of every row, below 0 where it was not judged.
        fault: the grade of a faulty row.
        tolerance: in units of ``sum_i |q_i k_i|``.
    """
    faulty_per_token = (grades == fault).any(axis=0)
    requests = _requests(case, faulty_per_token)
    in_sample = np.zeros(case.total_q, dtype=bool)
    for taken in requests:
        in_sample[case.cu_seqlens_q[taken] : case.cu_seqlens_q[taken + 1]] = True
    faulty = _spread(np.argwhere((grades == fault) & in_sample), FAULTY_ROWS)
    right = _spread(np.argwhere((grades >= 0) & (grades != fault) & in_sample), RIGHT_ROWS)
    rows = np.concatenate([faulty, right])
    is_faulty = np.arange(len(rows)) < len(faulty)
    order = np.argsort(rows[:, 1], kind="stable")  # by token, so by request
    rows, is_faulty = rows[order], is_faulty[order]
    head, token = rows[:, 0], rows[:, 1]
    request = np.searchsorted(case.cu_seqlens_q, token, side="right") - 1
    record = case.engine
    if record is None:
        raise AssertionError("a judged case has an engine's result")
    return Evidence(
        case=case,
        request=request.astype(np.int64),
        head=head,
        token=token,
        faulty=is_faulty,
        scores=None if record.scores is None else record.scores[head, token],
        block_ids=None if record.block_ids is None else record.block_ids[head, token],
        tolerance=tolerance,
    )


def _requests(case: Case, faulty_per_token: NDArray[np.bool_]) -> list[int]:
    """Requests to look at: those with faults, short ones first, and one without any."""
    blocks = -(-case.seq_lens.astype(np.int64) // BLOCK_TOKENS)
    counts = [
        int(faulty_per_token[start:end].sum())
        for start, end in zip(case.cu_seqlens_q[:-1], case.cu_seqlens_q[1:])
    ]
    with_queries = case.query_lens > 0
    shortest_first = np.argsort(blocks, kind="stable")
    faulty = [int(r) for r in shortest_first if counts[r]]
    clean = [int(r) for r in shortest_first if with_queries[r] and not counts[r]]
    taken: list[int] = []
    for request in (*faulty, *clean[-2:]):
        if not taken or blocks[[*taken, request]].sum() <= MAX_PAGES:
            taken.append(request)
    return sorted(taken)


def _spread(rows: Ints, most: int) -> Ints:
    """At most so many rows, evenly spaced over tokens and heads."""
    if len(rows) <= most:
        return rows
    rows = rows[np.lexsort((rows[:, 0], rows[:, 1]))]
    chosen: Ints = np.unique(np.linspace(0, len(rows) - 1, most).round().astype(np.int64))
    return rows[chosen]
