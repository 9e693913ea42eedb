"""The wrong selection from the right scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from indexer.explain.evidence import (
    Evidence,
    Floats,
    IdOrder,
    Ids,
    Ints,
    Prediction,
    ReadIds,
    Scored,
    Steps,
    by_contract,
    score,
    unforced,
)
from indexer.explain.match import Hypothesis
from kernel.batch import LOCAL_SCORE
from kernel.contract import BLOCK_TOKENS

FAMILY = "selection"
SHARED: dict[str, tuple[str, Callable[[list[Floats]], Floats], Callable[[list[Floats]], Floats]]] = {
    "largest": (
        "the largest of the heads' scores",
        lambda scores: np.maximum.reduce(scores),
        lambda slacks: np.maximum.reduce(slacks),
    ),
    "sum": (
        "the sum of the heads' scores",
        lambda scores: np.add.reduce(scores),
        lambda slacks: np.add.reduce(slacks),
    ),
    "mean": (
        "the mean of the heads' scores",
        lambda scores: np.add.reduce(scores) / np.float32(len(scores)),
        lambda slacks: np.add.reduce(slacks) / np.float32(len(slacks)),
    ),
}


def hypotheses(evidence: Evidence, _narrow: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    found = []
    if evidence.case.num_heads > 1:
        found += _shared_by_heads(evidence)
    if evidence.block_ids is not None:
        found += _lowest(evidence)
        found.append(
            Hypothesis(
                "the best block is left out",
                FAMILY,
                "The ids are those of ranks 2 to k + 1: a top-k that starts one too late.",
                _without_best,
            )
        )
        found += _fewer(evidence, evidence.block_ids)
    return found


def _shared_by_heads(evidence: Evidence) -> list[Hypothesis]:
    found = []
    for how, (words, _, _) in SHARED.items():
        says = f"All heads have one selection, by {words}; each head must have its own."
        if evidence.block_ids is not None and how != "mean":  # by the mean is by the sum
            by = words if how == "largest" else "the sum or mean of the heads' scores"
            found.append(
                Hypothesis(
                    f"one selection is shared by all heads: by {by}",
                    FAMILY,
                    says.replace(words, by),
                    lambda e, how=how: Prediction(score(e), _reduced(e, how)),  # type: ignore[misc]
                )
            )
        if evidence.scores is not None:
            found.append(
                Hypothesis(
                    f"all heads have the same scores: {words}",
                    FAMILY,
                    f"Scores are reduced over the heads before they are written: {words}.",
                    lambda e, how=how: Prediction(*(_reduced(e, how),) * 2),  # type: ignore[misc]
                )
            )
    return found


def _reduced(evidence: Evidence, how: str) -> Scored:
    _, scores_of, slacks_of = SHARED[how]
    heads = [
        score(evidence.at(np.full_like(evidence.head, head), evidence.token), Steps(forced=unforced))
        for head in range(evidence.case.num_heads)
    ]
    reduced = scores_of([head.scores for head in heads])
    reduced = by_contract(reduced, heads[0].num_blocks, evidence)
    return Scored(reduced, heads[0].num_blocks, slacks_of([head.slack for head in heads]))


def _lowest(evidence: Evidence) -> list[Hypothesis]:
    found = [
        Hypothesis(
            "the lowest scores are picked",
            FAMILY,
            "The k smallest of a row's blocks are picked, and the first is the smallest.",
            lambda e: _picks_lowest(e, keeps_forced=False, sees_masked=False),
        ),
        Hypothesis(
            "the lowest scores are picked, masked blocks first",
            FAMILY,
            "The k smallest of all columns are picked: blocks that the row does not see, at -inf, win.",
            lambda e: _picks_lowest(e, keeps_forced=False, sees_masked=True),
        ),
    ]
    if evidence.case.init_blocks or evidence.case.local_blocks:
        found.append(
            Hypothesis(
                "the lowest scores are picked beside the forced blocks",
                FAMILY,
                "Forced blocks are picked, and the smallest scores of the others.",
                lambda e: _picks_lowest(e, keeps_forced=True, sees_masked=False),
            )
        )
    return found


def _picks_lowest(evidence: Evidence, *, keeps_forced: bool, sees_masked: bool) -> Prediction:
    right = score(evidence)
    scores = right.scores
    turned = np.where(scores >= LOCAL_SCORE, scores, -scores) if keeps_forced else -scores
    num_blocks = right.num_blocks
    if sees_masked:
        num_blocks = np.full_like(num_blocks, scores.shape[1])
    else:
        turned = np.where(np.arange(scores.shape[1]) < num_blocks[:, None], turned, np.float32(-np.inf))
    return Prediction(right, replace(right, scores=turned, num_blocks=num_blocks))


def _without_best(evidence: Evidence) -> Prediction:
    right = score(evidence)
    best = np.argmax(np.nan_to_num(right.scores, nan=-np.inf), axis=1)[:, None].astype(np.int32)
    scores = right.scores.copy()
    np.put_along_axis(scores, best, np.float32(-np.inf), axis=1)

    def read(e: Evidence, ids: Ids) -> Ids:
        """Rows that have no k + 1 blocks have one id less: the block left out stands for it."""
        filling = (ids == -1) & (e.num_blocks <= ids.shape[1])[:, None]
        first = filling & (np.arange(ids.shape[1]) == np.argmax(filling, axis=1)[:, None])
        return np.where(first, best, ids)

    return Prediction(right, replace(right, scores=scores), read_ids=read)


def _fewer(evidence: Evidence, ids: Ids) -> list[Hypothesis]:
    """As many ids as the longest of the faulty rows has before its filling starts."""
    faulty = ids[evidence.faulty]
    found = []
    for filling in (-1, 0):
        filled = np.minimum.accumulate((faulty == filling)[:, ::-1], axis=1).sum(axis=1)
        count = ids.shape[1] - int(filled.min(initial=ids.shape[1]))
        if not 0 < count < evidence.case.topk:
            continue
        found.append(
            Hypothesis(
                f"{_blocks(count)} selected where {evidence.case.topk} are stated"
                + ("" if filling == -1 else ", and 0 is written behind them"),
                FAMILY,
                f"The k used is {count}: nothing stands behind the {f'{count} ' * (count > 1)}best.",
                lambda e, count=count, filling=filling: _shorter(e, count, filling),  # type: ignore[misc]
                fitted=1,
            )
        )
    return found


def _blocks(count: int) -> str:
    return "1 block is" if count == 1 else f"{count} blocks are"


def _shorter(evidence: Evidence, count: int, filling: int) -> Prediction:
    right = score(evidence)

    def read(e: Evidence, ids: Ids) -> Ids:
        if filling == -1:
            return ids
        behind = np.arange(ids.shape[1]) >= np.minimum(count, e.num_blocks)[:, None]
        return np.where(behind & (ids == filling), np.int32(-1), ids)

    return Prediction(right, right, topk=count, read_ids=read)


# Ids that are not logical blocks of the request.

ID_MEANING_FAMILY = "meaning of ids"
NO_BLOCK = np.int32(np.iinfo(np.int32).max)


def id_meaning_hypotheses(evidence: Evidence) -> list[Hypothesis]:
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

    return Hypothesis(name, ID_MEANING_FAMILY, says, predict)


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


# Ids that are all off by the same number, more than one.

ID_OFFSET_FAMILY = "meaning of ids"


def id_offset_hypotheses(evidence: Evidence, _narrow: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    offset = 0 if evidence.block_ids is None else _offset(evidence, evidence.block_ids)
    if abs(offset) < 2:
        return []
    return [
        Hypothesis(
            f"ids are {abs(offset)} too {'high' if offset > 0 else 'low'}",
            ID_OFFSET_FAMILY,
            f"Block b is written as b {'+' if offset > 0 else '-'} {abs(offset)}: ids must start at the "
            "request's first block.",
            lambda e: _moved(e, offset),
            fitted=1,
        )
    ]


def _offset(evidence: Evidence, ids: Ids) -> int:
    """The distance of most rows' ids from those of the best blocks; 0 if they are not at one distance."""
    scores = score(evidence).scores
    best = np.argsort(-np.nan_to_num(scores, nan=-np.inf), axis=1, kind="stable")
    distances = []
    for row in np.flatnonzero(evidence.faulty):
        held = np.sort(ids[row][ids[row] != -1]).astype(np.int64)
        wanted = np.sort(best[row, : min(evidence.num_blocks[row], ids.shape[1])])
        if len(held) == len(wanted) and len(held) and np.ptp(held - wanted) == 0:
            distances.append(int(held[0] - wanted[0]))
    values, counts = np.unique(np.array(distances or [0]), return_counts=True)
    return int(values[counts.argmax()])


