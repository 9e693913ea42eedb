"""Faults in the selection and in the ids that stand for it: the scores are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from indexer.explain.evidence import (
    Evidence,
    IdOrder,
    Prediction,
    ReadIds,
    Scored,
    Steps,
    by_contract,
    by_ids,
    by_scores,
    partly,
    request_blocks,
    score,
    unforced,
)
from indexer.explain.match import Family, Hypothesis, Predict, as_is
from indexer.explain.verdict import Floats, Ids, Ints
from kernel.batch import LOCAL_SCORE
from kernel.contract import BLOCK_TOKENS


def _has_ids(evidence: Evidence) -> bool:
    return evidence.block_ids is not None


# ---- The right blocks of a row in an order that is not the one stated ----

ORDER = Family("order of ids", as_is, when=lambda e: e.block_ids is not None and e.order != "any")
SAYS = "The rows hold the right blocks, but {0}; engine_order states {1}."
ORDERS: tuple[tuple[IdOrder, str, str], ...] = (
    ("block", "ids are sorted by block", "by ascending block"),
    ("score", "ids are sorted by score", "by descending score"),
    ("lowest score", "ids are sorted from the lowest score up", "by ascending score"),
    ("last block", "ids are sorted from the last block down", "by descending block"),
)


@ORDER.generator
def _orders(evidence: Evidence, _narrow: Evidence) -> Iterator[Hypothesis]:
    stated = evidence.order
    must = "by score" if stated == "score" else "by block"
    for order, name, how in ORDERS:
        if order != stated:
            says = SAYS.format(f"sorted {how}", stated)
            yield ORDER.hypothesis(f"{name}, not {must}", says, by_ids(None, order))
    yield ORDER.hypothesis(
        "-1 stands before the ids", SAYS.format("behind the filling", stated), by_ids(_filled_last, stated)
    )
    says = SAYS.format("in no order known here", stated)
    yield ORDER.hypothesis("ids are not in the order stated", says, by_ids(None, "any"), fitted=3)


def _filled_last(_evidence: Evidence, ids: Ids) -> Ids:
    return np.take_along_axis(ids, np.argsort(ids < 0, axis=1, kind="stable"), axis=1)


# ---- Ids that are not logical blocks of the request ----

MEANING: Family[ReadIds] = Family("meaning of ids", by_ids, when=_has_ids)
NO_BLOCK = np.int32(np.iinfo(np.int32).max)


@MEANING.cause("ids are one too high", "Block b is written as b + 1: blocks are counted from 1.")
def _from_one(_evidence: Evidence, ids: Ids) -> Ids:
    return np.where(ids > 0, ids - 1, np.int32(-1))  # no block is written as 0: that is filling, plus one


@MEANING.cause("ids are one too low", "Block b is written as b - 1, and block 0 as -1.")
def _from_minus_one(evidence: Evidence, ids: Ids) -> Ids:
    wanted = np.minimum(evidence.num_blocks, evidence.case.topk)
    missing = (ids >= 0).sum(axis=1) < wanted  # one of a row's -1 is block 0: the first, the rest is behind
    first = np.argmax(ids == -1, axis=1)
    is_block_0 = missing[:, None] & (np.arange(ids.shape[1]) == first[:, None]) & (ids == -1)
    return np.where(is_block_0, np.int32(0), np.where(ids >= 0, ids + 1, np.int32(-1)))


@MEANING.cause(
    "ids are first tokens of blocks",
    f"Block b is written as {BLOCK_TOKENS} b: ids must count blocks, not tokens.",
)
def _of_first_tokens(_evidence: Evidence, ids: Ids) -> Ids:
    blocks, rest = np.divmod(ids, np.int32(BLOCK_TOKENS))
    return np.where(ids < 0, ids, np.where(rest == 0, blocks, NO_BLOCK))


@MEANING.cause(
    "0 stands behind the ids for -1",
    "Rows with fewer blocks than k must be filled with -1: 0 is a block.",
)
def _filled_with_0(evidence: Evidence, ids: Ids) -> Ids:
    behind = np.arange(ids.shape[1]) >= evidence.num_blocks[:, None]
    return np.where(behind & (ids == 0), np.int32(-1), ids)


@MEANING.cause(
    "ids are page ids of the file",
    "Ids are the block table's entries; they must be the columns, logical blocks of the request.",
)
def _of_pages(evidence: Evidence, ids: Ids) -> Ids:
    return _blocks_of_pages(evidence, ids, np.arange(len(evidence.pages)))


@MEANING.cause(
    "ids count on over the requests of the batch",
    "Blocks of the requests before a row's own are counted, too: ids must start at 0.",
    lambda e: e.case.batch > 1,
)
def _from_batch(evidence: Evidence, ids: Ids) -> Ids:
    blocks = request_blocks(evidence.case)
    first = (np.cumsum(blocks) - blocks)[evidence.request][:, None]
    return np.where(ids < 0, ids, np.where(ids < first, NO_BLOCK, ids - first)).astype(np.int32)


@MEANING.cause(
    "ids are page ids of the engine's cache",
    "Ids are physical pages of the cache; they must be logical blocks of the request.",
    lambda e: e.engine.page_ids is not None,
)
def _of_cache_pages(evidence: Evidence, ids: Ids) -> Ids:
    return _blocks_of_pages(evidence, ids, np.asarray(evidence.engine.page_ids, dtype=np.int64))


def _blocks_of_pages(evidence: Evidence, ids: Ids, page_ids: Ints) -> Ids:
    """Blocks whose page has the id, an impossible one where none has."""
    found = np.where(ids < 0, ids, NO_BLOCK)
    for request in np.unique(evidence.request):
        rows = evidence.request == request
        blocks = int(request_blocks(evidence.case)[request])
        own = page_ids[evidence.table[request, :blocks]]
        ascending = np.argsort(own, kind="stable")
        place = np.searchsorted(own, ids[rows], sorter=ascending).clip(max=blocks - 1)
        block = ascending[place].astype(np.int32)
        found[rows] = np.where(own[block] == ids[rows], block, found[rows])
    return found


# ---- Ids that are all off by the same number, more than one ----

OFFSET: Family[ReadIds] = Family("meaning of ids", by_ids, when=_has_ids)


@OFFSET.generator
def _offsets(evidence: Evidence, _narrow: Evidence) -> Iterator[Hypothesis]:
    offset = _offset(evidence)

    def read(_evidence: Evidence, ids: Ids) -> Ids:
        blocks = ids.astype(np.int64) - offset
        return np.where(ids == -1, ids, np.where(blocks < 0, NO_BLOCK, blocks)).astype(np.int32)

    if abs(offset) > 1:
        yield OFFSET.hypothesis(
            f"ids are {abs(offset)} too {'high' if offset > 0 else 'low'}",
            f"Block b is written as b {'+' if offset > 0 else '-'} {abs(offset)}: ids must start at the "
            "request's first block.",
            read,
            fitted=1,
        )


def _offset(evidence: Evidence) -> int:
    """The distance of most rows' ids from those of the best blocks; 0 if they are not at one distance."""
    ids, scores = evidence.ids, score(evidence).scores
    best = np.argsort(-np.nan_to_num(scores, nan=-np.inf), axis=1, kind="stable")
    distances = []
    for row in np.flatnonzero(evidence.faulty):
        held = np.sort(ids[row][ids[row] != -1]).astype(np.int64)
        wanted = np.sort(best[row, : min(evidence.num_blocks[row], ids.shape[1])])
        if len(held) == len(wanted) and len(held) and np.ptp(held - wanted) == 0:
            distances.append(int(held[0] - wanted[0]))
    values, counts = np.unique(np.array(distances or [0]), return_counts=True)
    return int(values[counts.argmax()])


