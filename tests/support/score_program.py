"""A program that appends, scores, decodes and selects on ``flydsl-sim`` and compares with ``reference``."""

from __future__ import annotations

SCORE = """
import sys
import torch
from indexer import IndexScorer, IndexerConfig

results = []
for backend in ("flydsl-sim", "reference"):
    generator = torch.Generator().manual_seed(4)
    scorer = IndexScorer(IndexerConfig(num_index_heads=4, num_pages=5, topk_blocks=2, local_blocks=0,
        backend=backend, device="cpu"))
    sequence = scorer.add_sequence()
    scorer.append_keys(sequence, torch.randn(500, 128, generator=generator).to(torch.bfloat16))
    q = torch.randn(9, 4, 128, generator=generator)
    results += [scorer.score(q, [sequence]), scorer.score(q[:1], [sequence])]
for found, expected in zip(results[:2], results[2:]):
    assert torch.allclose(found.scores, expected.scores, rtol=1e-5, atol=1e-4)
    assert torch.equal(found.block_ids, expected.block_ids)
assert results[0].backend == "flydsl-sim"
print(sorted(name for name in sys.modules if name.split(".")[0] == "flydsl"))
"""
"""Its last line are the modules of FlyDSL that it imported."""
