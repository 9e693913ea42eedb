"""Single launches of a top-k kernel's assembly, without FlyDSL's launcher: every cell that it may touch is
known, and nothing else is registered."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernel.backends.flydsl.geometry import THREADS, WAVES, KeyType, Variant
from kernel.backends.reference.quantizer import E4M3_MAGNITUDES
from kernel.gfx950 import Kernel, Memory, Program, RunOptions, RunReport, Schedule, run
from tests.gfx950.topk_rows import Row
from tests.support.compare import oracle_inserted

UNWRITTEN = -7
_TOKEN_STRIDE, _HEAD_STRIDE = (1 << 30) + 5, (1 << 40) + (1 << 31) + 3
"""Cells: offsets of rows need 64 bits, and rows begin at any multiple of 4 bytes."""
_WAVE_INSTRUCTIONS = 200_000
"""Far more than the rows of a wave take."""


class WrongIdsError(Exception):
    """The kernel ended, and its ids are not the contract's."""


@dataclass(frozen=True)
class TopkLaunch:
    """Rows ``[heads][tokens]`` and how they are selected.

    ``columns`` is S, that of the longest row if None; ``lengths`` replaces what the kernel is told of tokens.
    """

    name: str
    variant: Variant
    rows: Sequence[Sequence[Row]]
    k: int
    ascending: bool = False
    schedule: Schedule = Schedule()  # noqa: RUF009  frozen
    columns: int | None = None
    lengths: Sequence[int] | None = None

    @cached_property
    def expected(self) -> npt.NDArray[np.int32]:
        """Ids ``[heads, tokens, k]``."""
        found = [[row.best(self.k) for row in head] for head in self.rows]
        if self.ascending:
            found = [[_ascending(ids) for ids in head] for head in found]
        return np.array(found, np.int32).reshape(len(self.rows), -1, self.k)

    def under(self, schedule: Schedule) -> TopkLaunch:
        """The same launch in another order."""
        return replace(self, schedule=schedule)

    def run(self, kernel: Kernel) -> RunReport:
        """Raises an InterpreterError for what the kernel does wrong, WrongIdsError for what it writes."""
        heads, tokens = len(self.rows), len(self.rows[0])
        grouped = self.variant.most_groups is not None
        longest = max(row.scores.size for head in self.rows for row in head)
        lengths = self.lengths or [row.scores.size for row in self.rows[0]]
        num_blocks = np.array(lengths, np.int32)
        ids = np.full((heads, tokens, self.k), UNWRITTEN, np.int32)
        memory = Memory()
        # all 48 bits of an address, rows before and behind a multiple of 4 GiB
        scores_at, maxima_at, ids_at = ((place << 40) - 4 for place in (0x85, 0xA5, 0xC5))
        for head, rows in enumerate(self.rows):
            for token, row in enumerate(rows):
                at, name = head * _HEAD_STRIDE + token * _TOKEN_STRIDE, f"head {head}, token {token}"
                if row.scores.size:
                    _read_only(memory, row.scores, f"scores of {name}", scores_at + 4 * at)
                if row.scores.size and grouped:
                    _read_only(memory, row.maxima, f"maxima of {name}", maxima_at + 4 * at)
                memory.register_array(ids[head, token], f"ids of {name}", address=ids_at + 4 * at)
        lengths_at = (5 << 40) - 8
        _read_only(memory, num_blocks, "num_blocks", lengths_at)
        strides = (_HEAD_STRIDE, _TOKEN_STRIDE)
        kernargs = struct.pack(
            "<10q4i",
            scores_at,
            *strides,
            maxima_at if grouped else 0,
            *strides,
            lengths_at,
            ids_at,
            *strides,
            longest if self.columns is None else self.columns,
            tokens,
            self.k,
            self.ascending,
        )
        report = run(
            Program({kernel.name: kernel}),
            kernel.name,
            grid=(-(-tokens // (WAVES * self.variant.rows_per_wave)), heads, 1),
            block=(THREADS, 1, 1),
            kernargs=kernargs,
            memory=memory,
            schedule=self.schedule,
            options=RunOptions(wave_instruction_limit=_WAVE_INSTRUCTIONS),
        )
        self._compare(ids)
        return report

    def _compare(self, ids: npt.NDArray[np.int32]) -> None:
        wrong = np.argwhere((ids != self.expected).any(-1))
        if wrong.size:
            head, token = map(int, wrong[0])
            raise WrongIdsError(
                f"{len(wrong)} rows are wrong, the first {self.rows[head][token].name!r}: "
                f"{ids[head, token].tolist()} instead of {self.expected[head, token].tolist()}"
            )


def _ascending(ids: list[int]) -> list[int]:
    return sorted(one for one in ids if one >= 0) + [-1] * ids.count(-1)


def _read_only(memory: Memory, array: npt.NDArray[np.generic], name: str, address: int) -> None:
    memory.register_array(array, name, writable=False, address=address)


# Single launches of an insert kernel's assembly, without FlyDSL's launcher: every byte of the pages is
# compared, and nothing around them may be touched.

BEFORE = 0xA5
"""What every byte of the pages holds before."""
_PAGE_STRIDE = (5 << 30) + 48
"""Bytes: each page is a region of its own, and page offsets need 64 bits."""
_KEY_STRIDE = (5 << 30) + 16
"""Bytes: so is each key."""
_THREADS, _KEYS_A_WORKGROUP = 256, 32


class WrongPagesError(Exception):
    """The kernel ended, and the pages are not those of the oracle."""


@dataclass(frozen=True)
class InsertLaunch:
    """Keys ``[n, 128]`` to ``slots`` of ``num_pages`` pages; slots outside them are skipped."""

    name: str
    key_type: KeyType
    keys: torch.Tensor
    slots: torch.Tensor
    num_pages: int
    schedule: Schedule = Schedule()  # noqa: RUF009  frozen

    @cached_property
    def expected(self) -> torch.Tensor:
        """The pages afterwards, ``[num_pages, 9216]``."""
        pages = torch.full((self.num_pages, 9216), BEFORE, dtype=torch.uint8)
        inside = (self.slots >= 0) & (self.slots < 128 * self.num_pages)
        return oracle_inserted(self.keys[inside], pages, self.slots[inside])

    def under(self, schedule: Schedule) -> InsertLaunch:
        """The same launch in another order."""
        return replace(self, schedule=schedule)

    def run(self, kernel: Kernel) -> RunReport:
        """Raises an InterpreterError for what the kernel does wrong, WrongPagesError for what it writes."""
        num, key_bytes = self.keys.shape[0], 128 * self.key_type.num_bytes
        keys = self.keys.contiguous().view(torch.uint8).numpy().reshape(num, key_bytes)
        pages = np.full((self.num_pages, 9216), BEFORE, np.uint8)
        slots = self.slots.numpy()
        memory = Memory()
        keys_at, slots_at, pages_at = (1 << 46) - 4096, (2 << 40) - 8, (3 << 44) - 4096
        for row, key in enumerate(keys):
            memory.register_array(key, f"key {row}", writable=False, address=keys_at + row * _KEY_STRIDE)
        memory.register_array(slots, "slots", writable=False, address=slots_at)
        for page_id, page in enumerate(pages):
            address = pages_at + page_id * _PAGE_STRIDE
            memory.register_array(page, f"page {page_id}", address=address)
        kernargs = struct.pack(
            "<6qi",
            keys_at,
            _KEY_STRIDE,
            slots_at,
            pages_at,
            _PAGE_STRIDE,
            128 * self.num_pages,
            num,
        )
        report = run(
            Program({kernel.name: kernel}),
            kernel.name,
            grid=(-(-num // _KEYS_A_WORKGROUP), 1, 1),
            block=(_THREADS, 1, 1),
            kernargs=kernargs,
            memory=memory,
            schedule=self.schedule,
        )
        wrong = np.argwhere(pages != self.expected.numpy())
        if wrong.size:
            page_id, at = map(int, wrong[0])
            raise WrongPagesError(
                f"{len(wrong)} bytes are wrong, the first of page {page_id} at {at}: {pages[page_id, at]} "
                f"instead of {int(self.expected[page_id, at])}"
            )
        return report


def insert_launch(key_type: KeyType, keys: torch.Tensor, seed: int = 0) -> InsertLaunch:
    """Keys to scattered slots; one in five is skipped: negative, or past the pages."""
    random = np.random.default_rng(seed)
    num = keys.shape[0]
    num_pages = num // 128 + 2
    slots = random.permutation(128 * num_pages)[:num].astype(np.int64)
    skipped = random.random(num) < 0.2
    outside = [-1, -128, -(2**31), -(2**63), 128 * num_pages, 2**31, 2**40, 2**63 - 1]
    slots[skipped] = random.choice(np.array(outside), num)[skipped]
    return InsertLaunch(key_type.value, key_type, keys, torch.from_numpy(slots), num_pages)


# Groups of 16 key values that are hard to quantise: on and next to every threshold, ties of the scale.

THRESHOLDS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
DTYPES = {
    KeyType.BFLOAT16: torch.bfloat16,
    KeyType.FLOAT16: torch.float16,
    KeyType.FLOAT32: torch.float32,
}
_SCALES = E4M3_MAGNITUDES[1:].astype(np.float64)
Float64Array = npt.NDArray[np.float64]


def hard_keys(key_type: KeyType, scales: slice, seed: int = 0) -> torch.Tensor:
    """Keys ``[n, 128]`` of the type; ``scales`` picks from the 126 scales, ascending."""
    dtype = DTYPES[key_type]
    picked = _SCALES[scales]
    thresholds = torch.cat([*_on_thresholds(picked, dtype)])
    turned = torch.roll(thresholds, 5, dims=1)  # so that every place of a group has every threshold
    groups = torch.cat(
        [thresholds, turned, *_on_midpoints(picked, dtype), *_alone(dtype), *_others(dtype, seed)]
    )
    groups = groups[torch.isfinite(groups).all(1)]  # the largest scales' limits are past float16
    padding = -groups.shape[0] % 8
    return torch.cat([groups, groups.new_zeros(padding, 16)]).reshape(-1, 128)


def _on_thresholds(scales: Float64Array, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Every threshold of a scale, and the next value of the type on either side, with both signs."""
    limits = torch.from_numpy(scales[:, None] * THRESHOLDS).to(dtype)
    exact = torch.from_numpy(6 * scales[:, None]).to(dtype)
    rounded = torch.from_numpy(6 * (1 + 1 / 32) * scales[:, None]).to(dtype)  # to the same scale
    largest = torch.where(torch.arange(len(scales))[:, None] % 2 == 1, rounded, exact)
    zero = torch.full_like(largest, -0.0)
    for step in (0, 1, -1):
        values = _stepped(limits, step)
        yield torch.cat([values, -values, largest, zero], dim=1)
        yield torch.cat([-values, values, -largest, zero], dim=1)


def _on_midpoints(scales: Float64Array, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """A largest magnitude whose sixth lies between two scales, or next to that, in one place or another."""
    limits = torch.from_numpy(3 * (scales[:-1] + scales[1:])[:, None]).to(dtype)
    for step in (0, 1, -1):
        largest = _stepped(limits, step)
        groups = torch.cat([largest / 7, largest / 3, -largest, largest.new_zeros(len(largest), 13)], dim=1)
        # of two neighbouring midpoints one is rounded down: both take each place
        yield torch.stack([group.roll(at // 2) for at, group in enumerate(groups)])


def _alone(dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The largest magnitude in each place, of either sign and with any bits; nothing else is near it."""
    for value in (-1000.0, 1.99, -0.003):
        yield torch.diag(torch.full((16,), value)).to(dtype)


def _others(dtype: torch.dtype, seed: int) -> Iterator[torch.Tensor]:
    """Magnitudes from the least denormal to the greatest number; zeros; a negative that rounds to 0."""
    generator = torch.Generator().manual_seed(seed)
    exponents = range(-14, 15, 7) if dtype == torch.float16 else range(-126, 127, 36)
    for exponent in exponents:
        yield (torch.randn(4, 16, generator=generator) * 2.0**exponent).to(dtype)
    info = torch.finfo(dtype)
    special = [0.0, -0.0, info.tiny, -info.tiny, info.smallest_normal / 8, -info.smallest_normal / 8]
    special += [info.max, -info.max, 2.0**-11, -(2.0**-11)]
    yield torch.tensor(special, dtype=dtype)[torch.randint(0, 10, (12, 16), generator=generator)]
    yield torch.tensor(special[:6], dtype=dtype)[torch.randint(0, 6, (6, 16), generator=generator)]


def _stepped(values: torch.Tensor, step: int) -> torch.Tensor:
    """The next value of the type: up for 1, down for -1."""
    integer = torch.int32 if values.dtype == torch.float32 else torch.int16
    return (values.view(integer) + step).view(values.dtype)


# The networks of top-k's bound in numpy, exchange by exchange, and the lanes that tell if one is missing.
#
# A missing exchange only makes a bound too low, so ids stay right: what it costs is seen in rows chosen for
# it.

Lanes = npt.NDArray[np.signedinteger[Any]]

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
        greatest, second = np.ascontiguousarray(keys.transpose(2, 1, 0))  # a lane's keys side by side
        if self.best == 16:
            x = self._larger(self._sorted_rows(greatest), 16, _MIRROR)
            x = self._larger(self._merged_rows(x, _ROTATE_8), 32, _MIRROR)
        elif self.best == 32:
            x = self._larger(self._sorted_halves(greatest), 32, _BEHIND_HALF)
        else:
            ascending = ~self._sorted_wave(~second)
            x = np.maximum(self._sorted_wave(greatest), ascending)
        least: Lanes = x[: min(self.best, 64)].min(0)
        return least

    def _larger(self, x: Lanes, apart: int, order: Lanes) -> Lanes:
        """The larger of lanes ``apart``, the upper ones taken in another order."""
        low, high = x[_LANE & ~apart], x[_LANE | apart]
        larger: Lanes = np.maximum(low, high[order])
        return larger

    def _sorted_rows(self, x: Lanes) -> Lanes:
        for partner, bit in ((1, 0), (3, 1), (1, 0), (7, 2), (2, 1), (1, 0)):
            x = self._exchange(x, x[_LANE ^ partner], bit)
        return self._merged_rows(x, _MIRROR)

    def _merged_rows(self, x: Lanes, first: Lanes) -> Lanes:
        for partner, bit in ((first, 3), (_LANE ^ 4, 2), (_LANE ^ 2, 1), (_LANE ^ 1, 0)):
            x = self._exchange(x, x[partner], bit)
        return x

    def _sorted_halves(self, x: Lanes) -> Lanes:
        x = self._sorted_rows(x)
        low, high = x[_LANE & ~16], x[(_LANE | 16) ^ 15]
        x = self._exchange(low, high, 4, x)
        return self._merged_rows(x, _ROTATE_8)

    def _sorted_wave(self, x: Lanes) -> Lanes:
        x = self._sorted_halves(x)
        low, high = x[_LANE & ~32], x[(_LANE | 32) ^ 31]
        x = self._exchange(low, high, 5, x)
        x = self._exchange(x[_LANE & ~16], x[_LANE | 16], 4, x)
        return self._merged_rows(x, _ROTATE_8)

    def _exchange(self, x: Lanes, partner: Lanes, bit: int, untouched: Lanes | None = None) -> Lanes:
        self.exchanges += 1
        if self.exchanges - 1 == self.missing:
            if self.instead is None or untouched is not None:
                return x if untouched is None else untouched
            partner = x[self.instead]
        upper = np.flatnonzero(_LANE >> bit & 1)
        exchanged: Lanes = np.maximum(x, partner)
        exchanged[upper] = np.minimum(x[upper], partner[upper])
        return exchanged


def exact(keys: Lanes, best: int) -> Lanes:
    """What a network should find."""
    flat = keys[..., 0] if best < 64 else keys.reshape(len(keys), -1)
    found: Lanes = np.sort(flat, 1)[:, -best]
    return found


def random_keys(random: np.random.Generator, best: int, high: int, count: int) -> Lanes:
    """``[count, 64, 2]`` keys of 0 and 1, of which ``high`` lanes' (or, of 64, keys) are 1."""
    keys = np.zeros((count, 64, 2), np.int8)
    for one in keys:
        if best < 64:
            one[random.choice(64, high, replace=False), 0] = 1
        else:
            twice = int(random.integers(max(high - 64, 0), high // 2 + 1))
            lanes = random.permutation(64)
            one[lanes[: high - twice], 0] = 1
            one[lanes[:twice], 1] = 1
    return keys


@cache
def telling_keys(best: int) -> tuple[npt.NDArray[np.int64], ...]:
    """For each exchange, keys ``[64]`` (how many of a lane's are high) whose bound is another without it, or
    with other lanes than its own."""
    keys = random_keys(np.random.default_rng(0), best, best, _TRIED)
    whole = Network(best)
    right = whole.bound(keys)
    found: set[int] = set()
    for missing in range(whole.exchanges):
        for instead in (None, *(_LANE ^ other for other in _OTHER_LANES)):
            wrong = np.flatnonzero(Network(best, missing, instead).bound(keys) != right)
            if wrong.size and not found & set(wrong.tolist()):
                found.add(int(wrong[0]))
    return tuple(keys[at].sum(1, np.int64) for at in sorted(found))


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
