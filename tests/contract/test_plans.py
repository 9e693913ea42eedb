"""Plans and the operators that run them, on every backend that can run here."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FrameType

import numpy as np
import pytest
import torch

from indexer import IndexerConfig, IndexScorer
from indexer.plan import IndexPlan
from kernel.backends import registry
from kernel.backends.base import Backend, Order
from kernel.errors import InvalidArgumentError
from tests.support.calls import Call, pages_on, random_call
from tests.support.compare import (
    assert_same_bits,
    in_block_order,
    inserted,
    oracle_inserted,
    oracle_scores,
    scores_of,
    selected,
    selection_of,
)

LENGTHS = [(2700, 20), (300, 0), (1155, 3), (129, 1), (40, 40)]
"""Prefill and decode mixed, more blocks than k, a request without queries."""
SHORTER = [(523, 17), (300, 0), (643, 3), (129, 1)]
"""The same of fewer blocks."""
STEP = [(2700, 2), (300, 0), (1155, 4), (129, 1)]
"""A decode step."""
OPERATORS = torch.ops.nvfp4_indexer


def scorer_of(backend: Backend, heads: int, num_pages: int = 0) -> IndexScorer:
    """A scorer of the same backend and device."""
    config = IndexerConfig(
        heads, num_pages, topk_blocks=4, local_blocks=0, backend=backend.name, device=backend.device
    )
    return IndexScorer(config)


def on_host_lengths(backend: Backend, call: Call, topk: int = 4, order: Order = "score") -> IndexPlan:
    """A plan of the call by lengths on the host."""
    return scorer_of(backend, call.num_heads).plan(
        call.block_table.to(backend.device),
        query_lens=call.cu_seqlens_q.diff().tolist(),
        seq_lens=call.seq_lens.numpy(),
        topk=topk,
        init_blocks=call.init_blocks,
        local_blocks=call.local_blocks,
        order=order,
    )


def on_device_lengths(backend: Backend, call: Call, total_q: int, max_seq_len: int = 3072) -> IndexPlan:
    """A plan of the call by lengths on the device."""
    return scorer_of(backend, call.num_heads).plan(
        call.block_table.to(backend.device).contiguous(),
        cu_seqlens_q=call.cu_seqlens_q.to(backend.device),
        seq_lens=call.seq_lens.to(backend.device),
        total_q=total_q,
        init_blocks=call.init_blocks,
        local_blocks=call.local_blocks,
        max_query_len=4,
        max_seq_len=max_seq_len,
    )


def tensors_of(backend: Backend, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and pages on the device."""
    return call.q.to(backend.device), pages_on(call.pages, backend.device)


@pytest.mark.parametrize(("heads", "forced", "order"), [(1, (0, 0), "score"), (4, (1, 2), "block")])
def test_a_run_gives_what_a_call_gives(
    backend: Backend, heads: int, forced: tuple[int, int], order: Order
) -> None:
    call = random_call(SHORTER if backend.name == "flydsl-sim" else LENGTHS, heads, seed=20).forcing(*forced)
    q, pages = tensors_of(backend, call)
    plan = on_host_lengths(backend, call, 4, order)
    expected = selection_of(backend, call, 4, order)
    assert_same_bits(plan.select(q, pages).cpu(), expected)
    assert_same_bits(plan.select(q.view(torch.uint8), pages).cpu(), expected)
    token_major = torch.full((call.total_q, heads, 4), -9, dtype=torch.int32, device=backend.device)
    plan.select(q, pages, out=token_major.transpose(0, 1))
    assert_same_bits(token_major.transpose(0, 1).cpu().contiguous(), expected)
    if backend.name != "flydsl-sim" or heads == 1:
        assert_same_bits(plan.score(q, pages).cpu(), scores_of(backend, call))


