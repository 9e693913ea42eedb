"""Pages that did not yet, or no longer, hold their keys when the engine read them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from indexer.explain.evidence import Evidence, Ints
from indexer.explain.hypothesis import Hypothesis
from indexer.explain.match import Bools, match, picked_blocks, possible_scores
from indexer.explain.page_match import pages_that_match
from indexer.explain.prediction import by_scores, by_steps
from indexer.explain.replica import PageOf, Scored, Steps, by_table, score
from kernel.batch import LOCAL_SCORE
from kernel.contract import PAGE_BYTES

FAMILY = "stale or unwritten page"
Cells = frozenset[tuple[int, int]]
"""Requests and blocks."""
MAX_CELLS_BY_IDS = 4
"""Pages that are suspected where ids alone tell of them."""
LEAST_ROWS = 3
"""Faulty rows for each page that ids alone tell of."""


def hypotheses(evidence: Evidence, _narrow: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    found = [
        Hypothesis(
            "this step's keys are not yet written, zeros are read",
            FAMILY,
            "The scorer ran before the insert of the same step: a missing wait, or the wrong order of calls.",
            by_steps(lambda e: Steps(first_absent=e.prefix, absent_is_zero=True)),
        ),
        Hypothesis(
            "this step's keys are left out",
            FAMILY,
            "Only the keys before this step's queries are scored: lengths of the step before are used.",
            by_steps(lambda e: Steps(first_absent=e.prefix)),
        ),
    ]
    suspects = _by_scores(evidence) if evidence.scores is not None else _by_ids(evidence)
    for cells in suspects:
        found += _replaced_pages(evidence, cells)
    return found


def _replaced_pages(evidence: Evidence, cells: Cells) -> list[Hypothesis]:
    where = ", ".join(f"block {block} of request {request}" for request, block in sorted(cells)[:4])
    where += "" if len(cells) <= 4 else f" and {len(cells) - 4} more"
    by = "" if evidence.scores is not None else " (by the ids alone: nothing else is recorded)"
    found = [
        Hypothesis(
            "pages are read as unwritten",
            FAMILY,
            f"The pages of {where} score as zero bytes do: they were not written, or not yet.",
            by_steps(lambda _: Steps(page_of=_replaced(cells, _ZERO))),
            fitted=1,
        )
    ]
    sources = pages_that_match(evidence, cells)
    if sources:
        names = ", ".join(
            f"block {block} of request {request} from page {place}"
            for (request, block), place in sorted(sources.items())[:4]
        )
        found.append(
            Hypothesis(
                "pages hold another block's keys",
                FAMILY,
                f"Scored from another page of the file: {names}{by}. The block table or the page was stale.",
                by_steps(lambda _: Steps(page_of=_from(sources))),
                fitted=2 if by else 1,
            )
        )
    found.append(
        Hypothesis(
            "pages held something else",
            FAMILY,
            f"All that is wrong comes from the pages of {where}{by}, and no known fault gives it: they "
            "held other bytes when the engine read them than when they were captured.",
            by_steps(lambda _: Steps(page_of=_replaced(cells, None))),
            fitted=3,
            leaves_open=True,
        )
    )
    return found


_ZERO = np.zeros(PAGE_BYTES, dtype=np.uint8)


def _by_scores(evidence: Evidence) -> list[Cells]:
    """Pages whose scores are wrong in most rows that see them: few, and not all that are seen.

    A score that no content of a page gives, and one that a sentinel decides, tells nothing of a page.
    """
    if evidence.scores is None:
        return []
    right = score(evidence)
    visible = np.arange(right.scores.shape[1]) < evidence.num_blocks[:, None]
    got = evidence.scores[:, : right.scores.shape[1]]
    with np.errstate(invalid="ignore"):
        near = np.abs(got.astype(np.float64) - right.scores) <= right.slack
    wrong = visible & ~near & possible_scores(evidence) & (right.scores < LOCAL_SCORE)
    cells = _cells(evidence.request, wrong & evidence.faulty[:, None])
    seen = _cells(evidence.request, visible)
    suspects = frozenset(
        (request, block)
        for request, block in cells
        if 2 * wrong[evidence.request == request, block].sum()
        >= visible[evidence.request == request, block].sum()
    )
    return [suspects] if suspects and len(suspects) <= max(1, len(seen) // 4) else []


def _by_ids(evidence: Evidence) -> list[Cells]:
    """The least pages without which the picks of nearly all faulty rows are right: the one first that most
    rows miss, or pick, against their score."""
    if evidence.block_ids is None:
        return []
    right = score(evidence)
    picked = picked_blocks(evidence.block_ids, right.scores.shape[1])
    against = _against(evidence, right, picked)
    cells: Cells = frozenset()
    left = evidence.faulty & ~match(by_scores(right), evidence).rows
    faulty = int(left.sum())
    while left.sum() > 0.1 * faulty and len(cells) < MAX_CELLS_BY_IDS:
        votes = _votes(evidence.request, against & left[:, None], cells)
        if not votes:
            return []
        cells |= {max(votes, key=lambda cell: (votes[cell], cell))}
        left &= ~match(by_scores(_without(evidence, right, cells)), evidence).rows
    if not cells or faulty < LEAST_ROWS * len(cells) or left.sum() > 0.1 * faulty:
        return []
    return [cells]


def _against(evidence: Evidence, right: Scored, picked: Bools) -> Bools:
    """``[R, S]`` blocks that are picked or left with a score far enough from the k-th for neither."""
    scores = right.scores
    kth = -np.sort(-scores, axis=1)[:, min(evidence.case.topk, scores.shape[1]) - 1][:, None]
    with np.errstate(invalid="ignore"):
        missed = ~picked & (scores - kth > right.slack)
        extra = picked & (kth - scores > right.slack)
    visible = np.arange(scores.shape[1]) < evidence.num_blocks[:, None]
    return np.asarray((missed | extra) & visible & (scores < LOCAL_SCORE))


def _votes(request: Ints, where: Bools, taken: Cells) -> dict[tuple[int, int], int]:
    rows, blocks = np.nonzero(where)
    cells, counts = np.unique(np.stack([request[rows], blocks]), axis=1, return_counts=True)
    votes = {(int(r), int(b)): int(n) for (r, b), n in zip(cells.T, counts)}
    return {cell: count for cell, count in votes.items() if cell not in taken}


def _without(evidence: Evidence, right: Scored, cells: Cells) -> Scored:
    """The right scores, those of some pages not known."""
    scores = right.scores.copy()
    for request, block in cells:
        rows = (
            (evidence.request == request) & (scores[:, block] < LOCAL_SCORE) & (block < evidence.num_blocks)
        )
        scores[rows, block] = np.nan
    return Scored(scores, right.num_blocks, right.slack)


def _cells(request: Ints, where: Bools) -> Cells:
    rows, blocks = np.nonzero(where)
    return frozenset(zip(request[rows].tolist(), blocks.tolist()))


def _replaced(cells: Cells, page: NDArray[np.uint8] | None) -> PageOf:
    def page_of(evidence: Evidence, request: int, block: int) -> NDArray[np.uint8] | None:
        if (request, block) in cells:
            return page
        return by_table(evidence, request, block)

    return page_of


def _from(sources: dict[tuple[int, int], int]) -> PageOf:
    def page_of(evidence: Evidence, request: int, block: int) -> NDArray[np.uint8] | None:
        place = sources.get((request, block))
        if place is None:
            return by_table(evidence, request, block)
        found: NDArray[np.uint8] = evidence.pages[place]
        return found

    return page_of
