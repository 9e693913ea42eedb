"""Head and token exchanged in the buffers that come out."""

from __future__ import annotations

from indexer.explain.evidence import Evidence
from indexer.explain.hypothesis import Hypothesis
from indexer.explain.prediction import Prediction
from indexer.explain.replica import score

FAMILY = "head/token layout"


def hypotheses(evidence: Evidence) -> list[Hypothesis]:
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
                    FAMILY,
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
