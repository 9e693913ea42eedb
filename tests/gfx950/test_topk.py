"""The gfx950 top-k kernels, compiled and interpreted: the contract's ids, whatever the scores."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest

from kernel.backends.flydsl.geometry import CLASSES, VARIANTS, Variant, variant_for
from kernel.gfx950 import SCHEDULES, RunReport, Schedule
from tests.gfx950 import compiled
from tests.gfx950.row_launches import Network, TopkLaunch, exact, random_keys, telling_keys, telling_rows
from tests.gfx950.topk_rows import (
    Row,
    counted_rows,
    crowded_groups,
    crowded_rows,
    network_rows,
    rows_of_groups,
    short_rows,
    special_rows,
)

BY_NAME = {variant.name: variant for variant in VARIANTS}
PART = 48
"""Rows of a launch: several workgroups."""


def length_of(variant: Variant) -> int:
    """Rows that go through every loop: two chunks where the kernel takes chunks of scores."""
    return 2100 if variant.most_groups is None else 800


def most_blocks(variant: Variant) -> int:
    """The longest rows that are tried: of kernels for any length some more than two chunks."""
    if variant.most_groups is None:
        return 8192
    return 16 * variant.most_groups or 17_000


def launches(variant: Variant, rows: Iterator[Row], k: int, ascending: bool = False) -> Iterator[TopkLaunch]:
    """Rows of one head each, a part at a time."""
    while part := list(islice(rows, PART)):
        yield TopkLaunch(part[0].name, variant, [part], k, ascending)


def hard_rows(
    variant: Variant, length: int, seed: int, networks: int, special: int | None = None
) -> Iterator[Row]:
    """``networks`` rows for the bound's network, the first ``special`` rows of ties and special values."""
    random = np.random.default_rng(seed)
    yield from short_rows(random)
    yield from islice(special_rows(random, length), special)
    yield from rows_of_groups(random, length, variant.best)
    yield from counted_rows(random, variant.best)
    yield from crowded_rows(random, variant.best)
    yield from crowded_groups(random, variant.best)
    yield from telling_rows(variant.best, variant.most_groups is not None)
    for width in (4, 16):
        if 64 * width <= most_blocks(variant):
            yield from network_rows(random, variant.best, width, networks)


EVERY_COMMIT = ("topk_scan_k16", "topk_group_k32", "topk_group_k16_b1024")
"""Of the other kernels the hard rows are nightly; the contract runs k = 64, other tests here the rest."""


@pytest.fixture(params=BY_NAME)
def variant(request: pytest.FixtureRequest) -> Variant:
    name: str = request.param
    return BY_NAME[name]


@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=() if name in EVERY_COMMIT else pytest.mark.nightly) for name in BY_NAME],
    indirect=True,
)
def test_hard_rows(variant: Variant) -> None:
    """Nothing outside the cells below nb is read, nothing outside the row's ids written."""
    special = None if variant.best == 16 else 9  # of the others the rest is nightly
    rows = hard_rows(variant, length_of(variant), 1, 3, special)
    for launch in launches(variant, rows, variant.best):
        launch.run(compiled.kernel(variant.name))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
def test_hard_rows_of_every_length(variant: Variant, seed: int) -> None:
    """The longest rows, other seeds, more places of high lanes."""
    length = most_blocks(variant) - 7 * seed
    for ascending in (False, True):
        rows = hard_rows(variant, length, 10 + seed, 48)
        for launch in launches(variant, rows, variant.best - seed, ascending=ascending):
            launch.run(compiled.kernel(variant.name))


@pytest.mark.parametrize(
    "best", [CLASSES[0], *(pytest.param(best, marks=pytest.mark.nightly) for best in CLASSES[1:])]
)
def test_rows_longer_than_a_chunk_of_groups(best: int) -> None:
    """More than 8,192 blocks: the second chunk holds the best, ties with the first one, or nothing."""
    random = np.random.default_rng(2)
    variant = Variant(best, 0)
    ties = random.integers(0, 3, 8500).astype(np.float32)
    late = np.arange(8193, dtype=np.float32)
    rows = [Row("ties", ties), Row("rising", late), Row("falling", -late)]
    rows.append(Row("normal", random.standard_normal(16_500).astype(np.float32)))
    TopkLaunch("long", variant, [rows], best).run(compiled.kernel(variant.name))


@pytest.mark.parametrize("k", [1, 17, *(pytest.param(k, marks=pytest.mark.nightly) for k in (15, 33))])
def test_fewer_ids_than_the_class(k: int) -> None:
    """Any k of a class gets the first k, by score or by block, from scores and from maxima."""
    random = np.random.default_rng(k)
    rows = [*short_rows(random), *islice(special_rows(random, 600), 8)]
    for grouped in (False, True):
        variant = variant_for(k, 700, grouped)
        ascending = grouped == (k == 15)
        TopkLaunch("fewer", variant, [rows], k, ascending).run(compiled.kernel(variant.name))


def test_heads_and_tokens_have_their_places() -> None:
    """Heads by the grid's second dimension; a last wave with fewer rows than it could take."""
    random = np.random.default_rng(3)
    for variant in (Variant(16), Variant(16, 64)):
        lengths = random.integers(0, 600, 19)
        rows = [
            [
                Row(f"{head} {at}", random.standard_normal(num).astype(np.float32))
                for at, num in enumerate(lengths)
            ]
            for head in range(4)
        ]
        TopkLaunch("heads", variant, rows, 16).run(compiled.kernel(variant.name))


