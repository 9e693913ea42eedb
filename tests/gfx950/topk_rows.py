"""Rows of scores that are hard to select from: ties, NaN, infinities, ends in every load, chosen lanes."""

from __future__ import annotations

from collections.abc import Iterator
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
