"""A sidecar whose device takes a second and a half for a call of 77 queries, and its warm-up longer if asked.

It is within torch as real work is, without a rest if the variable says so.
"""

from __future__ import annotations

import os
import sys
import time

import torch

import server.app
from kernel.backends.cpu.backend import CpuBackend
from kernel.step import Plan
from server.engine import Engine, prepared_engine
from server.serve import main
from server.settings import Settings

SLOW_QUERIES = 77
SLOW_SECONDS = float(os.environ.get("SLOW_SERVER_SECONDS", "1.5"))
REST_SECONDS = float(os.environ.get("SLOW_SERVER_REST_SECONDS", "0.01"))
WARM_UP_SECONDS = float(os.environ.get("SLOW_SERVER_WARM_UP_SECONDS", "0"))
_right = CpuBackend.score_plan


def _slow(self: CpuBackend, plan: Plan, q: torch.Tensor, pages: torch.Tensor, scores: torch.Tensor) -> None:
    if q.shape[0] == SLOW_QUERIES:
        matrix = torch.zeros(256, 256)
        end = time.monotonic() + SLOW_SECONDS
        while time.monotonic() < end:
            torch.mm(matrix, matrix)
            if REST_SECONDS:
                time.sleep(REST_SECONDS)
    _right(self, plan, q, pages, scores)


def _late(settings: Settings) -> Engine:
    time.sleep(WARM_UP_SECONDS)
    return prepared_engine(settings)


if __name__ == "__main__":
    CpuBackend.score_plan = _slow  # type: ignore[method-assign]
    server.app.prepared_engine = _late  # type: ignore[attr-defined]
    server.app._LAST_CALL_SECONDS = 0.5
    sys.exit(main())
