"""The host plan: every (row, block) once, nothing else, balanced, aligned, within 32 bits, deterministic."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel import plan
from kernel.batch import Request
from kernel.contract import MAX_SEQ_LEN, SUPPORTED_HEADS
from kernel.errors import InvalidArgumentError
from kernel.page import blocks_of
from kernel.plan import (
    MAX_LAUNCH_ITEMS,
    MAXIMA_BLOCKS,
    STORE_BLOCKS,
    TILE_ROWS,
    WORK_ITEM_DWORDS,
    PackedPlan,
    PlanCache,
    WorkItem,
    dealt_makespan,
    launches,
    makespan,
    pack_items,
    plan_prefill,
)
from tests.gfx950.scorers import scored
from tests.support.calls import random_call
from tests.support.compare import assert_same_bits, oracle_scores

HEADS = st.sampled_from(SUPPORTED_HEADS)
ALIGNMENTS = st.sampled_from((STORE_BLOCKS, MAXIMA_BLOCKS))
SLOTS = st.integers(1, 600)
XCDS = st.sampled_from((1, 2, 8))


@st.composite
def batches(draw: st.DrawFn) -> tuple[Request, ...]:
    """Ragged batches with requests without queries or keys, in the order of their query rows."""
    lengths = draw(
        st.lists(
            st.tuples(st.sampled_from([0, 1, 3, 127, 128, 129, 400, 700]), st.integers(0, 6000)), max_size=9
        )
    )
    requests, start = [], 0
    for row, (queries, prefix) in enumerate(lengths):
        requests.append(Request(row, start, queries, queries + prefix))
        start += queries
    return tuple(requests)


def planned(
    requests: tuple[Request, ...],
    heads: int,
    slots: int,
    alignment: int = STORE_BLOCKS,
    xcds: int = 8,
    columns: int = 64,
) -> list[WorkItem]:
    return plan_prefill(
        requests,
        heads,
        table_stride=columns,
        score_blocks=columns,
        slots=slots,
        alignment=alignment,
        xcds=xcds,
    )


@given(batches(), HEADS, SLOTS, ALIGNMENTS, XCDS)
def test_every_block_below_nb_of_every_row_is_in_one_item(
    requests: tuple[Request, ...], heads: int, slots: int, alignment: int, xcds: int
) -> None:
    """Each item's tokens lie in one request, at their positions; each pair below nb is covered once."""
    covered: Counter[tuple[int, int]] = Counter()
    for item in planned(requests, heads, slots, alignment, xcds):
        request = requests[item.table_offset // 64]
        first = item.first_token - request.query_start
        assert 0 <= first < first + item.num_tokens <= request.query_len
        assert item.position == request.prefix_len + first
        for token in range(item.first_token, item.first_token + item.num_tokens):
            for block in range(item.first_block, item.end_block):
                covered[token, block] += 1
    for request in requests:
        for query in range(request.query_len):
            num_blocks = (request.prefix_len + query) // 128 + 1
            for block in range(num_blocks):
                assert covered[request.query_start + query, block] == 1
    assert max(covered.values(), default=1) == 1


@given(batches(), HEADS, SLOTS, ALIGNMENTS)
def test_items_are_within_the_kernels_limits(
    requests: tuple[Request, ...], heads: int, slots: int, alignment: int
) -> None:
    """No dead item, none that sees past its tile, segments aligned, tiles of at most 512 rows."""
    for item in planned(requests, heads, slots, alignment):
        assert 1 <= item.num_tokens * heads <= TILE_ROWS
        assert item.first_block % alignment == 0
        last_position = item.position + item.num_tokens - 1
        assert item.first_block < item.end_block <= last_position // 128 + 1
        at_row_end = item.end_block == last_position // 128 + 1
        assert at_row_end or item.end_block % alignment == 0
        assert item.fill_end == (64 if at_row_end else item.end_block)


@given(batches(), HEADS, SLOTS, ALIGNMENTS, XCDS)
def test_items_are_balanced(
    requests: tuple[Request, ...], heads: int, slots: int, alignment: int, xcds: int
) -> None:
    """No item exceeds a slot's share by more than its rounding, so neither does the last slot to finish."""
    items = planned(requests, heads, slots, alignment, xcds)
    if not items:
        return
    costs = [item.cost for item in items]
    tiles = {(item.first_token, item.num_tokens): item for item in items}
    overhead = costs[0] - 4 * (items[0].end_block - items[0].first_block)
    unsplit = sum(
        4 * ((item.position + item.num_tokens - 1) // 128 + 1) + overhead for item in tiles.values()
    )
    assert max(costs) <= unsplit / slots + 4 * alignment + overhead
    assert makespan(costs, slots) <= sum(costs) / slots + max(costs)


def test_a_long_context_fills_the_device_evenly() -> None:
    """8,192 queries of 4 heads on 131,072 keys: 64 tiles are split until 512 slots are busy to the end."""
    items = planned((Request(0, 0, 8192, 131072),), 4, 512, MAXIMA_BLOCKS, columns=1024)
    costs = [item.cost for item in items]
    assert len(items) >= 512
    assert makespan(costs, 512) <= 1.1 * sum(costs) / 512


def test_a_ragged_batch_has_no_more_items_than_it_needs() -> None:
    """1,025 short requests beside one long one: short ones are not split."""
    requests = (*(Request(row, row, 1, 200) for row in range(1024)), Request(1024, 1024, 64, 65536))
    items = plan_prefill(requests, 4, table_stride=512, score_blocks=512, slots=512)
    short = [item for item in items if item.table_offset < 1024 * 512]
    assert len(short) == 1024
    assert max(item.cost for item in items) < 2 * sum(item.cost for item in items) / 512 + 40


def test_heavy_items_come_first_and_tiles_of_one_segment_share_a_die() -> None:
    """Grid position p goes to die p mod 8."""
    items = planned((Request(0, 0, 4096, 131072),), 4, 512, MAXIMA_BLOCKS, columns=1024)
    assert items[0].cost == max(item.cost for item in items)
    assert items[-1].cost <= sum(item.cost for item in items) / len(items)
    dies: dict[int, set[int]] = {}
    for position, item in enumerate(items):
        dies.setdefault(item.first_block, set()).add(position % 8)
    assert sum(len(found) for found in dies.values()) / len(dies) < 2


@given(batches(), HEADS, SLOTS, ALIGNMENTS, XCDS)
def test_plans_are_deterministic(
    requests: tuple[Request, ...], heads: int, slots: int, alignment: int, xcds: int
) -> None:
    assert planned(requests, heads, slots, alignment, xcds) == planned(
        requests, heads, slots, alignment, xcds
    )


def test_requests_without_queries_give_no_items() -> None:
    assert planned((Request(0, 0, 0, 0), Request(1, 0, 0, 900)), 4, 512) == []


def test_launches_are_chunked_within_the_grids_limit() -> None:
    """A launch of 256 threads an item has fewer than 2^32 threads."""
    chunks = list(launches(2 * MAX_LAUNCH_ITEMS + 7))
    assert [len(chunk) for chunk in chunks] == [MAX_LAUNCH_ITEMS, MAX_LAUNCH_ITEMS, 7]
    assert [chunk.start for chunk in chunks] == [0, MAX_LAUNCH_ITEMS, 2 * MAX_LAUNCH_ITEMS]
    assert MAX_LAUNCH_ITEMS * 256 < 2**32
    assert list(launches(0)) == []


def test_items_are_packed_in_the_order_of_their_fields() -> None:
    words = pack_items([WorkItem(1, 2, 3, 4, 5, 6, 7), WorkItem(11, 12, 13, 14, 15, 16, 17)])
    assert words.tolist() == [1, 2, 3, 4, 5, 6, 7, 0, 11, 12, 13, 14, 15, 16, 17, 0]
    assert words.itemsize == 4
    assert len(words) == 2 * WORK_ITEM_DWORDS


@pytest.mark.parametrize(
    ("requests", "table_stride", "score_blocks", "argument"),
    [
        ((Request(0, 2**29, 4, 4),), 8, 8, "total_q * H"),
        ((Request(2**18, 0, 4, 4),), 8192, 8, "block_table.numel()"),
        ((Request(0, 0, 4, 4),), 8, 2**31 - 8, "scores.shape[2]"),
        # A position or a block past what the device counts in 32 bits.
        ((Request(0, 0, 4, 4), Request(1, 4, 4, 2**31)), 8, 8, "requests[1].seq_len"),
        ((Request(0, 0, 4, 2**40),), 2**20, 2**20, "requests[0].seq_len"),
        ((Request(0, 0, 4, 3),), 8, 8, "requests[0].seq_len"),
        ((Request(0, 0, -1, 4),), 8, 8, "requests[0].query_len"),
        ((Request(0, -1, 4, 4),), 8, 8, "requests[0].query_start"),
        ((Request(-1, 0, 4, 4),), 8, 8, "requests[0].table_row"),
        # Blocks past a row of the table, or past the score buffer's columns.
        ((Request(0, 0, 4, 1025),), 8, 9, "table_stride"),
        ((Request(0, 0, 4, 1025),), 9, 8, "score_blocks"),
        ((Request(0, 0, 0, 0),), -1, 8, "table_stride"),
        ((Request(0, 0, 0, 0),), 8, -1, "score_blocks"),
    ],
)
def test_numbers_that_the_device_cannot_hold_are_refused(
    requests: tuple[Request, ...], table_stride: int, score_blocks: int, argument: str
) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        plan_prefill(requests, 4, table_stride=table_stride, score_blocks=score_blocks, slots=512)
    assert refused.value.argument == argument
    assert refused.value.remedy


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"num_heads": 0}, "num_index_heads"),
        ({"num_heads": 3}, "num_index_heads"),
        ({"slots": 0}, "slots"),
        ({"slots": 2.5}, "slots"),
        ({"alignment": 0}, "alignment"),
        ({"alignment": -4}, "alignment"),
        ({"alignment": 6}, "alignment"),
        ({"xcds": 0}, "xcds"),
    ],
)
def test_what_cannot_be_planned_for_is_refused(options: dict[str, Any], argument: str) -> None:
    given = {"num_heads": 4, "table_stride": 8, "score_blocks": 8, "slots": 512} | options
    with pytest.raises(InvalidArgumentError) as refused:
        plan_prefill((Request(0, 0, 4, 4),), **given)
    assert refused.value.argument == argument
    assert f"{argument} = {next(iter(options.values()))}: must be " in str(refused.value)


