"""Both precisions: their bounds, their names, and one set of bits for every path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from indexer import IndexerConfig, IndexScorer
from kernel.backends.base import SCORE_TOLERANCE, Order
from kernel.batch import Request
from tests.support.calls import RAGGED, Values, random_call
from tests.support.compare import assert_same_bits, assert_within_bounds
from tests.support.run import scores_of, selection_of, topk_of

if TYPE_CHECKING:
    from kernel.backends.triton.backend import TritonBackend


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("values", ["exact", "bytes", "inexact"])
def test_scores_lie_within_the_bound(gpu_backend: TritonBackend, heads: int, values: Values) -> None:
    """2^-16 and 2^-9 of sum|q k|; decode gives prefill's bits (scores_of compares them)."""
    call = random_call(RAGGED, heads, seed=90, values=values)
    assert_within_bounds(scores_of(gpu_backend, call), call, gpu_backend.precision)
    assert set(SCORE_TOLERANCE) == {"exact", "fast"}


def test_selection_is_that_of_the_scores(gpu_backend: TritonBackend) -> None:
    """Prefill, decode and the fused selection agree in either precision, for enough rows for both top-k
    kernels."""
    call = random_call(
        [(4000, 700), (3000, 1), (2305, 16), (130, 129)], 4, seed=91, values="inexact"
    ).forcing(1, 1)
    scores = scores_of(gpu_backend, call)
    num_blocks = call.batch().num_blocks_per_query()
    orders: tuple[Order, ...] = ("score", "block")
    for order in orders:
        for topk in (1, 16, 40):
            expected = topk_of(gpu_backend, scores, num_blocks, topk, order)
            assert_same_bits(selection_of(gpu_backend, call, topk, order), expected)


def test_results_name_their_precision(gpu_backend: TritonBackend) -> None:
    """A scorer on the GPU says which precision it used."""
    config = IndexerConfig(4, 8, backend="triton", device="cuda", precision=gpu_backend.precision)
    scorer = IndexScorer(config)
    call = random_call([(300, 5)], 4, seed=92)
    tensors = (call.q, call.pages, call.block_table, call.cu_seqlens_q, call.seq_lens)
    result = scorer.score_paged(*(tensor.cuda() for tensor in tensors))
    assert (result.backend, result.precision) == ("triton", gpu_backend.precision)
    assert call.batch().requests == (Request(0, 0, 5, 300),)
