"""Block scores in fp64, and how far another backend's may be from them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kernel.backends.reference.formats import e4m3_values
from kernel.backends.reference.page_bytes import read_tokens
from kernel.batch import INIT_SCORE, LOCAL_SCORE, Request, ScoreBatch
from kernel.contract import BLOCK_TOKENS


def score_batch(batch: ScoreBatch, scores: NDArray[np.float32]) -> None:
    """Write the rows of the batch's requests into ``scores`` ``[H, total_q, S]`` and no other row."""
    pages, queries = batch.pages.numpy(), _queries(batch)
    for request in batch.requests:
        rows = _rows(request)
        scores[:, rows, :] = -np.inf
        best = _best_products(batch, request, pages, queries[:, rows])
        best = _with_forced_blocks(best, request, batch.init_blocks, batch.local_blocks)
        scores[:, rows, : request.num_blocks] = best


def score_bounds(batch: ScoreBatch) -> NDArray[np.float64]:
    """The largest ``sum_i |q_i k_i|`` over a cell's causal tokens: ``[H, total_q, num_score_blocks]`` fp64.

    A backend's score may differ from the oracle's by this times ``SCORE_TOLERANCE`` of its precision; two
    maxima differ by no more than the largest difference between the values that they are taken over. It is
    0 for cells without a causal token, and cells with a sentinel are not special.
    """
    bounds = np.zeros((batch.num_heads, batch.total_q, batch.num_score_blocks))
    pages, queries = batch.pages.numpy(), np.abs(_queries(batch))
    for request in batch.requests:
        rows = _rows(request)
        largest = _best_products(batch, request, pages, queries[:, rows], magnitudes=True)
        bounds[:, rows, : request.num_blocks] = np.maximum(largest, 0.0)
    return bounds


def _queries(batch: ScoreBatch) -> NDArray[np.float64]:
    """Head-major query values, ``[H, total_q, 128]``."""
    queries: NDArray[np.float64] = e4m3_values(batch.q.view(torch.uint8).numpy()).transpose(1, 0, 2)
    return queries


def _rows(request: Request) -> slice:
    return slice(request.query_start, request.query_start + request.query_len)


def _best_products(
    batch: ScoreBatch,
    request: Request,
    pages: NDArray[np.uint8],
    queries: NDArray[np.float64],
    magnitudes: bool = False,
) -> NDArray[np.float64]:
    """``max over causal tokens of q . k``: ``[H, query_len, num_blocks]``, -inf where no token is causal."""
    heads, query_len, _ = queries.shape
    best = np.full((heads, query_len, request.num_blocks), -np.inf)
    positions = request.prefix_len + np.arange(query_len)
    block_table = batch.block_table.numpy()
    for block in range(request.num_blocks):
        first_token = block * BLOCK_TOKENS
        first_query = max(0, first_token - request.prefix_len)  # earlier queries stand before this block
        tokens = min(BLOCK_TOKENS, request.seq_len - first_token)
        keys = read_tokens(pages[block_table[request.table_row, block]], tokens)
        if magnitudes:
            keys = np.abs(keys)
        # Not a matrix product of BLAS: an oracle must not depend on kernels that differ from CPU to CPU, of
        # which some have been wrong. These are numpy's own loops.
        products = np.einsum("hqd,td->hqt", queries[:, first_query:], keys)
        causal = first_token + np.arange(tokens) <= positions[first_query:, None]
        # The sum of 128 products starts from +0.0, so a score of zero is never -0.0.
        best[:, first_query:, block] = np.where(causal, products, -np.inf).max(axis=2) + 0.0
    return best


def _with_forced_blocks(
    best: NDArray[np.float64], request: Request, init_blocks: int, local_blocks: int
) -> NDArray[np.float64]:
    positions = request.prefix_len + np.arange(request.query_len)
    num_blocks = (positions // BLOCK_TOKENS + 1)[:, None]
    blocks = np.arange(request.num_blocks)
    causal = blocks < num_blocks
    best = np.where(causal & (blocks < init_blocks), INIT_SCORE, best)
    return np.where(causal & (blocks >= num_blocks - local_blocks), LOCAL_SCORE, best)
