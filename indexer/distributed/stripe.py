"""Which blocks of a sequence a rank holds. Integers.

A sequence's blocks go round the context ranks: block ``b`` lies on rank ``(first_rank + b) % ranks``. So a
rank holds ``phase, phase + ranks, phase + 2 * ranks, ...``, its share grows with the context to within one
block of every other's, and of the blocks it holds only the last one can be partial: one after another they
are a sequence of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernel.contract import BLOCK_TOKENS


@dataclass(frozen=True)
class Stripe:
    """The blocks ``phase + step * i`` of a sequence: those that one rank holds, ``i`` its column."""

    phase: int
    """The first of them, below ``step``."""
    step: int
    """Ranks that the blocks go round."""

    def block(self, column: int) -> int:
        """The block of a column."""
        return self.phase + self.step * column

    def count(self, blocks: int) -> int:
        """How many of the first ``blocks`` blocks are held: the columns of blocks below ``blocks``."""
        return -((self.phase - blocks) // self.step) if blocks > self.phase else 0

    def tokens(self, start: int, end: int) -> torch.Tensor:
        """Which of the tokens ``start`` to ``end - 1`` lie in held blocks: ``[end - start]`` bool, host."""
        positions = torch.arange(start, end, dtype=torch.int64, device="cpu")
        return positions // BLOCK_TOKENS % self.step == self.phase
