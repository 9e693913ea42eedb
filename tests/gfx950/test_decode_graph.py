"""A decode launch is fit for capture: one launch, fixed by shapes and addresses, serves any lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernel.backends.flydsl.score_decode_launch import DeviceRequests
from kernel.batch import ScoreBatch
from kernel.contract import SUPPORTED_HEADS
from kernel.gfx950.hip import simulated_device
from tests.gfx950.decode import launcher
from tests.gfx950.prefill import POISON, device_with, group_maxima
from tests.support.call import Call
from tests.support.calls import random_call
from tests.support.compare import assert_same_bits, oracle_scores

STEPS: list[list[tuple[int, int]]] = [
    [(2305, 1), (128, 1), (129, 1), (4000, 1), (1, 1)],
    [(2306, 1), (0, 0), (130, 2), (17, 1), (700, 1)],
    [(40, 1), (4001, 2), (0, 0), (700, 0), (256, 2)],
    [(3072, 1), (3073, 1), (3074, 1), (3075, 1), (3076, 1)],
]
"""(seq_len, query_len) of five requests in consecutive steps; some pad the batch."""
ROWS, COLUMNS = 6, 32


class Buffers:
    """What a step is captured with."""

    def __init__(self, heads: int, calls: list[Call]) -> None:
        num_pages = max(call.pages.shape[0] for call in calls)
        self.q = torch.zeros(ROWS, heads, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)
        self.pages = torch.zeros(num_pages, 9216, dtype=torch.uint8)
        self.block_table = torch.zeros(5, COLUMNS, dtype=torch.int32)
        self.offsets = torch.zeros(6, dtype=torch.int32)
        self.seq_lens = torch.zeros(5, dtype=torch.int32)
        self.table_rows = torch.arange(5, dtype=torch.int32)
        self.scores = torch.empty(heads, ROWS, COLUMNS)
        self.maxima = torch.empty(heads, ROWS, COLUMNS // 16)

    def write(self, call: Call) -> None:
        """Fill the buffers with a call, in place."""
        self.q.view(torch.uint8)[: call.total_q] = call.q.view(torch.uint8)
        self.pages[: call.pages.shape[0]] = call.pages
        width = min(COLUMNS, call.block_table.shape[1])
        self.block_table[:, :width] = call.block_table[:, :width]
        self.offsets.copy_(call.cu_seqlens_q)
        self.seq_lens.copy_(call.seq_lens)
        self.scores.fill_(POISON)
        self.maxima.fill_(POISON)

    def launch(self, like: ScoreBatch) -> None:
        """Every step passes the same arguments; only what the buffers hold differs."""
        batch = replace(like.subset([]), q=self.q, pages=self.pages, block_table=self.block_table)
        requests = DeviceRequests(self.table_rows, self.offsets[:-1], self.offsets[1:], self.seq_lens)
        launcher().launch(batch, requests, self.scores, self.maxima)


@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
def test_steps_of_any_lengths_are_one_launch(heads: int) -> None:
    """Same grid, same argument bytes, exact scores and maxima in rows of requests and no others."""
    calls = [random_call(lengths, heads, seed=70 + i) for i, lengths in enumerate(STEPS)]
    buffers, like = Buffers(heads, calls), calls[0].batch()
    launches = set()
    with device_with(2):
        for call in [*calls, calls[0]]:
            buffers.write(call)
            buffers.launch(like)
            record = simulated_device().launches[-1]
            launches.add((record.kernel, record.grid, record.block, record.kernargs))
            expected = oracle_scores(call, COLUMNS)
            assert_same_bits(buffers.scores[:, : call.total_q].contiguous(), expected)
            assert_same_bits(buffers.maxima[:, : call.total_q].contiguous(), group_maxima(expected))
            assert bool(buffers.scores[:, call.total_q :].isnan().all())
    assert len(launches) == 1
