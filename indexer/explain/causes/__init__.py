"""The faults that are tried, one file a family."""

from __future__ import annotations

from indexer.explain.causes import (
    causal_mask,
    chunk_start,
    equal_scores,
    heads,
    id_meaning,
    id_offset,
    id_order,
    nibbles,
    output_layout,
    page_id_bits,
    page_wrap,
    queries,
    saturation,
    scale_group,
    scale_order,
    score_columns,
    score_dtype,
    score_scale,
    selection,
    sentinel_counts,
    sentinels,
    sign,
    stale_pages,
    table_stride,
    token_shift,
)
from indexer.explain.evidence import Evidence
from indexer.explain.hypothesis import Hypothesis

FROM_THE_CALL = (
    id_order,
    id_meaning,
    causal_mask,
    chunk_start,
    sentinels,
    output_layout,
    queries,
    nibbles,
    scale_order,
    scale_group,
    sign,
    saturation,
    score_columns,
    table_stride,
    page_wrap,
    page_id_bits,
)
FROM_THE_RESULT = (
    selection,
    id_offset,
    sentinel_counts,
    heads,
    token_shift,
    score_scale,
    score_dtype,
    equal_scores,
    stale_pages,
)
"""These look at what the engine recorded to see which faults are worth trying."""


def hypotheses(evidence: Evidence, narrow: Evidence) -> list[Hypothesis]:
    """Every fault that this evidence can speak about.

    Args:
        evidence: the sample.
        narrow: the same rows, computed only in the columns that tell most.
    """
    found = [hypothesis for family in FROM_THE_CALL for hypothesis in family.hypotheses(evidence)]
    found += [one for family in FROM_THE_RESULT for one in family.hypotheses(evidence, narrow)]
    return found
