"""The causes that are tried, by families: a cause is one row of its family."""

from __future__ import annotations

from indexer.explain.causes import ids, keys, pages, rows, scores
from indexer.explain.evidence import Evidence
from indexer.explain.match import Hypothesis

FAMILIES = (
    ids.ORDER,
    ids.MEANING,
    rows.CAUSAL_MASK,
    rows.CHUNK_START,
    rows.SENTINELS,
    ids.LAYOUT,
    rows.QUERY_LAYOUT,
    rows.QUERY_CAST,
    rows.ROTATION,
    keys.NIBBLES,
    keys.SCALE_ORDER,
    keys.SCALE_GROUP,
    keys.SIGN,
    keys.SATURATION,
    scores.COLUMNS,
    pages.TABLE,
    pages.PAGE_OFFSET,
    pages.PAGE_ID,
    # Fitted to what the engine recorded.
    ids.SELECTION,
    ids.OFFSET,
    rows.SENTINEL_COUNTS,
    rows.HEADS,
    rows.TOKEN_SHIFT,
    scores.SCALE,
    scores.DTYPE,
    scores.NEVER,
    pages.STALE,
)
"""In the order in which they are tried; of causes that explain as much, the first is shown first."""


def hypotheses(evidence: Evidence, narrow: Evidence) -> list[Hypothesis]:
    """Every cause that this evidence can speak about.

    Args:
        evidence: the sample.
        narrow: the same rows, computed only in the columns that tell most.
    """
    return [one for family in FAMILIES for one in family.hypotheses(evidence, narrow)]
