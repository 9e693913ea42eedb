"""A part of a case as a case of its own: some query tokens of one request."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from indexer.case.case import Case
from kernel.contract import BLOCK_TOKENS


@dataclass(frozen=True, eq=False)
class Part:
    """Some query tokens of one request; its rows have the bits that they have in the whole call.

    Attributes:
        case: the part; its arrays are views where they can be.
        request: the request in the whole case.
        first: its first query token in the whole case.
    """

    case: Case
    request: int
    first: int


def parts(case: Case, max_cells: int) -> Iterator[Part]:
    """A case in parts of at most ``max_cells`` (row, block) cells, or of one query token, in order.

    Requests without queries have no part.
    """
    for request in range(case.batch):
        start, end = (int(offset) for offset in case.cu_seqlens_q[request : request + 2])
        blocks = -(-int(case.seq_lens[request]) // BLOCK_TOKENS)
        step = max(1, max_cells // max(1, blocks * case.num_heads))
        for first in range(start, end, step):
            yield Part(part_of(case, request, first, min(first + step, end)), request, first)


def part_of(case: Case, request: int, first: int, last: int) -> Case:
    """Query tokens ``first`` to ``last - 1`` of the whole call, all of one request; not empty."""
    end = int(case.cu_seqlens_q[request + 1])
    length = int(case.seq_lens[request]) - (end - last)
    tokens = slice(first, last)
    table = None if case.block_table is None else case.block_table[request : request + 1]
    keys = None
    if case.index_k is not None:
        first_key = int(case.seq_lens[:request].sum(dtype=np.int64))
        keys = case.index_k[first_key : first_key + length]
    engine = case.engine
    if engine is not None:
        engine = dataclasses.replace(
            engine,
            block_ids=None if engine.block_ids is None else engine.block_ids[:, tokens],
            scores=None if engine.scores is None else engine.scores[:, tokens],
            new_keys=None if engine.new_keys is None else engine.new_keys[tokens],
        )
    return dataclasses.replace(
        case,
        index_q=case.index_q[tokens],
        cu_seqlens_q=np.array([0, last - first], dtype=np.int32),
        seq_lens=np.array([length], dtype=np.int32),
        index_k=keys,
        block_table=table,
        expected_scores=None if case.expected_scores is None else case.expected_scores[:, tokens],
        expected_block_ids=None if case.expected_block_ids is None else case.expected_block_ids[:, tokens],
        engine=engine,
    )