def test_runs_of_a_plan_take_tensors_of_any_place_and_strides(backend: Backend) -> None:
    """What a backend keeps of a run is not the addresses of its tensors."""
    first, other = (random_call([(300, 20), (700, 2)], 2, seed=seed) for seed in (21, 22))
    layers = (first, replace(other, block_table=first.block_table))
    plan = on_host_lengths(backend, first)
    short = replace(random_call([(300, 2), (700, 2)], 2), block_table=first.block_table)
    step, step_plan = on_device_lengths(backend, short, 4, 700), on_host_lengths(backend, short)
    odd = torch.empty(1 + 2 * 22 * 4, dtype=torch.int32, device=backend.device)[1:].view(2, 22, 4)
    for call in layers:
        q, pages = tensors_of(backend, call)
        wide = torch.zeros(pages.shape[0], pages.shape[1] + 1024, dtype=torch.uint8, device=backend.device)
        wide[:, : pages.shape[1]] = pages
        expected = selection_of(backend, call, 4)
        strided = wide[:, : pages.shape[1]]
        for given in (strided,) if backend.name == "flydsl-sim" else (pages, strided, pages.clone()):
            assert_same_bits(plan.select(q.clone(), given, out=odd).cpu(), expected)
            four = q[:4].clone()
            assert_same_bits(step.select(four, given).cpu(), step_plan.select(four, given).cpu())


@pytest.mark.parametrize("heads", [1, 4])
def test_lengths_on_the_device_give_the_same(backend: Backend, heads: int) -> None:
    """Rows past the last request get -1 and -inf."""
    call = random_call(STEP, heads, seed=21).forcing(1, 1)
    q, pages = tensors_of(backend, call)
    padded = torch.zeros(call.total_q + 2, heads, 128, dtype=torch.uint8, device=backend.device)
    padded[: call.total_q] = q.view(torch.uint8)
    plan = on_device_lengths(backend, call, padded.shape[0])
    expected = torch.full((heads, padded.shape[0], 4), -1, dtype=torch.int32)
    expected[:, : call.total_q] = selection_of(backend, call, 4)
    assert_same_bits(plan.select(padded, pages).cpu(), expected)
    if backend.name != "flydsl-sim" or heads == 1:
        scores = torch.full((heads, padded.shape[0], plan.num_score_blocks), -torch.inf)
        scores[:, : call.total_q] = scores_of(backend, call, plan.num_score_blocks)
        assert_same_bits(plan.score(padded, pages).cpu(), scores)


def test_values_of_the_device_may_change_until_a_run(backend: Backend) -> None:
    """Lengths, offsets, page ids and contents are read when the plan runs."""
    first, second = (
        random_call(lengths, 1, seed=22) for lengths in (STEP, [(900, 1), (260, 3), (0, 0), (2050, 2)])
    )
    q = torch.zeros(8, 1, 128, dtype=torch.uint8, device=backend.device)
    table = torch.zeros(4, 24, dtype=torch.int32, device=backend.device)
    offsets = torch.zeros(5, dtype=torch.int32, device=backend.device)
    seq_lens = torch.zeros(4, dtype=torch.int32, device=backend.device)
    plan = scorer_of(backend, 1).plan(
        table, cu_seqlens_q=offsets, seq_lens=seq_lens, max_query_len=4, max_seq_len=3072, total_q=8
    )
    for call in (first, second):
        q[: call.total_q] = call.q.view(torch.uint8).to(backend.device)
        width = min(24, call.block_table.shape[1])
        table[:, :width] = call.block_table[:, :width].to(backend.device)
        offsets.copy_(call.cu_seqlens_q)
        seq_lens.copy_(call.seq_lens)
        found = plan.select(q, pages_on(call.pages, backend.device)).cpu()
        assert_same_bits(found[:, : call.total_q].contiguous(), selection_of(backend, call, 4))
        assert bool((found[:, call.total_q :] == -1).all())


def test_page_ids_outside_the_cache_are_the_nearest_inside(backend: Backend) -> None:
    """In prefill and decode: a plan does not read the block table."""
    call = random_call(SHORTER if backend.name == "flydsl-sim" else LENGTHS, 1, seed=23)
    q, pages = tensors_of(backend, call)
    num_pages, table = call.pages.shape[0], call.block_table.reshape(-1).clone()
    outside = torch.tensor([2**31 - 1, -(2**31), -1, num_pages], dtype=torch.int32)
    table[::3] = outside.repeat(table.numel())[: table[::3].numel()]
    table = table.view_as(call.block_table)
    inside = replace(call, block_table=table.clamp(0, num_pages - 1))
    plan = on_host_lengths(backend, replace(call, block_table=table))
    assert_same_bits(plan.select(q, pages).cpu(), selection_of(backend, inside, 4))


