"""Rows whose queries are not finite: they have no right answer, and the other rows of their call have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from indexer.case import Case

CHUNK_TOKENS = 1 << 14
"""Queries that are widened at a time."""


@dataclass(frozen=True)
class NotFiniteRow:
    """A row that is not judged.

    Attributes:
        request: of the batch.
        head: index head.
        token: query token, in the whole call.
        position: of the token in its request.
        dim: the first of the query's 128 values that is not finite.
        value: that value: ``nan``, ``inf`` or ``-inf``.
    """

    request: int
    head: int
    token: int
    position: int
    dim: int
    value: str


def finite_rows(case: Case) -> NDArray[np.bool_]:
    """``[H, total_q]``: whether a row's query is finite."""
    finite = np.empty((case.total_q, case.num_heads), dtype=bool)
    for first in range(0, case.total_q, CHUNK_TOKENS):
        chunk = case.index_q[first : first + CHUNK_TOKENS].astype(np.float32)
        finite[first : first + CHUNK_TOKENS] = np.isfinite(chunk).all(axis=2)
    return np.asarray(finite.T)


def with_finite_queries(case: Case, finite: NDArray[np.bool_]) -> Case:
    """The same call with zeros for the queries of the other rows; itself if there are none."""
    if finite.all():
        return case
    queries = case.index_q.copy()
    queries[~finite.T] = 0
    return replace(case, index_q=queries)


def not_finite_rows(case: Case, finite: NDArray[np.bool_]) -> Iterator[NotFiniteRow]:
    """The rows that are not finite, by token and head."""
    prefix = case.seq_lens.astype(np.int64) - case.query_lens - case.cu_seqlens_q[:-1]
    for token, head in np.argwhere(~finite.T).tolist():
        request = int(np.searchsorted(case.cu_seqlens_q, token, side="right")) - 1
        query = case.index_q[token, head].astype(np.float32)
        dim = int(np.flatnonzero(~np.isfinite(query))[0])
        position = token + int(prefix[request])
        yield NotFiniteRow(request, head, token, position, dim, str(float(query[dim])))
