"""The gfx950 decode scorer, compiled and interpreted, against the oracle: same bits where sums are exact."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernel.backends import flydsl, registry
from kernel.backends.flydsl.geometry import MAX_ROWS, VARIABLE
from kernel.backends.flydsl.launch import DeviceRequests, grid_log2
from kernel.batch import ScoreBatch
from kernel.contract import SUPPORTED_HEADS
from kernel.errors import DeviceUnavailableError, LaunchError
from kernel.gfx950 import SCHEDULES, RaceError, Schedule
from kernel.gfx950.hip import simulated_device
from kernel.gfx950.report.model import resources_of
from tests.gfx950.scorers import (
    HEADS,
    POISON,
    assert_exact,
    decode,
    decode_launcher,
    decoded,
    device_with,
    group_maxima,
    heads_in_turn,
)
from tests.support.calls import (
    COLUMNS,
    CPU,
    ROWS,
    STEPS,
    Call,
    StepBuffers,
    random_call,
    sparse_pages,
    sparse_scores,
    staircase_call,
)
from tests.support.compare import assert_same_bits, assert_within_bounds, oracle_scores

EDGES = (0, 1, 2, 63, 64, 126, 127, 128, 129, 255, 256, 383)
"""Prefixes about the edges of blocks."""
ORDERS = [
    pytest.param(schedule, maxima, marks=() if at % 2 == maxima else pytest.mark.nightly)
    for at, schedule in enumerate(SCHEDULES)
    for maxima in (False, True)
]
"""Orders of waves, by day with and without maxima in turn."""
FORCED = ((0, 0), (1, 1), (3, 2), (0, 3), (2, 0), (1, 2))


@pytest.mark.parametrize(("heads", "forced"), heads_in_turn(FORCED))
def test_scores_equal_the_oracle(heads: int, forced: tuple[int, int]) -> None:
    """Ragged batches on permuted pages, every cell written, sentinels and -inf included."""
    most = MAX_ROWS // heads
    lengths = [(640, most), (0, 0), (2176, 1), (300, 0), (129, 1), (130, min(3, most)), (1, 1)]
    assert_exact(random_call(lengths, heads, seed=heads).forcing(*forced), compute_units=2)


@pytest.mark.parametrize("heads", HEADS)
def test_every_number_of_queries_about_the_edges_of_blocks(heads: int) -> None:
    for queries in range(1, MAX_ROWS // heads + 1):
        edges = EDGES[queries % 3 :: 3]
        call = random_call([(edge + queries, queries) for edge in edges], heads, seed=100 + queries)
        expected = oracle_scores(call)
        assert_same_bits(decoded(call, compute_units=1, maxima=queries % 2 == 0)[0], expected)


@pytest.mark.parametrize(("heads", "first"), heads_in_turn([0, 64]))
def test_the_diagonal_is_exact_at_every_position(heads: int, first: int) -> None:
    """A request for each ``prefix mod 128``; one key too many or too few shows in every row."""
    most = MAX_ROWS // heads
    lengths = [(prefix + 1 + prefix % most, 1 + prefix % most) for prefix in range(first, first + 64)]
    call = staircase_call(lengths, heads)
    scores, _ = decoded(call, compute_units=8)
    positions = torch.cat([torch.arange(seq_len - queries, seq_len) for seq_len, queries in lengths])
    steps = positions[:, None] - 128 * torch.arange(scores.shape[2])
    expected = torch.where(steps >= 0, steps.clamp(max=127).float(), -torch.inf)
    assert_same_bits(scores, expected.expand(heads, -1, -1))


@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
def test_every_scale_byte_is_scored(heads: int) -> None:
    """Any scale byte: zero, NaN, negative, saturating ones."""
    assert_exact(random_call([(400, 2), (1100, 1)], heads, seed=5, values="bytes"), compute_units=1)


@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
def test_inexact_scores_lie_within_the_bound(heads: int) -> None:
    call = random_call([(900, 2), (700, 1)], heads, seed=6, values="inexact").forcing(1, 1)
    assert_within_bounds(decoded(call)[0], call, "exact")


@pytest.mark.parametrize("compute_units", [1, pytest.param(2, marks=pytest.mark.nightly), 8])
def test_scores_and_maxima_depend_on_no_split(compute_units: int) -> None:
    """Waves with whole groups of 16 blocks (few workgroups), workgroups that share one (many), blocks; shares
    that begin and end inside requests."""
    lengths = [(4200, 2), (2047, 1), (2048, 1), (2049, 1), (70, 1)]
    assert_exact(random_call(lengths, 4, seed=8).forcing(1, 0), compute_units=compute_units)


@pytest.mark.parametrize(
    "columns", [3, 16, 17, 70, *(pytest.param(n, marks=pytest.mark.nightly) for n in (4, 8, 13, 130))]
)
def test_rows_are_filled_to_any_width(columns: int) -> None:
    """Cells past nb are -inf in scores and maxima, up to ``S``."""
    assert_exact(random_call([(300, 4), (150, 3), (1, 1)], 4, seed=9), columns=columns)


def test_without_fill_cells_past_a_request_stay_as_they_were() -> None:
    call = random_call([(300, 4), (150, 3)], 4, seed=9)
    scores, maxima = decoded(call, columns=40, maxima=True, fill=False)
    assert maxima is not None
    expected = oracle_scores(call, 40)
    assert_same_bits(scores[:, :4, :3], expected[:, :4, :3])
    assert_same_bits(scores[:, 4:, :2], expected[:, 4:, :2])
    assert bool(scores[:, :, 3:].isnan().all())
    assert bool(scores[:, 4:, 2].isnan().all())
    assert bool(maxima[:, :, 1:].isnan().all())


def test_only_the_rows_of_the_requests_are_written() -> None:
    """A subset of the batch, into a strided view: rows, gaps and other requests keep what they held."""
    call = random_call([(200, 2), (500, 3), (0, 0), (100, 4), (90, 1)], 4, seed=10)
    batch = call.batch()
    storage = torch.full((10, 4, 7), POISON)
    with device_with(2):
        decode(batch.subset(batch.requests[1::2]), storage.permute(1, 0, 2)[:, :, 1:6])
    expected = oracle_scores(call, 5)
    rows = [2, 3, 4, 5, 6, 7, 8]
    assert_same_bits(storage[rows, :, 1:6].permute(1, 0, 2), expected[:, rows])
    untouched = storage.clone()
    untouched[rows, :, 1:6] = POISON
    assert bool(untouched.isnan().all())


@pytest.mark.parametrize(("schedule", "maxima"), ORDERS)
def test_every_order_of_waves_gives_the_same_bytes(schedule: Schedule, maxima: bool) -> None:
    call = random_call([(700, 3), (2500, 1), (64, 1)], 4, seed=11)
    assert_exact(call, schedule=schedule, compute_units=2, with_maxima=[maxima])


@pytest.mark.parametrize("heads", HEADS)
def test_batches_of_more_requests_than_lanes(heads: int) -> None:
    """70 requests; and 300 of which almost all are padding, so that a share spans more than 64."""
    lengths = [(0, 0) if i % 3 else (1 + 37 * i % 300, 1) for i in range(70)]
    call = random_call(lengths, heads, seed=53)
    assert_same_bits(decoded(call, compute_units=2)[0], oracle_scores(call))
    lengths = [(0, 0)] * 300
    lengths[3], lengths[140], lengths[261] = (130, 1), (300, 1), (500, 1)
    assert_exact(random_call(lengths, heads, seed=60), compute_units=1)


def test_pages_may_lie_further_apart_than_their_size() -> None:
    assert_exact(random_call([(600, 4), (100, 1)], 2, seed=12, page_stride=9216 + 48))


def test_page_offsets_beyond_4_gib() -> None:
    """Pages 3 GiB apart: page_id * page_stride passes 2^31 and 2^32."""
    call = random_call([(640, 4)], 4, seed=13)
    stride = 3 << 30
    pages = sparse_pages(call.pages.shape[0], stride, CPU)
    pages[:] = call.pages
    assert int(call.block_table.max()) * stride > 2**32
    assert_same_bits(decoded(replace(call, pages=pages))[0], oracle_scores(call))


def test_score_offsets_beyond_4_gib() -> None:
    """The last rows of a score buffer of 4.1 GiB."""
    call = random_call([(300, 4), (200, 3)], 4, seed=14)
    scores = sparse_scores((4, 33_000, 8192), CPU)[:, -7:]
    with device_with():
        decode(call.batch(), scores[:, :, :3])
    assert_same_bits(scores[:, :, :3], oracle_scores(call))


def test_no_grid_is_larger_than_its_work_or_the_device() -> None:
    assert grid_log2(1, 1, False, 256) == 0
    assert grid_log2(1, 8, False, 256) == 1
    assert grid_log2(32, 1024, True, 256) == 9
    assert grid_log2(1, 8192, True, 256) == 9
    assert grid_log2(1, 64, True, 256) == 2
    assert grid_log2(1025, 8192, False, 304) == 9
    assert grid_log2(1025, 8192, False, 32) == 6


# ---- A decode launch is fit for capture: fixed by shapes and addresses, it serves any lengths ----


class Buffers(StepBuffers):
    """What a step is launched with, its outputs included."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__(calls, CPU)
        self.table_rows = torch.arange(5, dtype=torch.int32)
        self.scores = torch.empty(calls[0].num_heads, ROWS, COLUMNS)
        self.maxima = torch.empty(calls[0].num_heads, ROWS, COLUMNS // 16)

    def write(self, call: Call) -> None:
        """Fill the buffers with a call, in place, and poison the outputs."""
        super().write(call)
        self.scores.fill_(POISON)
        self.maxima.fill_(POISON)

    def launch(self, like: ScoreBatch) -> None:
        """Every step passes the same arguments; only what the buffers hold differs."""
        batch = replace(like.subset([]), q=self.q, pages=self.pages, block_table=self.block_table)
        requests = DeviceRequests(
            self.table_rows, self.cu_seqlens_q[:-1], self.cu_seqlens_q[1:], self.seq_lens
        )
        decode_launcher().launch(batch, requests, self.scores, self.maxima)


@pytest.mark.parametrize("heads", HEADS)
def test_steps_of_any_lengths_are_one_launch(heads: int) -> None:
    """Same grid, same argument bytes, exact scores and maxima in rows of requests and no others."""
    calls = [random_call(lengths, heads, seed=70 + i) for i, lengths in enumerate(STEPS)]
    buffers, like = Buffers(calls), calls[0].batch()
    launches = set()
    with device_with(2):
        for call in [*calls, calls[0]]:
            buffers.write(call)
            buffers.launch(like)
            record = simulated_device().launches[-1]
            launches.add((record.kernel, record.grid, record.block, record.kernargs))
            expected = oracle_scores(call, COLUMNS)
            assert_same_bits(buffers.scores[:, : call.total_q].contiguous(), expected)
            assert_same_bits(buffers.maxima[:, : call.total_q].contiguous(), group_maxima(expected))
            assert bool(buffers.scores[:, call.total_q :].isnan().all())
    assert len(launches) == 1


def test_blocks_of_query_tokens_are_stored() -> None:
    """``nb`` of every query that is scored and of no other; queries past the bound are not."""
    call = random_call([(300, 2), (0, 0), (129, 2), (2000, 2)], 4, seed=79)
    offsets = torch.tensor([0, 4, 4, 8, 12], dtype=torch.int32)
    q = call.q.view(torch.uint8).view(3, 2, 4, 128).repeat(1, 2, 1, 1).view(12, 4, 128)
    batch = replace(call.batch().subset([]), q=q.view(torch.float8_e4m3fn))
    rows = torch.arange(4, dtype=torch.int32)
    requests = DeviceRequests(rows, offsets[:-1], offsets[1:], call.seq_lens)
    expected = torch.full((12,), -7, dtype=torch.int32)
    expected.view(3, 2, 2)[:, 0] = call.batch().num_blocks_per_query().view(3, 2)
    for compute_units, columns in ((1, 16), (4, 40)):
        scores = torch.full((4, 12, columns), POISON)
        num_blocks = torch.full((12,), -7, dtype=torch.int32)
        maxima = torch.full((4, 12, -(-columns // 16)), POISON)
        with device_with(compute_units):
            decode_launcher().launch(
                batch, requests, scores, maxima, fill=False, num_blocks=num_blocks, max_query_len=2
            )
        assert_same_bits(num_blocks, expected)
        assert bool(scores.view(4, 3, 2, 2, columns)[:, :, 1].isnan().all())


# ---- Lengths, offsets and ids that a captured launch cannot refuse: no access is out of bounds ----

LEAST, MOST = -(2**31), 2**31 - 1
HOSTILE_COLUMNS, TOKENS, BATCH = 6, 9, 9


def hostile(heads: int, local_blocks: int) -> tuple[Call, ScoreBatch, DeviceRequests]:
    """A legal call of one query at the end of five blocks, and a batch of it and eight illegal requests."""
    good = random_call([(600, 1)], heads, seed=9).forcing(0, local_blocks)
    random = np.random.default_rng(heads)
    num_pages = good.pages.shape[0]
    ids = np.array([-1, MOST, LEAST, num_pages, 0, 1], np.int32)
    table = torch.from_numpy(random.choice(ids, (BATCH, HOSTILE_COLUMNS - 1)))
    table[0] = good.block_table[0, :5]
    queries = good.q.view(torch.uint8).expand(TOKENS, -1, -1).contiguous().view(torch.float8_e4m3fn)
    # Table row, query start, query end, length: no two have the same query token.
    rows = [
        (0, 0, 1, 600), (1, 1, 2, MOST), (BATCH, 2, 3, -5), (MOST, MOST, LEAST, 100_000), (-1, LEAST, 4, 1),
        (LEAST, 4, 5, 100_000), (6, 7, MOST, 640), (7, 5, 6, 3), (8, 8, 7, 513),
    ]  # fmt: skip
    columns = zip(*rows)
    requests = DeviceRequests(*(torch.tensor(column, dtype=torch.int32) for column in columns))
    good = replace(good, block_table=good.block_table[:, : HOSTILE_COLUMNS - 1])
    return good, replace(good.batch(), q=queries, block_table=table), requests


@pytest.mark.parametrize(
    ("heads", "local_and_maxima"), heads_in_turn(itertools.product((0, 1), (False, True)))
)
def test_nothing_leaves_the_buffers(heads: int, local_and_maxima: tuple[int, bool]) -> None:
    """Whatever the others hold, the legal request's row is exact."""
    local_blocks, wants_maxima = local_and_maxima
    legal, batch, requests = hostile(heads, local_blocks)
    scores = torch.full((heads, TOKENS, HOSTILE_COLUMNS), POISON)
    maxima = torch.full((heads, TOKENS, 1), POISON) if wants_maxima else None
    for compute_units in (1, 4):
        with device_with(compute_units):
            decode_launcher().launch(batch, requests, scores, maxima)
        expected = oracle_scores(legal, HOSTILE_COLUMNS)
        assert_same_bits(scores[:, :1], expected)
        if maxima is not None:
            assert_same_bits(maxima[:, :1], group_maxima(expected))


@pytest.mark.parametrize("seed", range(2))
def test_every_number_may_be_anything(seed: int) -> None:
    """Seeded garbage in all four arrays and the block table. Requests may then claim the same rows, which the
    device tells at the end of a launch as a race of their stores; an access outside ends it at once."""
    _, batch, _ = hostile(4, 0)
    random = np.random.default_rng(seed)
    extremes = np.array([LEAST, LEAST + 1, -200, -1, 0, 1, 5, 9, 16, 129, 1000, MOST - 127, MOST - 1, MOST])
    garbage = random.choice(extremes, (4, 70)).astype(np.int32)
    table = torch.from_numpy(random.choice(extremes, (BATCH, HOSTILE_COLUMNS)).astype(np.int32))
    scores, maxima = torch.full((4, TOKENS, 20), POISON), torch.full((4, TOKENS, 2), POISON)
    requests = DeviceRequests(*torch.from_numpy(garbage))
    with device_with(1):
        try:
            decode_launcher().launch(replace(batch, block_table=table), requests, scores, maxima)
        except LaunchError as error:
            if not isinstance(error.__cause__, RaceError):
                raise


# ---- Pages through LDS by DMA: the same bits, whenever a DMA lands ----


@pytest.mark.parametrize(
    ("heads", "launch"), heads_in_turn([((0, 0), 2, None), ((1, 1), 4, 23), ((2, 1), 1, 18)])
)
def test_staged_scores_equal_the_oracle(heads: int, launch: tuple[tuple[int, int], int, int | None]) -> None:
    """Every number of blocks of a tail, the diagonal, sentinels, shares that end inside requests."""
    forced, compute_units, columns = launch
    most = MAX_ROWS // heads
    lengths = [(640, most), (0, 0), (2176, 1), (129, 1), (1, 1), (512, 1), (384, 1)]
    call = random_call(lengths, heads, seed=heads).forcing(*forced)
    assert_exact(call, compute_units=compute_units, columns=columns, layout="staged")
    record = simulated_device().launches[-1]
    assert record.kernel == f"score_decode_h{heads}_staged"
    has = resources_of(record.report.kernel)
    assert (has.vgpr_spills, has.sgpr_spills, has.scratch_bytes, has.waves_per_simd) == (0, 0, 0, 2)


@pytest.mark.parametrize(("schedule", "maxima"), ORDERS)
def test_every_order_of_waves_and_landing_of_dma_gives_the_same_bytes(
    schedule: Schedule, maxima: bool
) -> None:
    call = random_call([(700, 3), (3500, 1), (64, 1)], 4, seed=11)
    assert_exact(call, schedule=schedule, compute_units=1, layout="staged", with_maxima=[maxima])


def test_every_scale_byte_is_scored_staged() -> None:
    call = random_call([(400, 2), (1100, 1)], 4, seed=5, values="bytes")
    assert_exact(call, compute_units=1, layout="staged")


@pytest.mark.parametrize("compute_units", [*(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 2)), 8])
def test_staged_scores_and_maxima_depend_on_no_split(compute_units: int) -> None:
    lengths = [(4200, 2), (2047, 1), (2049, 1), (70, 1)]
    assert_exact(random_call(lengths, 4, seed=8).forcing(1, 0), compute_units=compute_units, layout="staged")


@pytest.mark.parametrize(
    ("value", "kernel"), [("staged", "_staged"), ("registers", ""), ("", ""), (None, "")]
)
def test_a_setting_chooses(value: str | None, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    call = random_call([(300, 1)], 4)
    scores = torch.full((4, 1, call.batch().num_score_blocks), float("nan"))
    flydsl.create_simulated(None, "exact").score(call.batch(), scores)
    assert simulated_device().launches[-1].kernel == f"score_decode_h4{kernel}"
    assert_same_bits(scores, oracle_scores(call))


def test_a_layout_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "lds")
    status = registry.status("flydsl-sim")
    assert not status.usable
    assert status.reason == (
        f"{VARIABLE}=lds is no layout of the decode scorer; use registers or staged, or unset it"
    )
    with pytest.raises(DeviceUnavailableError, match=f"{VARIABLE}=lds"):
        flydsl.create_simulated(None, "exact")
    assert f"{VARIABLE}=lds" in registry.status("flydsl").reason
