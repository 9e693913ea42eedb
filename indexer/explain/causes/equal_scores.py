"""Scores that were never computed, and the selection from scores that are all equal."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from indexer.explain.evidence import Evidence, Floats
from indexer.explain.hypothesis import Hypothesis
from indexer.explain.match import Bools, ids_agree
from indexer.explain.prediction import Prediction
from indexer.explain.prediction import by_contract as right_prediction
from indexer.explain.replica import Scored, by_contract, score
from kernel.batch import LOCAL_SCORE

FAMILY = "scores never computed"
USUAL_SHARE = 0.9
"""Share of a sample's cells, or of its rows, that must be so."""
End = Literal["lowest", "highest"]


def hypotheses(evidence: Evidence, _narrow: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    found = []
    if evidence.scores is not None:
        found += _never_computed(evidence, evidence.scores)
    if evidence.block_ids is not None:
        found += _equal(evidence)
    return found


def _equal(evidence: Evidence) -> list[Hypothesis]:
    if not (evidence.num_blocks[evidence.faulty] > evidence.case.topk).any():
        return []  # whatever the scores are, all blocks are picked
    found = []
    tried: list[Bools] = []
    for end in ("lowest", "highest"):
        for keeps_forced in (False, True):
            picked = _by_equal_scores(evidence, end, keeps_forced).scores > 0
            if any(np.array_equal(picked, other) for other in tried):
                continue
            tried.append(picked)
            found.append(
                Hypothesis(
                    f"the selection saw equal scores: the {end} ids"
                    + (" beside the forced blocks" if keeps_forced else ""),
                    FAMILY,
                    f"The top-k reads zeros, -inf or a buffer that was never written, and the {end} ids fill "
                    "all places: look at what it reads, and at where its scores start. Ids alone do not "
                    "tell it from forced blocks that fill them.",
                    lambda e, end=end, keeps=keeps_forced: Prediction(  # type: ignore[misc]
                        score(e), _by_equal_scores(e, end, keeps)
                    ),
                    fitted=1,  # as other counts of forced blocks, which give the same ids
                )
            )
    return found


def _by_equal_scores(evidence: Evidence, end: End, keeps_forced: bool) -> Scored:
    """The places filled from one end: above 0 what is picked, in any order."""
    right = score(evidence)
    shape = right.scores.shape
    visible = np.arange(shape[1]) < right.num_blocks[:, None]
    equal: Floats = np.zeros(shape, dtype=np.float32)
    if keeps_forced:
        equal = by_contract(equal, right.num_blocks, evidence)
    forced = equal > 0
    free = visible & ~forced
    rank = np.cumsum(free, axis=1) if end == "lowest" else np.cumsum(free[:, ::-1], axis=1)[:, ::-1]
    room = evidence.case.topk - forced.sum(axis=1, keepdims=True)
    scores = np.where(free & (rank <= room), np.float32(1), equal)
    scores = np.where(visible, scores, np.float32(-np.inf))
    return replace(right, scores=scores, slack=np.zeros(shape, dtype=np.float32))


def _never_computed(evidence: Evidence, recorded: Floats) -> list[Hypothesis]:
    right = score(evidence).scores
    got = recorded[:, : right.shape[1]]
    visible = (np.arange(right.shape[1]) < evidence.num_blocks[:, None]) & evidence.faulty[:, None]
    cells, forced = visible & (right < LOCAL_SCORE), visible & (right >= LOCAL_SCORE)
    with_sentinels = bool(forced.any()) and bool((got == right)[forced].mean() >= USUAL_SHARE)
    if not with_sentinels:
        cells = visible
    found = _what_all_are(got[cells])
    if found is None:
        return []
    words, value = found
    says = "They were never computed, or the buffer is not the one that the kernel wrote"
    says += ", or every page is read as zero." if words == "zero" else "."
    ids_are_right = False
    if evidence.block_ids is not None:
        ids_are_right = bool(ids_agree(right_prediction(evidence), evidence).mean() >= USUAL_SHARE)
        says += (
            " The ids are right: they were selected by other scores."
            if ids_are_right
            else " The ids are those that equal scores give, the lowest."
        )

    def predicted(e: Evidence) -> Prediction:
        correct = score(e)
        seen = np.arange(correct.scores.shape[1]) < correct.num_blocks[:, None]
        scores = np.where(seen, np.float32(value), np.float32(-np.inf))
        if with_sentinels:
            scores = by_contract(scores, correct.num_blocks, e)
        empty = replace(correct, scores=scores, slack=np.zeros_like(correct.slack))
        return Prediction(empty, correct if ids_are_right else _by_equal_scores(e, "lowest", with_sentinels))

    return [Hypothesis(f"scores are all {words}", FAMILY, says, predicted)]


def _what_all_are(cells: Floats) -> tuple[str, float] | None:
    """What most cells hold in words, and what they count as: NaN is -inf wherever scores are compared."""
    for words, value, holds in (
        ("zero", 0.0, cells == 0),
        ("NaN", -np.inf, np.isnan(cells)),
        ("-inf", -np.inf, np.isneginf(cells)),
    ):
        if len(cells) and holds.mean() >= USUAL_SHARE:
            return words, value
    return None
