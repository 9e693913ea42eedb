"""A sidecar whose device takes a second and a half for a call of 77 queries, within torch as real work is."""

from __future__ import annotations

import os
import sys
import time

import torch

import server.app
from kernel.backends.cpu.backend import CpuBackend
from kernel.batch import ScoreBatch
from server.serve import main

SLOW_QUERIES = 77
SLOW_SECONDS = float(os.environ.get("SLOW_SERVER_SECONDS", "1.5"))
_right = CpuBackend.score


def _slow(self: CpuBackend, batch: ScoreBatch, scores: torch.Tensor) -> None:
    if batch.q.shape[0] == SLOW_QUERIES:
        matrix = torch.zeros(256, 256)
        end = time.monotonic() + SLOW_SECONDS
        while time.monotonic() < end:
            torch.mm(matrix, matrix)
    _right(self, batch, scores)


if __name__ == "__main__":
    CpuBackend.score = _slow  # type: ignore[method-assign]
    server.app._LAST_CALL_SECONDS = 0.5
    sys.exit(main())
