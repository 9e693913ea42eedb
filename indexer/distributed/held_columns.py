"""The scores of held blocks moved together, and forced blocks written: all rows of a piece at once.

A row's scores come as those of a virtual request, see :mod:`indexer.distributed.share`: only its last
columns, from ``whole`` on, stand for blocks that may not be held.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from kernel.batch import INIT_SCORE, LOCAL_SCORE


@dataclass(frozen=True, eq=False)
class RowColumns:
    """What the columns of each row are: ``[tokens]`` int64 on the device, unless said otherwise.

    Attributes:
        phases: the phase of the row's stripe.
        num_blocks: ``nb`` of the row.
        whole: blocks held that lie wholly before the row's chunk: their columns are in place.
        first_held: column of the first held block after those.
        num_held: blocks held that some row of the chunk sees.
        init_end: end of the columns of init blocks.
        local_start: first column that may be a local block's.
    """

    phases: torch.Tensor
    num_blocks: torch.Tensor
    whole: torch.Tensor
    first_held: torch.Tensor
    num_held: torch.Tensor
    init_end: torch.Tensor
    local_start: torch.Tensor

    @classmethod
    def uploaded(cls, facts: NDArray[np.int64], device: torch.device) -> RowColumns:
        """From ``[fields, tokens]`` on the host, in one copy."""
        if facts.shape[0] != len(fields(cls)):
            raise AssertionError("a row of facts for each field")
        return cls(*torch.from_numpy(facts).to(device).unbind())


def keep_held(scores: torch.Tensor, rows: RowColumns, step: int, most: int) -> None:
    """Move the columns of blocks that are held together; those past them become -inf.

    Args:
        scores: ``[H, tokens, columns]`` float32, written; -inf past each row's virtual request.
        rows: of the tokens.
        step: ranks that blocks go round.
        most: columns of a virtual request from ``whole`` on, at most.
    """
    columns = _window(rows.whole, most, scores.shape[2])
    whole = rows.whole[:, None]
    moved_from = columns.where(columns < whole, rows.first_held[:, None] + (columns - whole) * step)
    kept = _taken(scores, moved_from.clamp(max=scores.shape[2] - 1))
    kept.masked_fill_(columns >= rows.num_held[:, None], -torch.inf)
    _put(scores, columns, kept)


def force(
    scores: torch.Tensor,
    rows: RowColumns,
    step: int,
    *,
    init_columns: int,
    local_columns: int,
    local_blocks: int,
) -> None:
    """Write the sentinels of forced blocks, by their true ids; the local value wins over the init value.

    Args:
        scores: ``[H, tokens, columns]`` float32 of the blocks held, written.
        rows: of the tokens.
        step: ranks that blocks go round.
        init_columns: the largest ``init_end``.
        local_columns: columns from ``local_start`` to ``num_held``, at most.
        local_blocks: blocks forced at a row's end.
    """
    phases, num_blocks = rows.phases[:, None], rows.num_blocks[:, None]
    if init_columns > 0:
        columns = torch.arange(init_columns, dtype=torch.int64, device=scores.device)
        forced = (columns < rows.init_end[:, None]) & (columns * step + phases < num_blocks)
        scores[..., :init_columns].masked_fill_(forced, INIT_SCORE)
    if local_columns > 0:
        columns = _window(rows.local_start, local_columns, scores.shape[2])
        blocks = columns * step + phases
        forced = (
            (columns < rows.num_held[:, None]) & (blocks < num_blocks) & (blocks >= num_blocks - local_blocks)
        )
        _put(scores, columns, _taken(scores, columns).masked_fill_(forced, LOCAL_SCORE))


def _window(starts: torch.Tensor, width: int, columns: int) -> torch.Tensor:
    """``[tokens, width]``: so many columns of each row from its start on, or the last ones that there are."""
    return starts.clamp(max=columns - width)[:, None] + torch.arange(
        width, dtype=torch.int64, device=starts.device
    )


def _taken(scores: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return scores.gather(2, columns.expand(scores.shape[0], -1, -1))


def _put(scores: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> None:
    scores.scatter_(2, columns.expand(scores.shape[0], -1, -1), values)
