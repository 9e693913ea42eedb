"""Rows of scores that are hard to select from: ties, NaN, infinities, ends in every load, chosen lanes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]

INF, NAN = np.float32(np.inf), np.float32(np.nan)
LARGEST = np.float32(3.4028235e38)
GROUP = 16
LENGTHS = (0, 1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 255, 256, 257, 259, 300)


@dataclass(frozen=True)
class Row:
    """Scores ``[num_blocks]`` of one row, and what is special about them."""

    name: str
    scores: Float32Array

    @property
    def maxima(self) -> Float32Array:
        """The greatest score of each 16 blocks, NaN as -inf."""
        groups = -(-self.scores.size // GROUP)
        padded = np.full(groups * GROUP, -INF, np.float32)
        padded[: self.scores.size] = np.where(np.isnan(self.scores), -INF, self.scores)
        found: Float32Array = padded.reshape(groups, GROUP).max(1)
        return found

    def best(self, k: int) -> list[int]:
        """The row's best blocks, -1 behind the last: the contract's sentence, by a stable sort."""
        ordered = np.where(np.isnan(self.scores), -INF, self.scores).astype(np.float64)
        found: list[int] = np.argsort(-ordered, kind="stable")[:k].tolist()
        return found + [-1] * (k - len(found))


def short_rows(random: np.random.Generator) -> Iterator[Row]:
    """Of every length about the edges of loads, lanes and slices."""
    for length in LENGTHS:
        yield Row(f"{length} blocks", normal(random, length))


def special_rows(random: np.random.Generator, length: int) -> Iterator[Row]:
    """Ties and special values; ``length`` is at least 600."""
    full = np.full
    yield Row("normal", normal(random, length))
    yield Row("all equal", full(length, 3.5, np.float32))
    yield Row("40 equal", full(40, -1, np.float32))
    yield Row("all -inf", full(length, -INF))
    yield Row("all NaN", full(length, NAN))
    yield Row("9 NaN", full(9, NAN))
    x = normal(random, length)
    for share, pattern in ((0.3, 0x7FC00000), (0.1, 0xFFC00001), (0.1, 0x7F800001), (0.1, 0xFF812345)):
        x.view(np.uint32)[random.random(length) < share] = pattern
    yield Row("quiet, signalling and negative NaN", x)
    x = full(length, -INF)
    x[random.choice(length, length // 3, replace=False)] = NAN
    x[random.choice(length, 7, replace=False)] = normal(random, 7)
    yield Row("7 finite among NaN and -inf", x)
    yield Row("two values", random.integers(0, 2, length).astype(np.float32))
    yield Row("three values, a tail", random.integers(-1, 2, length - 5).astype(np.float32))
    yield Row("six values", random.integers(0, 6, length).astype(np.float32))
    yield Row("rising", np.arange(length, dtype=np.float32))
    yield Row("falling", -np.arange(length, dtype=np.float32))
    within = np.arange(length)
    for name, period, few in (("few lanes", 64, 3), ("three lanes", 256, 12)):
        x = normal(random, length) * np.float32(0.01)
        x[within % period < few] += within[within % period < few].astype(np.float32)
        yield Row(f"rising in {name}", x)
    x = normal(random, length) * np.float32(0.01)
    x[within % 256 < 40] += (within // 256)[within % 256 < 40].astype(np.float32)
    yield Row("rising steps with ties", x)
    bits = full(length, 100, np.float32).view(np.uint32)
    yield Row("low contrast", (bits + random.integers(0, 40, length).astype(np.uint32)).view(np.float32))
    x = -(bits + random.integers(0, 4000, length).astype(np.uint32)).view(np.float32)
    yield Row("low contrast, negative", x)
    signs = random.integers(0, 2, length).astype(np.uint32) << np.uint32(31)
    patterns = random.integers(0, 200, length).astype(np.uint32) | signs
    yield Row("denormals", patterns.view(np.float32))
    x = np.where(random.random(length) < 0.5, np.float32(0), np.float32(-0.0))
    yield Row("zeros of both signs", x.copy())
    x[random.choice(length, 10, replace=False)] = np.repeat(np.array([1e-45, -1e-45], np.float32), 5)
    yield Row("zeros and denormals", x)
    x = normal(random, length)
    x[[0, length - 1, length // 2]] = 1e30, 1e29, INF
    yield Row("sentinels and +inf", x)
    x = full(length, INF)
    x[: length // 2] = -3
    yield Row("half +inf", x)
    x = full(length, -5, np.float32)
    x[-20:] = 1
    yield Row("the best at the end", x)
    x = full(length, -5, np.float32)
    x[[length - 1, 0, 255, 256, 513]] = 1
    yield Row("few ties above ties", x)
    yield Row("largest and least", random.choice(np.array([LARGEST, -LARGEST, INF, -INF, NAN]), length))
    yield Row(
        "any bits", random.integers(0, 2**32, length, dtype=np.uint64).astype(np.uint32).view(np.float32)
    )


def rows_of_groups(random: np.random.Generator, length: int, best: int) -> Iterator[Row]:
    """The ``best`` scores in as many groups, and the row ends inside a load of four groups: a group behind
    the end must not displace the last of them. The row's last group is among each 16 of the best in turn."""
    lefts = [(left, 0) for left in (40, 20, 7)]
    lefts += [(left, first) for left in (4, 3, 2, 1, 0) for first in range(0, best, GROUP)]
    for left, first in lefts:  # the 0 of a load behind the end would be the best
        num = length - left
        x = np.full(num, -101, np.float32)
        whole = num // GROUP
        groups = random.permutation(whole)[:best]
        if left <= 4:
            place = min(first + int(random.integers(GROUP)), groups.size - 1)
            last = (num - 1) // GROUP
            groups = np.insert(np.setdiff1d(random.permutation(whole)[:best], last)[: best - 1], place, last)
        columns = np.minimum(groups * GROUP + random.integers(0, GROUP, groups.size), num - 1)
        x[columns] = -100 - np.arange(groups.size, dtype=np.float32) / 100
        yield Row(f"{best} groups of {num} blocks", x)


