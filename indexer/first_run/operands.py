"""Random operands of measured calls, made on the device: no case file of a million keys is needed."""

from __future__ import annotations

import torch

from kernel.batch import Request, ScoreBatch
from kernel.contract import CODE_BYTES, HEAD_DIM, PAGE_BYTES, SCALE_BYTES
from kernel.nvfp4 import build_lut
from kernel.page import blocks_of
from kernel.plan import MAXIMA_BLOCKS

_SCALES = (0x20, 0x48)
"""E4M3 bytes of scales from 2^-3 up to below 4."""


def batch_of(device: torch.device, num_requests: int, queries: int, keys: int, heads: int) -> ScoreBatch:
    """Requests of as many queries and keys each, their pages permuted in a cache of no others."""
    blocks = blocks_of(keys)
    num_pages = num_requests * blocks
    pages = torch.randint(0, 256, (num_pages, PAGE_BYTES), dtype=torch.uint8, device=device)
    pages[:, CODE_BYTES:] = torch.randint(
        *_SCALES, (num_pages, SCALE_BYTES), dtype=torch.uint8, device=device
    )
    table = (
        torch.randperm(num_pages, dtype=torch.int64, device=device).to(torch.int32).view(num_requests, blocks)
    )
    q = torch.randn(num_requests * queries, heads, HEAD_DIM, dtype=torch.float32, device=device).to(
        torch.float8_e4m3fn
    )
    requests = tuple(Request(row, row * queries, queries, keys) for row in range(num_requests))
    return ScoreBatch(q, pages, table, build_lut(device), requests, 0, 1)


def score_buffers(batch: ScoreBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores ``[H, total_q, S]`` and group maxima, unwritten."""
    shape = (batch.num_heads, batch.total_q, batch.num_score_blocks)
    groups = -(-shape[2] // MAXIMA_BLOCKS)
    device = batch.pages.device
    return torch.empty(shape, dtype=torch.float32, device=device), torch.empty(
        (*shape[:2], groups), dtype=torch.float32, device=device
    )
