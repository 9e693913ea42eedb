"""Rows whose lists of candidates have a chosen length, and whose best columns lie anywhere in them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.gfx950.topk_rows import GROUP, Float32Array, Row, ended_rows, normal, of_groups


def few_groups(random: np.random.Generator) -> Iterator[Row]:
    """As many groups as half of a wave has lanes, and fewer: all of them are among the best 32."""
    for groups in range(17, 34):
        yield Row(f"{groups} groups", normal(random, GROUP * groups - int(random.integers(GROUP))))


def one_a_lane(random: np.random.Generator, best: int) -> Iterator[Row]:
    """Of as many columns, and of as many groups, as more than half of a wave has lanes, and as are all among
    the best: a list of each length whose candidates are compared one a lane."""
    for num in range(33, best + 1):
        yield Row(f"{num} blocks", normal(random, num))
        yield Row(f"{num} groups of 16 blocks", normal(random, GROUP * num))


def whole_lists(random: np.random.Generator, best: int, slices: int) -> Iterator[Row]:
    """All groups tie and pass, and the better ones lie anywhere among them: of ``64 * slices`` groups, and of
    some fewer."""
    lane = np.arange(64 * slices) % 64
    for at in range(16):
        x = np.full(64 * slices, -50, np.float32)
        cells = np.flatnonzero(np.isin(lane, random.choice(64, best - 1, replace=False)))
        better = random.permutation(cells)[: best - 1 + at]
        x[better] = random.permutation(better.size)
        num = x.size - (at % 2) * int(random.integers(1, 64))
        yield Row(f"{num} groups that tie", of_groups(random, x[:num]))


def every_length(random: np.random.Generator, best: int, slices: int, width: int) -> Iterator[Float32Array]:
    """Cells of which a list takes 1 more, up to as many as it can before it is cut; in no order.

    Few lanes have better cells, a last one the least of those that the bound lets pass.
    """
    own = 1 if best < 64 else 2
    heavy = best // own - 1
    for count in range(heavy * own, min(heavy * slices * width, 64 * own) + 1):
        lanes = random.permutation(64)
        cells = np.arange(64 * width * slices).reshape(slices, 64, width).transpose(1, 0, 2).reshape(64, -1)
        of_lane = [random.permutation(cells[lane]) for lane in lanes[: heavy + own]]
        first = [one[:own] for one in of_lane[:heavy]]
        more = random.permutation(np.concatenate([one[own:] for one in of_lane[:heavy]]))
        chosen = np.concatenate([*first, more[: count - heavy * own]])
        x = np.full(cells.size, -1e6, np.float32)
        x[chosen] = random.permutation(chosen.size) - 500
        x[[one[0] for one in of_lane[heavy:]]] = -1000
        yield x


def uneven_halves(random: np.random.Generator, best: int, width: int) -> Iterator[Float32Array]:
    """Cells whose best are in as many lanes, each number of them in the wave's lower half."""
    half = min(best, 32)
    for low in range(half + 1):
        lanes = [*random.permutation(32)[:low], *(32 + random.permutation(32)[: half - low])]
        if best == 64:
            lanes = [*lanes, *lanes]
        x = np.full(64 * width, -1e6, np.float32)
        for at, lane in enumerate(lanes):
            x[lane * width + (at >= half)] = random.permutation(1000)[0] - at * 1e-3
        x[random.permutation(64 * width)[:2]] += 1
        yield x