def _moved(evidence: Evidence, offset: int) -> Prediction:
    def read(_evidence: Evidence, ids: Ids) -> Ids:
        blocks = ids.astype(np.int64) - offset
        return np.where(ids == -1, ids, np.where(blocks < 0, NO_BLOCK, blocks)).astype(np.int32)

    right = score(evidence)
    return Prediction(right, right, read_ids=read)


# The right blocks of a row in an order that is not the one stated.

ID_ORDER_FAMILY = "order of ids"
SAYS = "The rows hold the right blocks, but {0}; engine_order states {1}."
ORDERS: tuple[tuple[IdOrder, str, str], ...] = (
    ("block", "ids are sorted by block", "by ascending block"),
    ("score", "ids are sorted by score", "by descending score"),
    ("lowest score", "ids are sorted from the lowest score up", "by ascending score"),
    ("last block", "ids are sorted from the last block down", "by descending block"),
)


def id_order_hypotheses(evidence: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    stated = evidence.order
    if evidence.block_ids is None or stated == "any":
        return []
    must = "by score" if stated == "score" else "by block"
    found = [
        _ordered(f"{name}, not {must}", SAYS.format(f"sorted {how}", stated), order)
        for order, name, how in ORDERS
        if order != stated
    ]
    found.append(
        _ordered("-1 stands before the ids", SAYS.format("behind the filling", stated), stated, _filled_last)
    )
    found.append(
        _ordered(
            "ids are not in the order stated", SAYS.format("in no order known here", stated), "any", fitted=3
        )
    )
    return found


def _ordered(
    name: str, says: str, order: IdOrder, read: ReadIds | None = None, fitted: int = 0
) -> Hypothesis:
    def predict(evidence: Evidence) -> Prediction:
        right = score(evidence)
        return Prediction(right, right, order=order, read_ids=read)

    return Hypothesis(name, ID_ORDER_FAMILY, says, predict, fitted)


def _filled_last(_evidence: Evidence, ids: Ids) -> Ids:
    return np.take_along_axis(ids, np.argsort(ids < 0, axis=1, kind="stable"), axis=1)


# Head and token exchanged in the buffers that come out.

OUTPUT_LAYOUT_FAMILY = "head/token layout"


def output_layout_hypotheses(evidence: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    if evidence.case.num_heads == 1 or evidence.case.total_q == 1:
        return []
    found = []
    both = evidence.scores is not None and evidence.block_ids is not None
    for where in ("ids", "scores", "ids and scores") if both else ("ids and scores",):
        shown = where if both else ("ids" if evidence.block_ids is not None else "scores")
        for order, wanted in (("token-major", "head-major"), ("head-major", "token-major")):
            found.append(
                Hypothesis(
                    f"{shown} are {order} in a buffer that is read {wanted}",
                    OUTPUT_LAYOUT_FAMILY,
                    f"Row (head, token) holds another row's {shown}: its strides are exchanged.",
                    lambda e, where=where, order=order: _exchanged(e, where, order),  # type: ignore[misc]
                )
            )
    return found


def _exchanged(evidence: Evidence, where: str, order: str) -> Prediction:
    heads, tokens = evidence.case.num_heads, evidence.case.total_q
    if order == "token-major":
        flat = evidence.head * tokens + evidence.token
        other = evidence.at(flat % heads, flat // heads)
    else:
        flat = evidence.token * heads + evidence.head
        other = evidence.at(flat // tokens, flat % tokens)
    moved, right = score(other), score(evidence)
    return Prediction(moved if "scores" in where else right, moved if "ids" in where else right)
