"""Faults in the scores that are recorded: never computed, shifted, rounded or scaled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np

from indexer.explain.evidence import Evidence, Prediction, Scored, by_contract, prediction_by_contract, score
from indexer.explain.match import Family, Hypothesis, as_is, ids_agree
from indexer.explain.verdict import Bools, Floats
from kernel.batch import INIT_SCORE, LOCAL_SCORE
from kernel.contract import HEAD_DIM

# ---- Scores that stand one column beside their block ----

COLUMNS = Family("score columns", as_is, when=lambda e: e.scores is not None and e.num_score_blocks > 1)


def _shifted(evidence: Evidence, shift: int) -> Prediction:
    """What leaves at one end comes in at the other; nothing does where columns were recorded past the last
    block."""
    columns = evidence.num_score_blocks
    source = evidence
    if evidence.blocks is not None:
        wanted = np.union1d(evidence.blocks, (evidence.blocks - shift) % columns)
        source = evidence.narrowed(wanted.astype(np.int64))
    right = score(source)
    scores, slack = (np.roll(cells, shift, axis=1) for cells in (right.scores, right.slack))
    if evidence.scores is not None and evidence.scores.shape[1] > columns:
        scores[:, 0 if shift > 0 else -1] = -np.inf
    return Prediction(replace(right, scores=scores, slack=slack), score(evidence))


for _sign, _shift in (("+", 1), ("-", -1)):
    COLUMNS.add(
        f"score columns are shifted by one: block b stands in column b {_sign} 1",
        "The ids do not follow: the scores are written, or read for the capture, one column off.",
        partial(_shifted, shift=_shift),
    )

# ---- Scores times a constant: the selection is the same ----

SCALE = Family("scale of scores", as_is, when=lambda e: e.scores is not None)
LEAST_CELLS = 4
KNOWN = {
    HEAD_DIM**-0.5: "1/sqrt(128), the softmax scale",
    HEAD_DIM**-0.5 / math.log(2): "log2(e)/sqrt(128), the softmax scale for exp2",
    1 / math.log(2): "log2(e)",
    1 / HEAD_DIM: "1/128",
    HEAD_DIM**0.5: "sqrt(128)",
    1 / 448: "1/448, a query's scale",
    1 / 2688: "1/2688, the global scale of NVFP4",
    0.5: "1/2",
    2.0: "2",
}


@SCALE.generator
def _scales(_evidence: Evidence, narrow: Evidence) -> Iterator[Hypothesis]:
    right = score(narrow)
    got = narrow.recorded.astype(np.float64)
    with np.errstate(invalid="ignore"):
        usable = (np.abs(right.scores) > 100 * right.slack) & (right.scores < LOCAL_SCORE)
        usable &= np.isfinite(right.scores) & (np.abs(got) < LOCAL_SCORE / 1e6) & narrow.faulty[:, None]
    want, have = right.scores[usable].astype(np.float64), got[usable]
    if len(want) < LEAST_CELLS:
        return
    factor = float(np.median(have / want))
    inlier = np.abs(have - factor * want) <= 0.02 * np.abs(factor * want)
    if factor <= 0 or inlier.sum() < 0.5 * len(want):
        return
    factor = float((have[inlier] * want[inlier]).sum() / np.square(want[inlier]).sum())
    if abs(factor - 1) < 1e-3:
        return
    known = [words for value, words in KNOWN.items() if abs(factor / value - 1) < 1e-4]
    with np.errstate(invalid="ignore"):
        forced = right.scores >= LOCAL_SCORE
        with_sentinels = bool((np.abs(got / (factor * right.scores) - 1) < 1e-3)[forced].any())
    yield SCALE.hypothesis(
        f"scores are multiplied by {factor:.6g}" + (f" ({known[0]})" if known else ""),
        "Every score has this factor" + (", sentinels too" if with_sentinels else "") + ". The selection "
        "is the same: harmless where only ids are used, a fault where scores are compared.",
        partial(_scaled, factor=factor, with_sentinels=with_sentinels),
        fitted=1,
    )


def _scaled(evidence: Evidence, factor: float, with_sentinels: bool) -> Prediction:
    right = score(evidence)
    scaled = (factor * right.scores.astype(np.float64)).astype(np.float32)
    if not with_sentinels:
        scaled = np.where(right.scores >= LOCAL_SCORE, right.scores, scaled)
    slack = (factor * right.slack + 1e-6 * np.abs(np.nan_to_num(scaled, posinf=0, neginf=0))).astype("f4")
    return Prediction(Scored(scaled, right.num_blocks, slack), right)


# ---- Scores in a type of 16 bits: what is compared, or only what is written ----

DTYPE = Family("rounding of scores", as_is)
LEAST_CAP = 2.0**15
"""An engine of float16 may cap its sentinels at any finite value above its scores."""
Cast = Callable[[Floats], Floats]
Sentinels = dict[float, float]
"""What stands in the place of each."""


def to_bfloat16(values: Floats) -> Floats:
    """Values rounded to bfloat16, to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(values), values, rounded.astype(np.uint32).view(np.float32))


