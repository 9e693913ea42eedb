"""A batch in pieces whose scores take bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kernel.batch import Request, ScoreBatch

_CELLS = 1 << 26
"""Score cells of a piece: 256 MiB."""


def pieces(batch: ScoreBatch) -> Iterator[tuple[slice, ScoreBatch]]:
    """Cut a batch so that the scores of each piece take ``_CELLS`` cells at most, or are one query's.

    Returns:
        For each piece the rows of the batch's ``q`` that it holds, none of which belong to requests outside
        the batch, and the batch of these rows alone.
    """
    run: list[Request] = []
    for request in _short_requests(batch):
        together = [*run, request]
        rows = sum(other.query_len for other in together)
        cells = batch.num_heads * rows * max(other.num_blocks for other in together)
        follows = not run or run[-1].query_start + run[-1].query_len == request.query_start
        if run and (cells > _CELLS or not follows):
            yield _piece(batch, run)
            together = [request]
        run = together
    if run:
        yield _piece(batch, run)


def _short_requests(batch: ScoreBatch) -> Iterator[Request]:
    """The requests with queries, cut so that the scores of each take ``_CELLS`` cells at most."""
    for request in batch.requests:
        step = max(_CELLS // (batch.num_heads * max(request.num_blocks, 1)), 1)
        for first in range(0, request.query_len, step):
            queries = min(step, request.query_len - first)
            yield replace(
                request,
                query_start=request.query_start + first,
                query_len=queries,
                seq_len=request.prefix_len + first + queries,
            )


def _piece(batch: ScoreBatch, requests: list[Request]) -> tuple[slice, ScoreBatch]:
    start, last = requests[0].query_start, requests[-1]
    rows = slice(start, last.query_start + last.query_len)
    moved = tuple(replace(request, query_start=request.query_start - start) for request in requests)
    return rows, replace(batch, q=batch.q[rows], requests=moved)
