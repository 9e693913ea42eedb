"""One scoring call, checked: what every backend is given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from kernel.contract import BLOCK_TOKENS
from kernel.page import blocks_of

LOCAL_SCORE = 1e29
"""Score of the last ``local_blocks`` causal blocks of a row. A block that is also an init block gets this."""
INIT_SCORE = 1e30
"""Score of the first ``init_blocks`` blocks of a row."""


@dataclass(frozen=True)
class Request:
    """One request of a ragged batch: its rows in ``q`` and its row in the block table."""

    table_row: int
    query_start: int
    query_len: int
    seq_len: int

    @property
    def prefix_len(self) -> int:
        """Keys before the first query: the j-th query stands at position ``prefix_len + j``."""
        return self.seq_len - self.query_len

    @property
    def num_blocks(self) -> int:
        """Blocks its rows may see, the ``nb`` of its last query; 0 without queries: nothing is read then."""
        return blocks_of(self.seq_len) if self.query_len else 0


@dataclass(frozen=True, eq=False)
class ScoreBatch:
    """A ragged batch whose every field was checked by :func:`kernel.checks.checked_batch`.

    Attributes:
        q: ``[total_q, H, 128]`` float8_e4m3fn, contiguous, token-major.
        pages: ``[num_pages, 9216]`` uint8, rows ``page_stride`` bytes apart.
        block_table: ``[rows, max_blocks]`` int32; every id a request uses lies in ``[0, num_pages)``.
        lut: ``[256, 8]`` uint8, see :func:`kernel.nvfp4.build_lut`.
        requests: in the order of their query rows; lengths and offsets are host integers. The rows of a
            request that was left out by :meth:`subset` are not to be touched.
        init_blocks: blocks forced at a row's start, 0 or more.
        local_blocks: blocks forced at a row's end, 0 or more.
    """

    q: torch.Tensor
    pages: torch.Tensor
    block_table: torch.Tensor
    lut: torch.Tensor
    requests: tuple[Request, ...]
    init_blocks: int
    local_blocks: int

    @property
    def total_q(self) -> int:
        return self.q.shape[0]

    @property
    def num_heads(self) -> int:
        return self.q.shape[1]

    @property
    def num_score_blocks(self) -> int:
        """Blocks of the longest request: the least ``S`` a score buffer of this batch may have."""
        return max((request.num_blocks for request in self.requests), default=0)

    def subset(self, requests: Iterable[Request]) -> ScoreBatch:
        """Returns the same call with only some of its requests."""
        return replace(self, requests=tuple(requests))

    def num_blocks_per_query(self) -> torch.Tensor:
        """``nb`` of every query token: ``[total_q]`` int32 on the host, ``pos // 128 + 1``; 0 in no request.

        For the oracle and tests; plans have :meth:`kernel.step.Lengths.blocks_per_query`.
        """
        num_blocks = torch.zeros(self.total_q, dtype=torch.int32, device="cpu")
        for request in self.requests:
            positions = torch.arange(request.prefix_len, request.seq_len, dtype=torch.int32, device="cpu")
            rows = slice(request.query_start, request.query_start + request.query_len)
            num_blocks[rows] = positions // BLOCK_TOKENS + 1
        return num_blocks
