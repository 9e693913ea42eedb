"""Rows whose lists grow past their limit and are cut, in each place of the code that cuts one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from tests.gfx950.topk_rows import GROUP, Float32Array, Row, of_groups

_CHUNK_SLICES = 8
_TIE = -50
"""What the bound lets pass at the least: fewer lanes than there are results have better cells."""


def cut_cells(random: np.random.Generator, best: int, slices: int, width: int) -> Iterator[Float32Array]:
    """Cells whose list is cut in each slice of ``64 * width`` that may bring it past its limit, also in the
    first of the next chunk, and again in the next ones."""
    first = _limit(best) // (64 * width)
    for at in range(first, min(slices, first + _CHUNK_SLICES + 1)):
        yield from _cut_in(random, best, slices, width, at, range(1, _limit(best) // 64 + width))


def cut_short(random: np.random.Generator, best: int) -> Iterator[Row]:
    """Rows of one slice, whose lists are cut at the end."""
    for at, x in enumerate(_cut_in(random, best, 1, 4, 0, range(1, 4))):
        yield Row(f"list that is cut at the end, {at}", x)


def _cut_in(
    random: np.random.Generator, best: int, slices: int, width: int, at: int, slots: Iterable[int]
) -> Iterator[Float32Array]:
    """Cells whose list is cut behind slice ``at``, of so many times 64 candidates."""
    # A list of the best 64 has most places, and each lane's own one of each is compared in code of its own.
    for where in ("anywhere", "anywhere, in part", "last", *["among"] * (12 if best == 64 else 4)):
        yield _among_ties(random, best, slices, width, at, where)
    enough = _better_lanes(best) * width * (at + 1) >= best + 8
    for slot in slots if enough else ():
        yield _many_better(random, best, slices, width, at, slot)
    if (at + 1) * 64 * width > _limit(best):
        for _ in range(2):
            yield _just_too_long(random, best, slices, width, at)


def _among_ties(
    random: np.random.Generator, best: int, slices: int, width: int, at: int, where: str
) -> Float32Array:
    """A slice of ties passes, whole or in part, behind as many of them as do not cut the list yet. One lane
    fewer than ``best`` has better cells: anywhere, in no order and with ties; or among the ties of the slice
    alone; or they are the last of the ties, and fill the list's last eight places."""
    covered, limit = 64 * width, _limit(best)
    x = np.full(slices * covered, -1e6, np.float32)
    passing = covered // 2 + 8 if where == "anywhere, in part" else covered
    ties = at * covered + random.permutation(covered)[:passing]
    before = int(random.integers(max(limit + 1 - passing, 0), limit - 9))
    if where == "last":
        before += -(before + passing) % 8
    x[[*random.permutation(at * covered)[:before], *ties]] = _TIE
    better = _cells_of_lanes(random, _better_lanes(best), slices, width)
    if where == "last":
        better = np.sort(ties)[-max(4 * width, 12) :]
    elif where == "among":
        better = random.permutation(better[better // covered == at])[: best - 1]
    else:
        early = better[better < (at + 1) * covered]
        better = np.concatenate([random.permutation(early)[: best - 1], better[early.size :]])
    x[better] = random.integers(0, 40, better.size) if at % 2 else random.permutation(better.size)
    return x


def _many_better(
    random: np.random.Generator, best: int, slices: int, width: int, at: int, slot: int
) -> Float32Array:
    """More than ``best`` better cells up to a slice of ties; the best is the first of the list's 64 from
    ``64 slot`` on, and the first that is left out another of them. Behind the slice are cells as good as the
    last of the best, which must not pass, and some that are the next number above it, and must."""
    covered, first = 64 * width, 0
    most = _limit(best) - 9 - (best + 8)
    before = int(random.integers(2, most)) if slot < width else most
    if at >= _CHUNK_SLICES and width > 1:  # see _just_too_long; the better ones are of the slice alone
        before, first = _limit(best) - 2, at * covered
    x = np.full(slices * covered, -1e6, np.float32)
    x[[*random.permutation(at * covered)[:before], *range(at * covered, (at + 1) * covered)]] = _TIE
    of_lanes = _cells_of_lanes(random, _better_lanes(best), slices, width)
    early = of_lanes[(of_lanes >= first) & (of_lanes < (at + 1) * covered)]
    better = random.permutation(early)[: best + 8]
    x[better] = _TIE
    held = int((x[: at * covered] == _TIE).sum())
    # Some ties more, so that one of the lanes' cells is the first of its 64.
    missing = int((-(held + of_lanes // width) % 64).min())
    if at and missing < 9:
        x[random.permutation(np.flatnonzero(x[: at * covered] < _TIE))[:missing]] = _TIE
        held += missing
    here = early[early >= at * covered]
    places = held + here % width * 64 + here // width % 64
    fitting = here[np.argsort(places)][np.sort(places) // 64 == slot]
    fitting = [*fitting[:1], *random.permutation(fitting[1:])[:1]]
    others = random.permutation(np.setdiff1d(better, fitting))
    order = [*fitting[:1], *others[: best - 1], *fitting[1:], *others[best - 1 :]]
    x[order] = 10 + np.arange(len(order))[::-1]
    last = x[order[best - 1]]
    later = of_lanes[of_lanes >= (at + 1) * covered]
    x[later] = last
    x[random.permutation(later)[:2]] = np.nextafter(last, np.float32(np.inf))
    return x


def _just_too_long(random: np.random.Generator, best: int, slices: int, width: int, at: int) -> Float32Array:
    """A list that a slice brings to one more than its limit, the results anywhere in it."""
    covered, length = 64 * width, _limit(best) + 1
    # Before a chunk's first slice the bound is that of what the chunks before hold: nearly all of the ties.
    most = 5 if at >= _CHUNK_SLICES else min(length, covered)
    here = int(random.integers(max(length - at * covered, 1), most + 1))
    cells = [
        *random.permutation(at * covered)[: length - here],
        *(at * covered + random.permutation(covered)[:here]),
    ]
    x = np.full(slices * covered, -1e6, np.float32)
    x[cells] = _TIE
    x[random.permutation(cells)[: best - 1]] = random.permutation(best - 1)
    return x


def _cells_of_lanes(
    random: np.random.Generator, lanes: int, slices: int, width: int
) -> npt.NDArray[np.int64]:
    """All cells of so many lanes, in order."""
    chosen = random.choice(64, lanes, replace=False)
    return np.flatnonzero(np.isin(np.arange(64 * width * slices) // width % 64, chosen))


def _better_lanes(best: int) -> int:
    """Lanes that may have better cells than ties without the bound becoming better: of each one cell counts,
    or two."""
    return best - 1 if best < 64 else 31


def _limit(best: int) -> int:
    """Length past which a list is cut."""
    return 64 if best < 64 else 128


def cut_scores(random: np.random.Generator, best: int) -> Iterator[Row]:
    """:func:`cut_cells` of a chunk of 2,048 columns and two slices of the next."""
    for at, x in enumerate(cut_cells(random, best, 10, 4)):
        yield Row(f"list that is cut, {at}", x)


def cut_groups(random: np.random.Generator, best: int, slices: int) -> Iterator[Row]:
    """:func:`cut_cells` as the maxima of groups."""
    for at, maxima in enumerate(cut_cells(random, best, slices, 1)):
        yield Row(f"list of groups that is cut, {at}", of_groups(random, maxima))


def cut_columns(random: np.random.Generator, best: int) -> Iterator[Row]:
    """Of 16 of the best groups all columns pass, of the others few: lists that are cut behind each 16 groups,
    or just not."""
    for first in range(0, best, GROUP):
        passing = random.integers(1, 4, best)
        passing[first : first + GROUP] = GROUP
        for levels in (1, 3, *[1000] * 5):  # among ties are lower and higher ids
            yield Row(f"columns cut behind group {first}", _of_groups(random, passing, levels)[0])
        for slot in range(1, _limit(best) // 64 + 4):
            yield Row(f"columns cut behind group {first}", _left_out(random, passing, first, slot))
        for length in (_limit(best), _limit(best) + 1):
            passing = np.ones(best, np.int64)
            for _ in range(length - first - GROUP):
                passing[random.choice(np.flatnonzero(passing[: first + GROUP] < GROUP))] += 1
            x, of_group = _of_groups(random, passing, 1000)
            yield Row(f"{length} columns behind group {first}", x)
            yield Row(f"{length} columns behind group {first}", _last_kept(x, of_group, first))


def _of_groups(
    random: np.random.Generator, passing: npt.NDArray[np.int64], levels: int
) -> tuple[Float32Array, list[npt.NDArray[np.int64]]]:
    """Scores, and of each of the best groups by place the columns that pass: as good as the last group's
    maximum, which is their bound, or better. The first of them is the group's maximum."""
    best = passing.size
    x = np.full(1024, -1e6, np.float32)
    of_group = []
    for place, (group, count) in enumerate(zip(random.permutation(64)[:best], passing, strict=True)):
        columns = group * GROUP + random.permutation(GROUP)[:count]
        x[columns] = random.integers(0, levels, count)
        x[columns[0]] = levels + best - place
        of_group.append(columns)
    x[of_group[-1]] = -1
    return x, of_group


def _last_kept(x: Float32Array, of_group: list[npt.NDArray[np.int64]], first: int) -> Float32Array:
    """:func:`_of_groups` where the last of the list is among the best."""
    listed = [
        (column % 4, at, column)
        for at, columns in enumerate(of_group[first : first + GROUP])
        for column in np.sort(columns)
        if columns is not of_group[-1]
    ]
    last = max(listed)[-1]
    x = x.copy()
    x[last] = max(x[last], 999.5)
    return x


def _left_out(
    random: np.random.Generator, passing: npt.NDArray[np.int64], first: int, slot: int
) -> Float32Array:
    """:func:`_of_groups` where the first column that is left out is among the list's 64 from ``64 slot``
    on."""
    x, of_group = _of_groups(random, passing, 1000)
    before = int(passing[:first].sum())
    places = [
        (before + column % 4 * 64 + 4 * at + column % GROUP // 4, column)
        for at, columns in enumerate(of_group[first : first + GROUP])
        for column in columns[1:]
        if columns is not of_group[-1]
    ]
    fitting = [column for place, column in places if place // 64 == slot]
    others = [column for place, column in places if place // 64 != slot]
    if fitting and others:
        x[[random.choice(others), random.choice(fitting)]] = 999.75, 999.5
    return x
