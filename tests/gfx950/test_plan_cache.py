"""Cached plans are those that planning gives, for every argument, in bounded memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kernel import plan
from kernel.batch import Request
from kernel.errors import InvalidArgumentError
from kernel.plan import PackedPlan, PlanCache, pack_items, plan_prefill
from tests.gfx950.prefill import scored
from tests.support.calls import random_call
from tests.support.compare import assert_same_bits, oracle_scores

REQUESTS = (Request(0, 0, 300, 5000), Request(1, 300, 7, 700))
OPTIONS: dict[str, Any] = {
    "num_heads": 4,
    "table_stride": 64,
    "score_blocks": 64,
    "slots": 32,
    "alignment": 4,
}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was planned, not found."""
    calls: list[object] = []

    def counted(requests: object, *arguments: Any, **options: Any) -> object:
        calls.append(requests)
        return plan_prefill(requests, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(plan, "plan_prefill", counted)
    return calls


def expected(requests: tuple[Request, ...], options: dict[str, Any]) -> PackedPlan:
    items = plan_prefill(requests, **options)
    return PackedPlan(len(items), pack_items(items).tobytes())


def test_a_plan_is_made_once(planned: list[object]) -> None:
    cache = PlanCache()
    again = tuple(Request(r.table_row, r.query_start, r.query_len, r.seq_len) for r in REQUESTS)
    first = cache.plan(REQUESTS, **OPTIONS)
    assert cache.plan(again, **OPTIONS) is first
    assert first == expected(REQUESTS, OPTIONS)
    assert len(planned) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"num_heads": 2},
        {"table_stride": 65},
        {"score_blocks": 80},
        {"slots": 8},
        {"alignment": 16},
        {"requests": REQUESTS[:1]},
        {"requests": (REQUESTS[0], Request(1, 300, 7, 701))},
        {"requests": (REQUESTS[0], Request(1, 300, 6, 700))},
        {"requests": (REQUESTS[0], Request(1, 301, 7, 700))},
        {"requests": (REQUESTS[0], Request(2, 300, 7, 700))},
    ],
)
def test_everything_that_a_plan_depends_on_tells_plans_apart(change: dict[str, Any]) -> None:
    cache = PlanCache()
    before = cache.plan(REQUESTS, **OPTIONS)
    options = OPTIONS | change
    requests = options.pop("requests", REQUESTS)
    found = cache.plan(requests, **options)
    assert found == expected(requests, options)
    assert found != before
    assert cache.plan(REQUESTS, **OPTIONS) is before


def test_the_plan_used_longest_ago_goes_first(planned: list[object]) -> None:
    def ask(queries: int) -> None:
        cache.plan((Request(0, 0, queries, queries),), **OPTIONS)

    cache = PlanCache(most=4)  # a plan of one item of one request counts 2
    for queries in (1, 2, 1, 3):
        ask(queries)
    assert len(cache) == 2
    planned.clear()
    ask(1)
    ask(3)
    assert planned == []
    ask(2)
    assert len(planned) == 1


def test_a_plan_that_is_too_large_is_made_and_displaces_nothing() -> None:
    cache = PlanCache(most=3)
    kept = cache.plan((Request(0, 0, 1, 1),), **OPTIONS)
    assert cache.plan(REQUESTS, **OPTIONS) == expected(REQUESTS, OPTIONS)
    assert len(cache) == 1
    assert cache.plan((Request(0, 0, 1, 1),), **OPTIONS) is kept


def test_calls_of_one_shape_are_planned_once(planned: list[object]) -> None:
    """Two layers of a step, on the simulated device: other keys and queries, other buffers, one plan."""
    for seed in (1, 2):
        call = random_call([(203, 131), (519, 3)], 4, seed=seed)
        assert_same_bits(scored(call)[0], oracle_scores(call))
    assert len(planned) == 1


def test_what_is_refused_is_not_kept() -> None:
    cache = PlanCache()
    for _ in range(2):
        with pytest.raises(InvalidArgumentError):
            cache.plan(REQUESTS, **(OPTIONS | {"slots": 0}))
    assert len(cache) == 0


def test_threads_share_a_cache() -> None:
    cache = PlanCache(most=40)
    wrong: list[int] = []

    def work() -> None:
        for queries in [*range(1, 30), *range(1, 30)]:
            requests = (Request(0, 0, queries, queries + 400),)
            if cache.plan(requests, **OPTIONS) != expected(requests, OPTIONS):
                wrong.append(queries)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert 0 < len(cache) <= 20