# ---- Head and token exchanged in the buffers that come out ----

LAYOUT = Family("head/token layout", as_is, when=lambda e: e.case.num_heads > 1 and e.case.total_q > 1)


@LAYOUT.generator
def _layouts(evidence: Evidence, _narrow: Evidence) -> Iterator[Hypothesis]:
    both = evidence.scores is not None and evidence.block_ids is not None
    for where in ("ids", "scores", "ids and scores") if both else ("ids and scores",):
        shown = where if both else ("ids" if evidence.block_ids is not None else "scores")
        for order, wanted in (("token-major", "head-major"), ("head-major", "token-major")):
            yield LAYOUT.hypothesis(
                f"{shown} are {order} in a buffer that is read {wanted}",
                f"Row (head, token) holds another row's {shown}: its strides are exchanged.",
                partial(_transposed, where=where, order=order),
            )


def _transposed(evidence: Evidence, where: str, order: str) -> Prediction:
    heads, tokens = evidence.case.num_heads, evidence.case.total_q
    if order == "token-major":
        flat = evidence.head * tokens + evidence.token
        other = evidence.at(flat % heads, flat // heads)
    else:
        flat = evidence.token * heads + evidence.head
        other = evidence.at(flat // tokens, flat % tokens)
    return partly(where, score(other), score(evidence))


# ---- The wrong selection from the right scores ----

SELECTION = Family("selection", as_is)
Reduction = Callable[[list[Floats]], Floats]
SHARED: dict[str, Reduction] = {
    "the largest of the heads' scores": np.maximum.reduce,
    "the sum of the heads' scores": np.add.reduce,
    "the mean of the heads' scores": lambda scores: np.add.reduce(scores) / np.float32(len(scores)),
}


@SELECTION.generator
def _shared_by_heads(evidence: Evidence, _narrow: Evidence) -> Iterator[Hypothesis]:
    if evidence.case.num_heads == 1:
        return
    for words, reduction in SHARED.items():
        reduced = partial(_reduced, reduction=reduction)
        if evidence.block_ids is not None and "mean" not in words:  # the mean selects as the sum does
            by = words.replace("the sum of", "the sum or mean of")
            yield SELECTION.hypothesis(
                f"one selection is shared by all heads: by {by}",
                f"All heads have one selection, by {by}; each head must have its own.",
                lambda e, reduced=reduced: Prediction(score(e), reduced(e)),  # type: ignore[misc]
            )
        if evidence.scores is not None:
            yield SELECTION.hypothesis(
                f"all heads have the same scores: {words}",
                f"Scores are reduced over the heads before they are written: {words}.",
                lambda e, reduced=reduced: by_scores(reduced(e)),  # type: ignore[misc]
            )


def _reduced(evidence: Evidence, reduction: Reduction) -> Scored:
    heads = [
        score(evidence.at(np.full_like(evidence.head, head), evidence.token), Steps(forced=unforced))
        for head in range(evidence.case.num_heads)
    ]
    scores = by_contract(reduction([head.scores for head in heads]), heads[0].num_blocks, evidence)
    return Scored(scores, heads[0].num_blocks, reduction([head.slack for head in heads]))


def _picks_lowest(keeps_forced: bool = False, sees_masked: bool = False) -> Predict:
    def predict(evidence: Evidence) -> Prediction:
        right = score(evidence)
        scores = right.scores
        turned = np.where(scores >= LOCAL_SCORE, scores, -scores) if keeps_forced else -scores
        num_blocks = right.num_blocks
        if sees_masked:
            num_blocks = np.full_like(num_blocks, scores.shape[1])
        else:
            turned = np.where(evidence.visible, turned, np.float32(-np.inf))
        return Prediction(right, replace(right, scores=turned, num_blocks=num_blocks))

    return predict


SELECTION.add(
    "the lowest scores are picked",
    "The k smallest of a row's blocks are picked, and the first is the smallest.",
    _picks_lowest(),
    _has_ids,
)
SELECTION.add(
    "the lowest scores are picked, masked blocks first",
    "The k smallest of all columns are picked: blocks that the row does not see, at -inf, win.",
    _picks_lowest(sees_masked=True),
    _has_ids,
)
SELECTION.add(
    "the lowest scores are picked beside the forced blocks",
    "Forced blocks are picked, and the smallest scores of the others.",
    _picks_lowest(keeps_forced=True),
    lambda e: _has_ids(e) and bool(e.case.init_blocks or e.case.local_blocks),
)


@SELECTION.cause(
    "the best block is left out",
    "The ids are those of ranks 2 to k + 1: a top-k that starts one too late.",
    _has_ids,
)
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


@SELECTION.generator
def _fewer(evidence: Evidence, _narrow: Evidence) -> Iterator[Hypothesis]:
    """As many ids as the longest of the faulty rows has before its filling starts."""
    if evidence.block_ids is None:
        return
    faulty, k = evidence.ids[evidence.faulty], evidence.ids.shape[1]
    for filling, written in ((-1, ""), (0, ", and 0 is written behind them")):
        filled = np.minimum.accumulate((faulty == filling)[:, ::-1], axis=1).sum(axis=1)
        count = k - int(filled.min(initial=k))
        if 0 < count < evidence.case.topk:
            blocks = "1 block is" if count == 1 else f"{count} blocks are"
            yield SELECTION.hypothesis(
                f"{blocks} selected where {evidence.case.topk} are stated{written}",
                f"The k used is {count}: nothing stands behind the {f'{count} ' * (count > 1)}best.",
                by_ids(None if filling else partial(_unfilled, count=count), topk=count),
                fitted=1,
            )


def _unfilled(evidence: Evidence, ids: Ids, count: int) -> Ids:
    """Ids without the zeros behind the first ``count``."""
    behind = np.arange(ids.shape[1]) >= np.minimum(count, evidence.num_blocks)[:, None]
    return np.where(behind & (ids == 0), np.int32(-1), ids)