def test_a_query_of_nan_counts_as_minus_infinity(backend: Backend) -> None:
    """Its blocks tie, so the lowest ids are selected; rows beside it are as they were."""
    call = random_call([(2700, 20), (1155, 2)], 1, seed=25)
    q, pages = tensors_of(backend, call)
    expected = selection_of(backend, call, 4)
    q.view(torch.uint8)[[3, 21]] = 0x7F
    expected[0, [3, 21]] = torch.arange(4, dtype=torch.int32)
    assert_same_bits(on_host_lengths(backend, call).select(q, pages).cpu(), expected)


def test_insert_writes_what_a_backend_writes(backend: Backend) -> None:
    """Negative slots are skipped; pages lie apart."""
    keys = torch.randn(5, 128, generator=torch.Generator().manual_seed(3))
    pages = torch.full((3, 9232), 7, dtype=torch.uint8)[:, :9216]
    slots = torch.tensor([130, -1, 0, 383, 127])
    written = pages_on(pages.clone(), backend.device)
    scorer_of(backend, 1).insert(keys.to(backend.device), written, slots.to(backend.device))
    assert_same_bits(written.cpu(), inserted(backend, keys, pages, slots))


def test_appends_of_many_sequences_are_one(backend: Backend) -> None:
    """Keys of several sequences, appended together, score like those appended one by one."""
    keys = torch.randn(700, 128, generator=torch.Generator().manual_seed(4)).to(backend.device)
    q = torch.randn(4, 1, 128, generator=torch.Generator().manual_seed(5)).to(backend.device)
    one, many = (scorer_of(backend, 1, num_pages=16) for _ in range(2))
    for scorer in (one, many):
        for _ in range(2):
            scorer.add_sequence()
    one.append_keys(0, keys[:300])
    one.append_keys(1, keys[300:])
    many.append_keys([0, 1], torch.cat((keys[:200], keys[300:301])), [200, 1])
    many.append_keys([1, 0], torch.cat((keys[301:], keys[200:300])), [399, 100])
    for scorer in (one, many):
        assert [scorer.sequence_length(seq) for seq in scorer.sequences] == [300, 400]
    results = [
        scorer.score(q, [0, 1], [2, 2], return_scores=backend.name != "flydsl-sim") for scorer in (one, many)
    ]
    assert_same_bits(results[1].block_ids.cpu(), results[0].block_ids.cpu())
    plan = many.plan(sequences=[0, 1], query_lens=[2, 2])
    assert_same_bits(plan.select(q).cpu(), results[0].block_ids.cpu())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_lens": [1, 1]}, "query_lens = 2 lengths: must be one for each of the 5 rows"),
        ({"query_lens": [20, 0, -3, 1, 40]}, r"query_lens\[2\] = -3"),
        ({"query_lens": [20, 0, 1.5, 1, 40]}, r"query_lens\[2\] = 1.5"),
        ({"seq_lens": [19, 0, 1155, 129, 40]}, r"seq_lens\[0\] = 19: must be at least its 20 queries"),
        ({"seq_lens": [2700, 0, 1048577, 129, 40]}, r"seq_lens\[2\] = 1048577"),
        ({"seq_lens": [2700, 0, 9000, 129, 40]}, r"block_table.shape\[1\] = 22: must be at least 71"),
        ({"seq_lens": None}, "seq_lens = None"),
        ({"query_lens": None}, "query_lens = None: must be given, or cu_seqlens_q"),
        ({"max_seq_len": 128}, "max_seq_len = int: does not go with query_lens"),
        ({"topk": 65}, "topk = 65"),
    ],
)
def test_wrong_plans_are_refused(change: dict[str, object], message: str) -> None:
    call = random_call(LENGTHS, 1, seed=26)
    arguments: dict[str, object] = {
        "query_lens": call.cu_seqlens_q.diff().tolist(),
        "seq_lens": call.seq_lens.tolist(),
    }
    scorer = IndexScorer(IndexerConfig(1, 0, backend="cpu"))
    with pytest.raises(InvalidArgumentError, match=message):
        scorer.plan(call.block_table[:, :22], **{**arguments, **change})  # type: ignore[arg-type]


