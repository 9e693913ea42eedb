"""Top-k of block scores, exact and deterministic: score descending, ties to the lower block id.

A score and its block id are packed into one int64 whose order is the contract's, so that ``torch.topk`` has
no ties to break:

    bits 63..32   the score as a signed integer of the same order (NaN as -inf, -0.0 as +0.0)
    bits 31..0    2^31 - 1 - block id
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import partial

import torch

from kernel.backends.base import Order
from kernel.threads import on_one_thread, run_tasks

ABSENT = torch.iinfo(torch.int64).min
"""The packed key of no block: below every block's key, that of a score of -inf included."""
_MAX_ID = (1 << 31) - 1
_MAGNITUDE = torch.tensor(0x7FFFFFFF, dtype=torch.int32, device="cpu")  # a number would cost a conversion
_CHUNK_CELLS = 1 << 17
"""Score cells packed at a time: 1 MiB of keys."""
_FEW_BLOCKS = 16
"""Blocks of a row up to which sorting them takes less than packing them: fewer operations."""
_PENDING_BLOCKS = 256
"""Blocks a running selection collects before it selects again."""


def pack(scores: torch.Tensor, first_block: int, num_blocks: torch.Tensor) -> torch.Tensor:
    """Packed keys of the scores of consecutive blocks.

    Args:
        scores: ``[rows, blocks]`` float32; cells at and past a row's ``num_blocks`` may hold anything.
        first_block: block id of column 0.
        num_blocks: ``[rows]`` integers, the row's causal blocks.

    Returns:
        ``[rows, blocks]`` int64, ``ABSENT`` at and past a row's ``num_blocks``.
    """
    ids = torch.arange(first_block, first_block + scores.shape[1], dtype=torch.int64, device=scores.device)
    return pack_blocks(scores, ids, num_blocks)


def pack_blocks(scores: torch.Tensor, ids: torch.Tensor, num_blocks: torch.Tensor) -> torch.Tensor:
    """As :func:`pack`, of the blocks that ``ids`` (``[blocks]`` or ``[rows, blocks]`` int64) names."""
    ordered = comparable(scores)
    keys = (ordered.long() << 32) | (_MAX_ID - ids)
    return keys.masked_fill_(ids >= num_blocks[:, None], ABSENT)


def comparable(scores: torch.Tensor) -> torch.Tensor:
    """Scores as int32 of the same order. A host may flush denormals, and would find them equal."""
    bits = scores.nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf).view(torch.int32)
    return bits.sign().mul_(bits & _MAGNITUDE)  # both zeros are 0


def unpack(keys: torch.Tensor, order: Order) -> torch.Tensor:
    """Block ids of packed keys sorted descending: ``[rows, k]`` int32, -1 for ``ABSENT``."""
    ids = _MAX_ID - (keys & _MAX_ID)  # of ABSENT, whose low bits are 0, the greatest
    if order == "block":
        ids = ids.sort(dim=-1).values
    return ids.masked_fill_(ids == _MAX_ID, -1).to(torch.int32)


def best(keys: torch.Tensor, k: int) -> torch.Tensor:
    """The ``k`` greatest keys of each row, descending, filled up with ``ABSENT``: ``[rows, k]`` int64."""
    found = keys.topk(min(k, keys.shape[1]), dim=-1).values
    return torch.nn.functional.pad(found, (0, k - found.shape[1]), value=ABSENT)


def select_rows(scores: torch.Tensor, num_blocks: torch.Tensor, k: int, order: Order) -> torch.Tensor:
    """Each row's best blocks, ``[rows, k]`` int32.

    Args:
        scores: ``[rows, blocks]`` float32 of this backend, of which none is a denormal; -inf at and past a
            row's ``num_blocks``.
        num_blocks: ``[rows]`` int64.
        k: blocks to select.
        order: of them.
    """
    if scores.shape[1] > _FEW_BLOCKS:
        return unpack(best(pack(scores, 0, num_blocks), k), order)
    return _sorted_rows(
        scores.nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf), num_blocks, k, order
    )


def _sorted_rows(keys: torch.Tensor, num_blocks: torch.Tensor, k: int, order: Order) -> torch.Tensor:
    """As :func:`select_rows`, of a few keys without NaN."""
    # A stable sort leaves the lower of equally good blocks first, so those of a row before those past it.
    ids = keys.sort(dim=1, descending=True, stable=True).indices[:, :k]
    ids = ids.masked_fill(ids >= num_blocks[:, None], _MAX_ID)
    if order == "block":
        ids = ids.sort(dim=1).values
    found = torch.full((ids.shape[0], k), -1, dtype=torch.int32, device="cpu")
    found[:, : ids.shape[1]] = ids.masked_fill_(ids == _MAX_ID, -1)
    return found


