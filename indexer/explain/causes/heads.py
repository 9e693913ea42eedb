"""A head's result in another head's place."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from indexer.explain.evidence import Evidence, Ints
from indexer.explain.hypothesis import Hypothesis
from indexer.explain.match import Bools, ids_agree, score_agrees
from indexer.explain.prediction import Prediction, by_scores
from indexer.explain.replica import score

FAMILY = "head/token layout"


def hypotheses(_evidence: Evidence, narrow: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    heads = narrow.case.num_heads
    if heads == 1:
        return []
    own = np.arange(heads)
    sources = {where: _sources(narrow, where) for where in _recorded(narrow)}
    found = []
    if len(sources) == 1:
        ((where, source),) = sources.items()
        # Of ids or scores alone, head 0's for all is what "scored with head 0's queries" gives.
        if (source != own).any() and source.any():
            found.append(_holds(where, source))
    elif (sources["scores"] == sources["ids"]).all():
        if (sources["ids"] != own).any() and sources["ids"].any():
            found.append(_holds("ids and scores", sources["ids"]))
    else:
        found += [_holds(where, source) for where, source in sources.items() if (source != own).any()]
    return found


def _recorded(evidence: Evidence) -> list[str]:
    recorded = {"scores": evidence.scores, "ids": evidence.block_ids}
    return [where for where, values in recorded.items() if values is not None]


def _sources(evidence: Evidence, where: str) -> NDArray[np.int64]:
    """``[H]``: whose result each head has; its own where others agree no better."""
    heads = evidence.case.num_heads
    votes = np.zeros((heads, heads))
    for source in range(heads):
        moved = by_scores(score(evidence.at(np.full_like(evidence.head, source), evidence.token)))
        if where == "ids":
            agrees: Bools = ids_agree(moved, evidence)
        else:
            visible = np.arange(evidence.num_score_blocks) < evidence.num_blocks[:, None]
            agrees = np.asarray((score_agrees(moved, evidence) | ~visible).all(axis=1))
        votes[:, source] = np.bincount(evidence.head, agrees, heads)
    votes += 0.5 * np.eye(heads)
    found: NDArray[np.int64] = votes.argmax(axis=1)
    return found


def _holds(where: str, source: Ints) -> Hypothesis:
    heads = ", ".join(str(head) for head in source)
    if len(set(source.tolist())) == len(source):
        name = f"heads are permuted: {where} of heads 0 to {len(source) - 1} are those of {heads}"
        says = "Each head's result stands in another head's place: the order of the heads, or of the ranks."
    elif len(set(source.tolist())) == 1:
        name = f"every head has head {source[0]}'s {where}"
        says = f"One head's {where} are written for all heads, or the head is left out of an address."
    else:
        name = f"heads are mixed up: {where} of heads 0 to {len(source) - 1} are those of {heads}"
        says = "Some heads have another head's result, and some heads' results are nowhere."
    return Hypothesis(name, FAMILY, says, lambda e: _moved(e, where, source), fitted=1)


def _moved(evidence: Evidence, where: str, source: Ints) -> Prediction:
    moved = score(evidence.at(source[evidence.head], evidence.token))
    right = score(evidence)
    return Prediction(moved if "scores" in where else right, moved if "ids" in where else right)
