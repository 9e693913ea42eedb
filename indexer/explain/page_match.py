"""Which page of a file gives the scores that an engine has for a block."""

from __future__ import annotations

import numpy as np

from indexer.explain.evidence import Evidence
from indexer.explain.page_keys import right_keys
from indexer.explain.replica import right_queries
from kernel.contract import BLOCK_TOKENS, HEAD_DIM

MAX_CELLS = 16
"""Blocks that are looked for."""
MAX_PAGES = 4096
"""Pages that are tried."""
LEAST_ROWS = 2
"""Rows that must agree: one score alone could be another page's by chance."""
CHUNK_PAGES = 64


def pages_that_match(evidence: Evidence, cells: frozenset[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """For each (request, block) the page whose keys give the engine's scores in every row that sees the whole
    block; empty unless there is one for each."""
    if evidence.scores is None or len(cells) > MAX_CELLS:
        return {}
    scores, queries = evidence.scores, right_queries(evidence)
    norms = np.sqrt(np.square(queries, dtype=np.float64).sum(axis=1))
    rows_of = {}
    for request, block in cells:
        whole = evidence.position // BLOCK_TOKENS > block
        rows = np.flatnonzero((evidence.request == request) & whole)
        if len(rows) < LEAST_ROWS:
            return {}
        rows_of[request, block] = rows
    found: dict[tuple[int, int], int] = {}
    for first in range(0, min(len(evidence.pages), MAX_PAGES), CHUNK_PAGES):
        keys = right_keys(evidence.pages[first : min(first + CHUNK_PAGES, MAX_PAGES)])
        best = (queries @ keys.reshape(-1, HEAD_DIM).T).reshape(len(queries), -1, BLOCK_TOKENS).max(axis=2)
        largest = np.sqrt(np.square(keys, dtype=np.float64).sum(axis=2).max(axis=1))
        slack = 2 * evidence.tolerance * norms[:, None] * largest
        for (request, block), rows in rows_of.items():
            near = np.abs(best[rows] - scores[rows, block][:, None]) <= slack[rows]
            for place in np.flatnonzero(near.all(axis=0))[:1]:
                found.setdefault((request, block), first + int(place))
    return found if len(found) == len(rows_of) else {}
