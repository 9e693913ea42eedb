"""IndexScorer against the oracle behind the same calls, against sums by hand, and on its callers' terms."""

from __future__ import annotations

import dataclasses
import math
import threading
from typing import Any

import numpy as np
import pytest
import torch

from indexer import BackendUnavailableError, IndexerConfig, IndexScorer, InvalidArgumentError
from indexer.pipeline import StageTimes
from kernel.backends.base import Order
from kernel.backends.cpu import CpuBackend
from kernel.contract import PAGE_BYTES
from kernel.step import Plan, Step
from tests.support.calls import random_call
from tests.support.compare import assert_same_bits
from tests.support.scorer_state import LENGTHS, QUERY_LENS, all_queries, exact, filled, new_scorer


@pytest.mark.parametrize("order", ["score", "block"])
@pytest.mark.parametrize(("heads", "init", "local"), [(1, 0, 0), (2, 1, 1), (4, 2, 0), (4, 0, 0)])
def test_scores_and_selection_are_the_oracle_s(heads: int, init: int, local: int, order: Order) -> None:
    results = []
    for backend in ("cpu", "reference"):
        scorer = new_scorer(backend, heads)
        seqs = filled(scorer)
        assert scorer.block_table(seqs[0]).tolist() != list(range(6)), "the pages should be permuted"
        q = all_queries(heads)
        result = scorer.score(q, seqs, QUERY_LENS, init_blocks=init, local_blocks=local, order=order)
        alone = scorer.score(
            q, seqs, QUERY_LENS, init_blocks=init, local_blocks=local, order=order, return_scores=False
        )
        assert alone.scores is None
        assert_same_bits(alone.block_ids, result.block_ids)
        assert_same_bits(alone.num_blocks, result.num_blocks)
        results.append((scorer, result))
    (scorer, result), (oracle_scorer, oracle) = results
    assert_same_bits(scorer.pages, oracle_scorer.pages)
    assert result.scores is not None
    assert oracle.scores is not None
    assert_same_bits(result.scores, oracle.scores)
    assert_same_bits(result.block_ids, oracle.block_ids)
    assert_same_bits(result.num_blocks, oracle.num_blocks)
    assert (result.backend, result.precision) == ("cpu", "exact")
    assert (oracle.backend, oracle.precision) == ("reference", "exact")


