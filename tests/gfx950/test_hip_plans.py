"""Runs of a plan on the simulated device: launches and nothing else, and what a HIP graph allows.

An engine plans a step once and runs it for every layer. So a run makes no HIP call but launches, uploads
nothing, and its host work is the same for any number of requests.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from indexer import IndexerConfig, IndexScorer
from indexer.plan import IndexPlan
from kernel import operators
from kernel.backends import flydsl
from kernel.backends.flydsl import launch
from kernel.errors import LaunchError
from kernel.gfx950.hip import HipCallError, simulated_device, standin
from tests.gfx950.scorers import device_with
from tests.support.calls import CPU, Call, random_call
from tests.support.cases import ROOT
from tests.support.compare import assert_same_bits, oracle_inserted, oracle_scores, selected

TOPK = 4
COLUMNS = 8
"""Columns of the block tables of captured runs."""
STEPS = {
    "decode": [(300, 1)],
    "prefill": [(260, 17)],
    "mixed": [(260, 17), (300, 1)],
    "bounded": [(300, 1)],
}
"""Requests that are repeated; ``bounded`` has its lengths on the device."""
LAUNCHES = {"decode": 1, "prefill": 1, "mixed": 2, "bounded": 1}
"""Launches of a run of ``score``; a selection has one more."""
ALLOCATIONS = ("aten::empty.memory_format", "aten::zeros")
OTHERS = (
    *("aten::view.dtype", "aten::slice.Tensor", "aten::unbind.int", "aten::fill_.Scalar"),
    *("aten::resolve_conj", "aten::resolve_neg"),
)
"""What else torch does in a run: views, the fill of scores whose rows only the device knows, the list of the
plan's numbers."""
HOST = tuple(
    str(ROOT / name) for name in ("indexer", "kernel/backends", "kernel/operators.py", "kernel/step.py")
)


@pytest.fixture(autouse=True)
def small_device() -> Iterator[None]:
    with device_with(2):
        yield


def scorer() -> IndexScorer:
    return IndexScorer(
        IndexerConfig(1, 0, topk_blocks=TOPK, local_blocks=0, backend="flydsl-sim", device="cpu")
    )


def planned(step: str, call: Call) -> IndexPlan:
    """A plan of a call, by lengths on the host or on the device."""
    if step == "bounded":
        return scorer().plan(
            call.block_table.contiguous(),
            cu_seqlens_q=call.cu_seqlens_q,
            seq_lens=call.seq_lens,
            max_query_len=4,
            max_seq_len=128 * call.block_table.shape[1],
            total_q=call.total_q,
        )
    query_lens, seq_lens = call.cu_seqlens_q.diff().tolist(), call.seq_lens.tolist()
    return scorer().plan(call.block_table, query_lens=query_lens, seq_lens=seq_lens)


# ---- Launches only, and as much host work for 20 requests as for one ----


@dataclass
class Work:
    """What a run does on the host."""

    calls: Counter[str]
    """HIP functions."""
    operations: Counter[str] = field(default_factory=Counter)
    """Of torch."""
    lines: int = 0
    """Executed of the program's own."""


