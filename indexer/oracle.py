"""Runs a case through the oracle: what has to come out, and how far a backend may be from it.

Queries are cast and keys are inserted by the oracle too, into pages of its own, so nothing but the case is
shared with what is being checked.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from indexer.case import Case
from indexer.replay import as_tensor
from kernel.backends.reference import ReferenceBackend
from kernel.backends.reference.backend import best_blocks, float_values, score_bounds
from kernel.backends.reference.quantizer import magnitude_lut, quantize_query
from kernel.batch import LOCAL_SCORE, ScoreBatch
from kernel.checks import checked_batch
from kernel.contract import BLOCK_TOKENS, PAGE_BYTES
from kernel.page import PAGE_STRIDE_ALIGNMENT, blocks_of

WRONG_CELL_ERROR = sys.float_info.max
"""Error of a cell that must be equal and is not (sentinel, ``-inf``, NaN): finite, as JSON needs it."""
CHUNK_KEYS = 1 << 14
"""Keys that the oracle quantises at a time: it takes some 2 KB for each."""


@dataclass(frozen=True, eq=False)
class OracleResult:
    """What the oracle says about a case.

    Attributes:
        scores: ``[H, total_q, S]`` float32, ``S`` the blocks of the longest request.
        bounds: ``[H, total_q, S]`` float64, largest ``sum_i |q_i k_i|`` over a cell's causal tokens.
        block_ids: ``[H, total_q, k]`` int32.
    """

    scores: NDArray[np.float32]
    bounds: NDArray[np.float64]
    block_ids: NDArray[np.int32]


def run_oracle(case: Case) -> OracleResult:
    """Score and select a case whose queries and keys are finite."""
    batch = _batch(case)
    shape = (batch.num_heads, batch.total_q, batch.num_score_blocks)
    scores = torch.empty(shape, dtype=torch.float32, device="cpu")
    ReferenceBackend().score(batch, scores)
    return OracleResult(scores.numpy(), score_bounds(batch), select(scores.numpy(), case))


def in_pages(case: Case) -> Case:
    """The same call with its keys in pages that the oracle wrote; itself if it has pages."""
    if case.pages is not None:
        return case
    pages, block_table = _pages(case)
    return replace(case, index_k=None, pages=pages.numpy(), block_table=block_table.numpy())


def select(scores: NDArray[np.float32], case: Case) -> NDArray[np.int32]:
    """The right selection from given scores ``[H, total_q, S]``: ``[H, total_q, k]`` int32."""
    num_blocks = case.num_blocks_per_query()
    return np.stack([best_blocks(head_scores, num_blocks, case.topk) for head_scores in scores])


def _batch(case: Case) -> ScoreBatch:
    pages, block_table = _pages(case)
    query = as_tensor(case.index_q)
    if query.dtype != torch.float8_e4m3fn:
        query = torch.from_numpy(quantize_query(float_values(query))).view(torch.float8_e4m3fn)
    return checked_batch(
        query,
        pages,
        block_table,
        as_tensor(case.cu_seqlens_q),
        as_tensor(case.seq_lens),
        lut=torch.from_numpy(magnitude_lut().copy()),
        num_heads=case.num_heads,
        init_blocks=case.init_blocks,
        local_blocks=case.local_blocks,
    )


def _pages(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    if case.pages is not None and case.block_table is not None:
        pages = as_tensor(case.pages.reshape(-1, PAGE_BYTES), alignment=PAGE_STRIDE_ALIGNMENT)
        return pages, as_tensor(case.block_table)
    blocks = [blocks_of(tokens) for tokens in case.seq_lens.tolist()]
    pages = torch.zeros(sum(blocks), PAGE_BYTES, dtype=torch.uint8, device="cpu")
    shape = (case.batch, max(blocks, default=0))
    block_table = torch.full(shape, -1, dtype=torch.int32, device="cpu")
    slots, first_page = [], 0
    for row, (tokens, num_blocks) in enumerate(zip(case.seq_lens.tolist(), blocks)):
        page_ids = torch.arange(first_page, first_page + num_blocks, dtype=torch.int32, device="cpu")
        block_table[row, :num_blocks] = page_ids
        positions = torch.arange(tokens, dtype=torch.int64, device="cpu")
        slots.append(positions + first_page * BLOCK_TOKENS)
        first_page += num_blocks
    if case.index_k is not None and slots:
        keys, places = as_tensor(case.index_k), torch.cat(slots)
        for first in range(0, len(keys), CHUNK_KEYS):
            chunk = slice(first, first + CHUNK_KEYS)
            ReferenceBackend().insert(keys[chunk], pages, places[chunk])
    return pages, block_table


# ---- How far an answer is from the right one ----


def score_error(
    scores: NDArray[np.float32], right: NDArray[np.float32], bounds: NDArray[np.float64]
) -> float:
    """Largest error of scores ``[..., S]`` in units of ``bounds``.

    Columns past the narrower array's must be ``-inf``: no row sees them.
    """
    width = bounds.shape[-1]
    for array in (scores, right):
        if array.shape[-1] < width or not np.isneginf(array[..., width:]).all():
            return WRONG_CELL_ERROR
    got, want = scores[..., :width], right[..., :width]
    differs = got != want  # NaN differs from everything
    if not differs.any():
        return 0.0
    got, want, bounds = got[differs], want[differs], bounds[differs]
    exact = ~np.isfinite(got) | ~np.isfinite(want) | (want >= LOCAL_SCORE) | (bounds == 0)
    if exact.any():
        return WRONG_CELL_ERROR
    return float((np.abs(got.astype(np.float64) - want.astype(np.float64)) / bounds).max())


def mismatched_rows(
    case: Case,
    scores: NDArray[np.float32],
    block_ids: NDArray[np.int32],
    oracle: OracleResult,
    tolerance: float,
) -> int:
    """How many :func:`wrong_rows` there are."""
    return int(wrong_rows(case, scores, block_ids, oracle, tolerance).sum())


def wrong_rows(
    case: Case,
    scores: NDArray[np.float32],
    block_ids: NDArray[np.int32],
    oracle: OracleResult,
    tolerance: float,
) -> NDArray[np.bool_]:
    """``[H, total_q]``: rows whose ids are not the right selection.

    The ids must be the exact top-k of the backend's own scores. They must also be the oracle's, and the
    expected ones where the case has them, but for blocks that change places because their scores are so close
    that the tolerance of the two cells covers the difference. Blocks of equal score, for the backend and for
    the oracle, may not: ties go to the lower id. Expected ids must themselves be a selection of the row, and
    the exact top-k of the expected scores where the case has both.
    """
    wrong: NDArray[np.bool_] = (block_ids != select(scores, case)).any(axis=2)
    rankings = [oracle.block_ids]
    if case.expected_block_ids is not None:
        rankings.append(case.expected_block_ids)
        wrong |= ~_is_selection(case.expected_block_ids, case)
        if case.expected_scores is not None:
            wrong |= (case.expected_block_ids != select(case.expected_scores, case)).any(axis=2)
    for ranking in rankings:
        suspect = (block_ids != ranking).any(axis=2) & ~wrong
        for cell in zip(*np.nonzero(suspect)):
            wrong[cell] = not _close_exchange(
                block_ids[cell],
                ranking[cell],
                own_scores=scores[cell],
                right_scores=oracle.scores[cell],
                allowed=tolerance * oracle.bounds[cell],
            )
    return wrong


def _is_selection(block_ids: NDArray[np.int32], case: Case) -> NDArray[np.bool_]:
    """Which rows of ``[H, total_q, k]`` ids hold distinct blocks of the row, as many as it can select, and -1
    after them: ``[H, total_q]``."""
    num_blocks = case.num_blocks_per_query()[:, None]
    selects = np.arange(case.topk) < num_blocks
    in_place = np.where(selects, (block_ids >= 0) & (block_ids < num_blocks), block_ids == -1)
    ascending = np.sort(block_ids, axis=2)
    repeated = (ascending[:, :, 1:] == ascending[:, :, :-1]) & (ascending[:, :, 1:] >= 0)
    selections: NDArray[np.bool_] = in_place.all(axis=2) & ~repeated.any(axis=2)
    return selections


def _close_exchange(
    got: NDArray[np.int32],
    want: NDArray[np.int32],
    *,
    own_scores: NDArray[np.float32],
    right_scores: NDArray[np.float32],
    allowed: NDArray[np.float64],
) -> bool:
    """Whether any two blocks that the selections ``got`` and ``want`` rank differently are within tolerance
    and not tied. ``own_scores`` are those that ``got`` was selected by."""
    blocks = np.union1d(got[got >= 0], want[want >= 0])
    got_rank, want_rank = _ranks(got, blocks), _ranks(want, blocks)
    exchanged = (got_rank[:, None] < got_rank) & (want_rank[:, None] > want_rank)
    values = right_scores[blocks].astype(np.float64)
    close = np.abs(values[:, None] - values) <= allowed[blocks][:, None] + allowed[blocks]
    own = own_scores[blocks]
    close &= (values[:, None] != values) | (own[:, None] != own)
    # A block that only one of the two holds is exchanged with every block that only the other holds.
    return bool((close | ~exchanged).all())


def _ranks(ids: NDArray[np.int32], blocks: NDArray[np.int32]) -> NDArray[np.int64]:
    found = blocks[:, None] == ids
    return np.where(found.any(axis=1), found.argmax(axis=1), ids.size)
