"""A case through the oracle: what has to come out, and how far a backend may be from it.

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
from kernel.backends.reference.backend import float_values
from kernel.backends.reference.quantizer import magnitude_lut, quantize_query
from kernel.backends.reference.scorer import score_bounds
from kernel.backends.reference.selection import best_blocks
from kernel.batch import ScoreBatch
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
    ReferenceBackend().score_prefill(batch, scores)
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
    heads = [best_blocks(head_scores, num_blocks, case.topk) for head_scores in scores]
    return np.stack(heads)


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