def to_float16(values: Floats) -> Floats:
    """Values rounded to float16, infinite where they exceed it."""
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float32)


@DTYPE.generator
def _dtypes(evidence: Evidence, narrow: Evidence) -> Iterator[Hypothesis]:
    # The right ids are a selection by rounded scores as well: equal ones may change places.
    ids_are_right = evidence.block_ids is None or bool(
        ids_agree(prediction_by_contract(evidence), evidence).all()
    )
    # Blocks that float16 makes equal, bfloat16 makes equal, too: of the two the finer one is taken.
    for fitted, (dtype, cast, step) in enumerate(
        (("float16", to_float16, "0.05 %"), ("bfloat16", to_bfloat16, "0.4 %")), start=1
    ):
        if evidence.block_ids is None:
            when = ""
            says = (
                "Harmless for ids that were selected before the rounding; by rounded scores, blocks that "
                f"differ by less than {step} are equal and change places."
            )
        elif ids_are_right:
            when = " after the selection"
            says = "The ids are right: harmless where only ids are used, a fault where scores are compared."
        else:
            when = " before the selection"
            says = (
                f"Blocks whose scores differ by less than {step} are equal: the k-th one and the next may "
                "change places, and any two in the order. The selection must compare fp32."
            )
            if evidence.scores is None:
                says += (
                    " Ids alone do not tell it from noise below that, as of sums in 16 bits: record scores."
                )
        sentinels = _sentinels(narrow, cast)
        rounded = partial(_rounded, cast=cast, sentinels=sentinels, ids_are_right=ids_are_right)
        yield DTYPE.hypothesis(f"scores are rounded to {dtype}{when}", says, rounded, fitted)


def _sentinels(evidence: Evidence, cast: Cast) -> Sentinels:
    """Written as they are, rounded, or, for float16, capped: whichever the engine has in all its rows."""
    right = score(evidence).scores
    found = {}
    for sentinel in (INIT_SCORE, LOCAL_SCORE):
        rounded = found[sentinel] = float(cast(np.array([sentinel], dtype=np.float32))[0])
        if evidence.scores is None:
            continue
        got = np.unique(evidence.recorded[right == np.float32(sentinel)])
        capped = np.isinf(rounded) and len(got) == 1 and LEAST_CAP <= got[0] < LOCAL_SCORE
        if len(got) == 1 and (got[0] == np.float32(sentinel) or capped):
            found[sentinel] = float(got[0])
    return found


def _rounded(evidence: Evidence, cast: Cast, sentinels: Sentinels, ids_are_right: bool) -> Prediction:
    right = score(evidence)
    scores = cast(right.scores)
    with np.errstate(invalid="ignore"):
        above = cast(right.scores + right.slack) - scores
        below = scores - cast(right.scores - right.slack)
    slack = np.nan_to_num(np.maximum(above, below), nan=0.0, posinf=0.0)
    for sentinel, value in sentinels.items():
        scores = np.where(right.scores == np.float32(sentinel), np.float32(value), scores)
    slack = np.where(right.scores >= LOCAL_SCORE, np.float32(0), slack).astype(np.float32)
    rounded = replace(right, scores=scores, slack=slack)
    return Prediction(rounded, right if ids_are_right else rounded)


# ---- Scores that were never computed, and the selection from scores that are all equal ----

NEVER = Family("scores never computed", as_is)
USUAL_SHARE = 0.9
"""Share of a sample's cells, or of its rows, that must be so."""
End = Literal["lowest", "highest"]


