"""Pages that one backend wrote are the bytes that every other writes, and are scored alike by all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernel.backends.base import Backend
from kernel.backends.cpu.backend import CpuBackend
from kernel.backends.reference import ReferenceBackend
from kernel.contract import BLOCK_TOKENS, HEAD_DIM
from tests.support.calls import random_call, strided_pages
from tests.support.compare import assert_same_bits, assert_within_bounds
from tests.support.run import inserted, scores_of

LENGTHS = ((300, 5), (2200, 3), (131, 40), (129, 1), (0, 0))
"""Decode steps, one beyond 16 blocks, and a prefill."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_each_scores_the_pages_of_the_other(backend: Backend, dtype: torch.dtype) -> None:
    call = random_call(LENGTHS, heads=2, seed=11).forcing(0, 1)
    slots = torch.cat(
        [
            call.block_table[request, : -(-seq_len // BLOCK_TOKENS), None].long() * BLOCK_TOKENS
            + torch.arange(BLOCK_TOKENS)
            for request, (seq_len, _) in enumerate(LENGTHS)
            if seq_len
        ]
    ).flatten()
    generator = torch.Generator().manual_seed(12)
    spread = torch.rand(len(slots), 1, generator=generator).mul(12).sub(6).exp2()  # 2^-6 to 2^6
    keys = (torch.randn(len(slots), HEAD_DIM, generator=generator) * spread).to(dtype)
    empty = strided_pages(call.pages.shape[0], 9216 + 64)

    written = inserted(backend, keys, empty, slots)
    for other in (CpuBackend("exact"), ReferenceBackend()):
        theirs = inserted(other, keys, empty, slots)
        assert_same_bits(written, theirs)
        for scorer, pages in ((backend, theirs), (other, written)):
            own = replace(call, pages=pages)
            assert_within_bounds(scores_of(scorer, own), own, scorer.precision)
