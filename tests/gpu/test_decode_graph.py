"""A captured decode step: replays follow the buffers, whatever they hold."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from kernel.backends.base import Order
from kernel.errors import InvalidArgumentError
from tests.support.call import Call, cumulative
from tests.support.calls import random_call
from tests.support.compare import assert_same_bits, oracle_scores
from tests.support.run import selection_of
from tests.support.selection import in_block_order, selected

if TYPE_CHECKING:
    from kernel.backends.triton.backend import TritonBackend
    from kernel.backends.triton.decode_graph import DecodeGraph

STEPS: list[list[tuple[int, int]]] = [
    [(2305, 1), (128, 1), (129, 1), (4000, 1), (1, 1)],
    [(2306, 1), (0, 0), (130, 2), (17, 1), (700, 1)],
    [(40, 1), (4001, 2), (0, 0), (700, 0), (256, 2)],
    [(3072, 1), (3073, 1), (3074, 1), (3075, 1), (3076, 1)],
]
"""(seq_len, query_len) of five requests in consecutive steps; some pad the batch."""
ROWS, COLUMNS = 6, 32


class Buffers:
    """Device buffers that a step is captured with."""

    def __init__(self, device: torch.device, heads: int, num_pages: int, batch: int = 5) -> None:
        self.q = torch.zeros(ROWS, heads, 128, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        self.pages = torch.zeros(num_pages, 9216, dtype=torch.uint8, device=device)
        self.block_table = torch.zeros(batch, COLUMNS, dtype=torch.int32, device=device)
        self.cu_seqlens_q = torch.zeros(batch + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=device)

    def write(self, call: Call) -> None:
        """Fill the buffers with a call."""
        self.q.view(torch.uint8).zero_()
        self.q.view(torch.uint8)[: call.total_q] = call.q.view(torch.uint8).to(self.q.device)
        self.pages[: call.pages.shape[0]] = call.pages.to(self.pages.device)
        width = min(COLUMNS, call.block_table.shape[1])
        self.block_table[:, :width] = call.block_table[:, :width].to(self.q.device)
        self.cu_seqlens_q.copy_(call.cu_seqlens_q)
        self.seq_lens.copy_(call.seq_lens)

    def capture(
        self, backend: TritonBackend, topk: int = 16, order: Order = "score", local_blocks: int = 0
    ) -> DecodeGraph:
        """Capture a step on the buffers."""
        from kernel.backends.triton.decode_graph import DecodeGraph

        return DecodeGraph(
            backend,
            self.q,
            self.pages,
            self.block_table,
            self.cu_seqlens_q,
            self.seq_lens,
            max_queries=2,
            topk=topk,
            order=order,
            local_blocks=local_blocks,
        )


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("order", ["score", "block"])
def test_replays_follow_changed_lengths(gpu_backend: TritonBackend, heads: int, order: Order) -> None:
    """Captured on the first step, replayed on all: ids are those of the same call without a graph."""
    calls = [random_call(lengths, heads, seed=70 + i) for i, lengths in enumerate(STEPS)]
    buffers = Buffers(gpu_backend.device, heads, max(call.pages.shape[0] for call in calls))
    buffers.write(calls[0])
    graph = buffers.capture(gpu_backend, order=order)
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
    buffers = Buffers(gpu_backend.device, 2, call.pages.shape[0])
    buffers.write(call)
    graph = buffers.capture(gpu_backend)
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
    buffers = Buffers(gpu_backend.device, 1, max(call.pages.shape[0] for call in calls), batch=3)
    buffers.write(calls[0])
    graph = buffers.capture(gpu_backend)
    buffers.write(calls[1])
    ids = graph.replay().cpu()
    assert bool((ids[0, 3] == -1).all())
    expected = selection_of(gpu_backend, calls[1], 16)
    assert_same_bits(ids[:, [0, 4]].contiguous(), expected[:, [0, 4]].contiguous())


def test_steps_run_in_a_graph_of_the_callers(gpu_backend: TritonBackend) -> None:
    """Two steps captured together, as a model's layers are, replayed on other lengths."""
    calls = [random_call(STEPS[i], 2, seed=83 + i) for i in range(4)]
    layers = [Buffers(gpu_backend.device, 2, max(call.pages.shape[0] for call in calls)) for _ in range(2)]
    for buffers, call in zip(layers, calls[:2]):
        buffers.write(call)
    steps = [buffers.capture(gpu_backend) for buffers in layers]
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

    buffers = Buffers(gpu_backend.device, 4, 4)
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