def of_groups(random: np.random.Generator, maxima: Float32Array) -> Float32Array:
    """Scores whose groups have these maxima, anywhere in them."""
    x = np.full(GROUP * maxima.size, -2e6, np.float32)
    x[np.arange(maxima.size) * GROUP + random.integers(0, GROUP, maxima.size)] = maxima
    return x


def ended_rows(random: np.random.Generator, slices: int, width: int) -> Iterator[Float32Array]:
    """Cells that end in each slice at each of a lane's, of even and odd lanes. The last is the best, but for
    the 0 of a load behind the end."""
    for at in range(slices):
        for place in range(2 * width):
            num = 64 * width * at + 2 * width * int(random.integers(1, 32)) + place
            x = -1 - np.abs(normal(random, num))
            x[-1] = -0.5
            yield x


def zero_rows(random: np.random.Generator, length: int) -> Iterator[Row]:
    """Zeros of both signs are equal, and the lower ids of them fill what few better columns leave."""
    for better in (0, 3, 7, 11):
        x = np.copysign(np.zeros(length, np.float32), normal(random, length))
        x[random.permutation(length)[:better]] = 1
        yield Row(f"{better} above zeros, {length} blocks", x)


def whole_chunks(random: np.random.Generator, chunk: int) -> Iterator[Row]:
    """Rows of as many columns as one or two trips of the kernel's loop read, and of one more or fewer."""
    for num in (chunk - 1, chunk, chunk + 1):
        yield Row(f"{num} blocks", normal(random, num))
    x = normal(random, 2 * chunk) - 9
    part = chunk // 8
    x[np.arange(16) * part + random.integers(0, part, 16)] = random.permutation(16)
    yield Row(f"{2 * chunk} blocks, the best in each eighth of a chunk", x)


def spread_rows(random: np.random.Generator, length: int) -> Iterator[Row]:
    """The best columns at every place of a lane's loads."""
    places = random.permutation(min(length, 2048) // 256 * 4)
    for first in range(0, places.size, GROUP):
        x = normal(random, length) - np.float32(9)
        slices, columns = np.divmod(places[first : first + GROUP], 4)
        lanes = random.choice(64, slices.size, replace=False)
        x[slices * 256 + lanes * 4 + columns] = random.permutation(slices.size)
        yield Row(f"spread over {length} blocks, {first}", x)


def network_rows(random: np.random.Generator, best: int, width: int, count: int) -> Iterator[Row]:
    """One fewer, as many, or one more than ``best`` lanes hold a high score, wherever in the wave: what the
    bound's network must tell apart. A lane holds ``width`` neighbouring columns of a load."""
    for at in range(count):
        high = min(best - 1 + at % 3, 64)
        x = np.full(64 * width, -1, np.float32)
        lanes = random.choice(64, high, replace=False)
        values = np.ones(high) if at % 2 else random.permutation(high)
        x[lanes * width + random.integers(0, width, high)] = values.astype(np.float32)
        yield Row(f"{high} lanes of {width} high, {at}", x)


def normal(random: np.random.Generator, length: int) -> Float32Array:
    """Normal scores."""
    return random.standard_normal(length).astype(np.float32)


# ---- Rows whose lists grow past their limit and are cut, in each place of the code that cuts one ----

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


def cut_beside_padding(random: np.random.Generator, best: int) -> Iterator[Row]:
    """Lists that are cut at 200 candidates or a few more: behind their 64 of padding a lane's fifth entry is
    not theirs any more."""
    for at in (_CHUNK_SLICES // 2, _CHUNK_SLICES // 2 + 1):
        x = _among_ties(random, best, 10, 4, at, "anywhere, in part", _limit(best) - 14)
        yield Row(f"list cut in slice {at}, padding behind it", x)


def _among_ties(
    random: np.random.Generator,
    best: int,
    slices: int,
    width: int,
    at: int,
    where: str,
    before: int | None = None,
) -> Float32Array:
    """A slice of ties passes, whole or in part, behind as many of them as do not cut the list yet. One lane
    fewer than ``best`` has better cells: anywhere, in no order and with ties; or among the ties of the slice
    alone; or they are the last of the ties, and fill the list's last eight places."""
    covered, limit = 64 * width, _limit(best)
    x = np.full(slices * covered, -1e6, np.float32)
    passing = covered // 2 + 8 if where == "anywhere, in part" else covered
    ties = at * covered + random.permutation(covered)[:passing]
    if before is None:
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


# ---- Rows whose lists of candidates have a chosen length, and whose best columns lie anywhere in them ----


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
