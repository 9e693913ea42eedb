"""A decode launch is fit for capture: one launch, fixed by shapes and addresses, serves any lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernel.backends.flydsl.launch import DeviceRequests
from kernel.batch import ScoreBatch
from kernel.contract import SUPPORTED_HEADS
from kernel.gfx950.hip import simulated_device
from tests.gfx950.decode import launcher
from tests.gfx950.prefill import POISON, device_with, group_maxima
from tests.support.call import CPU, Call
from tests.support.calls import random_call
from tests.support.compare import assert_same_bits, oracle_scores
from tests.support.decode_steps import COLUMNS, ROWS, STEPS, StepBuffers


class Buffers(StepBuffers):
    """What a step is launched with, its outputs included."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__(calls, CPU)
        self.table_rows = torch.arange(5, dtype=torch.int32)
        self.scores = torch.empty(calls[0].num_heads, ROWS, COLUMNS)
        self.maxima = torch.empty(calls[0].num_heads, ROWS, COLUMNS // 16)

    def write(self, call: Call) -> None:
        """Fill the buffers with a call, in place, and poison the outputs."""
        super().write(call)
        self.scores.fill_(POISON)
        self.maxima.fill_(POISON)

    def launch(self, like: ScoreBatch) -> None:
        """Every step passes the same arguments; only what the buffers hold differs."""
        batch = replace(like.subset([]), q=self.q, pages=self.pages, block_table=self.block_table)
        requests = DeviceRequests(
            self.table_rows, self.cu_seqlens_q[:-1], self.cu_seqlens_q[1:], self.seq_lens
        )
        launcher().launch(batch, requests, self.scores, self.maxima)


@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
def test_steps_of_any_lengths_are_one_launch(heads: int) -> None:
    """Same grid, same argument bytes, exact scores and maxima in rows of requests and no others."""
    calls = [random_call(lengths, heads, seed=70 + i) for i, lengths in enumerate(STEPS)]
    buffers, like = Buffers(calls), calls[0].batch()
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
