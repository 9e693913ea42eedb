"""The score map of an owner's last call, which the page draws: some rows, one byte a cell."""

from __future__ import annotations

import base64
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from indexer.wire import CallHead, CallMap, ScoreReply

MAX_ROWS = 96
"""Most query tokens of a head that are drawn."""
MAX_COLUMNS = 512
"""Most columns that are drawn; a column is one block or several."""
MAX_COPIED = 1 << 20
"""Most score cells that are kept of a call: fewer rows of a long context."""
INVISIBLE, LOWEST, HIGHEST, FORCED = 0, 1, 254, 255
"""Bytes of a drawn cell: past the row's ``nb``, ranks of scores, a sentinel."""
_SENTINEL = 1e28


@dataclass(frozen=True, eq=False)
class CallRecord:
    """Some rows of an owner's last call, copied.

    Attributes:
        title: the route and shape of the call.
        tokens: ``[rows]`` query tokens that were kept.
        reply: the call's answer, of these tokens only.
    """

    title: str
    tokens: NDArray[np.int64]
    reply: ScoreReply


def record_call(title: str, reply: ScoreReply) -> CallRecord:
    """Copies what the page may show, at a small part of the call's cost."""
    total_q = reply.num_blocks.shape[0]
    rows = min(MAX_ROWS, total_q)
    if reply.scores is not None:
        row_cells = reply.scores.shape[0] * reply.scores.shape[2]
        rows = min(rows, max(1, MAX_COPIED // max(1, row_cells)))
    tokens = np.linspace(0, max(total_q - 1, 0), rows).round().astype(np.int64)
    kept = replace(
        reply,
        scores=None if reply.scores is None else reply.scores[:, tokens],
        block_ids=reply.block_ids[:, tokens],
        num_blocks=reply.num_blocks[tokens],
    )
    return CallRecord(title, tokens, kept)


def draw(record: CallRecord) -> CallMap:
    """Returns the record as the page reads it: one byte a cell, base64, row by row and head by head."""
    reply = record.reply
    num_blocks = int(reply.num_blocks.max(initial=0))
    blocks_a_column = max(1, -(-num_blocks // MAX_COLUMNS))
    columns = -(-num_blocks // blocks_a_column)
    visible = np.arange(columns) * blocks_a_column < reply.num_blocks[:, None]
    heads = []
    for head, ids in enumerate(reply.block_ids):
        if reply.scores is None:
            cells = np.where(visible, LOWEST, INVISIBLE).astype(np.uint8)
        else:
            cells = _levels(_pooled(reply.scores[head, :, :num_blocks], columns, blocks_a_column), visible)
        selected = [sorted({int(block) // blocks_a_column for block in row if block >= 0}) for row in ids]
        heads.append(CallHead(cells=base64.b64encode(cells.tobytes()).decode(), selected=selected))
    return CallMap(
        title=record.title,
        backend=reply.backend,
        timings_ms={name: round(1e3 * seconds, 4) for name, seconds in reply.timings.items()},
        tokens=record.tokens.tolist(),
        num_blocks=num_blocks,
        blocks_a_column=blocks_a_column,
        columns=columns,
        has_scores=reply.scores is not None,
        heads=heads,
    )


def _pooled(scores: NDArray[np.float32], columns: int, width: int) -> NDArray[np.float32]:
    padding = columns * width - scores.shape[1]
    padded = np.pad(scores, ((0, 0), (0, padding)), constant_values=-np.inf)
    pooled: NDArray[np.float32] = padded.reshape(scores.shape[0], columns, width).max(axis=2, initial=-np.inf)
    return pooled


def _levels(scores: NDArray[np.float32], visible: NDArray[np.bool_]) -> NDArray[np.uint8]:
    forced = scores >= _SENTINEL
    computed = visible & ~forced & np.isfinite(scores)
    levels = np.full(scores.shape, INVISIBLE, dtype=np.uint8)
    if computed.any():
        # By rank: a few blocks that everything attends to would leave the others one colour.
        values = scores[computed]
        ordered = np.sort(values)
        rank = np.searchsorted(ordered, values) / max(1, values.size - 1)
        levels[computed] = (LOWEST + np.minimum(rank, 1.0) * (HIGHEST - LOWEST)).round().astype(np.uint8)
    levels[forced & visible] = FORCED
    return levels
