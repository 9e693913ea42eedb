"""Which page of a file gives what an engine has for a block."""

from __future__ import annotations

import numpy as np

from indexer.explain.evidence import Evidence, Floats, Ints
from indexer.explain.match import Bools, picked_blocks
from indexer.explain.page_keys import right_keys
from indexer.explain.replica import right_queries, score
from kernel.contract import BLOCK_TOKENS, HEAD_DIM

MAX_CELLS = 16
"""Blocks that are looked for."""
MAX_PAGES = 4096
"""Pages that are tried."""
LEAST_ROWS = 2
"""Rows that must agree: one score alone could be another page's by chance."""
LEAST_CONTRADICTIONS = 2
"""Rows in which every other page must be wrong, where ids alone tell of a page."""
CHUNK_PAGES = 64
Cell = tuple[int, int]


def pages_that_match(evidence: Evidence, cells: frozenset[Cell]) -> dict[Cell, int]:
    """For each (request, block) the page whose keys give the engine's scores in every row that sees the whole
    block; the only one that its picks allow where there are no scores. Empty unless there is one for each."""
    if len(cells) > MAX_CELLS:
        return {}
    rows_of = {}
    for request, block in cells:
        whole = evidence.position // BLOCK_TOKENS > block
        rows = np.flatnonzero((evidence.request == request) & whole)
        if len(rows) < LEAST_ROWS:
            return {}
        rows_of[request, block] = rows
    best, slack = _scores_of_pages(evidence)
    found: dict[Cell, int] = {}
    bounds = None if evidence.scores is not None else _bounds_by_ids(evidence)
    for (request, block), rows in rows_of.items():
        if evidence.scores is not None:
            near = np.abs(best[rows] - evidence.scores[rows, block][:, None]) <= slack[rows]
            pages = np.flatnonzero(near.all(axis=0))[:1]
        elif bounds is not None:
            pages = _only_page(best[rows], slack[rows], rows, block, bounds)
        if not len(pages):
            return {}
        found[request, block] = int(pages[0])
    return found


def _scores_of_pages(evidence: Evidence) -> tuple[Floats, Floats]:
    """``[R, pages]`` scores that whole pages of the file would give, and how far sums in fp32 may differ."""
    queries = right_queries(evidence)
    norms = np.sqrt(np.square(queries, dtype=np.float64).sum(axis=1)).astype(np.float32)
    count = min(len(evidence.pages), MAX_PAGES)
    best: Floats = np.empty((len(queries), count), dtype=np.float32)
    largest: Floats = np.empty(count, dtype=np.float32)
    for first in range(0, count, CHUNK_PAGES):
        chunk = slice(first, min(first + CHUNK_PAGES, count))
        keys = right_keys(evidence.pages[chunk])
        products = (queries @ keys.reshape(-1, HEAD_DIM).T).reshape(len(queries), -1, BLOCK_TOKENS)
        best[:, chunk] = products.max(axis=2)
        largest[chunk] = np.sqrt(np.einsum("ptd,ptd->pt", keys, keys).max(axis=1))
    return best, (2 * evidence.tolerance * norms[:, None] * largest).astype(np.float32)


def _bounds_by_ids(evidence: Evidence) -> tuple[Bools, Floats, Floats]:
    """Which blocks are picked ``[R, S]``, and the right scores of each row's worst pick and best other; a
    picked block must not be below the latter, one that is left not above the former."""
    if evidence.block_ids is None:
        raise AssertionError("only asked for with ids")
    right = score(evidence).scores
    picked = picked_blocks(evidence.block_ids, right.shape[1])
    visible = np.arange(right.shape[1]) < evidence.num_blocks[:, None]
    return picked, np.where(picked, right, np.inf), np.where(visible & ~picked, right, -np.inf)


def _only_page(
    best: Floats, slack: Floats, rows: Ints, block: int, bounds: tuple[Bools, Floats, Floats]
) -> Ints:
    """The page that the picks of ``rows`` allow, if all others are wrong in some of them."""
    picked, picks, others = bounds
    taken = picked[rows, block][:, None]
    apart = np.arange(picked.shape[1]) != block
    floor = others[rows][:, apart].max(axis=1)[:, None]
    ceiling = picks[rows][:, apart].min(axis=1)[:, None]
    wrong = np.where(taken, best + 2 * slack < floor, best - 2 * slack > ceiling).sum(axis=0)
    pages = np.flatnonzero(wrong == 0)
    if len(pages) != 1 or (np.delete(wrong, pages) < LEAST_CONTRADICTIONS).any():
        return pages[:0]
    return pages
