"""A page id kept in 8 or 16 bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from indexer.explain.evidence import Evidence
from indexer.explain.hypothesis import Hypothesis
from indexer.explain.match import score_agrees
from indexer.explain.prediction import Prediction, by_contract, by_scores
from indexer.explain.replica import Steps, score

FAMILY = "page id wrap"
Page = NDArray[np.uint8]


def hypotheses(evidence: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    record = evidence.case.engine
    if record is None or record.page_ids is None:
        return []
    ids = record.page_ids.astype(np.int64)
    place_of = {int(page_id): place for place, page_id in enumerate(ids)}
    found = []
    for bits in (8, 16):
        limit = 1 << bits
        beyond = ids[ids >= limit] % limit
        # By ids alone, what is not in the file contradicts nothing; nor does it where no page is right.
        held = all(int(page_id) in place_of for page_id in beyond)
        if not len(beyond) or not (held or (evidence.scores is not None and len(beyond) < len(ids))):
            continue
        found.append(
            Hypothesis(
                f"page ids are kept in {bits} bits",
                FAMILY,
                f"Page p of the cache is read from page p mod {limit:,}: those from {limit:,} on are wrong.",
                lambda e, limit=limit: _truncated(e, limit, ids, place_of),  # type: ignore[misc]
            )
        )
    return found


def _truncated(
    evidence: Evidence, limit: int, ids: NDArray[np.int64], place_of: dict[int, int]
) -> Prediction:
    def page_of(e: Evidence, request: int, block: int) -> Page | None:
        place = place_of.get(int(ids[e.table[request, block]]) % limit)
        if place is None:
            return None
        page: Page = e.pages[place]
        return page

    read = score(evidence, Steps(page_of=page_of))
    if evidence.scores is None:
        return by_scores(read)
    # What is read from outside the file is not known, but it is another page: its score is not the right one.
    computed = np.ones(read.scores.shape[1], dtype=bool)
    if evidence.blocks is not None:
        computed[:] = False
        computed[evidence.blocks] = True
    same = np.isnan(read.scores) & computed & score_agrees(by_contract(evidence), evidence)
    return by_scores(replace(read, scores=np.where(same, np.float32(np.inf), read.scores)))