class Operations(TorchDispatchMode):
    """Counts torch's operations, and the storages that they allocate."""

    def __init__(self, counted: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counted = counted
        self.storages: set[int] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.namespace != "aten":
            with self:
                return operator.redispatch(
                    torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **(kwargs or {})
                )
        self.counted[operator.name()] += 1
        result = operator(*args, **(kwargs or {}))
        if operator.name() in ALLOCATIONS:
            self.storages.add(storage(result))
        return result


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def lines_counted(work: Work) -> Iterator[None]:
    """Counts executed lines of ``HOST``."""

    def count(_frame: FrameType, event: str, _argument: object) -> object:
        work.lines += event == "line"
        return count

    def enter(frame: FrameType, _event: str, _argument: object) -> object:
        return count if frame.f_code.co_filename.startswith(HOST) else None

    before = sys.gettrace()
    sys.settrace(enter)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.settrace(before)


def launches(number: int) -> dict[str, int]:
    """HIP calls of so many launches: FlyDSL looks a loaded module's function up each time."""
    return {"hipModuleGetFunction": number, "hipModuleLaunchKernel": number}


def work_of(
    run: Callable[[], object], given: Iterable[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> Work:
    """What a second run does beside the kernels, which are not executed.

    Launches may get the given tensors and those that torch was asked for.
    """
    device = simulated_device()
    monkeypatch.setattr(device, "run", lambda _launch: None)
    run()
    launched: list[torch.Tensor] = []
    registered = device.registered

    def spy(tensors: Iterable[torch.Tensor]) -> Any:
        tensors = list(tensors)
        launched.extend(tensors)
        return registered(tensors)

    before = Counter(device.calls())
    work = Work(Counter())
    with monkeypatch.context() as patch, Operations(work.operations) as operations, lines_counted(work):
        patch.setattr(device, "registered", spy)
        run()
    work.calls = Counter(device.calls()) - before
    backend = operators.backend_of(operators.spec("flydsl-sim"), CPU)
    known = {storage(tensor) for tensor in (*given, backend._lut)} | operations.storages  # type: ignore[attr-defined]
    assert {storage(tensor) for tensor in launched} <= known, "a launch got a tensor that the run made"
    return work


@pytest.mark.parametrize("operation", ["select", "score"])
@pytest.mark.parametrize("step", STEPS)
def test_a_run_is_launches_whatever_the_number_of_requests(
    step: str, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for times in (1, 20):
        call = random_call(STEPS[step] * times, 1, seed=times)
        plan = planned(step, call)
        scores = torch.empty(1, call.total_q, plan.num_score_blocks)
        out = scores if operation == "score" else torch.empty(1, call.total_q, TOPK, dtype=torch.int32)
        given = (call.q, call.pages, out, *plan.plan.tensors)
        run = partial(getattr(plan, operation), call.q, call.pages, out=out)
        work = work_of(run, given, monkeypatch)
        assert work.calls == launches(LAUNCHES[step] + (operation == "select"))
        assert work.operations.keys() <= {*ALLOCATIONS, *OTHERS}
        found.append(work)
    assert found[0] == found[1]


def test_an_insert_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, found = scorer(), []
    for number in (1, 20):
        keys, pages = torch.randn(number, 128), torch.zeros(2, 9216, dtype=torch.uint8)
        slots = torch.arange(number) * 7
        work = work_of(partial(engine.insert, keys, pages, slots), (keys, pages, slots), monkeypatch)
        assert work.calls == launches(1)
        assert not work.operations
        found.append(work)
    assert found[0] == found[1]


@pytest.mark.parametrize("step", STEPS)
def test_later_runs_read_and_write_their_own_tensors(step: str) -> None:
    """Ids side by side and apart; queries that are aligned and that are not."""
    calls = [random_call(STEPS[step], 1, seed=seed) for seed in (30, 31)]
    plan = planned(step, calls[0])
    expected = [expected_ids(replace(call, block_table=calls[0].block_table)) for call in calls]
    shape = calls[0].total_q, 1, 2 * TOPK
    for shift, width in ((0, 1), (4, 2)):
        written = []
        for call, ids in zip(calls, expected):
            q = torch.empty(call.q.numel() + 64, dtype=torch.uint8)[shift : shift + call.q.numel()]
            q = q.view(call.q.shape).copy_(call.q.view(torch.uint8))
            out = torch.full(shape, -7, dtype=torch.int32).transpose(0, 1)[:, :, : TOPK * width : width]
            plan.select(q, call.pages.clone(), out=out)
            written.append((out, ids))
        for out, ids in written:
            assert_same_bits(out.contiguous(), ids)


@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_a_kept_run_serves_other_block_tables_and_keeps_none(step: str) -> None:
    """Calls of the same lengths share a plan, and each brings a table of its own."""
    calls = [random_call(STEPS[step], 1, seed=seed) for seed in (32, 33)]
    plan, engine = planned(step, calls[0]).plan, scorer()._backend
    for call in calls:
        table = weakref.ref(own := call.block_table.clone().contiguous())
        out = torch.empty(1, call.total_q, TOPK, dtype=torch.int32)
        engine.select_plan(plan.on(own), call.q, call.pages, out)
        assert_same_bits(out, expected_ids(call))
        del own
        assert table() is None
    assert len(plan.runs) == 1


# ---- Graphs ----


def expected_ids(call: Call) -> torch.Tensor:
    """The oracle's selection."""
    scores = oracle_scores(call)
    return selected(scores, call.batch().num_blocks_per_query(), TOPK)


def test_a_captured_step_serves_other_lengths_tables_slots_and_contents() -> None:
    """Insert and select, lengths on the device; nothing runs in the capture."""
    calls = [
        random_call(lengths, 1, seed=40 + at)
        for at, lengths in enumerate(([(300, 1), (700, 2), (0, 0)], [(1000, 3), (0, 0), (129, 1)]))
    ]
    num_pages = max(call.pages.shape[0] for call in calls)
    q = torch.zeros(6, 1, 128, dtype=torch.uint8)
    pages = torch.zeros(num_pages, 9216, dtype=torch.uint8)
    table = torch.zeros(3, COLUMNS, dtype=torch.int32)
    offsets, seq_lens = torch.zeros(4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    keys, slots = torch.zeros(2, 128), torch.full((2,), -1)
    ids = torch.full((1, 6, TOPK), -7, dtype=torch.int32)
    engine = scorer()
    plan = engine.plan(
        table, cu_seqlens_q=offsets, seq_lens=seq_lens, max_query_len=3, max_seq_len=1024, total_q=6
    )

    def step() -> None:
        engine.insert(keys, pages, slots)
        plan.select(q, pages, out=ids)

    step()  # loads the modules
    ids.fill_(-7)
    launches = len(simulated_device().launches)
    with simulated_device().capturing() as recording:
        step()
    assert len(simulated_device().launches) == launches
    assert bool((ids == -7).all())
    for at, call in enumerate([*calls, calls[0]]):
        keys.copy_(torch.randn(2, 128, generator=torch.Generator().manual_seed(at)))
        slots.copy_(call.block_table[:2, 0].long() * 128 + torch.tensor([at, 5]))
        pages[: call.pages.shape[0]] = call.pages
        q[: call.total_q] = call.q.view(torch.uint8)
        width = min(COLUMNS, call.block_table.shape[1])
        table[:, :width] = call.block_table[:, :width]
        offsets.copy_(call.cu_seqlens_q)
        seq_lens.copy_(call.seq_lens)
        ids.fill_(-7)
        recording.replay()
        inserted = oracle_inserted(keys, call.pages, slots)
        assert_same_bits(pages[: call.pages.shape[0]], inserted)
        assert_same_bits(ids[:, : call.total_q].contiguous(), expected_ids(replace(call, pages=inserted)))
        assert bool((ids[:, call.total_q :] == -1).all())


def test_a_captured_prefill_serves_other_contents() -> None:
    """Lengths on the host are those of the plan; queries, keys and block tables are read in the replay."""
    first, second = (random_call([(700, 40), (300, 1)], 1, seed=seed) for seed in (50, 51))
    q, pages, table = first.q.clone(), first.pages.clone(), first.block_table.clone()
    plan = planned("mixed", replace(first, block_table=table))
    scores = torch.full((1, 41, plan.num_score_blocks), torch.nan)
    plan.score(q, pages, out=scores)
    with simulated_device().capturing() as recording:
        plan.score(q, pages, out=scores)
    for call in (second, first):
        q.view(torch.uint8).copy_(call.q.view(torch.uint8))
        pages.copy_(call.pages)
        table.copy_(call.block_table)
        scores.fill_(torch.nan)
        recording.replay()
        assert_same_bits(scores, oracle_scores(call))


def test_a_first_launch_in_a_capture_is_refused_and_the_process_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = random_call([(300, 1)], 1, seed=60)
    monkeypatch.setattr(launch, "_COMPILED", {})  # as in a process that has launched nothing
    backend = flydsl.create_simulated(None, "exact")
    scores = torch.full((1, 1, 3), torch.nan)
    message = "the first launch of score_decode_h1 loads its module, .*; run the same plan once before"
    with simulated_device().capturing() as recording:
        with pytest.raises(LaunchError, match=message) as caught:
            backend.score(call.batch(), scores)
        assert caught.value.name == "hipErrorStreamCaptureUnsupported"
    recording.replay()
    assert bool(scores.isnan().all())
    backend.score(call.batch(), scores)
    assert_same_bits(scores, oracle_scores(call))
    scores.fill_(torch.nan)
    with simulated_device().capturing() as recording:
        backend.score(call.batch(), scores)
    recording.replay()
    assert_same_bits(scores, oracle_scores(call))


POINTER = ctypes.byref(ctypes.c_void_p())


@pytest.mark.parametrize(
    ("function", "arguments", "code"),
    [
        ("hipMalloc", (POINTER, ctypes.c_size_t(16)), 900),
        ("hipFree", (ctypes.c_void_p(16),), 900),
        ("hipModuleLoadData", (POINTER, ctypes.c_void_p(16)), 900),
        ("hipModuleUnload", (ctypes.c_void_p(16),), 900),
        ("hipDeviceSynchronize", (), 900),
        ("hipStreamSynchronize", (ctypes.c_void_p(),), 900),
        ("hipEventSynchronize", (ctypes.c_void_p(),), 900),
        ("hipMemcpy", (ctypes.c_void_p(16), ctypes.c_void_p(16), ctypes.c_size_t(0), 0), 906),
        ("hipMemset", (ctypes.c_void_p(16), 0, ctypes.c_size_t(0)), 906),
        ("hipMemcpyAsync", (*[ctypes.c_void_p(16)] * 2, ctypes.c_size_t(0), 0, ctypes.c_void_p()), 906),
    ],
)
def test_a_capture_refuses_what_hip_refuses(function: str, arguments: tuple[Any, ...], code: int) -> None:
    """By its code, and the capture ends with an error; the next one is sound."""
    device = simulated_device()
    device.prepare()
    hip = ctypes.CDLL(str(standin.library()))
    refused = pytest.raises(
        HipCallError, match="hipStreamEndCapture returned hipErrorStreamCaptureInvalidated"
    )
    with refused, device.capturing():
        assert getattr(hip, function)(*arguments) == code
    assert device.take_failure() is not None
    with device.capturing():
        pass


def test_a_launch_after_a_refused_call_is_not_recorded() -> None:
    call = random_call([(300, 1)], 1, seed=61)
    plan = planned("decode", call)
    plan.select(call.q, call.pages)
    device = simulated_device()
    hip = ctypes.CDLL(str(standin.library()))
    refused = pytest.raises(LaunchError, match="hipErrorStreamCaptureInvalidated")
    with refused, device.capturing():
        hip.hipDeviceSynchronize()
        device.take_failure()
        plan.select(call.q, call.pages)
    plan.select(call.q, call.pages)
