"""Device functions of the top-k kernels: what a score counts as, and whose a row of a decode step is."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cleaned(scores):
    """NaN counts as -inf, and -0.0 as +0.0."""
    return tl.where(scores == scores, scores, float("-inf")) + 0.0


@triton.jit
def row_of_request(
    row,
    query_starts_ptr,
    query_ends_ptr,
    seq_lens_ptr,
    out_starts_ptr,
    batch,
    max_queries,
    H: tl.constexpr,
    BATCH: tl.constexpr,
):
    """A row of the output of :mod:`kernel.backends.triton.score_decode`: its ``nb``, 0 where it is no
    request's, and its number in ``q``."""
    token = row // H
    request = tl.arange(0, BATCH)
    listed = request < batch
    starts = tl.load(query_starts_ptr + request, mask=listed, other=0)
    ends = tl.load(query_ends_ptr + request, mask=listed, other=0)
    out_starts = tl.load(out_starts_ptr + request, mask=listed, other=0)
    queries = tl.minimum(ends - starts, max_queries)
    owner = tl.max(tl.where((out_starts <= token) & (token < out_starts + queries), request, -1), 0)
    found = owner >= 0
    query = token - tl.load(out_starts_ptr + owner, mask=found, other=0)
    start = tl.load(query_starts_ptr + owner, mask=found, other=0)
    length = tl.minimum(tl.load(query_ends_ptr + owner, mask=found, other=0) - start, max_queries)
    position = tl.load(seq_lens_ptr + owner, mask=found, other=0) - length + query
    nb = tl.where(found & (position >= 0), position // 128 + 1, 0)
    return nb, tl.where(found, (start + query) * H + row % H, row)