def gathered_rows(random: np.random.Generator, best: int) -> Iterator[Row]:
    """Of the best groups as many columns pass as a list takes before it is cut, one more in each row."""
    for count in range(best, 65):
        groups = random.permutation(64)[:best]
        x = np.full(1024, -1e6, np.float32)
        columns = groups * GROUP + random.integers(0, GROUP, best)
        x[columns] = random.permutation(best) - 500
        last = columns[np.argmin(x[columns])]
        others = np.setdiff1d((groups[:, None] * GROUP + np.arange(GROUP)).ravel(), columns)
        others = others[others // GROUP != last // GROUP]
        more = random.permutation(others)[: count - best]
        x[more] = x[last] + 0.5
        yield Row(f"{count} columns of {best} groups", x)


def counted_rows(random: np.random.Generator, best: int) -> Iterator[Row]:
    """As many equal best scores as a wave has lanes, one fewer and one more: lists that are not cut, just not
    cut, and cut. Then rows of many candidates in no order."""
    for count in (63, 64, 65):
        yield Row(f"{count} equal", np.full(count, -1, np.float32))
        x = np.full(500, -9, np.float32)
        groups = random.choice(31, best if best == GROUP else 31, replace=False)
        columns = (groups[:, None] * GROUP + np.arange(GROUP)).ravel()
        x[random.choice(columns, count, replace=False)] = -1
        yield Row(f"{count} equal in groups", x)
    yield Row("64 equal groups", np.full(1024, -1, np.float32))
    for length in (256, 255, 250, 200, 190, 150):
        yield Row(f"normal, {length} blocks", normal(random, length) - 100)


def crowded_rows(random: np.random.Generator, best: int) -> Iterator[Row]:
    """Lists of many lengths up to a wave, and the result's columns anywhere in them: all but one of ``best``
    lanes hold some of the best columns, the last lane the least of all."""
    for columns in (1, 2, 2, 3, 3, 3, *[4] * 10):
        lanes = random.choice(64, best, replace=False)
        places = (4 * lanes[1:, None] + np.arange(columns)).ravel()[: 44 if columns == 3 else None]
        x = np.full(256, -1e6, np.float32)
        x[places] = random.permutation(places.size) - 500
        x[4 * lanes[0]] = -1000
        yield Row(f"{best} lanes of {columns} columns", x)


def tied_rows(random: np.random.Generator, length: int) -> Iterator[Row]:
    """Everything passes, and a few better columns lie anywhere in lists that are cut: of every other row they
    differ, in no order."""
    for at in range(8):
        x = np.full(length, -50, np.float32)
        places = random.choice(length // GROUP, 13, replace=False) * GROUP + random.integers(0, GROUP, 13)
        x[places] = -at if at % 2 else -random.permutation(13)
        yield Row(f"13 above {length} equal ones, {at}", x)


def heavy_rows(random: np.random.Generator, best: int, length: int) -> Iterator[Row]:
    """One lane fewer than ``best`` holds only high scores, so that most of them pass and lists are cut again
    and again; in no order, and rising so that the last are the best."""
    lane = np.arange(length) // 4 % 64
    for at in range(8):
        heavy = np.isin(lane, random.choice(64, best - 1, replace=False))
        x = np.full(length, -1e6, np.float32)
        values = random.permutation(int(heavy.sum())) if at % 2 else np.arange(int(heavy.sum()))
        x[heavy] = values
        yield Row(f"{best - 1} heavy lanes of {length} blocks, {at}", x)


def tied_groups(random: np.random.Generator, best: int) -> Iterator[Float32Array]:
    """Maxima of which as many are equal or better as a list takes before it is cut: any are better, or the
    last are."""
    for count in range(best, 65):
        for late in (False, True):
            x = np.full(64, -1e6, np.float32)
            passing = random.permutation(64)[:count]
            x[passing] = -1
            better = np.sort(passing)[::-1][: best - 1] if late else passing[: random.integers(0, best)]
            x[better] = 5
            yield x


def late_rows(random: np.random.Generator) -> Iterator[Row]:
    """Short rows that pass whole, whose last columns are the best."""
    for num in (72, 80, 104, 128, 136, 152, 168, 192, 200, 216, 232, 256):
        x = np.full(num, -50, np.float32)
        x[-16:] = random.permutation(16)
        yield Row(f"the last 16 of {num} blocks", x)


def fine_rows(random: np.random.Generator, best: int, slices: int | None) -> Iterator[Row]:
    """:func:`every_length` and :func:`uneven_halves`, of the columns of short rows, and of up to ``slices``
    times 64 groups."""
    yield from late_rows(random)
    for x in ended_rows(random, 9 if slices is None else 1, 4):
        yield Row("a row's end", x)
    for x in (*every_length(random, best, 1, 4), *uneven_halves(random, best, 4)):
        yield Row("a short row's columns", x)
    if slices is not None:
        for x in (*tied_groups(random, best), *ended_rows(random, slices, 1)):
            yield Row("tied or ended groups", of_groups(random, x))
        for x in every_length(random, best, min(slices, 4), 1) if slices > 1 else ():
            yield Row("lengths of a list of groups", of_groups(random, x))
        for x in uneven_halves(random, min(best, 32), 1):
            yield Row("groups in uneven halves", of_groups(random, x))
        yield from gathered_rows(random, best)


def crowded_groups(random: np.random.Generator, best: int) -> Iterator[Row]:
    """Of 64 groups the best stand next to each other, wherever, and the others tie for the places left; or
    all differ, and the best of them hold some of the best columns."""
    whole = [(first, 15, 64) for first in (0, 1, 2, 16, 31, 46, 49)]
    for first, better, num in (*whole, (30, 13, 45)):
        x = np.full(1024, -1e6, np.float32)
        groups = np.sort(random.permutation(64)[:num])
        x[groups * GROUP + random.integers(0, GROUP, num)] = -1000
        x[groups[first : first + better] * GROUP] = random.permutation(better) - 500
        yield Row(f"{better} groups above {num - better} equal ones", x)
    for columns in (1, 2, 3, *[4] * 8):
        x = np.full(1024, -2000, np.float32)
        x += normal(random, 1024)
        groups = random.choice(64, best if best < 64 else 60, replace=False)
        places = (groups[:, None] * GROUP + np.arange(columns)).ravel()
        x[places] = random.permutation(places.size) - 500
        yield Row(f"{columns} columns of {groups.size} groups", x)
    for at in range(6):
        yield Row(f"normal, 1024 blocks, {at}", normal(random, 1024))