def test_a_length_outside_the_row_is_not_believed() -> None:
    """More than S counts as S, less than 0 as 0: nothing is read out of bounds."""
    random = np.random.default_rng(4)
    full, none = (
        Row("full", random.standard_normal(333).astype(np.float32)),
        Row("none", np.zeros(0, np.float32)),
    )
    for variant in (Variant(16), Variant(16, 64)):
        lengths = (334, 2**31 - 1, -1, -(2**31))
        launch = TopkLaunch("lengths", variant, [[full, full, none, none]], 16, columns=333, lengths=lengths)
        launch.run(compiled.kernel(variant.name))


ORDERED = (Variant(16), Variant(16, 64), Variant(64, 0))


@pytest.mark.parametrize(
    ("variant", "schedule"),
    [
        pytest.param(
            variant,
            schedule,
            marks=() if turn % len(ORDERED) == at else pytest.mark.nightly,
            id=f"{variant.name}-{turn}",
        )
        for at, variant in enumerate(ORDERED)
        for turn, schedule in enumerate(SCHEDULES)
    ],
)
def test_every_order_of_waves_gives_the_same_ids(variant: Variant, schedule: Schedule) -> None:
    random = np.random.default_rng(5)
    rows = [*islice(special_rows(random, 700), 12)]
    TopkLaunch("orders", variant, [rows], 9).under(schedule).run(compiled.kernel(variant.name))


def test_a_call_takes_the_kernel_that_fits() -> None:
    """The smallest class of k and, for maxima, the smallest that holds the longest row's groups."""
    assert [variant_for(k, 9, False).best for k in (1, 16, 17, 32, 33, 64)] == [16, 16, 32, 32, 64, 64]
    lengths = (0, 1024, 1025, 2048, 4096, 4097, 8192, 8193, 1 << 25)
    groups = [variant_for(16, length, True).most_groups for length in lengths]
    assert groups == [64, 64, 128, 128, 256, 512, 512, 0, 0]
    assert variant_for(17, 100, True).most_groups == 0
    assert len(BY_NAME) == len(VARIANTS)


# ---- The bound's networks: exact, and the chosen rows tell of every exchange that could be missing ----


@pytest.mark.parametrize("best", CLASSES)
def test_a_network_finds_the_bound_exactly(best: int) -> None:
    """Of 0 and 1, which suffices for a network, and of random keys."""
    random = np.random.default_rng(best)
    for high in (best - 1, best, min(best + 1, 64)):
        keys = random_keys(random, best, high, 1000)
        np.testing.assert_array_equal(Network(best).bound(keys), exact(keys, best))
    keys = np.sort(random.integers(-200, 200, (2000, 64, 2)).astype(np.int16))[..., ::-1]
    np.testing.assert_array_equal(Network(best).bound(keys), exact(keys, best))


@pytest.mark.parametrize("best", CLASSES)
def test_a_missing_exchange_is_too_low_and_told(best: int) -> None:
    """Never too high, which would lose a column; each of them is told by one of the chosen keys."""
    random = np.random.default_rng(best)
    keys = np.sort(random.integers(-200, 200, (100, 64, 2)).astype(np.int16))[..., ::-1]
    whole = Network(best)
    chosen = np.stack([np.stack([counts > 0, counts > 1], -1) for counts in telling_keys(best)]).astype(
        np.int16
    )
    every = np.concatenate([chosen, keys])
    right = whole.bound(every)
    assert (right[: len(chosen)] == 1).all()
    for missing in range(whole.exchanges):
        bound = Network(best, missing).bound(every)
        assert (bound <= right).all()
        assert (bound[: len(chosen)] < 1).any(), f"exchange {missing} of {whole.exchanges}"


# ---- What a row takes of the top-k kernels: the bound lets pass exactly the columns that it is due to ----


def compares(report: RunReport) -> int:
    """Comparisons of candidates, whole waves."""
    return sum(num for name, num in report.by_mnemonic().items() if name in ("v_cmp_gt_i64", "v_cmp_lt_i64"))


def due(row: Row, best: int) -> int:
    """Of a row of 256 columns, four neighbours a lane, of which at most 64 pass: 16 candidates unasked, then
    four at a time; half of them where both halves of the wave share the work."""
    lanes = np.sort(row.scores.reshape(64, 4), 1)[:, ::-1]
    bound = np.sort(lanes[:, : 1 if best < 64 else 2].ravel())[-best]
    passing = int((row.scores >= bound).sum())
    assert best <= passing <= 64
    compared = 16 + 4 * -(-max(passing - 16, 0) // 4)
    return compared // 2 if passing <= 32 else compared


@pytest.mark.parametrize("variant", [Variant(16), Variant(16, 64), Variant(32)], ids=lambda v: str(v.name))
def test_the_bound_lets_pass_what_it_is_due_to(variant: Variant) -> None:
    """Rows chosen to tell of each exchange of the network, and random ones."""
    random = np.random.default_rng(1)
    rows = [row for row in telling_rows(variant.best, False) if row.scores.size == 256]
    rows += [Row("normal", random.standard_normal(256).astype(np.float32)) for _ in range(4)]
    report = TopkLaunch("due", variant, [rows], variant.best).run(compiled.kernel(variant.name))
    assert compares(report) == sum(due(row, variant.best) for row in rows)
