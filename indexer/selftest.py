"""A small case for telling, within a second, whether a backend computes right on this machine."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from indexer.case import Case
from indexer.verify import Verification, verify_case
from kernel.backends.base import Precision

REQUESTS = ((2500, 24), (300, 20), (129, 3), (1, 1))
"""(keys, queries): more blocks than a row selects, rows that straddle a block, one key."""


def selftest_case(num_heads: int = 4, seed: int = 0) -> Case:
    """Ragged prefill and decode rows on normal keys with a few strong channels; nothing is forced, since a
    forced last block would hide a fault in the causal mask."""
    generator = np.random.default_rng(seed)
    channels = np.exp(generator.normal(0, 0.7, 128))
    seq_lens, query_lens = np.array(REQUESTS, dtype=np.int32).T
    keys = generator.normal(size=(seq_lens.sum(), 128)) * channels
    queries = generator.normal(size=(query_lens.sum(), num_heads, 128))
    return Case(
        index_q=queries.astype(ml_dtypes.bfloat16),
        index_k=keys.astype(ml_dtypes.bfloat16),
        cu_seqlens_q=np.cumsum([0, *query_lens], dtype=np.int32),
        seq_lens=np.ascontiguousarray(seq_lens),
        local_blocks=0,
        topk=16,
        source=f"self-test, seed {seed}",
    )


def run_selftest(backend: str = "auto", precision: Precision = "exact") -> Verification:
    """Verify a backend on the self-test case.

    Raises:
        BackendUnavailableError: the backend cannot run here.
    """
    return verify_case(selftest_case(), "selftest", backend, precision=precision)
