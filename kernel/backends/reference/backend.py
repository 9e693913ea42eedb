"""The oracle: the contract's scores and selection in numpy and fp64, slow and obvious.

Scores are sums of exact products in fp64; :func:`score_bounds` bounds the error of another backend. Whatever
the host does to rounding and denormals, the arithmetic is IEEE's.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kernel.backends.base import Order, PlannedBackend, Precision, ScaleChoice
from kernel.backends.reference.quantizer import (
    e4m3_values,
    magnitude_lut,
    quantize_keys,
    read_tokens,
    write_token,
)
from kernel.batch import INIT_SCORE, LOCAL_SCORE, Request, ScoreBatch
from kernel.checks import check_slots
from kernel.contract import BLOCK_TOKENS
from kernel.float_environment import default_float_environment
from kernel.step import Plan, Step, host_plan, planned_batch

# ---- Block scores in fp64, and the bound on another backend's error ----


@default_float_environment()
def score_batch(batch: ScoreBatch, scores: NDArray[np.float32]) -> None:
    """Write the rows of the batch's requests into ``scores`` ``[H, total_q, S]`` and no other row."""
    pages = batch.pages.numpy()
    for request in batch.requests:
        rows = _rows(request)
        scores[:, rows, :] = -np.inf
        best = _best_products(batch, request, pages, _queries(batch, rows))
        best = _with_forced_blocks(best, request, batch.init_blocks, batch.local_blocks)
        scores[:, rows, : request.num_blocks] = best


@default_float_environment()
def score_bounds(batch: ScoreBatch) -> NDArray[np.float64]:
    """The largest ``sum_i |q_i k_i|`` over a cell's causal tokens: ``[H, total_q, num_score_blocks]`` fp64.

    A backend's score may differ from the oracle's by this times ``SCORE_TOLERANCE`` of its precision; two
    maxima differ by no more than the largest difference between the values that they are taken over. It is
    0 for cells without a causal token, and cells with a sentinel are not special.
    """
    bounds = np.zeros((batch.num_heads, batch.total_q, batch.num_score_blocks))
    pages = batch.pages.numpy()
    for request in batch.requests:
        rows = _rows(request)
        largest = _best_products(batch, request, pages, np.abs(_queries(batch, rows)), magnitudes=True)
        bounds[:, rows, : request.num_blocks] = np.maximum(largest, 0.0)
    return bounds


def _queries(batch: ScoreBatch, rows: slice) -> NDArray[np.float64]:
    """Head-major query values of some tokens, ``[H, rows, 128]``."""
    queries: NDArray[np.float64] = e4m3_values(batch.q.view(torch.uint8).numpy()[rows]).transpose(1, 0, 2)
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


# ---- Selection by a stable sort ----


@default_float_environment()
def best_blocks(scores: NDArray[np.float32], num_blocks: NDArray[np.int32], topk: int) -> NDArray[np.int32]:
    """Ids of the best blocks of each row, score descending, ties to the lower id, -1 past the row's blocks.

    Args:
        scores: ``[rows, S]``; cells at and past ``num_blocks`` may hold anything.
        num_blocks: ``[rows]``.
        topk: blocks to select.
    """
    rows, columns = scores.shape
    blocks = np.arange(columns)
    seen = blocks < num_blocks[:, None]
    # Ascending order of the negated score is descending order of the score; a stable sort leaves equal
    # scores in the order of their ids. Cells past num_blocks are last: no score sorts after +inf, and their
    # ids are the highest.
    descending = np.where(seen & ~np.isnan(scores), -scores, np.inf)
    order = np.argsort(descending, axis=1, kind="stable")[:, :topk]
    block_ids = np.full((rows, topk), -1, dtype=np.int32)
    kept = np.arange(order.shape[1]) < num_blocks[:, None]
    block_ids[:, : order.shape[1]] = np.where(kept, order, -1)
    return block_ids


