"""A row's best blocks by a stable sort."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


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