class CallsAbove:
    """Counts Python's calls, and those of built-in functions, but what a backend calls."""

    def __init__(self) -> None:
        self.count = self._inside = 0

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        of_backend = "backends" in frame.f_code.co_filename
        if event == "return":
            self._inside -= of_backend
        elif event == "call" and of_backend:
            self._inside += 1
        elif event in ("call", "c_call") and not self._inside:
            self.count += 1


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_a_run_has_no_loop_over_requests_above_the_backend(name: str, on_device: bool) -> None:
    """As many calls for 200 requests as for one."""
    backend, counts = registry.create(name), []
    for requests in (1, 200):
        call = random_call([(130, 1)] * requests, 1, seed=31, padding_columns=22)
        plan = on_device_lengths(backend, call, requests) if on_device else on_host_lengths(backend, call)
        q, out = call.q.float(), torch.empty(1, requests, 4, dtype=torch.int32)
        for _ in range(2):  # the first one reads the plan's numbers, and imports
            calls = CallsAbove()
            sys.setprofile(calls)
            try:
                plan.select(q, call.pages)
                plan.select(q, call.pages, out=out)
                plan.score(q, call.pages)
            finally:
                sys.setprofile(None)
        counts.append(calls.count)
    assert counts[0] == counts[1] > 50


def test_workspaces_of_device_lengths_are_bounded() -> None:
    """What bounds say that a run would allocate is refused when it is planned, on every backend."""
    offsets, lens = torch.zeros(1025, dtype=torch.int32), torch.zeros(1024, dtype=torch.int32)
    table = torch.zeros(1, 8192, dtype=torch.int32).repeat(1024, 1)
    scorer = IndexScorer(IndexerConfig(4, 0, backend="cpu"))
    bounds = {"cu_seqlens_q": offsets, "seq_lens": lens, "max_query_len": 16, "max_seq_len": 1 << 20}
    with pytest.raises(
        InvalidArgumentError,
        match="total_q = 16384: their scores, 4 heads x 8192 blocks each, take 2147483648 bytes at a run, of "
        "1073741824 allowed; plan fewer",
    ):
        scorer.plan(table, **bounds)  # type: ignore[arg-type]
    assert scorer.plan(table, **bounds, total_q=8192).total_q == 8192  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_query_len": 17}, "max_query_len = 17: must be 1 to 16 with 4 heads"),
        ({"max_query_len": None}, "max_query_len = None"),
        ({"max_seq_len": 0}, "max_seq_len = 0"),
        ({"max_seq_len": 1 << 20}, r"block_table.shape\[1\] = \d+: must be at least 8192"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, r"seq_lens.shape = \(3,\)"),
        ({"cu_seqlens_q": torch.zeros(5, dtype=torch.int64)}, "cu_seqlens_q.dtype"),
        ({"query_lens": [1]}, "query_lens = list: does not go with cu_seqlens_q"),
        ({"sequences": [0]}, "block_table = Tensor: does not go with sequences"),
    ],
)
def test_wrong_bounds_are_refused(change: dict[str, object], message: str) -> None:
    call = random_call(STEP, 4, seed=27)
    arguments: dict[str, object] = {
        "cu_seqlens_q": call.cu_seqlens_q,
        "seq_lens": call.seq_lens,
        "max_query_len": 4,
        "max_seq_len": 2700,
    }
    scorer = IndexScorer(IndexerConfig(4, 8, backend="cpu"))
    scorer.add_sequence()
    with pytest.raises(InvalidArgumentError, match=message):
        scorer.plan(call.block_table.contiguous(), **{**arguments, **change})  # type: ignore[arg-type]


def test_wrong_runs_are_refused() -> None:
    """Shapes, dtypes and strides, at every run; nothing is written."""
    call = random_call(STEP, 1, seed=28)
    plan = on_device_lengths(registry.create("cpu"), call, call.total_q)
    with pytest.raises(InvalidArgumentError, match=r"q.shape = \(6, 1, 128\): must be \[7, 1, 128\]"):
        plan.select(call.q[:6], call.pages)
    with pytest.raises(InvalidArgumentError, match=r"pages\.dtype"):
        plan.select(call.q, call.pages.float())
    with pytest.raises(InvalidArgumentError, match=r"out\.dtype"):
        plan.select(call.q, call.pages, out=torch.zeros(1, 7, 4))
    with pytest.raises(InvalidArgumentError, match=r"out.shape\[2\] = 5: must be the plan's topk, 4"):
        plan.select(call.q, call.pages, out=torch.zeros(1, 7, 5, dtype=torch.int32))
    with pytest.raises(InvalidArgumentError, match=r"out.shape\[2\] = 23: must be at least 24"):
        plan.score(call.q, call.pages, out=torch.zeros(1, 7, 23))


