"""Scores of a sample's rows, with each step of the contract open to be done wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from indexer.explain.evidence import Evidence, Floats, Ints
from indexer.explain.page_keys import PageKeys, right_keys
from kernel.backends.reference.formats import e4m3_bytes, e4m3_values
from kernel.batch import INIT_SCORE, LOCAL_SCORE
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, PAGE_BYTES

CHUNK_PAGES = 64
"""Pages dequantised at a time: 4 MiB of keys."""

PageOf = Callable[[Evidence, int, int], "NDArray[np.uint8] | None"]
"""Evidence, request, block to the bytes ``[9216]`` read for it; None where the file does not hold them."""
Forced = Callable[[Floats, Ints, Evidence], Floats]
"""Scores ``[R, S]``, causal blocks ``[R]``, evidence to the scores with sentinels."""


@dataclass(frozen=True, eq=False)
class Scored:
    """Rows as some way of computing scores them.

    Attributes:
        scores: ``[R, S]``: ``-inf`` where a row sees nothing, NaN where the file does not tell or nothing
            was computed.
        num_blocks: ``[R]`` blocks that a row selects from.
        slack: ``[R, S]`` how far sums in fp32 may differ.
    """

    scores: Floats
    num_blocks: Ints
    slack: Floats


@dataclass(frozen=True, eq=False)
class Steps:
    """How scores are computed; the defaults are the contract's.

    Attributes:
        keys: page bytes to keys.
        page_of: which bytes a block of a request is read from; the block table's page when None.
        queries: ``[R, 128]`` query of each row; the contract's when None.
        position: ``[R]`` positions, which say how many blocks a row sees; the contract's when None.
        last_key: ``[R]`` last key that a row sees; its position when None.
        first_absent: ``[R]`` keys from this one on are not there; no such key when None.
        absent_is_zero: whether those are read as zero; they are left out otherwise.
        forced: puts in the sentinels; the contract's when None.
    """

    keys: PageKeys = right_keys
    page_of: PageOf | None = None
    queries: Floats | None = None
    position: Ints | None = None
    last_key: Ints | None = None
    first_absent: Ints | None = None
    absent_is_zero: bool = False
    forced: Forced | None = None


_UNFORCED: WeakKeyDictionary[Evidence, Scored] = WeakKeyDictionary()


def score(evidence: Evidence, steps: Steps | None = None) -> Scored:
    """Score the sample's rows."""
    steps = steps or Steps()
    if _has_right_products(steps):
        if evidence not in _UNFORCED:
            _UNFORCED[evidence] = _unforced(evidence, steps)
        found = _UNFORCED[evidence]
    else:
        found = _unforced(evidence, steps)
    return replace(found, scores=(steps.forced or by_contract)(found.scores, found.num_blocks, evidence))


def _has_right_products(steps: Steps) -> bool:
    """Whether nothing but the sentinels differs from the contract."""
    return all(
        getattr(steps, field.name) is field.default for field in fields(steps) if field.name != "forced"
    )


