"""Other numbers of init or local blocks than the call states."""

from __future__ import annotations

import numpy as np

from indexer.explain.evidence import Evidence, Ints
from indexer.explain.hypothesis import Hypothesis
from indexer.explain.match import Bools, match, picked_blocks
from indexer.explain.prediction import by_steps
from indexer.explain.replica import Steps, force
from kernel.batch import INIT_SCORE, LOCAL_SCORE

FAMILY = "sentinels"
USUAL_SHARE = 0.9
"""Share of rows that must allow a count."""
Counts = tuple[int, int]
"""Init blocks, local blocks."""


def hypotheses(evidence: Evidence, narrow: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    stated = (evidence.case.init_blocks, evidence.case.local_blocks)
    apart = {stated, (0, 0), (0, stated[1]), (stated[0], 0)}  # has a name of its own
    if evidence.scores is not None:
        return [_forces(counts, stated) for counts in sorted({_recorded(evidence)} - apart)]
    return _from_ids(evidence, narrow, stated, apart)


def _forces(counts: Counts, stated: Counts, more: str = "") -> Hypothesis:
    init, local = counts
    named = [
        f"{number} {kind} block{'s' * (number != 1)} {'are' if number != 1 else 'is'} forced, not {asked}"
        for kind, number, asked in (("init", init, stated[0]), ("local", local, stated[1]))
        if number != asked
    ]
    return Hypothesis(
        " and ".join(named),
        FAMILY,
        f"init_blocks is {stated[0]} and local_blocks {stated[1]} in the file; the engine has {init} and "
        f"{local}{more}.",
        by_steps(lambda _: Steps(forced=lambda scores, ends, _e: force(scores, ends, init, local))),
        fitted=1,
    )


def _recorded(evidence: Evidence) -> Counts:
    """What the rows that see most have in their recorded scores."""
    if evidence.scores is None:
        raise AssertionError("only asked for with scores")
    scores = evidence.scores[:, : evidence.num_score_blocks]
    visible = np.arange(scores.shape[1]) < evidence.num_blocks[:, None]
    usual = []
    for sentinel in (INIT_SCORE, LOCAL_SCORE):
        found = ((scores == np.float32(sentinel)) & visible).sum(axis=1)[evidence.faulty]
        found = np.sort(found)
        usual.append(int(found[int(USUAL_SHARE * (len(found) - 1))]))
    return usual[0], usual[1]


def _from_ids(evidence: Evidence, narrow: Evidence, stated: Counts, apart: set[Counts]) -> list[Hypothesis]:
    """Counts that the picks of most rows allow; of those that give the same, the least."""
    if evidence.block_ids is None:
        return []
    topk = evidence.block_ids.shape[1]
    picked = picked_blocks(evidence.block_ids, evidence.num_score_blocks)
    most_init = _allowed(_run(picked, evidence.num_blocks), topk)
    from_end = np.zeros_like(picked)
    at = evidence.num_blocks[:, None] - 1 - np.arange(picked.shape[1])
    from_end = np.where(at >= 0, np.take_along_axis(picked, at.clip(min=0), axis=1), False)
    most_local = _allowed(_run(from_end, evidence.num_blocks), topk)
    found: list[Hypothesis] = []
    named: set[Counts] = set()
    locals_tried = [*range(1, most_local + 1), *_more_than_k(picked, evidence.num_blocks, stated[0], topk)]
    for tried in (
        [(stated[0], local) for local in locals_tried],
        [(init, stated[1]) for init in range(1, most_init + 1)],
        # What fills all places from both ends never looked at scores: that is no number of forced blocks.
        [(most_init, most_local)] if most_init + most_local < topk else [],
    ):
        fits = {counts: _explains(counts, stated, narrow) for counts in tried if counts not in apart}
        best = max(fits.values(), default=0)
        alike = [counts for counts in tried if best and fits.get(counts) == best]
        if alike and alike[0] not in named:
            named.add(alike[0])
            more = (
                "" if len(alike) == 1 else f", or up to {alike[-1][0]} and {alike[-1][1]}: the ids are alike"
            )
            found.append(_forces(alike[0], stated, more))
    return found


def _run(picked: Bools, num_blocks: Ints) -> Ints:
    """``[R]`` blocks that are picked one after another from the first on; many where all are."""
    run = np.logical_and.accumulate(picked, axis=1).sum(axis=1)
    return np.where(run >= num_blocks, np.iinfo(np.int64).max, run)


def _more_than_k(picked: Bools, num_blocks: Ints, init_blocks: int, topk: int) -> list[int]:
    """Where most rows pick k blocks in a row that start as far from their end: of more forced blocks than k,
    the first win. That all are forced would allow any pick, so the run itself is asked for, and not the one
    from the first block on, which equal scores give."""
    own = np.where(np.arange(picked.shape[1]) >= init_blocks, picked, False)
    first, count = own.argmax(axis=1), own.sum(axis=1)
    in_a_row = own.shape[1] - 1 - own[:, ::-1].argmax(axis=1) - first == count - 1
    in_a_row &= (count > 0) & (first > init_blocks)
    distances, rows = np.unique((num_blocks - first)[in_a_row], return_counts=True)
    if not len(distances) or rows.max() < 0.5 * len(own):
        return []
    usual = int(distances[rows.argmax()])
    return [usual] if usual > topk else []


def _allowed(run: Ints, topk: int) -> int:
    """The largest count that most rows allow, at most k."""
    ordered = np.sort(run)
    return int(min(topk, ordered[int((1 - USUAL_SHARE) * (len(ordered) - 1))]))


def _explains(counts: Counts, stated: Counts, narrow: Evidence) -> int:
    rows = match(_forces(counts, stated).predict(narrow), narrow).rows
    return int(rows[narrow.faulty].sum()) and int(rows.sum())