def test_more_wrong_arguments_are_named() -> None:
    """Queries without heads, no pages, no ids, a negative number of rows; a list that is none."""
    call = random_call(STEP, 1, seed=28)
    backend = registry.create("cpu")
    plan = on_device_lengths(backend, call, call.total_q)
    with pytest.raises(InvalidArgumentError, match=r"q\.shape = \(128,\)"):
        plan.select(call.q[0, 0], call.pages)
    with pytest.raises(InvalidArgumentError, match=r"pages\.shape\[0\] = 0"):
        plan.select(call.q)  # the scorer's own cache, which has none
    with pytest.raises(InvalidArgumentError, match=r"out\.shape\[2\] = 0"):
        OPERATORS.topk(torch.zeros(1, 2, 3), torch.ones(2, dtype=torch.int32), 0, False, "cpu")
    with pytest.raises(InvalidArgumentError, match="total_q = -1"):
        on_device_lengths(backend, call, -1)
    with pytest.raises(InvalidArgumentError, match="sequences = int"):
        scorer_of(backend, 1).block_tables(5)  # type: ignore[arg-type]


def test_topk_reads_scores_of_any_strides(backend: Backend) -> None:
    scores = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(6)).to(backend.device)
    num_blocks = torch.full((5,), 20, dtype=torch.int32, device=backend.device)
    found = OPERATORS.topk(scores[:, :, ::2], num_blocks, 4, False, backend.name)
    expected = OPERATORS.topk(scores[:, :, ::2].contiguous(), num_blocks, 4, False, backend.name)
    assert_same_bits(found.cpu(), expected.cpu())


def test_a_request_of_more_queries_than_keys_has_no_first_rows(backend: Backend) -> None:
    """Lengths of the device: scores -inf, sentinels too, and no ids."""
    call = random_call([(3, 3), (2700, 1)], 1, seed=30).forcing(0, 1)
    q, pages = tensors_of(backend, call)
    call.seq_lens[0] = 1
    plan = on_device_lengths(backend, call, call.total_q)
    scores, ids = plan.score(q, pages).cpu(), plan.select(q, pages).cpu()
    assert bool((scores[0, :2] == -torch.inf).all())
    assert bool((ids[0, :2] == -1).all())
    assert ids[0, 2].tolist() == [0, -1, -1, -1]


def test_operators_pass_torch_s_own_checks(backend: Backend) -> None:
    """Schemas, mutation and fakes, of every operator."""
    call = random_call([(300, 2), (140, 1)], 1, seed=29)
    q, pages = tensors_of(backend, call)
    q = q.view(torch.uint8)  # opcheck cannot compare float8 tensors
    plan = on_host_lengths(backend, call)
    parts = (plan.plan.tensors, plan.plan.numbers)
    ids = torch.zeros(1, 3, 4, dtype=torch.int32, device=q.device)
    scores = torch.zeros(1, 3, 3, device=q.device)
    num_blocks = call.batch().num_blocks_per_query().to(q.device)
    keys, slots = torch.randn(2, 128, device=q.device), torch.tensor([3, 200], device=q.device)
    name = plan.backend
    checks = ("test_schema", "test_faketensor")
    for operator, arguments, keywords in (
        (OPERATORS.insert.default, (keys, pages, slots, name), {}),
        (OPERATORS.select.default, (q, pages, *parts, 4, name), {}),
        (OPERATORS.select.out, (q, pages, *parts, name), {"out": ids}),
        (OPERATORS.score.default, (q, pages, *parts, 3, name), {}),
        (OPERATORS.score.out, (q, pages, *parts, name), {"out": scores}),
        (OPERATORS.topk.default, (scores, num_blocks, 4, False, name), {}),
        (OPERATORS.topk.out, (scores, num_blocks, True, name), {"out": ids}),
    ):
        torch.library.opcheck(operator, arguments, keywords, test_utils=checks)


# Values that nobody checked: buffers within guards, results by the sentences of docs/engine.md.

GUARD_BYTES = 4096
POISON = 0x77
"""A guard byte: large as a key, a query, a page id, a length or a score, so that a result shows a read."""
EXTREMES = np.array([-(2**31), -129, -1, 0, 1, 2, 5, 7, 128, 129, 700, 3073, 2**31 - 1], dtype=np.int32)


