"""A rank's part of a call costs the device as many operations for many short requests as for few."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from indexer.distributed.share import HeldRequest, ShareScorer, Stripe
from indexer.scorer import ScoreCall
from kernel.backends import registry
from kernel.batch import Request
from kernel.nvfp4 import build_lut


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(requests: int) -> int:
    """Operations of one piece of so many decode requests of 20 blocks, beside the backend's own."""
    call_requests = tuple(Request(row, row, 1, 2500) for row in range(requests))
    call = ScoreCall(tuple(range(requests)), call_requests, 4, "score", 2, 2, False)
    held = [HeldRequest(request, 0, Stripe(1, 2), array("i", range(10))) for request in call_requests]
    scorer = ShareScorer(registry.create("cpu"), torch.zeros(10, 9216, dtype=torch.uint8), build_lut("cpu"))
    q = torch.zeros(requests, 1, 128).to(torch.float8_e4m3fn)
    counting = Counting()
    with counting:
        pieces = list(scorer.pieces(q, held, call))
    assert len(pieces) == 1
    return counting.count


def test_operations_do_not_grow_with_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexer.distributed.share.score_requests", lambda *_: None)
    assert operations(100) == operations(3)
