"""A sidecar whose device takes a second and a half for a call of 77 queries, within torch as real work is."""

from __future__ import annotations

import os
import sys
import time

import torch

import server.app
from kernel.backends.cpu.backend import CpuBackend
from kernel.step import Plan
from server.serve import main

SLOW_QUERIES = 77
SLOW_SECONDS = float(os.environ.get("SLOW_SERVER_SECONDS", "1.5"))
_right = CpuBackend.score_plan


def _slow(self: CpuBackend, plan: Plan, q: torch.Tensor, pages: torch.Tensor, scores: torch.Tensor) -> None:
    if q.shape[0] == SLOW_QUERIES:
        matrix = torch.zeros(256, 256)
        end = time.monotonic() + SLOW_SECONDS
        while time.monotonic() < end:
            torch.mm(matrix, matrix)
    _right(self, plan, q, pages, scores)


if __name__ == "__main__":
    CpuBackend.score_plan = _slow  # type: ignore[method-assign]
    server.app._LAST_CALL_SECONDS = 0.5
    sys.exit(main())
