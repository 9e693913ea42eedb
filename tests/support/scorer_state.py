"""Everything a scorer remembers, and what must always hold of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from indexer import IndexerConfig, IndexScorer
from kernel.backends.reference import ReferenceBackend
from kernel.contract import BLOCK_TOKENS, PAGE_BYTES
from kernel.page import codes_of, scales_of


@dataclass(frozen=True)
class ScorerState:
    """A scorer's state, byte for byte."""

    page_bytes: bytes
    sequences: tuple[tuple[int, int, tuple[int, ...]], ...]
    """Id, length and block table of each."""
    free_pages: tuple[int, ...]
    ref_counts: tuple[int, ...]
    next_id: int


def state_of(scorer: IndexScorer) -> ScorerState:
    """The state now."""
    cache = scorer._cache
    return ScorerState(
        page_bytes=scorer.pages.cpu().numpy().tobytes(),
        sequences=tuple((seq, cache.length(seq), tuple(cache.block_table(seq))) for seq in cache.sequences),
        free_pages=cache.allocator.free_pages,
        ref_counts=tuple(cache.allocator.ref_count(page) for page in range(cache.allocator.num_pages)),
        next_id=cache._next_id,
    )


def assert_consistent(scorer: IndexScorer) -> None:
    """Fail unless references, free pages, lengths and unused bytes agree with each other."""
    state = state_of(scorer)
    held = Counter(page for _, _, table in state.sequences for page in table)
    assert state.ref_counts == tuple(held[page] for page in range(len(state.ref_counts)))
    assert sorted((*state.free_pages, *held)) == list(range(len(state.ref_counts)))
    assert not scorer.pages[list(state.free_pages)].any(), "a free page still shows keys"
    for _, length, table in state.sequences:
        assert len(table) == -(-length // BLOCK_TOKENS)
        assert len(set(table)) == len(table)
        if length % BLOCK_TOKENS:
            last = scorer.pages[table[-1]]
            assert not codes_of(last)[length % BLOCK_TOKENS :].any()
            assert not scales_of(last)[length % BLOCK_TOKENS :].any()


def oracle_pages(keys: torch.Tensor) -> torch.Tensor:
    """Pages ``[blocks, 9216]`` that the oracle fills with keys ``[n, 128]``; the rest is zero."""
    pages = torch.zeros(-(-len(keys) // BLOCK_TOKENS), PAGE_BYTES, dtype=torch.uint8)
    ReferenceBackend().insert(keys, pages, torch.arange(len(keys)))
    return pages


def pages_of(scorer: IndexScorer, seq: int) -> torch.Tensor:
    """The pages of a sequence in the order of its blocks, ``[blocks, 9216]``, copied."""
    return scorer.pages[scorer.block_table(seq).long()]


# A scorer with sequences of every kind in it, whose scores are exact in any order of summation.

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
