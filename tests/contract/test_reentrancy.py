"""A call inside another call on the same scorer: from a signal handler, a finaliser or a callback.

It is refused by name and changes nothing; the call that it interrupts goes on as if nothing had been.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from indexer import IndexerConfig, IndexScorer, Recorder, ReentrantCallError, UnknownSequenceError
from kernel.backends import registry
from kernel.gfx950 import launch
from server.ranks import LeadingScorer
from tests.contract import simulated
from tests.support.calls import random_call
from tests.support.compare import assert_same_bits
from tests.support.scorer_state import ScorerState, assert_consistent, state_of

ROOT = Path(__file__).resolve().parents[2]
KEYS = torch.randn(300, 128, generator=torch.Generator().manual_seed(1))
QUERIES = torch.randn(3, 1, 128, generator=torch.Generator().manual_seed(2))
Calls = dict[str, Callable[[IndexScorer], object]]


def scorer_with_two() -> IndexScorer:
    """Sequence 0 of 200 tokens with a fork, 2, and sequence 1 of 128."""
    scorer = IndexScorer(IndexerConfig(1, 8, local_blocks=0, backend="cpu"))
    for tokens in (200, 128):
        scorer.append_keys(scorer.add_sequence(), KEYS[:tokens])
    assert scorer.fork_sequence(0) == 2
    return scorer


def paged(scorer: IndexScorer) -> object:
    table, lens = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([200], dtype=torch.int32)
    return scorer.score_paged(QUERIES, scorer.pages, table, torch.tensor([0, 3], dtype=torch.int32), lens)


CALLS: Calls = {
    "add": lambda scorer: scorer.add_sequence(),
    "append": lambda scorer: scorer.append_keys(0, KEYS[:130]),
    "append to two": lambda scorer: scorer.append_keys([0, 1], KEYS[:140], [70, 70]),
    "fork": lambda scorer: scorer.fork_sequence(1),
    "free": lambda scorer: scorer.free_sequence(1),
    "free a fork": lambda scorer: scorer.free_sequence(2),
    "truncate": lambda scorer: scorer.truncate_sequence(0, 70),
    "score": lambda scorer: scorer.score(QUERIES, [0]),
    "score_paged": paged,
    "block_tables": lambda scorer: scorer.block_tables([0, 1]),
    "plan": lambda scorer: scorer.plan(sequences=[0, 1]),
}


def try_all(scorer: IndexScorer) -> int:
    """Make every call, each of which must be refused; read what may be read. Returns how many were made."""
    for call in CALLS.values():
        with pytest.raises(ReentrantCallError, match="under way"):
            call(scorer)
    assert 0 <= scorer.num_free_pages <= scorer.num_pages
    for seq in scorer.sequences:
        assert scorer.sequence_length(seq) <= 400
        assert set(scorer.block_table(seq).tolist()) <= set(range(8))
    return len(CALLS)


@contextmanager
def at_each_line(scorer: IndexScorer, action: Callable[[], object], rooms: tuple[str, ...]) -> Iterator[None]:
    """Does something before each line of our code that runs within a call, as a signal handler may."""

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(rooms):
            return None
        if event == "line" and scorer._lock._is_owned():  # type: ignore[attr-defined]
            action()
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(outer)


@pytest.mark.parametrize("name", CALLS)
def test_every_call_is_refused_at_every_line_of_a_call(name: str) -> None:
    undisturbed = scorer_with_two()
    CALLS[name](undisturbed)
    scorer, tried = scorer_with_two(), 0

    def action() -> None:
        nonlocal tried
        tried += try_all(scorer)

    with at_each_line(scorer, action, (str(ROOT / "indexer"), str(ROOT / "kernel"))):
        CALLS[name](scorer)
    assert tried >= 3 * len(CALLS), "the calls did not reach the inside of the call"
    assert state_of(scorer) == state_of(undisturbed)
    assert_consistent(scorer)


@pytest.mark.parametrize("name", ["append", "fork", "free", "truncate"])
def test_a_refusal_that_nobody_catches_leaves_the_state_before_or_after(name: str) -> None:
    """As an exception of a signal handler does, it leaves the call that was interrupted, too."""
    undisturbed = scorer_with_two()
    states = [state_of(undisturbed)]
    CALLS[name](undisturbed)
    states.append(state_of(undisturbed))
    left = 0
    for line in range(1, 60, 3):
        scorer, reached = scorer_with_two(), 0

        def action(line: int = line, scorer: IndexScorer = scorer) -> None:
            nonlocal reached
            reached += 1
            if reached == line:
                scorer.free_sequence(1)

        with at_each_line(scorer, action, (str(ROOT / "indexer"),)):
            try:
                CALLS[name](scorer)
            except ReentrantCallError:
                left += 1
        assert state_of(scorer) in states, f"line {line}"
        assert_consistent(scorer)
    assert left >= 3


# ---- The ways in which such calls come ----


class CallingMode(TorchFunctionMode):
    """Calls at each operation of torch."""

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__()
        self._action = action

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self._action()
        return function(*args, **(kwargs or {}))


class Finalised:
    """Calls when it is collected, and leaves another like it. A cycle: the collector chooses when."""

    armed = True

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action
        self._itself = self

    def __del__(self) -> None:
        if Finalised.armed:
            Finalised(self._action)
            self._action()


@contextmanager
def by_operations_of_torch(action: Callable[[], object]) -> Iterator[None]:
    with CallingMode(action):
        yield


@contextmanager
def by_finalisers(action: Callable[[], object]) -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.set_threshold(3)
    Finalised.armed = True
    Finalised(action)
    try:
        yield
    finally:
        Finalised.armed = False
        gc.set_threshold(*thresholds)


@contextmanager
def by_a_collector_callback(action: Callable[[], object]) -> Iterator[None]:
    def collected(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            action()

    thresholds = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(3)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collected)


@contextmanager
def by_a_signal(action: Callable[[], object]) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, lambda *_: action())
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "way",
    [by_operations_of_torch, by_finalisers, by_a_collector_callback, by_a_signal],
    ids=lambda way: way.__name__,
)
def test_calls_that_come_in_any_way_change_nothing(
    way: Callable[[Callable[[], object]], Any],
) -> None:
    """A handler that may come between two calls as well makes and frees a sequence there: no page is lost."""
    scorer = scorer_with_two()
    refused = done = 0

    def action() -> None:
        nonlocal refused, done
        try:
            seq = scorer.add_sequence()
            scorer.append_keys(seq, KEYS[:1])
            scorer.free_sequence(seq)
            done += 1
        except ReentrantCallError:
            refused += 1

    deadline = time.monotonic() + 20
    while not refused and time.monotonic() < deadline:
        with way(action):
            for _ in range(2):
                scorer.append_keys(1, KEYS[:130])
                scorer.truncate_sequence(1, 128)
    assert refused, "no call came inside of another"
    for seq in scorer.sequences:
        if scorer.sequence_length(seq) <= 1:  # a handler's own, whose later calls another handler's met
            scorer.free_sequence(seq)
    assert page_state(scorer) == page_state(scorer_with_two())
    assert_consistent(scorer)


def page_state(scorer: IndexScorer) -> tuple[object, ...]:
    """The state but for ids that were given out, and the order of the free pages."""
    state: ScorerState = state_of(scorer)
    return state.sequences[0][:2], state.sequences[1][:2], sorted(state.free_pages), sorted(state.ref_counts)


def test_another_thread_waits_for_its_turn() -> None:
    """It is not refused: only what this thread itself has begun can never end while it waits."""
    scorer = scorer_with_two()
    inside, go_on = threading.Event(), threading.Event()
    order: list[str] = []

    def pause() -> None:
        inside.set()
        assert go_on.wait(20)

    keys = KEYS[:1]

    def first() -> None:
        with CallingMode(pause):
            scorer.append_keys(0, keys)
        order.append("first")

    def second() -> None:
        scorer.free_sequence(1)
        order.append("second")

    threads = [threading.Thread(target=run) for run in (first, second)]
    threads[0].start()
    assert inside.wait(20)
    threads[1].start()
    time.sleep(0.05)
    assert not order
    assert scorer.sequence_length(1) == 128  # reading waits for nobody
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert order == ["first", "second"]
    with pytest.raises(UnknownSequenceError):
        scorer.sequence_length(1)
    assert_consistent(scorer)


# ---- What holds other locks ----


@pytest.mark.timeout(60)
def test_a_run_inside_of_a_launch_is_right_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a plan change nothing of a scorer and may be nested: on the simulated device, too, where a
    launch takes the interpreter."""
    if not registry.status(simulated.NAME).usable:
        pytest.skip(registry.status(simulated.NAME).reason)
    call = random_call([(300, 2)], 1, seed=5)
    scorer = IndexScorer(IndexerConfig(1, 0, topk_blocks=2, local_blocks=0, backend=simulated.NAME))
    plan = scorer.plan(call.block_table, query_lens=[2], seq_lens=[300])
    right = plan.select(call.q, call.pages)
    nested: list[torch.Tensor] = []
    run_workgroup = launch._Launch._run_workgroup

    def interrupted(self: Any, *arguments: Any) -> None:
        if not nested:
            nested.append(call.q)
            nested[0] = plan.select(call.q, call.pages)
        run_workgroup(self, *arguments)

    monkeypatch.setattr(launch._Launch, "_run_workgroup", interrupted)
    found = plan.select(call.q, call.pages)
    assert_same_bits(found, right)
    assert_same_bits(nested[0], right)


@pytest.mark.timeout(60)
def test_a_recorder_may_be_closed_from_inside_of_a_capture(tmp_path: Path) -> None:
    """As a handler of SIGTERM does."""
    call = random_call([(300, 2)], 1, seed=5)
    recorder = Recorder(tmp_path, strict=True)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if event == "line" and frame.f_code.co_name == "_number":
            recorder.flush()
        return trace if frame.f_code.co_filename.endswith("recorder.py") else None

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        assert recorder.capture(call.q, call.pages, call.block_table, call.cu_seqlens_q, call.seq_lens)
    finally:
        sys.settrace(outer)
    recorder.close()
    assert len(list(tmp_path.iterdir())) == 1


def test_ranks_are_not_told_of_a_call_that_is_refused() -> None:
    """They would make it, and wait for this rank."""
    told: list[object] = []

    class Leading(LeadingScorer):
        lost = None

        def __init__(self) -> None:
            self._lock = threading.RLock()
            self._followers = self  # type: ignore[assignment]

        def tell(self, call: object) -> None:
            told.append(call)

    scorer = Leading()
    with scorer._lock, pytest.raises(ReentrantCallError):
        scorer.add_sequence()
    assert not told
