"""The wrong selection from the right scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from indexer.explain.evidence import Evidence, Floats
from indexer.explain.hypothesis import Hypothesis
from indexer.explain.prediction import Ids, Prediction
from indexer.explain.replica import Scored, Steps, by_contract, score, unforced
from kernel.batch import LOCAL_SCORE

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
