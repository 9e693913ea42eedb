"""Plans in CUDA graphs: runs wait for nothing, and replays follow the buffers, whatever they hold."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from indexer import IndexerConfig, IndexScorer
from indexer.plan import IndexPlan
from kernel.backends.base import SCORE_TOLERANCE, Order
from kernel.batch import Request
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


def scorer_of(backend: TritonBackend, heads: int) -> IndexScorer:
    """A scorer on the backend's device, without forced blocks."""
    return IndexScorer(
        IndexerConfig(
            heads, 0, local_blocks=0, backend="triton", device=backend.device, precision=backend.precision
        )
    )


def planned(
    backend: TritonBackend, buffers: StepBuffers, order: Order = "score", max_query_len: int = 2
) -> IndexPlan:
    """A plan of what the buffers hold when it runs."""
    return scorer_of(backend, buffers.q.shape[1]).plan(
        buffers.block_table,
        cu_seqlens_q=buffers.cu_seqlens_q,
        seq_lens=buffers.seq_lens,
        max_query_len=max_query_len,
        max_seq_len=COLUMNS * 128,
        total_q=buffers.q.shape[0],
        order=order,
    )


class Captured:
    """Some runs in one graph, on a GPU that need not be the current one."""

    def __init__(self, *runs: Callable[[], torch.Tensor], device: torch.device | None = None) -> None:
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for run in runs:
                run()  # compiles what is to be captured
        torch.cuda.current_stream(device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.graph(self._graph, stream=side):
            self.results = [run() for run in runs]

    def replay(self) -> list[torch.Tensor]:
        """The results on the host."""
        self._graph.replay()
        return [result.cpu() for result in self.results]


@contextmanager
def no_waits() -> Iterator[None]:
    """Raises where a call waits for the device."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, that this is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("order", ["score", "block"])
def test_replays_follow_changed_lengths(gpu_backend: TritonBackend, heads: int, order: Order) -> None:
    """Captured on the first step, replayed on all: ids and scores are those of the call without a graph."""
    calls = [random_call(lengths, heads, seed=70 + i) for i, lengths in enumerate(STEPS)]
    buffers = StepBuffers(calls, gpu_backend.device)
    buffers.write(calls[0])
    plan = planned(gpu_backend, buffers, order)
    graph = Captured(
        lambda: plan.select(buffers.q, buffers.pages), lambda: plan.score(buffers.q, buffers.pages)
    )
    for call in [*calls, calls[0]]:
        buffers.write(call)
        ids, scores = graph.replay()
        assert_same_bits(ids[:, : call.total_q].contiguous(), selection_of(gpu_backend, call, 16, order))
        assert bool((ids[:, call.total_q :] == -1).all())
        assert_same_bits(scores[:, : call.total_q].contiguous(), scores_of(gpu_backend, call, COLUMNS))
        assert bool((scores[:, call.total_q :] == -torch.inf).all())
        if gpu_backend.precision == "exact":
            expected = selected(oracle_scores(call), call.batch().num_blocks_per_query(), 16)
            expected = expected if order == "score" else in_block_order(expected)
            assert_same_bits(ids[:, : call.total_q].contiguous(), expected)


def test_layers_in_one_graph(gpu_backend: TritonBackend) -> None:
    """Keys inserted and queries selected, for two layers with pages of their own, in one graph."""
    calls = [random_call(STEPS[i], 2, seed=83 + i) for i in range(4)]
    buffers = [StepBuffers(calls, gpu_backend.device) for _ in range(2)]
    scorer = scorer_of(gpu_backend, 2)
    keys = torch.randn(2, 3, 128, device=gpu_backend.device)
    slots = torch.tensor([5, -1, 130], device=gpu_backend.device)
    for layer, call in zip(buffers, calls):
        layer.write(call)
    plans = [planned(gpu_backend, layer) for layer in buffers]

    def run(number: int) -> torch.Tensor:
        scorer.insert(keys[number], buffers[number].pages, slots)
        return plans[number].select(buffers[number].q, buffers[number].pages)

    graph = Captured(lambda: run(0), lambda: run(1))
    for layer, call in zip(buffers, calls[2:]):
        layer.write(call)
    keys.mul_(-2)
    slots.copy_(torch.tensor([300, 7, -5]))
    found = graph.replay()
    for number, call in enumerate(calls[2:]):
        pages = call.pages.to(gpu_backend.device).contiguous()
        gpu_backend.insert(keys[number], pages, slots)
        expected = selection_of(gpu_backend, replace(call, pages=pages.cpu()), 16)
        assert_same_bits(found[number][:, : call.total_q].contiguous(), expected)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_kernels_launched_early_see_what_was_written_just_before(
    gpu_backend: TritonBackend, graph: bool
) -> None:
    """Insert and decode are launched while the kernel before still runs. Here kernels before them write keys,
    slots, queries, lengths and the table, and zero them right after."""
    device, requests, blocks, steps = gpu_backend.device, 8, 24, 12
    generator = torch.Generator(device).manual_seed(91)
    keys = torch.randn(steps, requests, 128, device=device, generator=generator).bfloat16()
    queries = torch.randn(steps, requests, 2, 128, device=device, generator=generator)
    queries = queries.to(torch.float8_e4m3fn).view(torch.uint8)
    tables = torch.stack([torch.randperm(requests * blocks, device=device) for _ in range(steps)])
    tables = tables.int().view(steps, requests, blocks)
    lens = torch.randint(blocks // 2 * 128, blocks * 128, (steps, requests), device=device).int()
    rows = torch.arange(requests, device=device)
    slots = tables[:, rows, 3].long() * 128 + 77
    old = torch.randn(requests * blocks * 128, 128, device=device, generator=generator).bfloat16()
    scorer = scorer_of(gpu_backend, 2)

    def run_all(wait: bool) -> list[torch.Tensor]:
        pages = torch.zeros(requests * blocks, 9216, dtype=torch.uint8, device=device)
        scorer.insert(old, pages, torch.arange(old.shape[0], device=device))
        now = [torch.zeros_like(each[0]) for each in (keys, queries, tables, lens, slots)]
        slow = torch.empty(1 << 26, dtype=torch.uint8, device=device)
        offsets = torch.arange(requests + 1, dtype=torch.int32, device=device)
        plan = scorer.plan(
            now[2], cu_seqlens_q=offsets, seq_lens=now[3], max_query_len=1, max_seq_len=blocks * 128
        )

        def step(number: int) -> torch.Tensor:
            slow.fill_(number)
            torch._foreach_copy_(now, [each[number] for each in (keys, queries, tables, lens, slots)])
            for call in (
                lambda: scorer.insert(now[0], pages, now[4]),
                lambda: plan.select(now[1].view(torch.float8_e4m3fn), pages),
            ):
                if wait:
                    torch.cuda.synchronize(device)
                found = call()
            for each in now:
                each.zero_()
            assert found is not None
            return found

        runs = [partial(step, number) for number in range(steps)]
        if not graph or wait:
            return [run().cpu() for run in runs] if wait else [each.cpu() for each in [run() for run in runs]]
        captured = Captured(*runs)
        scorer.insert(old, pages, torch.arange(old.shape[0], device=device))
        return captured.replay()

    for found, expected in zip(run_all(False), run_all(True)):
        assert_same_bits(found, expected)


def test_illegal_ids_and_lengths_stay_inside(gpu_backend: TritonBackend) -> None:
    """A replay cannot refuse: page ids outside the cache, lengths past the table and offsets that are no
    prefix sums read and write nothing out of bounds."""
    call = random_call(STEPS[0], 2, seed=79)
    buffers = StepBuffers([call], gpu_backend.device)
    buffers.write(call)
    plan = planned(gpu_backend, buffers)
    rows = buffers.q.shape[0]
    guarded = torch.full((2, rows + 2, 16), -7, dtype=torch.int32, device=gpu_backend.device)
    out = guarded[:, 1:-1]
    graph = Captured(
        lambda: plan.select(buffers.q, buffers.pages, out=out), lambda: plan.score(buffers.q, buffers.pages)
    )
    expected = [result.clone() for result in graph.replay()]
    generator = torch.Generator().manual_seed(0)
    extremes = torch.tensor([-(2**31), -129, -1, 0, 1, 5, 128, 1 << 20, 2**31 - 1], dtype=torch.int32)

    def scramble(buffer: torch.Tensor) -> None:
        chosen = torch.randint(0, len(extremes), tuple(buffer.shape), generator=generator)
        buffer.copy_(extremes[chosen])

    for _ in range(20):
        for buffer in (buffers.block_table, buffers.seq_lens, buffers.cu_seqlens_q):
            scramble(buffer)
        ids, _ = graph.replay()
        assert int(ids.max()) < COLUMNS
        assert int(ids.min()) >= -1
        assert bool((guarded[:, [0, -1]] == -7).all())
    buffers.write(call)
    for found, before in zip(graph.replay(), expected):
        assert_same_bits(found, before)


def test_queries_past_the_most_get_no_ids(gpu_backend: TritonBackend) -> None:
    """Planned for two queries a request, run with three: the third has no ids, others keep theirs."""
    calls = [random_call([(700, 1), (900, queries), (130, 1)], 1, seed=82) for queries in (2, 3)]
    buffers = StepBuffers(calls, gpu_backend.device)
    buffers.write(calls[0])
    plan = planned(gpu_backend, buffers)
    graph = Captured(lambda: plan.select(buffers.q, buffers.pages))
    buffers.write(calls[1])
    (ids,) = graph.replay()
    assert bool((ids[0, 3] == -1).all())
    expected = selection_of(gpu_backend, calls[1], 16)
    assert_same_bits(ids[:, [0, 4]].contiguous(), expected[:, [0, 4]].contiguous())


def test_a_replay_equals_a_call_of_a_real_size(gpu_backend: TritonBackend) -> None:
    """32 requests of about 20,000 keys: the split over programs differs from the call's, the ids do not."""
    call = random_call([(20_000 + 37 * i, 1) for i in range(32)], 1, seed=81, values="inexact")
    tensors = [call.q, call.pages, call.block_table, call.cu_seqlens_q, call.seq_lens]
    q, pages, table, offsets, seq_lens = (tensor.to(gpu_backend.device) for tensor in tensors)
    plan = scorer_of(gpu_backend, 1).plan(
        table.contiguous(), cu_seqlens_q=offsets, seq_lens=seq_lens, max_query_len=1, max_seq_len=21_248
    )
    graph = Captured(lambda: plan.select(q, pages))
    assert_same_bits(graph.replay()[0], selection_of(gpu_backend, call, 16))
    half = replace(call, seq_lens=call.seq_lens // 2, cu_seqlens_q=cumulative([1] * 32))
    seq_lens.copy_(half.seq_lens)
    assert_same_bits(graph.replay()[0], selection_of(gpu_backend, half, 16))


def test_runs_wait_for_nothing(gpu_backend: TritonBackend) -> None:
    """Insert, select, score and top-k of prefill and decode requests, and a plan, under torch's own check."""
    call = random_call(RAGGED, 4, seed=84)
    tensors = [call.q, call.pages, call.block_table]
    q, pages, table = (tensor.to(gpu_backend.device).contiguous() for tensor in tensors)
    query_lens, seq_lens = call.cu_seqlens_q.diff().tolist(), call.seq_lens.tolist()
    scorer = scorer_of(gpu_backend, 4)
    keys, slots = torch.randn(2, 128, device=q.device), torch.tensor([3, 200], device=q.device)
    num_blocks = call.batch().num_blocks_per_query().to(q.device)

    def run() -> torch.Tensor:
        plan = scorer.plan(table, query_lens=query_lens, seq_lens=seq_lens)
        scores = plan.score(q, pages)
        torch.ops.nvfp4_indexer.topk(scores, num_blocks, 16, False, plan.backend)
        scorer.insert(keys, pages, slots)
        return plan.select(q, pages)

    expected = run()
    with no_waits():
        found = run()
    assert_same_bits(found.cpu(), expected.cpu())


def waits_of(call: Callable[[], object]) -> list[str]:
    """What torch says of each time that a call waits for the device."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [str(warning.message) for warning in caught if "called a synchronizing" in str(warning.message)]


def test_a_paged_call_waits_once(gpu_backend: TritonBackend) -> None:
    """Checks read lengths, page ids and queries with one copy to the host."""
    call = random_call(STEPS[0], 2, seed=85)
    names = ("q", "pages", "block_table", "cu_seqlens_q", "seq_lens")
    arguments = {name: getattr(call, name).to(gpu_backend.device) for name in names}
    scorer = scorer_of(gpu_backend, 2)
    scorer.score_paged(**arguments, return_scores=False)
    waits = waits_of(lambda: scorer.score_paged(**arguments, return_scores=False))
    assert len(waits) == 1, waits


def test_calls_on_the_own_cache_wait_once(gpu_backend: TritonBackend) -> None:
    """``score`` and ``append_keys`` ask whether values are finite; nothing else waits. One page is shared and
    partial. Pages are those of a scorer on the host."""
    keys, more, q = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(86))
        for shape in ((900, 128), (6, 128), (5, 2, 128))
    )
    waits: dict[str, list[str]] = {}

    def pages_after(device: torch.device, backend: str, rounds: int) -> list[torch.Tensor]:
        own = [tensor.to(device) for tensor in (keys, more, q)]
        scorer = IndexScorer(IndexerConfig(2, 64, backend=backend, device=device))
        for _ in range(rounds):  # the first compiles and allocates
            sequences = [scorer.add_sequence() for _ in range(3)]
            scorer.append_keys(sequences, own[0], [500, 300, 100])
            sequences[0] = scorer.fork_sequence(sequences[0])
            calls: dict[str, Callable[[], object]] = {
                "append_keys": partial(scorer.append_keys, sequences, own[1], [1, 2, 3]),
                "score": partial(scorer.score, own[2], sequences, [1, 2, 2]),
                "select": partial(scorer.score, own[2], sequences, [1, 2, 2], return_scores=False),
            }
            for name, call in calls.items():
                if device.type == "cuda":
                    waits[name] = waits_of(call)
                else:
                    call()
            found = [scorer.pages[scorer.block_table(seq).to(device)].cpu() for seq in sequences]
            with no_waits():
                scorer.plan(sequences=sequences, query_lens=[1, 2, 2]).select(own[2])
                scorer.block_tables(sequences, out=torch.empty(3, 40, dtype=torch.int32, device=device))
                scorer.truncate_sequence(sequences[0], 130)
                scorer.free_sequence(sequences[1])
        return found

    found = pages_after(gpu_backend.device, "triton", 2)
    assert {name: len(messages) for name, messages in waits.items()} == dict.fromkeys(waits, 1), waits
    for own, expected in zip(found, pages_after(torch.device("cpu"), "cpu", 1)):
        assert_same_bits(own, expected)


# The same scores whichever of the two ways a call goes, and for whatever workspaces it is cut into.


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
