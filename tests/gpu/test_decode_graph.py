"""A captured decode step: replays follow the buffers, whatever they hold."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from indexer import IndexerConfig, IndexScorer
from kernel.backends.base import SCORE_TOLERANCE, Order
from kernel.batch import Request
from kernel.errors import InvalidArgumentError
from tests.support.calls import COLUMNS, RAGGED, STEPS, StepBuffers, Values, cumulative, random_call
from tests.support.compare import (
    assert_same_bits,
    assert_within_bounds,
    in_block_order,
    oracle_scores,
    scores_of,
    selected,
    selection_of,
    topk_of,
)

if TYPE_CHECKING:
    from kernel.backends.triton.backend import TritonBackend
    from kernel.backends.triton.decode_graph import DecodeGraph


def captured(backend: TritonBackend, buffers: StepBuffers, order: Order = "score") -> DecodeGraph:
    """Capture a step on the buffers."""
    from kernel.backends.triton.decode_graph import DecodeGraph

    return DecodeGraph(
        backend,
        buffers.q,
        buffers.pages,
        buffers.block_table,
        buffers.cu_seqlens_q,
        buffers.seq_lens,
        max_queries=2,
        topk=16,
        order=order,
        local_blocks=0,
    )


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("order", ["score", "block"])
def test_replays_follow_changed_lengths(gpu_backend: TritonBackend, heads: int, order: Order) -> None:
    """Captured on the first step, replayed on all: ids are those of the same call without a graph."""
    calls = [random_call(lengths, heads, seed=70 + i) for i, lengths in enumerate(STEPS)]
    buffers = StepBuffers(calls, gpu_backend.device)
    buffers.write(calls[0])
    graph = captured(gpu_backend, buffers, order=order)
    for call in [*calls, calls[0]]:
        buffers.write(call)
        ids = graph.replay().cpu()
        assert_same_bits(ids[:, : call.total_q].contiguous(), selection_of(gpu_backend, call, 16, order))
        assert bool((ids[:, call.total_q :] == -1).all())
        if gpu_backend.precision == "exact":
            expected = selected(oracle_scores(call), call.batch().num_blocks_per_query(), 16)
            expected = expected if order == "score" else in_block_order(expected)
            assert_same_bits(ids[:, : call.total_q].contiguous(), expected)


def test_illegal_ids_and_lengths_stay_inside(gpu_backend: TritonBackend) -> None:
    """A replay cannot refuse: page ids outside the cache and lengths past the table read nothing out of
    bounds."""
    call = random_call(STEPS[0], 2, seed=79)
    buffers = StepBuffers([call], gpu_backend.device)
    buffers.write(call)
    graph = captured(gpu_backend, buffers)
    expected = graph.replay().cpu().clone()
    buffers.block_table.fill_(2**31 - 1)
    buffers.seq_lens.fill_(1 << 20)
    assert int(graph.replay().max()) < COLUMNS
    buffers.block_table.fill_(-(2**31))
    buffers.seq_lens.fill_(-5)
    graph.replay()
    torch.cuda.synchronize()
    buffers.write(call)
    assert_same_bits(graph.replay().cpu(), expected)


def test_queries_past_the_most_get_no_ids(gpu_backend: TritonBackend) -> None:
    """Captured for two queries a request, replayed with three: the third has no ids, others keep theirs."""
    calls = [random_call([(700, 1), (900, queries), (130, 1)], 1, seed=82) for queries in (2, 3)]
    buffers = StepBuffers(calls, gpu_backend.device)
    buffers.write(calls[0])
    graph = captured(gpu_backend, buffers)
    buffers.write(calls[1])
    ids = graph.replay().cpu()
    assert bool((ids[0, 3] == -1).all())
    expected = selection_of(gpu_backend, calls[1], 16)
    assert_same_bits(ids[:, [0, 4]].contiguous(), expected[:, [0, 4]].contiguous())


def test_steps_run_in_a_graph_of_the_callers(gpu_backend: TritonBackend) -> None:
    """Two steps captured together, as a model's layers are, replayed on other lengths."""
    calls = [random_call(STEPS[i], 2, seed=83 + i) for i in range(4)]
    layers = [StepBuffers(calls, gpu_backend.device) for _ in range(2)]
    for buffers, call in zip(layers, calls[:2]):
        buffers.write(call)
    steps = [captured(gpu_backend, buffers) for buffers in layers]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step.enqueue()
    for buffers, call in zip(layers, calls[2:]):
        buffers.write(call)
    graph.replay()
    for step, call in zip(steps, calls[2:]):
        ids = step.block_ids.cpu()[:, : call.total_q].contiguous()
        assert_same_bits(ids, selection_of(gpu_backend, call, 16))


def test_what_cannot_be_captured_is_refused(gpu_backend: TritonBackend) -> None:
    """More than 64 rows a request, and steps of no rows."""
    from kernel.backends.triton.decode_graph import DecodeGraph

    buffers = StepBuffers([random_call(STEPS[0], 4, seed=80)], gpu_backend.device)
    with pytest.raises(InvalidArgumentError, match="max_queries = 17"):
        DecodeGraph(
            gpu_backend,
            buffers.q,
            buffers.pages,
            buffers.block_table,
            buffers.cu_seqlens_q,
            buffers.seq_lens,
            max_queries=17,
        )
    with pytest.raises(InvalidArgumentError, match=r"q\.shape"):
        DecodeGraph(
            gpu_backend,
            buffers.q[:0],
            buffers.pages,
            buffers.block_table,
            buffers.cu_seqlens_q,
            buffers.seq_lens,
        )


def test_a_replay_equals_a_call_of_a_real_size(gpu_backend: TritonBackend) -> None:
    """32 requests of about 20,000 keys: the split over programs differs from the call's, the ids do not."""
    from kernel.backends.triton.decode_graph import DecodeGraph

    lengths = [(20_000 + 37 * i, 1) for i in range(32)]
    call = random_call(lengths, 1, seed=81, values="inexact")
    tensors = [call.q, call.pages, call.block_table, call.cu_seqlens_q, call.seq_lens]
    q, pages, table, offsets, seq_lens = (tensor.to(gpu_backend.device) for tensor in tensors)
    graph = DecodeGraph(gpu_backend, q, pages, table.contiguous(), offsets, seq_lens, local_blocks=0)
    assert_same_bits(graph.replay().cpu(), selection_of(gpu_backend, call, 16))
    half = replace(call, seq_lens=call.seq_lens // 2, cu_seqlens_q=cumulative([1] * 32))
    seq_lens.copy_(half.seq_lens)
    assert_same_bits(graph.replay().cpu(), selection_of(gpu_backend, half, 16))


# ---- Both precisions: their bounds, their names, and one set of bits for every path ----


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
