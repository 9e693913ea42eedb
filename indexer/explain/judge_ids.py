"""Which of an engine's rows hold a selection at all, and which entries keep the others from being one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indexer.explain.differences import FAULT, NONE, Bools, Differences, Ints, Rule, differences

Ids = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Picked:
    """What rows pick.

    Attributes:
        blocks: ``[H, tokens, S]`` whether a row picks a block that it sees.
        invalid: ``[H, tokens]`` rows whose ids are no selection.
        wrong: the entries that keep them from it, and -1 that stands before an id.
    """

    blocks: Bools
    invalid: Bools
    wrong: list[Differences]


def picked_blocks(ids: Ids, num_blocks: Ids, columns: int, order: str) -> Picked:
    """Read rows of ids.

    Args:
        ids: ``[H, tokens, k]``, -1 is no block.
        num_blocks: ``[tokens]`` blocks that a row sees: it must pick k of them, or all if there are fewer.
        columns: S.
        order: that the ids are promised in; in ``any`` -1 may stand between them.
    """
    is_id = ids != NONE
    in_row = (ids >= 0) & (ids < num_blocks[:, None])
    blocks = np.zeros((*ids.shape[:2], columns + 1), dtype=bool)
    np.put_along_axis(blocks, np.where(in_row, ids, columns).astype(np.int64), True, axis=2)
    blocks = blocks[:, :, :-1]
    wanted = np.minimum(num_blocks, ids.shape[2])
    repeated = _repeated(ids, in_row, in_row.sum(axis=2) > blocks.sum(axis=2))
    too_few = is_id.sum(axis=2) < wanted
    followed = np.flip(np.logical_or.accumulate(np.flip(is_id, axis=2), axis=2), axis=2)
    gap = (~is_id & followed).any(axis=2) & ~too_few & (order != "any")
    first_none = np.zeros_like(is_id)
    np.put_along_axis(first_none, (~is_id).argmax(axis=2)[:, :, None], True, axis=2)
    entries: tuple[tuple[Rule, Bools], ...] = (
        ("below -1", ids < NONE),
        ("not of the row", is_id & ~in_row & (ids >= 0)),
        ("repeated", repeated),
        ("too few", first_none & too_few[:, :, None]),
        ("gap", first_none & gap[:, :, None]),
    )
    return Picked(
        blocks=blocks,
        invalid=(is_id & ~in_row).any(axis=2) | repeated.any(axis=2) | too_few,
        wrong=[_entries(ids, rule, at) for rule, at in entries],
    )


def _repeated(ids: Ids, in_row: Bools, rows: Bools) -> Bools:
    """Entries whose block stands at an earlier place of the row already, in the rows given."""
    repeated = np.zeros(ids.shape, dtype=bool)
    some = ids[rows]
    order = np.argsort(some, axis=1, kind="stable")
    ascending = np.take_along_axis(some, order, axis=1)
    again = np.zeros(some.shape, dtype=bool)
    np.put_along_axis(again, order[:, 1:], ascending[:, 1:] == ascending[:, :-1], axis=1)
    repeated[rows] = again
    return repeated & in_row


def _entries(ids: Ids, rule: Rule, at: Bools) -> Differences:
    places = np.argwhere(at)
    block: Ints = np.full(len(places), NONE, dtype=np.int64)
    if rule == "repeated":
        block = ids[tuple(places.T)].astype(np.int64)
    cells = np.column_stack([places[:, :2], block])
    return differences("id", rule, cells, FAULT, place=places[:, 2])