class Guarded:
    """Copies of tensors on a device, each inside of a larger allocation of which no other byte may change."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._read: list[tuple[torch.Tensor, torch.Tensor]] = []

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that nobody may write."""
        copy = self.written(tensor)
        self._read.append((copy, tensor.clone()))
        return copy

    def written(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of the same strides. Bytes between its rows are guards too."""
        item = tensor.element_size()
        places = [item * (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())]
        size = sum(places) + item
        storage = torch.full((size + 2 * GUARD_BYTES,), POISON, dtype=torch.uint8)
        guards = torch.ones(storage.shape, dtype=torch.bool)
        strides = [item * stride for stride in tensor.stride()]
        guards[GUARD_BYTES:].as_strided((*tensor.shape, item), (*strides, 1)).fill_(False)
        storage = storage.to(self._device)
        inside = storage[GUARD_BYTES : GUARD_BYTES + size].view(tensor.dtype)
        self._storages.append((storage, guards))
        return inside.as_strided(tensor.shape, tensor.stride()).copy_(tensor)

    def check(self) -> None:
        """Fail where a guard or what was to be read has changed."""
        for storage, guards in self._storages:
            assert bool((storage.cpu()[guards] == POISON).all())
        for copy, before in self._read:
            assert_same_bits(copy.cpu().contiguous().view(torch.uint8), before.contiguous().view(torch.uint8))


def expected_of(
    call: Call, max_query_len: int, num_blocks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The oracle's scores and ids of what a run makes of a call's values, and the rows that they are of.

    Args:
        call: anything.
        max_query_len: of the plan.
        num_blocks: ``S`` of the plan.

    Returns:
        ``[H, total_q, S]``, ``[H, total_q, 4]`` and ``[total_q]`` bool, False where requests share a row.
    """
    owners: dict[int, list[tuple[int, int]]] = {}
    for request, (first, end, keys) in enumerate(
        zip(call.cu_seqlens_q.tolist(), call.cu_seqlens_q[1:].tolist(), call.seq_lens.tolist())
    ):
        start = min(max(first, 0), call.total_q)
        stop = min(max(end, start), call.total_q, start + max_query_len)
        keys = min(max(keys, 0), 128 * num_blocks)
        for token in range(start, stop):
            owners.setdefault(token, []).append((request, keys - (stop - token)))
    own = {token: found[0] for token, found in owners.items() if len(found) == 1 and found[0][1] >= 0}
    num_pages = call.pages.shape[0]
    table = call.block_table[[request for request, _ in own.values()]]
    single = replace(
        call,
        q=call.q.view(torch.uint8)[list(own)].view(call.q.dtype),
        block_table=table.clamp(0, num_pages - 1),
        cu_seqlens_q=torch.arange(len(own) + 1, dtype=torch.int32),
        seq_lens=torch.tensor([position + 1 for _, position in own.values()], dtype=torch.int32),
    )
    scores = torch.full((call.num_heads, call.total_q, num_blocks), -torch.inf)
    ids = torch.full((call.num_heads, call.total_q, 4), -1, dtype=torch.int32)
    known = torch.tensor([len(owners.get(token, [])) < 2 for token in range(call.total_q)], dtype=torch.bool)
    if own:
        scores[:, list(own)] = oracle_scores(single, num_blocks)
        found = selected(scores[:, list(own)], single.batch().num_blocks_per_query(), 4)
        ids[:, list(own)] = found
    return scores, ids, known


def unchecked_values(call: Call, random: np.random.Generator) -> None:
    """Make page ids illegal, here and there, and a query NaN."""
    illegal = np.array([-(2**31), -1, call.pages.shape[0], 2**31 - 1], dtype=np.int32)
    for _ in range(4):
        row, column = (int(random.integers(size)) for size in call.block_table.shape)
        call.block_table[row, column] = int(random.choice(illegal))
    call.q.view(torch.uint8)[int(random.integers(call.total_q)), 0, 77] = 0x7F


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("lengths", ["legal", "illegal", "on the host"])
def test_values_that_nobody_checked_stay_inside_and_have_a_result(
    backend: Backend, lengths: str, heads: int
) -> None:
    """Guards stay as they are, rows of one request are the oracle's, others hold ids of blocks."""
    random, simulated = np.random.default_rng(heads), backend.name == "flydsl-sim"
    on_host = lengths == "on the host"
    for case in range(1 if simulated or on_host else 2):
        shape = LENGTHS if on_host and not simulated else STEP
        call = random_call(shape, heads, seed=40 + case, page_stride=9232).forcing(case, case)
        unchecked_values(call, random)
        guarded = Guarded(backend.device)
        q, pages = guarded.read(call.q.view(torch.uint8)), guarded.read(call.pages)
        placed = replace(call, block_table=guarded.read(call.block_table.contiguous()))
        if on_host:
            plan, most = on_host_lengths(backend, placed), call.total_q
        else:
            if lengths == "illegal":
                call.seq_lens.copy_(torch.from_numpy(random.choice(EXTREMES, 4)))
                changed = random.random(5) < 0.6
                call.cu_seqlens_q[changed] = torch.from_numpy(random.choice(EXTREMES, int(changed.sum())))
            offsets, seq_lens = guarded.read(call.cu_seqlens_q), guarded.read(call.seq_lens)
            placed = replace(placed, cu_seqlens_q=offsets, seq_lens=seq_lens)
            plan, most = on_device_lengths(backend, placed, call.total_q), 4
        written_ids = guarded.written(torch.full((call.total_q, heads, 4), -9, dtype=torch.int32))
        found = plan.select(q, pages, out=written_ids.transpose(0, 1)).cpu()
        guarded.check()
        scores, ids, known = expected_of(call, most, plan.num_score_blocks)
        assert_same_bits(found[:, known], ids[:, known])
        assert int(found.min()) >= -1
        assert int(found.max()) < plan.num_score_blocks
        if simulated and heads > 1:
            continue
        buffer = torch.full((heads, call.total_q + 1, plan.num_score_blocks + 3), 5.0)
        written = guarded.written(buffer[:, 1:, 2:])
        plan.score(q, pages, out=written)
        guarded.check()
        expected = torch.full(written.shape, -torch.inf)
        expected[..., : plan.num_score_blocks] = scores
        defined = known[:, None] & ~expected.isnan()  # scores of a NaN query are any
        assert_same_bits(written.cpu()[defined], expected[defined])


def test_insert_writes_its_slots_alone(backend: Backend) -> None:
    """Slots below 0 are skipped, on a GPU those past the cache too; on the CPU those are refused."""
    keys = torch.randn(8, 128, generator=torch.Generator().manual_seed(8))
    slots = torch.tensor([130, -(2**63), -1, 383, 0, 127, -129, 256])
    before = torch.full((3, 9232), 7, dtype=torch.uint8)[:, :9216]
    on_cpu = backend.name in ("cpu", "reference")
    past = torch.tensor([384, 2**63 - 1, 2**31, 2**40])
    guarded = Guarded(backend.device)
    pages, held = guarded.written(before), guarded.read(keys)
    if on_cpu:
        for slot in past.tolist():
            with pytest.raises(InvalidArgumentError, match=f"slots = {slot}"):
                OPERATORS.insert(held, pages, guarded.read(torch.tensor([0] * 7 + [slot])), backend.name)
        assert_same_bits(pages.cpu(), before)
    else:
        slots[[1, 2, 6]] = past[:3]
    OPERATORS.insert(held, pages, guarded.read(slots), backend.name)
    guarded.check()
    kept = (slots >= 0) & (slots < 384)
    assert_same_bits(pages.cpu().contiguous(), oracle_inserted(keys[kept], before, slots[kept]))


@pytest.mark.parametrize("by_block", [False, True])
def test_topk_reads_its_rows_alone(backend: Backend, by_block: bool) -> None:
    """Whatever numbers of blocks a buffer holds, they are clamped to the row."""
    extents = torch.tensor([-(2**31), -1, 0, 3, 40, 41, 2**31 - 1], dtype=torch.int32)
    scores = torch.randn(2, 7, 44, generator=torch.Generator().manual_seed(9))[:, :, 2:42]
    scores[0, 4, 5] = scores[1, 5, :] = torch.nan
    guarded = Guarded(backend.device)
    out = guarded.written(torch.full((7, 2, 4), -9, dtype=torch.int32)).transpose(0, 1)
    OPERATORS.topk.out(guarded.read(scores), guarded.read(extents), by_block, backend.name, out=out)
    guarded.check()
    expected = selected(scores, extents.clamp(0, 40), 4)
    assert_same_bits(out.cpu().contiguous(), in_block_order(expected) if by_block else expected)