def test_the_largest_call_fits() -> None:
    """65,536 query tokens of 4 heads at the end of 1,048,576 keys."""
    request = Request(0, 0, 65536, 2**20)
    items = plan_prefill((request,), 4, table_stride=8192, score_blocks=8192, slots=512)
    assert sum(item.num_tokens * (item.end_block - item.first_block) for item in items) == sum(
        128 * blocks_of(request.prefix_len + first + 128) for first in range(0, 65536, 128)
    )


@given(batches(), HEADS, SLOTS)
def test_tiles_are_as_few_as_can_be(requests: tuple[Request, ...], heads: int, slots: int) -> None:
    """Aligning tiles to blocks never adds one."""
    items = planned(requests, heads, slots)
    tiles = {item.first_token for item in items}
    assert len(tiles) == sum(-(-request.query_len * heads // TILE_ROWS) for request in requests)


@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
def test_tiles_start_at_blocks_where_that_is_free(heads: int) -> None:
    """A chunk of a prefill behind a prefix that ends inside a block: only its first tile is unaligned."""
    request = Request(0, 0, 1984, 4992)
    items = planned((request,), heads, 512)
    unaligned = {item.first_token for item in items if item.position % 128}
    assert unaligned == {0}
    assert request.prefix_len % 128 != 0


@pytest.mark.parametrize("queries", [512, 8_192, 16_384, 24_576, 32_768, 49_152, 65_536])
def test_longest_context_is_balanced_over_the_slots_of_each_die(queries: int) -> None:
    """Within 2 % of an even split, also where equal shares would cut the tallest tiles once too often, and
    where all first segments read the same pages."""
    request = Request(0, 0, queries, MAX_SEQ_LEN)
    items = plan_prefill([request], 4, table_stride=8_192, score_blocks=8_192, slots=512)
    costs = [item.cost for item in items]
    assert dealt_makespan(costs, slots=512, xcds=8) <= 1.02 * sum(costs) / 512


# ---- Cached plans are those that planning gives, for every argument, in bounded memory ----

REQUESTS = (Request(0, 0, 300, 5000), Request(1, 300, 7, 700))
OPTIONS: dict[str, Any] = {
    "num_heads": 4,
    "table_stride": 64,
    "score_blocks": 64,
    "slots": 32,
    "alignment": 4,
}


@pytest.fixture
def plan_cache_planned(monkeypatch: pytest.MonkeyPatch) -> list[object]:
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


def test_a_plan_is_made_once(plan_cache_planned: list[object]) -> None:
    cache = PlanCache()
    again = tuple(Request(r.table_row, r.query_start, r.query_len, r.seq_len) for r in REQUESTS)
    first = cache.plan(REQUESTS, **OPTIONS)
    assert cache.plan(again, **OPTIONS) is first
    assert first == expected(REQUESTS, OPTIONS)
    assert len(plan_cache_planned) == 1


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


def test_the_plan_used_longest_ago_goes_first(plan_cache_planned: list[object]) -> None:
    def ask(queries: int) -> None:
        cache.plan((Request(0, 0, queries, queries),), **OPTIONS)

    cache = PlanCache(most=4)  # a plan of one item of one request counts 2
    for queries in (1, 2, 1, 3):
        ask(queries)
    assert len(cache) == 2
    plan_cache_planned.clear()
    ask(1)
    ask(3)
    assert plan_cache_planned == []
    ask(2)
    assert len(plan_cache_planned) == 1


def test_a_plan_that_is_too_large_is_made_and_displaces_nothing() -> None:
    cache = PlanCache(most=3)
    kept = cache.plan((Request(0, 0, 1, 1),), **OPTIONS)
    assert cache.plan(REQUESTS, **OPTIONS) == expected(REQUESTS, OPTIONS)
    assert len(cache) == 1
    assert cache.plan((Request(0, 0, 1, 1),), **OPTIONS) is kept


def test_calls_of_one_shape_are_planned_once(plan_cache_planned: list[object]) -> None:
    """Two layers of a step, on the simulated device: other keys and queries, other buffers, one plan."""
    for seed in (1, 2):
        call = random_call([(203, 131), (519, 3)], 4, seed=seed)
        assert_same_bits(scored(call)[0], oracle_scores(call))
    assert len(plan_cache_planned) == 1


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