def in_block_order(block_ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """The same ids ascending, -1 last."""
    last = np.iinfo(np.int32).max
    ascending = np.sort(np.where(block_ids < 0, last, block_ids), axis=-1)
    return np.where(ascending == last, -1, ascending).astype(np.int32)


class ReferenceBackend(PlannedBackend):
    """See :class:`kernel.backends.base.Backend`. Tensors are used in place through numpy views."""

    name = "reference"
    device = torch.device("cpu")
    precision: Precision = "exact"

    def __init__(self, scale_choice: ScaleChoice = "six") -> None:
        self._scale_choice: ScaleChoice = scale_choice
        self._lut = torch.from_numpy(magnitude_lut().copy())

    @default_float_environment()
    def insert(self, keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        """Quantise keys to NVFP4 and scatter them into pages."""
        check_slots(slots, pages.shape[0])
        codes, scale_bytes = quantize_keys(float_values(keys), self._scale_choice)
        page_bytes = pages.numpy()
        for key, slot in enumerate(slots.tolist()):
            if slot >= 0:
                page, token = divmod(slot, BLOCK_TOKENS)
                write_token(page_bytes[page], token, codes[key], scale_bytes[key])

    def plan(self, step: Step) -> Plan:
        """See :meth:`kernel.backends.base.Backend.plan`."""
        return host_plan(step)

    def score_plan(self, plan: Plan, q: torch.Tensor, pages: torch.Tensor, scores: torch.Tensor) -> None:
        """See :meth:`kernel.backends.base.Backend.score_plan`."""
        header, batch = planned_batch(plan, q, pages, self._lut)
        if header.max_query_len:
            scores.fill_(-torch.inf)
        self.score(batch, scores)

    def select_plan(self, plan: Plan, q: torch.Tensor, pages: torch.Tensor, block_ids: torch.Tensor) -> None:
        """See :meth:`kernel.backends.base.Backend.select_plan`."""
        header, batch = planned_batch(plan, q, pages, self._lut)
        if header.max_query_len:
            block_ids.fill_(-1)
        self.select(batch, block_ids, "block" if header.by_block else "score")

    def score(self, batch: ScoreBatch, scores: torch.Tensor) -> None:
        """Score every row of the batch's requests."""
        score_batch(batch, scores.numpy())

    def topk(
        self, scores: torch.Tensor, num_blocks: torch.Tensor, block_ids: torch.Tensor, order: Order
    ) -> None:
        """Select each row's best blocks."""
        for head_scores, head_ids in zip(scores.numpy(), block_ids.numpy()):
            head_ids[:] = _selected(head_scores, num_blocks.numpy(), head_ids.shape[1], order)

    def select(self, batch: ScoreBatch, block_ids: torch.Tensor, order: Order) -> None:
        """Score and select; rows of requests that are not in the batch are left alone.

        The scores are all made first, so memory grows with queries times context.
        """
        num_blocks = batch.num_blocks_per_query()
        shape = (batch.num_heads, batch.total_q, batch.num_score_blocks)
        scores = np.full(shape, -np.inf, dtype=np.float32)
        score_batch(batch, scores)
        for request in batch.requests:
            rows = slice(request.query_start, request.query_start + request.query_len)
            self.topk(torch.from_numpy(scores[:, rows]), num_blocks[rows], block_ids[:, rows], order)


def float_values(tensor: torch.Tensor) -> NDArray[np.float64]:
    """The values of a bfloat16, float16 or float32 tensor."""
    if tensor.dtype == torch.bfloat16:
        # A bfloat16 is the upper half of a float32.
        upper_half = tensor.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        return (upper_half << 16).view(np.float32).astype(np.float64)
    return tensor.numpy().astype(np.float64)


def _selected(
    scores: NDArray[np.float32], num_blocks: NDArray[np.int32], topk: int, order: Order
) -> NDArray[np.int32]:
    block_ids = best_blocks(scores, num_blocks, topk)
    return block_ids if order == "score" else in_block_order(block_ids)
