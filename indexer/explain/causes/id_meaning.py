"""Ids that are not logical blocks of the request."""

from __future__ import annotations

import numpy as np

from indexer.explain.evidence import Evidence, Ints
from indexer.explain.hypothesis import Hypothesis
from indexer.explain.prediction import Ids, Prediction, ReadIds
from indexer.explain.replica import score
from kernel.contract import BLOCK_TOKENS

FAMILY = "meaning of ids"
NO_BLOCK = np.int32(np.iinfo(np.int32).max)


def hypotheses(evidence: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    if evidence.block_ids is None:
        return []
    record = evidence.case.engine
    found = [
        _means("ids are one too high", "Block b is written as b + 1: blocks are counted from 1.", _from_one),
        _means("ids are one too low", "Block b is written as b - 1, and block 0 as -1.", _from_minus_one),
        _means(
            "ids are first tokens of blocks",
            f"Block b is written as {BLOCK_TOKENS} b: ids must count blocks, not tokens.",
            _of_first_tokens,
        ),
        _means(
            "0 stands behind the ids for -1",
            "Rows with fewer blocks than k must be filled with -1: 0 is a block.",
            _filled_with_0,
        ),
        _means(
            "ids are page ids of the file",
            "Ids are the block table's entries; they must be the columns, logical blocks of the request.",
            lambda e, ids: _blocks_of_pages(e, ids, np.arange(len(e.pages))),
        ),
    ]
    if evidence.case.batch > 1:
        found.append(
            _means(
                "ids count on over the requests of the batch",
                "Blocks of the requests before a row's own are counted, too: ids must start at 0.",
                _from_batch,
            )
        )
    if record is not None and record.page_ids is not None:
        own = record.page_ids.astype(np.int64)
        found.append(
            _means(
                "ids are page ids of the engine's cache",
                "Ids are physical pages of the cache; they must be logical blocks of the request.",
                lambda e, ids: _blocks_of_pages(e, ids, own),
            )
        )
    return found


def _means(name: str, says: str, read: ReadIds) -> Hypothesis:
    def predict(evidence: Evidence) -> Prediction:
        right = score(evidence)
        return Prediction(right, right, read_ids=read)

    return Hypothesis(name, FAMILY, says, predict)


def _from_one(_evidence: Evidence, ids: Ids) -> Ids:
    return np.where(ids > 0, ids - 1, np.int32(-1))  # no block is written as 0: that is filling, plus one


def _from_minus_one(evidence: Evidence, ids: Ids) -> Ids:
    wanted = np.minimum(evidence.num_blocks, evidence.case.topk)
    missing = (ids >= 0).sum(axis=1) < wanted  # one of a row's -1 is block 0: the first, the rest is behind
    first = np.argmax(ids == -1, axis=1)
    is_block_0 = missing[:, None] & (np.arange(ids.shape[1]) == first[:, None]) & (ids == -1)
    return np.where(is_block_0, np.int32(0), np.where(ids >= 0, ids + 1, np.int32(-1)))


def _of_first_tokens(_evidence: Evidence, ids: Ids) -> Ids:
    blocks, rest = np.divmod(ids, np.int32(BLOCK_TOKENS))
    return np.where(ids < 0, ids, np.where(rest == 0, blocks, NO_BLOCK))


def _filled_with_0(evidence: Evidence, ids: Ids) -> Ids:
    behind = np.arange(ids.shape[1]) >= evidence.num_blocks[:, None]
    return np.where(behind & (ids == 0), np.int32(-1), ids)


def _from_batch(evidence: Evidence, ids: Ids) -> Ids:
    blocks = -(-evidence.case.seq_lens.astype(np.int64) // BLOCK_TOKENS)
    first = (np.cumsum(blocks) - blocks)[evidence.request][:, None]
    return np.where(ids < 0, ids, np.where(ids < first, NO_BLOCK, ids - first)).astype(np.int32)


def _blocks_of_pages(evidence: Evidence, ids: Ids, page_ids: Ints) -> Ids:
    """Blocks whose page has the id, an impossible one where none has."""
    found = np.where(ids < 0, ids, NO_BLOCK)
    for request in np.unique(evidence.request):
        rows = evidence.request == request
        blocks = -(-int(evidence.case.seq_lens[request]) // BLOCK_TOKENS)
        own = page_ids[evidence.table[request, :blocks]]
        ascending = np.argsort(own, kind="stable")
        place = np.searchsorted(own, ids[rows], sorter=ascending).clip(max=blocks - 1)
        block = ascending[place].astype(np.int32)
        found[rows] = np.where(own[block] == ids[rows], block, found[rows])
    return found
