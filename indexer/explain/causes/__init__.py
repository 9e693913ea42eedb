"""The faults that are tried, one file a family."""

from __future__ import annotations

from indexer.explain.causes import (
    causal_mask,
    chunk_start,
    nibbles,
    output_layout,
    page_wrap,
    queries,
    saturation,
    scale_group,
    scale_order,
    sentinels,
    sign,
    stale_pages,
    table_stride,
)
from indexer.explain.evidence import Evidence
from indexer.explain.hypothesis import Hypothesis

FAMILIES = (
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
    table_stride,
    page_wrap,
    stale_pages,
)


def hypotheses(evidence: Evidence) -> list[Hypothesis]:
    """Every fault that this evidence can speak about."""
    return [hypothesis for family in FAMILIES for hypothesis in family.hypotheses(evidence)]
