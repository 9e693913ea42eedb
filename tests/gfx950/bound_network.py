"""The networks of top-k's bound in numpy, exchange by exchange, and the lanes that tell if one is missing.

A missing exchange only makes a bound too low, so ids stay right: what it costs is seen in rows chosen for it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tests.gfx950.topk_rows import Row

Lanes = npt.NDArray[np.int64]

_LANE = np.arange(64)
_MIRROR = _LANE ^ 15
_ROTATE_8 = (_LANE & ~15) + (_LANE - 8) % 16
_BEHIND_HALF = _LANE ^ 31
_OTHER_LANES = (1, 2, 3, 6, 7, 12)
"""Numbers of lanes differ in these bits where an exchange takes a wrong one."""
_TRIED = 1000


class Network:
    """Finds what at least ``best`` lanes' keys reach; leaves out exchange number ``missing``, or
    makes it with the lanes of ``instead``."""

    def __init__(self, best: int, missing: int | None = None, instead: Lanes | None = None) -> None:
        self.best, self.missing, self.instead, self.exchanges = best, missing, instead, 0

    def bound(self, keys: Lanes) -> Lanes:
        """Of ``[n, 64, 2]`` keys, each lane's greatest and its second: ``[n]``."""
        greatest, second = keys[..., 0], keys[..., 1]
        if self.best == 16:
            x = self._larger(self._sorted_rows(greatest), 16, _MIRROR)
            x = self._larger(self._merged_rows(x, _ROTATE_8), 32, _MIRROR)
        elif self.best == 32:
            x = self._larger(self._sorted_halves(greatest), 32, _BEHIND_HALF)
        else:
            ascending = ~self._sorted_wave(~second)
            x = np.maximum(self._sorted_wave(greatest), ascending)
        least: Lanes = x[:, : min(self.best, 64)].min(1)
        return least

    def _larger(self, x: Lanes, apart: int, order: Lanes) -> Lanes:
        """The larger of lanes ``apart``, the upper ones taken in another order."""
        low, high = x[:, _LANE & ~apart], x[:, _LANE | apart]
        return np.maximum(low, high[:, order])

    def _sorted_rows(self, x: Lanes) -> Lanes:
        for partner, bit in ((1, 0), (3, 1), (1, 0), (7, 2), (2, 1), (1, 0)):
            x = self._exchange(x, x[:, _LANE ^ partner], bit)
        return self._merged_rows(x, _MIRROR)

    def _merged_rows(self, x: Lanes, first: Lanes) -> Lanes:
        for partner, bit in ((first, 3), (_LANE ^ 4, 2), (_LANE ^ 2, 1), (_LANE ^ 1, 0)):
            x = self._exchange(x, x[:, partner], bit)
        return x

    def _sorted_halves(self, x: Lanes) -> Lanes:
        x = self._sorted_rows(x)
        low, high = x[:, _LANE & ~16], x[:, (_LANE | 16) ^ 15]
        x = self._exchange(low, high, 4, x)
        return self._merged_rows(x, _ROTATE_8)

    def _sorted_wave(self, x: Lanes) -> Lanes:
        x = self._sorted_halves(x)
        low, high = x[:, _LANE & ~32], x[:, (_LANE | 32) ^ 31]
        x = self._exchange(low, high, 5, x)
        x = self._exchange(x[:, _LANE & ~16], x[:, _LANE | 16], 4, x)
        return self._merged_rows(x, _ROTATE_8)

    def _exchange(self, x: Lanes, partner: Lanes, bit: int, untouched: Lanes | None = None) -> Lanes:
        self.exchanges += 1
        if self.exchanges - 1 == self.missing:
            if self.instead is None or untouched is not None:
                return x if untouched is None else untouched
            partner = x[:, self.instead]
        return np.where(_LANE >> bit & 1, np.minimum(x, partner), np.maximum(x, partner))


def exact(keys: Lanes, best: int) -> Lanes:
    """What a network should find."""
    flat = keys[..., 0] if best < 64 else keys.reshape(len(keys), -1)
    found: Lanes = np.sort(flat, 1)[:, -best]
    return found


def random_keys(random: np.random.Generator, best: int, high: int, count: int) -> Lanes:
    """``[count, 64, 2]`` keys of 0 and 1, of which ``high`` lanes' (or, of 64, keys) are 1."""
    keys = np.zeros((count, 64, 2), np.int64)
    for one in keys:
        if best < 64:
            one[random.choice(64, high, replace=False), 0] = 1
        else:
            twice = int(random.integers(max(high - 64, 0), high // 2 + 1))
            lanes = random.permutation(64)
            one[lanes[: high - twice], 0] = 1
            one[lanes[:twice], 1] = 1
    return keys


def telling_keys(best: int, seed: int = 0) -> Iterator[npt.NDArray[np.int64]]:
    """For each exchange, keys ``[64]`` (how many of a lane's are high) whose bound is another without it, or
    with other lanes than its own."""
    keys = random_keys(np.random.default_rng(seed), best, best, _TRIED)
    whole = Network(best)
    right = whole.bound(keys)
    found: set[int] = set()
    for missing in range(whole.exchanges):
        for instead in (None, *(_LANE ^ other for other in _OTHER_LANES)):
            wrong = np.flatnonzero(Network(best, missing, instead).bound(keys) != right)
            if wrong.size and not found & set(wrong.tolist()):
                found.add(int(wrong[0]))
    yield from (keys[at].sum(1) for at in sorted(found))


def telling_rows(best: int, grouped: bool) -> Iterator[Row]:
    """Rows with such keys where a lane holds columns: in the only load of a short row; of a longer one in its
    first load, or in groups."""
    for at, counts in enumerate(telling_keys(best)):
        high = [4 * lane + j for lane in range(64) for j in range(counts[lane])]
        places = [(high, 256), (high, 300)]
        if grouped:
            groups = [lane + 64 * j for lane in range(64) for j in range(counts[lane])]
            places[1] = ([16 * group + at % 16 for group in groups], 2048 if best == 64 else 1024)
        for columns, length in places:
            x = np.full(length, -1, np.float32)
            x[columns] = 5
            yield Row(f"telling lanes {at} of {length} columns", x)
