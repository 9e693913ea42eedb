"""Cut a small ragged case out of the full one, copying its expected outputs and computing none.

    python -m tests.support.cut_ragged_case FULL.safetensors OUT.safetensors

Of each kept request the last queries stay, and the keys from some block on: a block's score depends on that
block's keys alone, so the scores of the blocks that stay are the full case's. The blocks that stay and were
among a row's best 16 of all are, in that order, its best of what is left; so fewer than 16 a row are kept.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from indexer.case import Case, read_case, write_case

BLOCK_TOKENS = 128


class Kept(NamedTuple):
    """What stays of one request of the full case."""

    request: int
    first_block: int
    queries: int


KEPT = (Kept(1, 35, 7), Kept(2, 0, 13), Kept(3, 0, 1), Kept(4, 22, 5), Kept(5, 0, 1))
TOPK = 3


def cut(case: Case, kept: Sequence[Kept], topk: int) -> Case:
    """The kept part of a case that has keys and both expected outputs, as a case of its own.

    Raises:
        ValueError: the case lacks them, or a row's ``topk`` best cannot be told from its 16 best.
    """
    if case.index_k is None or case.expected_scores is None or case.expected_block_ids is None:
        raise ValueError("the case must have index_k and both expected outputs")
    end_key, end_query = np.cumsum(case.seq_lens), case.cu_seqlens_q[1:]
    seq_lens = [int(case.seq_lens[part.request]) - part.first_block * BLOCK_TOKENS for part in kept]
    width = max(-(-tokens // BLOCK_TOKENS) for tokens in seq_lens)
    keys, queries, scores, block_ids = [], [], [], []
    for part, tokens in zip(kept, seq_lens):
        rows = slice(int(end_query[part.request]) - part.queries, int(end_query[part.request]))
        keys.append(case.index_k[end_key[part.request] - tokens : end_key[part.request]])
        queries.append(case.index_q[rows])
        part_scores = case.expected_scores[:, rows, part.first_block :][..., :width]
        missing = width - part_scores.shape[-1]
        scores.append(np.pad(part_scores, ((0, 0), (0, 0), (0, missing)), constant_values=-np.inf))
        block_ids.append(_left(case.expected_block_ids[:, rows], part.first_block, topk))
        visible = np.isfinite(scores[-1]).sum(axis=-1)
        if ((block_ids[-1] >= 0).sum(axis=-1) < np.minimum(visible, topk)).any():
            raise ValueError(f"request {part.request}: keep more blocks or a lower topk than {topk}")
    return dataclasses.replace(
        case,
        index_q=np.concatenate(queries),
        index_k=np.concatenate(keys),
        cu_seqlens_q=np.cumsum([0, *(part.queries for part in kept)], dtype=np.int32),
        seq_lens=np.array(seq_lens, dtype=np.int32),
        topk=topk,
        expected_scores=np.concatenate(scores, axis=1),
        expected_block_ids=np.concatenate(block_ids, axis=1),
    )


def _left(block_ids: NDArray[np.int32], first_block: int, topk: int) -> NDArray[np.int32]:
    left = np.where(block_ids >= first_block, block_ids - first_block, -1)
    in_order = np.argsort(left < 0, axis=-1, kind="stable")
    return np.take_along_axis(left, in_order, axis=-1)[..., :topk].astype(np.int32)


if __name__ == "__main__":
    write_case(cut(read_case(sys.argv[1]), KEPT, TOPK), sys.argv[2])
