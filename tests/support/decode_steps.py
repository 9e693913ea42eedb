"""Decode steps of one shape whose lengths change, and the buffers that one launch or graph serves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.support.call import Call

STEPS: list[list[tuple[int, int]]] = [
    [(2305, 1), (128, 1), (129, 1), (4000, 1), (1, 1)],
    [(2306, 1), (0, 0), (130, 2), (17, 1), (700, 1)],
    [(40, 1), (4001, 2), (0, 0), (700, 0), (256, 2)],
    [(3072, 1), (3073, 1), (3074, 1), (3075, 1), (3076, 1)],
]
"""(seq_len, query_len) of five requests in consecutive steps; some pad the batch."""
ROWS, COLUMNS = 6, 32


class StepBuffers:
    """What a step is captured with: room for any of ``calls``, which have one batch size and H."""

    def __init__(self, calls: Sequence[Call], device: torch.device) -> None:
        num_pages = max(call.pages.shape[0] for call in calls)
        heads, batch = calls[0].num_heads, calls[0].seq_lens.shape[0]
        self.q = torch.zeros(ROWS, heads, 128, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        self.pages = torch.zeros(num_pages, 9216, dtype=torch.uint8, device=device)
        self.block_table = torch.zeros(batch, COLUMNS, dtype=torch.int32, device=device)
        self.cu_seqlens_q = torch.zeros(batch + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=device)

    def write(self, call: Call) -> None:
        """Fill the buffers with a call, in place."""
        self.q.view(torch.uint8).zero_()
        self.q.view(torch.uint8)[: call.total_q] = call.q.view(torch.uint8).to(self.q.device)
        self.pages[: call.pages.shape[0]] = call.pages.to(self.pages.device)
        width = min(COLUMNS, call.block_table.shape[1])
        self.block_table[:, :width] = call.block_table[:, :width].to(self.q.device)
        self.cu_seqlens_q.copy_(call.cu_seqlens_q)
        self.seq_lens.copy_(call.seq_lens)
