"""A sidecar whose backend is wrong in one block's score: it must never become ready."""

from __future__ import annotations

import sys

import torch

from kernel.backends.cpu.backend import CpuBackend
from kernel.batch import ScoreBatch
from server.serve import main

_right = CpuBackend.score


def _wrong(self: CpuBackend, batch: ScoreBatch, scores: torch.Tensor) -> None:
    _right(self, batch, scores)
    scores[:, 0, 0] += 0.25


if __name__ == "__main__":
    CpuBackend.score = _wrong  # type: ignore[method-assign]
    sys.exit(main())