@NEVER.generator
def _never_computed(evidence: Evidence, _narrow: Evidence) -> Iterator[Hypothesis]:
    if evidence.scores is None:
        return
    right, got = score(evidence).scores, evidence.recorded
    visible = evidence.visible & evidence.faulty[:, None]
    forced = visible & (right >= LOCAL_SCORE)
    with_sentinels = bool(forced.any()) and bool((got == right)[forced].mean() >= USUAL_SHARE)
    found = _what_all_are(got[visible & (right < LOCAL_SCORE) if with_sentinels else visible])
    if found is None:
        return
    words, value = found
    says = "They were never computed, or the buffer is not the one that the kernel wrote"
    says += ", or every page is read as zero." if words == "zero" else "."
    ids_are_right = False
    if evidence.block_ids is not None:
        agree = ids_agree(prediction_by_contract(evidence), evidence)
        ids_are_right = bool(agree.mean() >= USUAL_SHARE)
        says += (
            " The ids are right: they were selected by other scores."
            if ids_are_right
            else " The ids are those that equal scores give, the lowest."
        )

    def predict(e: Evidence) -> Prediction:
        right = score(e)
        scores = np.where(e.visible, np.float32(value), np.float32(-np.inf))
        if with_sentinels:
            scores = by_contract(scores, right.num_blocks, e)
        empty = replace(right, scores=scores, slack=np.zeros_like(right.slack))
        return Prediction(empty, right if ids_are_right else _by_equal_scores(e, "lowest", with_sentinels))

    yield NEVER.hypothesis(f"scores are all {words}", says, predict)


def _what_all_are(cells: Floats) -> tuple[str, float] | None:
    """Name and value of what most cells hold: NaN is -inf wherever scores are compared."""
    for words, value, holds in (
        ("zero", 0.0, cells == 0),
        ("NaN", -np.inf, np.isnan(cells)),
        ("-inf", -np.inf, np.isneginf(cells)),
    ):
        if len(cells) and holds.mean() >= USUAL_SHARE:
            return words, value
    return None


@NEVER.generator
def _equal(evidence: Evidence, _narrow: Evidence) -> Iterator[Hypothesis]:
    picks_all = not (evidence.num_blocks[evidence.faulty] > evidence.case.topk).any()
    if evidence.block_ids is None or picks_all:  # all blocks, whatever the scores are
        return
    tried: list[Bools] = []
    ends: tuple[End, ...] = ("lowest", "highest")
    for end, keeps_forced in ((end, keeps) for end in ends for keeps in (False, True)):
        picked = _by_equal_scores(evidence, end, keeps_forced).scores > 0
        if any(np.array_equal(picked, other) for other in tried):
            continue
        tried.append(picked)
        beside = " beside the forced blocks" if keeps_forced else ""
        yield NEVER.hypothesis(
            f"the selection saw equal scores: the {end} ids{beside}",
            f"The top-k reads zeros, -inf or a buffer that was never written, and the {end} ids fill "
            "all places: look at what it reads, and at where its scores start. Ids alone do not "
            "tell it from forced blocks that fill them.",
            lambda e, end=end, keeps=keeps_forced: Prediction(score(e), _by_equal_scores(e, end, keeps)),  # type: ignore[misc]
            fitted=1,  # as other counts of forced blocks, which give the same ids
        )


def _by_equal_scores(evidence: Evidence, end: End, keeps_forced: bool) -> Scored:
    """The places filled from one end: above 0 what is picked, in any order."""
    right = score(evidence)
    equal: Floats = np.zeros(right.scores.shape, dtype=np.float32)
    if keeps_forced:
        equal = by_contract(equal, right.num_blocks, evidence)
    forced = equal > 0
    free = evidence.visible & ~forced
    rank = np.cumsum(free, axis=1) if end == "lowest" else np.cumsum(free[:, ::-1], axis=1)[:, ::-1]
    room = evidence.case.topk - forced.sum(axis=1, keepdims=True)
    scores = np.where(free & (rank <= room), np.float32(1), equal)
    scores = np.where(evidence.visible, scores, np.float32(-np.inf))
    return replace(right, scores=scores, slack=np.zeros_like(right.slack))
