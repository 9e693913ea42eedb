"""A scorer with sequences of every kind in it, whose scores are exact in any order of summation."""

from __future__ import annotations

import torch

from indexer import IndexerConfig, IndexScorer

LENGTHS = [(700, 40), (2305, 3), (129, 129), (5, 0), (1, 1), (300, 17), (256, 16)]
"""Tokens and queries of each sequence: prefill, decode, no queries, more blocks than are selected."""
QUERY_LENS = [queries for _, queries in LENGTHS]


def exact(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Values of E2M1 that use its largest in each group of 16: no rounding anywhere, and ties."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = magnitudes[torch.randint(8, shape, generator=generator)]
    values *= torch.randint(2, shape, generator=generator) * 2 - 1
    values[..., ::16] = 6.0
    return values.bfloat16()


def new_scorer(backend: str = "cpu", heads: int = 4, num_pages: int = 64) -> IndexScorer:
    """A scorer that selects 5 blocks and forces none, so that the own block's scores show."""
    return IndexScorer(IndexerConfig(heads, num_pages, topk_blocks=5, local_blocks=0, backend=backend))


def filled(scorer: IndexScorer) -> list[int]:
    """Sequences of the lengths above, whose pages lie in no order and past a gap."""
    generator = torch.Generator().manual_seed(0)
    gap = scorer.add_sequence()
    scorer.append_keys(gap, exact(generator, 900, 128))
    seqs = [scorer.add_sequence() for _ in LENGTHS]
    keys = [exact(generator, tokens, 128) for tokens, _ in LENGTHS]
    for start in range(0, 2305, 200):
        for seq, seq_keys in zip(reversed(seqs), reversed(keys)):
            scorer.append_keys(seq, seq_keys[start : start + 200])
    return seqs


def all_queries(heads: int) -> torch.Tensor:
    """Queries ``[total_q, H, 128]`` for all of them."""
    return exact(torch.Generator().manual_seed(9), sum(QUERY_LENS), heads, 128)