def _unforced(evidence: Evidence, steps: Steps) -> Scored:
    position = evidence.position if steps.position is None else steps.position
    last_key = position if steps.last_key is None else steps.last_key
    num_blocks = position // BLOCK_TOKENS + 1
    queries = right_queries(evidence) if steps.queries is None else steps.queries
    norms = np.sqrt(np.square(queries, dtype=np.float64).sum(axis=1)).astype(np.float32)
    columns = np.arange(evidence.num_score_blocks)
    wanted = columns if evidence.blocks is None else evidence.blocks
    shape = (len(position), evidence.num_score_blocks)
    scores: Floats = np.full(shape, np.nan, dtype=np.float32)
    slack: Floats = np.full(shape, 1e-30, dtype=np.float32)
    for request in np.unique(evidence.request):
        rows = np.flatnonzero(evidence.request == request)
        blocks = -(-int(evidence.case.seq_lens[request]) // BLOCK_TOKENS)
        end = min(blocks, int(num_blocks[rows].max()))
        seen = wanted[wanted < end]
        for first in range(0, len(seen), CHUNK_PAGES):
            chunk = seen[first : first + CHUNK_PAGES]
            pages, known = _pages(evidence, steps.page_of, int(request), chunk)
            keys = steps.keys(pages)
            best = _best(queries[rows], keys, chunk, steps, rows, last_key[rows])
            best[:, ~known] = np.nan
            scores[rows[:, None], chunk] = best
            length = _longest(keys, chunk, steps, rows, last_key[rows])
            slack[rows[:, None], chunk] += 2 * evidence.tolerance * norms[rows, None] * length
        scores[np.ix_(rows, columns >= blocks)] = -np.inf
    scores[columns >= num_blocks[:, None]] = -np.inf
    return Scored(scores, num_blocks, slack)


def _best(queries: Floats, keys: Floats, blocks: Ints, steps: Steps, rows: Ints, last_key: Ints) -> Floats:
    """Largest product with a visible key of each of ``blocks``: ``[rows, blocks]``."""
    count = len(keys)
    with np.errstate(invalid="ignore"):
        flat: Floats = queries @ keys.reshape(-1, HEAD_DIM).T
    products: Floats = flat.reshape(len(queries), count, BLOCK_TOKENS)
    if np.isnan(products).any():
        # A NaN product wins in no maximum of hardware; the contract counts a NaN score as -inf, too.
        products[np.isnan(products)] = -np.inf
    products = _absent_as(np.float32(0 if steps.absent_is_zero else -np.inf), products, blocks, steps, rows)
    return _largest_seen(products, blocks, last_key)


def _longest(keys: Floats, blocks: Ints, steps: Steps, rows: Ints, last_key: Ints) -> Floats:
    """Length of the longest visible key of each of ``blocks``: ``[rows, blocks]``. What lies behind the last
    one may be of any size, and rounds no score."""
    squares: Floats = np.nan_to_num(np.einsum("ptd,ptd->pt", keys, keys), nan=0.0, posinf=np.inf)
    seen = _largest_seen(_absent_as(np.float32(0), squares[None], blocks, steps, rows), blocks, last_key)
    return np.asarray(np.sqrt(np.maximum(seen, 0)), dtype=np.float32)


def _absent_as(value: np.float32, values: Floats, blocks: Ints, steps: Steps, rows: Ints) -> Floats:
    """Values of keys ``[rows or 1, blocks, 128]``, those of absent keys replaced."""
    if steps.first_absent is None:
        return values
    place = blocks[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)
    return np.where(place >= steps.first_absent[rows][:, None, None], value, values)


def _largest_seen(values: Floats, blocks: Ints, last_key: Ints) -> Floats:
    """Largest of the values of keys ``[rows or 1, blocks, 128]`` that a row sees: ``[rows, blocks]``."""
    rows = len(last_key)
    best: Floats = np.broadcast_to(values.max(axis=2), (rows, len(blocks))).copy()
    end = last_key // BLOCK_TOKENS  # the only block that a row sees a part of
    best[blocks > end[:, None]] = -np.inf
    place = np.searchsorted(blocks, end).clip(max=len(blocks) - 1)
    (cut,) = np.nonzero(blocks[place] == end)
    seen = np.arange(BLOCK_TOKENS) <= (last_key[cut] % BLOCK_TOKENS)[:, None]
    of_end = np.broadcast_to(values, (rows, *values.shape[1:]))[cut, place[cut]]
    best[cut, place[cut]] = np.where(seen, of_end, -np.inf).max(axis=1)
    return best


def by_table(evidence: Evidence, request: int, block: int) -> NDArray[np.uint8] | None:
    """The page of the block table."""
    page: NDArray[np.uint8] = evidence.pages[evidence.table[request, block]]
    return page


def by_contract(scores: Floats, num_blocks: Ints, evidence: Evidence) -> Floats:
    """Init blocks, then local blocks over them."""
    return force(scores, num_blocks, evidence.case.init_blocks, evidence.case.local_blocks)


def unforced(scores: Floats, _num_blocks: Ints, _evidence: Evidence) -> Floats:
    """No sentinels."""
    return scores


def force(scores: Floats, num_blocks: Ints, init_blocks: int, local_blocks: int) -> Floats:
    """The first ``init_blocks`` and the last ``local_blocks`` of a row's blocks forced, local over init."""
    blocks, ends = np.arange(scores.shape[1]), num_blocks[:, None]
    scores = np.where((blocks < ends) & (blocks < init_blocks), np.float32(INIT_SCORE), scores)
    local = (blocks < ends) & (blocks >= ends - local_blocks)
    return np.where(local, np.float32(LOCAL_SCORE), scores)


_QUERIES: WeakKeyDictionary[Evidence, Floats] = WeakKeyDictionary()


def right_queries(evidence: Evidence) -> Floats:
    """``[R, 128]`` queries as they are scored, in E4M3."""
    if evidence not in _QUERIES:
        given = evidence.case.index_q[evidence.token, evidence.head]
        _QUERIES[evidence] = quantised(given.astype(np.float64))
    return _QUERIES[evidence]


def quantised(queries: NDArray[np.float64]) -> Floats:
    """Values after the contract's cast to E4M3."""
    return e4m3_values(e4m3_bytes(queries)).astype(np.float32)


@functools.lru_cache(maxsize=1)
def _nothing() -> NDArray[np.uint8]:
    return np.zeros(PAGE_BYTES, dtype=np.uint8)


def _pages(
    evidence: Evidence, page_of: PageOf | None, request: int, blocks: Ints
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Bytes of blocks ``[count, 9216]``, and which of them the file holds."""
    if page_of is None:
        return evidence.pages[evidence.table[request, blocks]], np.ones(len(blocks), dtype=bool)
    found = [page_of(evidence, request, int(block)) for block in blocks]
    known = np.array([page is not None for page in found])
    return np.stack([_nothing() if page is None else page for page in found]), known