def test_a_hand_made_selection() -> None:
    scorer = new_scorer()
    seq = scorer.add_sequence()
    keys = torch.zeros(400, 128)
    keys[10, 0], keys[130, 0], keys[300, 0], keys[399, 0] = 2.0, 6.0, 4.0, 6.0
    scorer.append_keys(seq, keys)
    q = torch.zeros(2, 4, 128)
    q[:, :, 0] = torch.tensor([1.0, 2.0, -1.0, 0.0])
    result = scorer.score(q, [seq])
    assert result.scores is not None
    assert result.num_blocks.tolist() == [4, 4]
    assert result.scores[:, 0].tolist() == [[2, 6, 4, 0], [4, 12, 8, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert result.scores[:, 1].tolist() == [[2, 6, 4, 6], [4, 12, 8, 12], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert result.block_ids[:, 0].tolist() == [[1, 2, 0, 3, -1], [1, 2, 0, 3, -1], *[[0, 1, 2, 3, -1]] * 2]
    assert result.block_ids[:, 1].tolist() == [[1, 3, 2, 0, -1], [1, 3, 2, 0, -1], *[[0, 1, 2, 3, -1]] * 2]


def test_configured_defaults_and_overrides_of_a_call() -> None:
    scorer = IndexScorer(
        IndexerConfig(1, 8, topk_blocks=3, init_blocks=1, local_blocks=1, order="block", backend="cpu")
    )
    seq = scorer.add_sequence()
    scorer.append_keys(seq, exact(torch.Generator().manual_seed(0), 640, 128))
    q = exact(torch.Generator().manual_seed(1), 1, 1, 128)
    configured = scorer.score(q, [seq])
    assert configured.scores is not None
    assert configured.scores[0, 0, 0] == torch.tensor(1e30)
    assert configured.scores[0, 0, 4] == torch.tensor(1e29)
    ids = configured.block_ids[0, 0].tolist()
    assert ids == sorted(ids)
    assert {0, 4} < set(ids)
    changed = scorer.score(q, [seq], topk=7, init_blocks=0, local_blocks=0, order="score")
    assert changed.scores is not None
    assert changed.scores.abs().max() < 1e5
    assert changed.block_ids.shape == (1, 1, 7)
    best = changed.scores[0, 0][changed.block_ids[0, 0, :5].long()]
    assert best.tolist() == sorted(best.tolist(), reverse=True)
    everything = scorer.score(q, [seq], init_blocks=10**30, local_blocks=10**30)
    assert everything.scores is not None
    assert bool((everything.scores == torch.tensor(1e29)).all()), "a block that is both gets the local value"


def test_how_rows_are_told_apart() -> None:
    scorer = new_scorer()
    a, b = filled(scorer)[:2]
    q = all_queries(4)[:4]
    assert_same_bits(scorer.score(q, [a]).block_ids, scorer.score(q, [a], [4]).block_ids)
    each = scorer.score(q[:2], [a, b])
    assert_same_bits(each.block_ids, scorer.score(q[:2], [a, b], [1, 1]).block_ids)
    assert_same_bits(each.block_ids[:, 1:], scorer.score(q[1:2], [b]).block_ids)
    twice = scorer.score(q, [a, b, a, a], (2, 0, 1, 1))
    assert_same_bits(twice.block_ids[:, :2], scorer.score(q[:2], [a]).block_ids)
    assert_same_bits(twice.block_ids[:, 3:], scorer.score(q[3:], [a]).block_ids)


@pytest.mark.parametrize("return_scores", [True, False])
def test_calls_without_rows(return_scores: bool) -> None:
    scorer = new_scorer()
    empty = scorer.add_sequence()
    batches: list[tuple[list[int], list[int] | None]] = [
        ([], None),
        ([], []),
        ([empty], None),
        ([empty, empty], [0, 0]),
    ]
    for sequences, lens in batches:
        result = scorer.score(torch.zeros(0, 4, 128), sequences, lens, return_scores=return_scores)
        assert result.block_ids.shape == (4, 0, 5)
        assert result.num_blocks.shape == (0,)
        if return_scores:
            assert result.scores is not None
            assert result.scores.shape == (4, 0, 0)


@pytest.mark.parametrize("return_scores", [True, False])
@pytest.mark.parametrize("total_q", [1, 2, 4, 5])
def test_as_many_queries_as_heads_is_no_special_case(total_q: int, return_scores: bool) -> None:
    scorer = new_scorer(heads=4)
    seq = filled(scorer)[1]
    q = all_queries(4)[:total_q]
    together = scorer.score(q, [seq], return_scores=return_scores).block_ids
    for head in range(4):
        lone_head = torch.zeros_like(q)
        lone_head[:, 0] = q[:, head]
        assert_same_bits(together[head], scorer.score(lone_head, [seq]).block_ids[0])
    assert len({tuple(ids) for ids in together.flatten(0, 1).tolist()}) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_query_dtypes(dtype: torch.dtype) -> None:
    scorer = new_scorer()
    seq = filled(scorer)[0]
    q = all_queries(4)[:3]
    expected, actual = scorer.score(q, [seq]), scorer.score(q.to(dtype), [seq], timings=True)
    assert expected.scores is not None
    assert actual.scores is not None
    assert_same_bits(actual.scores, expected.scores)
    assert ("quantize_query" in actual.timings) == (dtype != torch.float8_e4m3fn)


def test_queries_saturate() -> None:
    scorer = new_scorer()
    seq = scorer.add_sequence()
    scorer.append_keys(seq, torch.eye(128)[:1] * 6)
    q = torch.zeros(1, 4, 128)
    q[0, :, 0] = torch.tensor([1e30, 465.0, 448.0, -1e30])
    result = scorer.score(q, [seq])
    assert result.scores is not None
    assert result.scores.flatten().tolist() == [2688.0, 2688.0, 2688.0, -2688.0]


def test_strided_queries_that_require_a_gradient() -> None:
    scorer = new_scorer()
    seq = filled(scorer)[0]
    q = all_queries(4)[:3].float()
    strided = q.transpose(0, 1).contiguous().requires_grad_().transpose(0, 1)
    result = scorer.score(strided, [seq])
    assert result.scores is not None
    assert not result.scores.requires_grad
    assert_same_bits(result.block_ids, scorer.score(q, [seq]).block_ids)


def test_score_paged_equals_score_and_touches_nothing() -> None:
    scorer = new_scorer()
    seqs = filled(scorer)
    q = all_queries(4)
    expected = scorer.score(q, seqs, QUERY_LENS)
    assert expected.scores is not None

    memory = torch.full((64, PAGE_BYTES + 48), 0xFF, dtype=torch.uint8)
    memory[:, :PAGE_BYTES] = scorer.pages
    table = torch.full((len(seqs), 25), 2**31 - 1, dtype=torch.int32)
    for row, seq in zip(table, seqs):
        row[: len(scorer.block_table(seq))] = scorer.block_table(seq)
    cu_seqlens_q = torch.tensor([0, *QUERY_LENS]).cumsum(0).int()
    seq_lens = torch.tensor([tokens for tokens, _ in LENGTHS], dtype=torch.int32)
    inputs = (q, memory[:, :PAGE_BYTES].view(64, 128, 72), table, cu_seqlens_q, seq_lens)
    copies = [tensor.clone() for tensor in (*inputs, memory)]

    stranger = new_scorer(num_pages=0)
    wide = torch.full((4, q.shape[0] + 2, 40), math.nan)
    buffer = wide[:, 1:-1, 3:33]
    result = stranger.score_paged(*inputs, scores=buffer)
    assert result.scores is not None
    assert result.scores.data_ptr() == buffer.data_ptr()
    assert_same_bits(buffer[..., :19].contiguous(), expected.scores)
    assert bool((buffer[..., 19:] == -math.inf).all())
    assert int(wide.isnan().sum()) == wide.numel() - buffer.numel(), "cells around the buffer were written"
    assert_same_bits(result.block_ids, expected.block_ids)
    assert_same_bits(stranger.score_paged(*inputs, return_scores=False).block_ids, expected.block_ids)
    for tensor, copy in zip((*inputs, memory), copies):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("block", [0, 500, 1022])
def test_a_needle_in_a_long_context_is_found(block: int) -> None:
    generator = torch.Generator().manual_seed(block)
    scorer = IndexScorer(IndexerConfig(4, 1024, topk_blocks=4, backend="cpu"))
    seq = scorer.add_sequence()
    keys = torch.randn(1024 * 128, 128, generator=generator).bfloat16()
    q = torch.randn(3, 4, 128, generator=generator).bfloat16()
    for head in range(4):
        keys[(block - head) % 1023 * 128 + 77] = q[1, head] * 3
    scorer.append_keys(seq, keys)
    result = scorer.score(q, [seq])
    assert result.scores is not None
    for head in range(4):
        needle = (block - head) % 1023
        assert result.block_ids[head, 1, :2].tolist() == [1023, needle], "the local block, then the needle"
        assert int(result.scores[head, 1, :1023].argmax()) == needle
        assert needle not in result.block_ids[head, 1, 2:].tolist()


# What a scorer's results carry, which operation makes them, and what happens when there is no room.


def test_a_result_names_its_stages_and_cannot_be_changed() -> None:
    scorer = new_scorer()
    seq = filled(scorer)[0]
    q = all_queries(4)[:3]
    with_scores = scorer.score(q, [seq], timings=True)
    without = scorer.score(q, [seq], return_scores=False, timings=True)
    assert list(with_scores.timings) == ["check", "quantize_query", "score", "topk"]
    assert list(without.timings) == ["check", "quantize_query", "select"]
    assert all(0 < seconds < 60 for seconds in dict(with_scores.timings).values())
    assert dict(scorer.score(q, [seq]).timings) == {}
    with pytest.raises(dataclasses.FrozenInstanceError):
        with_scores.backend = "other"  # type: ignore[misc]


def test_results_do_not_change_with_the_next_call() -> None:
    scorer = new_scorer()
    seq = filled(scorer)[0]
    first = scorer.score(all_queries(4)[:3], [seq])
    assert first.scores is not None
    ids, scores = first.block_ids.clone(), first.scores.clone()
    second = scorer.score(-all_queries(4)[:3], [seq])
    assert_same_bits(first.block_ids, ids)
    assert_same_bits(first.scores, scores)
    second.num_blocks.zero_()  # what a caller does to a result is its own affair
    again = scorer.score(all_queries(4)[:3], [seq])
    assert_same_bits(again.block_ids, ids)
    assert_same_bits(again.num_blocks, first.num_blocks)


def test_calls_of_the_same_lengths_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of a step; with other pages, tables and options each gets its own result."""
    call, other = (random_call([(700, 3), (300, 40)], 2, seed=seed) for seed in (1, 2))
    scorer = IndexScorer(IndexerConfig(2, 0, topk_blocks=3))
    planned: list[Step] = []
    plan = scorer._backend.plan

    def counted(step: Step) -> Plan:
        planned.append(step)
        return plan(step)

    monkeypatch.setattr(scorer._backend, "plan", counted)
    for local_blocks in (0, 2):
        for one in (call, other, call):
            tensors = (one.q, one.pages, one.block_table, one.cu_seqlens_q, one.seq_lens)
            result = scorer.score_paged(*tensors, local_blocks=local_blocks)
            alone = IndexScorer(scorer.config).score_paged(*tensors, local_blocks=local_blocks)
            assert_same_bits(result.block_ids, alone.block_ids)
            assert result.scores is not None
            assert alone.scores is not None
            assert_same_bits(result.scores, alone.scores)
    assert len(planned) == 2
    assert len(scorer._plans) == 2
    assert all(one.tensors[0] is not step.block_table for one, step in zip(scorer._plans.values(), planned))


def test_threads_take_turns() -> None:
    scorer = new_scorer(num_pages=400)
    made: list[tuple[int, int]] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(5):
            seq = scorer.add_sequence()
            for _ in range(5):
                scorer.append_keys(seq, exact(generator, 70, 128))
            scorer.free_sequence(scorer.fork_sequence(seq))
            made.append((seq, seed))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 20
    assert scorer.num_free_pages == 400 - 20 * 3
    tables = [page for seq, _ in made for page in scorer.block_table(seq).tolist()]
    assert len(set(tables)) == len(tables)


@pytest.mark.parametrize("known_beforehand", [True, False])
def test_scores_that_do_not_fit_are_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, known_beforehand: bool
) -> None:
    scorer = new_scorer()
    seq = filled(scorer)[0]
    q = all_queries(4)[:3]
    ids = scorer.score(q, [seq]).block_ids

    def no_memory(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    if known_beforehand:
        monkeypatch.setattr("indexer.pipeline.memory_bytes", lambda _: 4 * 4 * 3 * 6 - 1)
    else:
        empty, whole = torch.empty, (4, 3, 6)
        monkeypatch.setattr(
            "indexer.pipeline.torch.empty",
            lambda shape, **options: (no_memory if shape == whole else empty)(shape, **options),
        )
    message = (
        r"return_scores = True: scores \[4, 3, 6\] take 288 bytes, which cpu does not have; pass return_sc"
    )
    with pytest.raises(InvalidArgumentError, match=message):
        scorer.score(q, [seq])
    monkeypatch.undo()
    monkeypatch.setattr("indexer.pipeline.memory_bytes", lambda _: 4 * 4 * 3 * 6)
    assert_same_bits(scorer.score(q, [seq]).block_ids, ids)
    assert_same_bits(scorer.score(q, [seq], return_scores=False).block_ids, ids)


def test_a_backend_is_given_all_requests_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = new_scorer()
    seqs = filled(scorer)
    ran: list[str] = []
    planned: list[list[int]] = []

    def spy(name: str) -> None:
        real = getattr(CpuBackend, name)

        def call(self: CpuBackend, *arguments: Any) -> object:
            ran.append(name)
            if name == "plan":
                planned.append(arguments[0].lengths.query_lens.tolist())
            return real(self, *arguments)

        monkeypatch.setattr(CpuBackend, name, call)

    for name in ("plan", "score_plan", "select_plan", "topk"):
        spy(name)
    scorer.score(all_queries(4), seqs, QUERY_LENS)
    assert ran == ["plan", "score_plan", "topk"]
    scorer.score(all_queries(4), seqs, QUERY_LENS, return_scores=False)
    assert ran[3:] == ["select_plan"]  # by the same plan
    assert planned == [QUERY_LENS]


def test_results_are_compared_by_identity() -> None:
    """Tensors have no equality that is true or false."""
    scorer = new_scorer()
    first, second = (scorer.score(all_queries(4)[:0], []) for _ in range(2))
    assert first == first
    assert first != second
    assert len({first, second}) == 2


@pytest.mark.parametrize("return_scores", [True, False])
def test_numpy_out_of_memory_is_the_error_that_torch_s_is(
    monkeypatch: pytest.MonkeyPatch, return_scores: bool
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("injected")

    scorer = new_scorer("reference")
    seqs = filled(scorer)
    monkeypatch.setattr("kernel.backends.reference.backend.score_batch", fail)
    with pytest.raises(InvalidArgumentError, match=r"^q.shape\[0\] = 206: the call needs more memory"):
        scorer.score(all_queries(4), seqs, QUERY_LENS, return_scores=return_scores)


# Stage times: by the clock on a CPU, by events that are read late on a GPU.


def test_parts_of_a_stage_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 3.0, 10.0, 11.0, 20.0, 24.0])
    monkeypatch.setattr("indexer.pipeline.time.perf_counter", lambda: next(clock))
    times = StageTimes(torch.device("cpu"))
    for name in ("check", "score", "check"):
        with times.stage(name):
            pass
    assert dict(times) == {"check": 6.0, "score": 1.0}
    assert (len(times), repr(times)) == (2, "{'check': 6.0, 'score': 1.0}")
    with pytest.raises(KeyError):
        times["topk"]


def test_a_gpu_s_events_are_read_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        made = 0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.name = Event.made
            Event.made += 1

        def record(self, stream: str) -> None:
            log.append(f"record {self.name} on {stream}")

        def synchronize(self) -> None:
            log.append(f"wait {self.name}")

        def elapsed_time(self, end: Event) -> float:
            return 1000.0 * (end.name - self.name) + self.name

    monkeypatch.setattr("indexer.pipeline.torch.cuda.Event", Event)
    monkeypatch.setattr("indexer.pipeline.torch.cuda.current_stream", lambda device: f"stream of {device}")
    times = StageTimes(torch.device("cuda:1"))
    for name in ("score", "topk", "score"):
        with times.stage(name):
            log.append(name)
    assert list(times) == ["score", "topk"]
    assert len(times) == 2
    assert "wait" not in " ".join(log)
    assert log[:3] == ["record 0 on stream of cuda:1", "score", "record 1 on stream of cuda:1"]
    assert dict(times) == {"score": pytest.approx(2.004), "topk": pytest.approx(1.002)}
    assert [entry for entry in log if "wait" in entry] == ["wait 1", "wait 5", "wait 3"]
    assert times["score"] == pytest.approx(2.004)


# A configuration outside the limits is refused by its field's name, and so is a scorer that cannot be.

CONFIGS: list[tuple[str, Any, str]] = [
    *(("num_index_heads", value, "must be one of (1, 2, 4)") for value in (0, 3, 8, -1)),
    *(("num_index_heads", value, "must be an int") for value in ("4", True, 4.0, None)),
    *(("num_pages", value, "must be an int, 0 or more") for value in (-1, True, 1.5, "8", None)),
    *(("topk_blocks", value, "must be 1 to 64") for value in (0, 65, -1)),
    ("topk_blocks", 16.0, "must be an int"),
    *(("init_blocks", value, "must be 0 or more") for value in (-1, -(2**40))),
    ("init_blocks", None, "must be an int"),
    ("local_blocks", -1, "must be 0 or more"),
    ("local_blocks", False, "must be an int"),
    ("order", "token", "must be 'score' or 'block'"),
    ("backend", "cuda", "no such backend; use one of auto, "),
    ("backend", None, "no such backend"),
    *(("device", value, "must be a torch device") for value in (0, "tpu:0", "", "cpu:")),
    ("precision", "exactly", "must be 'exact' or 'fast'"),
]


@pytest.mark.parametrize(("field", "value", "limit"), CONFIGS)
def test_a_config_is_checked_when_it_is_made(field: str, value: Any, limit: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        IndexerConfig(**{"num_index_heads": 4, "num_pages": 8, field: value})
    assert caught.value.argument == field
    assert limit in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        ({"num_pages": 2**40}, "num_pages"),
        ({"num_pages": 2**70}, "num_pages"),
        ({"device": "meta"}, "device"),
    ],
)
def test_a_scorer_that_cannot_be_is_refused_by_name(changed: dict[str, Any], argument: str) -> None:
    config = IndexerConfig(**{"num_index_heads": 4, "num_pages": 8, "backend": "cpu", **changed})
    with pytest.raises((InvalidArgumentError, BackendUnavailableError)) as caught:
        IndexScorer(config)
    assert str(caught.value).startswith(f"{argument} = ")


def test_a_scorer_needs_a_config() -> None:
    with pytest.raises(InvalidArgumentError, match="config = dict: must be an IndexerConfig"):
        IndexScorer({"num_index_heads": 4})  # type: ignore[arg-type]


def test_integers_of_numpy_are_kept_as_python_s() -> None:
    integers: list[Any] = [np.int64(4), np.int32(8), np.uint8(16), np.int8(0), np.int16(1)]
    config = IndexerConfig(*integers)
    assert config == IndexerConfig(4, 8, 16, 0, 1)
    fields = (config.num_index_heads, config.num_pages, config.topk_blocks, config.init_blocks)
    assert [type(value) for value in fields] == [int] * 4


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0), None])
def test_a_device_may_be_named_in_any_way_of_torch_s(device: str | torch.device | None, backend: str) -> None:
    config = IndexerConfig(4, 8, backend=backend, device=device)
    assert config.device == (None if device is None else "cpu")
    assert IndexScorer(config).device == torch.device("cpu")