def select_topk(
    scores: torch.Tensor, num_blocks: torch.Tensor, block_ids: torch.Tensor, order: Order
) -> None:
    """Write each row's best blocks; see :meth:`kernel.backends.base.Backend.topk`."""
    heads, tokens, _ = scores.shape
    chunks = []
    start = 0
    while start < tokens:
        widest = max(int(num_blocks[start:].max()), 1)
        end = start + max(_CHUNK_CELLS // (heads * widest), 1)
        rows = slice(start, end)
        chunks.append(partial(_select_tokens, scores[:, rows], num_blocks[rows], block_ids[:, rows], order))
        start = end
    with on_one_thread() as threads:
        run_tasks(iter(chunks), lambda: None, min(threads, len(chunks)))


def _select_tokens(
    scores: torch.Tensor, num_blocks: torch.Tensor, block_ids: torch.Tensor, order: Order, _: None
) -> None:
    width = int(num_blocks.max())
    past = torch.arange(width, dtype=torch.int64, device=scores.device) >= num_blocks[:, None]
    rows = scores[:, :, :width].masked_fill(past, -torch.inf).flatten(0, 1)
    of_rows = num_blocks.long().repeat(len(scores)), block_ids.shape[2], order
    few = width <= _FEW_BLOCKS
    found = _sorted_rows(comparable(rows), *of_rows) if few else select_rows(rows, *of_rows)
    block_ids.copy_(found.view(block_ids.shape))


class RunningTopk:
    """The best ``k`` blocks of some rows whose scores come a few blocks at a time, in any order.

    Args:
        num_blocks: ``[rows]`` integers, the causal blocks of each row.
        k: blocks to select.
    """

    def __init__(self, num_blocks: torch.Tensor, k: int) -> None:
        rows = num_blocks.shape[0]
        self._num_blocks = num_blocks
        self._best = torch.full((rows, k), ABSENT, dtype=torch.int64, device="cpu")
        most = min(_PENDING_BLOCKS, int(num_blocks.max()))
        self._pending = torch.empty((most, rows), dtype=torch.float32, device="cpu")
        self._pending_ids = torch.empty(most, dtype=torch.int64, device="cpu")
        self._num_pending = 0

    def add(self, first_block: int, scores: torch.Tensor) -> None:
        """Take in the scores of some consecutive blocks, at most 256: ``[blocks, rows]`` float32."""
        if self._num_pending + scores.shape[0] > self._pending.shape[0]:
            self._reduce()
        end = self._num_pending + scores.shape[0]
        self._pending[self._num_pending : end] = scores
        ids = self._pending_ids[self._num_pending : end]
        stop = first_block + scores.shape[0]
        torch.arange(first_block, stop, dtype=torch.int64, device="cpu", out=ids)
        self._num_pending = end

    def merge(self, other: RunningTopk) -> None:
        """Take in what another one of the same rows has."""
        other._reduce()
        self._best = best(torch.cat((self._best, other._best), dim=1), self._best.shape[1])

    def block_ids(self, order: Order) -> torch.Tensor:
        """The selection so far: ``[rows, k]`` int32."""
        self._reduce()
        return unpack(self._best, order)

    def _reduce(self) -> None:
        if not self._num_pending:
            return
        # One transposed copy of many blocks: torch has a fast path for it, which a few columns do not take.
        scores = self._pending[: self._num_pending].t().contiguous()
        keys = pack_blocks(scores, self._pending_ids[: self._num_pending], self._num_blocks)
        self._best = best(torch.cat((self._best, keys), dim=1), self._best.shape[1])
        self._num_pending = 0


class SharedTopk:
    """The best blocks of some rows whose scores several threads find.

    Args:
        num_blocks: ``[rows]`` integers, the causal blocks of each row.
        k: blocks to select.
        parts: that are added in all.
    """

    def __init__(self, num_blocks: torch.Tensor, k: int, parts: int) -> None:
        self._num_blocks, self._k, self._missing = num_blocks, k, parts
        self._lock, self._idle = threading.Lock(), list[RunningTopk]()

    def add(self, part: Iterable[tuple[int, torch.Tensor]]) -> RunningTopk | None:
        """Take in a part, as :meth:`RunningTopk.add`; who ends the last part gets the selection."""
        with self._lock:
            running = self._idle.pop() if self._idle else None
        if running is None:
            running = RunningTopk(self._num_blocks, self._k)
        for first_block, scores in part:
            running.add(first_block, scores)
        with self._lock:
            self._idle.append(running)
            self._missing -= 1
            if self._missing:
                return None
        for other in self._idle[1:]:
            self._idle[0].merge(other)
        return self._idle[0]
