"""A sidecar whose backend is wrong in one block's score: it must never become ready."""

from __future__ import annotations

import sys

import torch

from kernel.backends.cpu.backend import CpuBackend
from kernel.step import Plan
from server.serve import main

_right = CpuBackend.score_plan


def _wrong(self: CpuBackend, plan: Plan, q: torch.Tensor, pages: torch.Tensor, scores: torch.Tensor) -> None:
    _right(self, plan, q, pages, scores)
    scores[:, 0, 0] += 0.25


if __name__ == "__main__":
    CpuBackend.score_plan = _wrong  # type: ignore[method-assign]
    sys.exit(main())
