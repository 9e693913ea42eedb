"""Pages that did not yet, or no longer, hold their keys when the engine read them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from indexer.explain.evidence import Evidence, Ints
from indexer.explain.hypothesis import Hypothesis, by_steps
from indexer.explain.page_match import pages_that_match
from indexer.explain.replica import PageOf, Steps, by_table, predict
from kernel.batch import LOCAL_SCORE
from kernel.contract import BLOCK_TOKENS, PAGE_BYTES

FAMILY = "stale or unwritten page"
Cells = frozenset[tuple[int, int]]
"""Requests and blocks."""


def hypotheses(evidence: Evidence) -> list[Hypothesis]:
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
    for cells in _suspects(evidence):
        where = ", ".join(f"block {block} of request {request}" for request, block in sorted(cells)[:4])
        more = "" if len(cells) <= 4 else f" and {len(cells) - 4} more"
        found.append(
            Hypothesis(
                "pages are read as unwritten",
                FAMILY,
                f"The pages of {where}{more} score as zero bytes do: they were not written, or not yet.",
                by_steps(lambda _, cells=cells: Steps(page_of=_replaced(cells, _ZERO))),  # type: ignore[misc]
                fitted=1,
            )
        )
        if evidence.scores is None:
            continue
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
                    f"Scored from another page of the file: {names}. The block table or the page was stale.",
                    by_steps(lambda _, sources=sources: Steps(page_of=_from(sources))),  # type: ignore[misc]
                    fitted=1,
                )
            )
        found.append(
            Hypothesis(
                "pages held something else",
                FAMILY,
                f"All that is wrong comes from the pages of {where}{more}, and no known fault gives it: they "
                "held other bytes when the engine read them than when they were captured.",
                by_steps(lambda _, cells=cells: Steps(page_of=_replaced(cells, None))),  # type: ignore[misc]
                fitted=3,
                leaves_open=True,
            )
        )
    return found


_ZERO = np.zeros(PAGE_BYTES, dtype=np.uint8)


def _suspects(evidence: Evidence) -> list[Cells]:
    """Sets of pages that may be at fault: few, and not all that the rows see."""
    right = predict(evidence)
    visible = np.arange(right.scores.shape[1]) < (evidence.position // BLOCK_TOKENS + 1)[:, None]
    sets: list[NDArray[np.bool_]] = []
    if evidence.scores is not None:
        got = evidence.scores[:, : right.scores.shape[1]]
        with np.errstate(invalid="ignore"):
            near = np.abs(got.astype(np.float64) - right.scores) <= right.slack[:, None]
        sets.append(visible & ~near & (got != right.scores))
    elif evidence.block_ids is not None:
        picked = (evidence.block_ids[:, :, None] == np.arange(right.scores.shape[1])).any(axis=1)
        kth = -np.sort(-right.scores, axis=1)[:, min(evidence.case.topk, right.scores.shape[1]) - 1]
        with np.errstate(invalid="ignore"):
            margin = right.scores - kth[:, None]
        ordinary = right.scores < LOCAL_SCORE
        sets.append(visible & ~picked & ordinary & (margin > right.slack[:, None]))
        sets.append(visible & picked & ordinary & (margin < -right.slack[:, None]))
    found = []
    for wrong in sets:
        cells = _cells(evidence.request, wrong & evidence.faulty[:, None])
        seen = _cells(evidence.request, visible)
        if cells and len(cells) <= max(1, len(seen) // 4):
            found.append(cells)
    return found


def _cells(request: Ints, where: NDArray[np.bool_]) -> Cells:
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
