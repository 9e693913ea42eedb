"""A prediction, not a measurement: calls of a million tokens on 1 to 8 MI355X.

``python -m tests.benchmarks.scaling_model`` prints the table that docs/performance.md shows. The rates are
assumptions, named below; the bytes are those of :mod:`indexer.distributed.ranks`.
"""

from __future__ import annotations

from dataclasses import dataclass

from indexer.distributed.ranks import candidate_bytes
from indexer.distributed.share import CHUNK_TOKENS
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, PAGE_BYTES

CONTEXT_BLOCKS = 8192
HEADS = 4
TOPK = 16

FLOPS = 3.5e15
"""E4M3 products a second: 70 % of the 5.03 PFLOP/s peak."""
MEMORY_RATE = 6e12
"""Bytes a second: 75 % of the 8 TB/s peak."""
LINK_RATE = 57.6e9
"""Bytes a second and direction from each GPU to each other: 75 % of 76.8 GB/s."""
COLLECTIVE_SECONDS = 20e-6
"""An all-gather of no length."""
MERGE_SECONDS = 30e-6
"""Launches of the merge, beside four passes over the candidates."""
HEADER_SECONDS = 200e-6
"""The headers over Gloo on the host, while the GPU scores."""


@dataclass(frozen=True)
class Work:
    """A call: requests of some queries each, at the end of a million tokens."""

    name: str
    requests: int
    query_len: int

    @property
    def rows(self) -> int:
        """Rows of all heads."""
        return self.requests * self.query_len * HEADS

    def seconds(self, ranks: int) -> float:
        """Predicted time of a call on so many ranks, block ids alone."""
        seen = CONTEXT_BLOCKS - self.query_len / BLOCK_TOKENS / 2
        chunk_blocks = min(self.query_len, CHUNK_TOKENS) / BLOCK_TOKENS
        # Of a chunk's own blocks a rank scores those that it does not hold as well.
        blocks = seen / ranks + (chunk_blocks + 1) / 2 * (ranks - 1) / ranks
        products = self.rows * blocks * BLOCK_TOKENS * HEAD_DIM * 2 / FLOPS
        pages = self.requests * blocks * PAGE_BYTES / MEMORY_RATE
        scores = self.rows * blocks * 2 * 4 / MEMORY_RATE
        scoring = max(products, pages) + scores
        if ranks == 1:
            return scoring
        payload = self.rows * candidate_bytes(TOPK)
        exchange = payload / LINK_RATE + COLLECTIVE_SECONDS
        merge = 4 * ranks * payload / MEMORY_RATE + MERGE_SECONDS
        return max(scoring, HEADER_SECONDS) + exchange + merge


CALLS = (
    Work("prefill, 8,192 queries", 1, 8192),
    Work("prefill, 32,768 queries", 1, 32768),
    Work("decode, 256 requests", 256, 1),
    Work("decode, 32 requests", 32, 1),
    Work("decode, 1 request", 1, 1),
)


def table() -> list[str]:
    """The prediction as lines of Markdown."""
    lines = ["| call | 1 GPU | 2 | 4 | 8 | speed-up at 8 |", "|---|---|---|---|---|---|"]
    for work in CALLS:
        times = [work.seconds(ranks) for ranks in (1, 2, 4, 8)]
        cells = " | ".join(f"{1e3 * seconds:.3g}" for seconds in times)
        lines.append(f"| {work.name} | {cells} | {times[0] / times[-1]:.2g} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
