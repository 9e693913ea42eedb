"""Global memory of the interpreter, the race check on it, and the orders in which waves may run.

Device memory is registered ranges of host memory, at their host addresses unless another is given.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kernel.gfx950.errors import OutOfBoundsError, RaceError

UInt8Array = npt.NDArray[np.uint8]


@dataclass(eq=False)
class Region:
    """``size`` bytes at ``address``. ``bytes`` is a view of the memory itself, never a copy.

    ``defined`` (one bool a byte) is None where every byte was written before the launch; else it starts
    all false and a store sets it: reading a byte that is not defined gives an undefined register lane.
    """

    address: int
    size: int
    name: str
    writable: bool
    bytes: UInt8Array
    defined: npt.NDArray[np.bool_] | None = None
    keep_alive: object = field(default=None, repr=False)
    words_address: int = field(init=False)
    words: npt.NDArray[np.uint32] = field(init=False, repr=False)
    """The whole aligned dwords of the region, the first of them at ``words_address``."""

    def __post_init__(self) -> None:
        self.words_address = -(-self.address // 4) * 4
        skip = self.words_address - self.address
        self.words = self.bytes[skip : skip + max(self.size - skip, 0) // 4 * 4].view(np.uint32)

    @property
    def end(self) -> int:
        return self.address + self.size

    def unwritten(self) -> npt.NDArray[np.int64]:
        """Offsets (bytes) of a region registered with ``initialised=False`` that nothing has written yet."""
        if self.defined is None:
            return np.zeros(0, np.int64)
        return np.flatnonzero(~self.defined)


class Memory:
    """All the memory a launch may touch; everything else is out of bounds.

    ``resolve`` is asked about an address in no region and returns ``(base, size)`` of live memory that
    holds it, or None: a runtime that owns allocations answers from its own table instead of registering
    each one.
    """

    def __init__(self, resolve: Callable[[int], tuple[int, int] | None] | None = None) -> None:
        self._resolve = resolve
        self._regions: list[Region] = []
        self._starts: list[int] = []
        self._resolved: dict[tuple[int, int], Region] = {}

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(self._regions)

    def register(
        self,
        address: int,
        size: int,
        name: str,
        *,
        writable: bool = True,
        initialised: bool = True,
        keep_alive: object = None,
    ) -> Region:
        """Makes ``size`` bytes of host memory at ``address`` device memory. ``name`` appears in messages.

        ``writable=False`` turns a store into an error; ``initialised=False`` tracks which bytes were written.
        Raises ValueError if it overlaps a region that is registered already.
        """
        if size <= 0:
            raise ValueError(f"size = {size}: a region has at least one byte; leave an empty buffer out")
        return self._insert(address, _bytes_at(address, size), name, writable, initialised, keep_alive)

    def register_array(
        self,
        array: npt.NDArray[np.generic],
        name: str,
        *,
        writable: bool = True,
        initialised: bool = True,
        address: int | None = None,
    ) -> Region:
        """Registers a C-contiguous numpy array, which is kept alive. Its device address is
        ``Region.address``: that of the host, or ``address``, so that a test can have any bits in it."""
        if not array.flags.c_contiguous:
            raise ValueError(
                f"{name}: strides {array.strides}: a registered array is C-contiguous; copy it first"
            )
        view = array.reshape(-1).view(np.uint8)
        at = view.ctypes.data if address is None else address
        return self._insert(at, view, name, writable, initialised, array)

    def addresses_of(self, arrays: Mapping[str, npt.NDArray[Any]], *, outputs: bool = False) -> list[int]:
        """Registers a launch's arrays by name: inputs are read-only, outputs hold nothing yet."""
        return [
            self.register_array(array, name, writable=outputs, initialised=not outputs).address
            for name, array in arrays.items()
        ]

    def unregister(self, region: Region) -> None:
        """Takes a region out; later accesses to it are out of bounds."""
        at = self._regions.index(region)
        del self._regions[at], self._starts[at]

    def find(self, address: int, size: int) -> Region:
        """The region that holds ``size`` bytes at ``address``; raises OutOfBoundsError if none does
        wholly."""
        region = self.holding(address, size)
        if region is None:
            raise OutOfBoundsError(
                f"{size} bytes at {address:#x} are in no registered memory; {self._nearest(address)}"
            )
        return region

    def holding(self, address: int, size: int) -> Region | None:
        """As ``find``, but None if no region holds all of them."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at >= 0:
            region = self._regions[at]
            if address + size <= region.end:
                return region
        resolved = self._resolve(address) if self._resolve is not None else None
        if resolved is not None and resolved[0] <= address and address + size <= resolved[0] + resolved[1]:
            return self._resolved_region(*resolved)
        return None

    def _resolved_region(self, base: int, size: int) -> Region:
        """One Region object for each allocation, so that a launch's race log sees one region, not many."""
        known = self._resolved.get((base, size))
        if known is None:
            known = Region(base, size, f"allocation {base:#x}", True, _bytes_at(base, size))
            self._resolved[base, size] = known
        return known

    def _nearest(self, address: int) -> str:
        if not self._regions:
            return "none is registered"
        region = min(self._regions, key=lambda r: max(r.address - address, address - r.end))
        if address >= region.end:
            return f"the nearest, {region.name!r}, ends {address - region.end} bytes before"
        if address < region.address:
            return f"the nearest, {region.name!r}, begins {region.address - address} bytes after"
        return f"{region.name!r} ends {region.end - address} bytes after that address"

    def _insert(
        self, address: int, view: UInt8Array, name: str, writable: bool, initialised: bool, keep_alive: object
    ) -> Region:
        size = view.size
        at = bisect.bisect_right(self._starts, address)
        for other in self._regions[max(at - 1, 0) : at + 1]:
            if address < other.end and other.address < address + size:
                raise ValueError(f"{name}: [{address:#x}, {address + size:#x}) overlaps {other.name!r}")
        defined = None if initialised else np.zeros(size, np.bool_)
        region = Region(address, size, name, writable, view, defined, keep_alive)
        self._regions.insert(at, region)
        self._starts.insert(at, address)
        return region


def _bytes_at(address: int, size: int) -> UInt8Array:
    """Host memory as an array: the memory itself, which the caller keeps alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


# ---- Races on global memory ----
#
# Waves of one workgroup are ordered by barriers: an access counts from its issue to the wait that covers it,
# both in barriers passed, and two accesses of different waves race if these spans meet. Waves of different
# workgroups are never ordered within a launch. Scalar loads go through a cache that stores do not update, so
# a scalar load of a byte that the launch writes is a race whoever writes it.

_OPEN = 1 << 40
"""End of a span whose access no wait has covered yet."""


@dataclass(eq=False, slots=True)
class Access:
    """``size`` bytes at each of ``addresses`` (bytes, the active lanes) by one instruction of one wave."""

    workgroup: int
    wave: int
    line: int
    addresses: npt.NDArray[np.int64]
    size: int
    write: bool
    scalar: bool
    first_epoch: int
    last_epoch: int = _OPEN


@dataclass(eq=False)
class GlobalLog:
    """Accesses of a launch by region. Regions that cannot be written are never logged."""

    granule: int
    """Bytes: 4 where every access of the kernel is whole aligned dwords, else 1."""
    accesses: dict[Region, list[Access]] = field(default_factory=dict)
    written: set[Region] = field(default_factory=set)

    def add(self, region: Region, access: Access) -> None:
        self.accesses.setdefault(region, []).append(access)
        if access.write:
            self.written.add(region)

    def check(self) -> None:
        """Raises RaceError for the lowest byte that two unordered accesses share, one of them a write."""
        for region in self.written:
            self._check_region(region, self.accesses[region])

    def _check_region(self, region: Region, accesses: list[Access]) -> None:
        if (
            len({(access.workgroup, access.wave, access.scalar) for access in accesses}) == 1
            and not accesses[0].scalar
        ):
            return  # one wave's own accesses are ordered
        granule = self.granule
        spans = [-(-access.size // granule) for access in accesses]
        cells = np.concatenate(
            [
                (access.addresses[:, None] // granule + np.arange(span)).reshape(-1)
                for access, span in zip(accesses, spans, strict=True)
            ]
        )
        counts = [access.addresses.size * span for access, span in zip(accesses, spans, strict=True)]
        owner = np.repeat(np.arange(len(accesses)), counts)
        who = np.array(
            [
                -1 - i if access.scalar else access.workgroup << 8 | access.wave
                for i, access in enumerate(accesses)
            ]
        )[owner]
        order = np.argsort(cells, kind="stable")
        cells, owner, who = cells[order], owner[order], who[order]
        starts = np.flatnonzero(np.r_[True, cells[1:] != cells[:-1]])
        writes = np.array([access.write for access in accesses])[owner]
        shared = np.maximum.reduceat(who, starts) != np.minimum.reduceat(who, starts)
        suspicious = shared & np.maximum.reduceat(writes, starts)
        ends = np.r_[starts[1:], cells.size]
        for at in np.flatnonzero(suspicious):
            group = [accesses[i] for i in np.unique(owner[starts[at] : ends[at]])]
            pair = _unordered_pair(group)
            if pair is not None:
                raise _race(region, int(cells[starts[at]]) * granule, *pair)


def _unordered_pair(accesses: list[Access]) -> tuple[Access, Access] | None:
    for at, one in enumerate(accesses):
        for two in accesses[at + 1 :]:
            if not (one.write or two.write):
                continue
            if one.scalar or two.scalar or one.workgroup != two.workgroup:
                return one, two
            apart = one.last_epoch < two.first_epoch or two.last_epoch < one.first_epoch
            if one.wave != two.wave and not apart:
                return one, two
    return None


def _race(region: Region, address: int, one: Access, two: Access) -> RaceError:
    def did(access: Access) -> str:
        kind = "writes" if access.write else "reads (scalar load)" if access.scalar else "reads"
        return f"workgroup {access.workgroup} wave {access.wave} {kind} it at line {access.line}"

    return RaceError(
        f"race on byte {address - region.address} of {region.name!r}: {did(one)}, {did(two)}, unordered"
    )


# ---- Schedules ----


@dataclass(frozen=True)
class Schedule:
    """One legal order of events. A correct kernel writes the same bytes under every one of them.

    ``waves``: lowest wave first, highest first, or a new seeded permutation at each barrier.
    ``workgroups``: the same choice over the grid.
    ``dma``: whether a DMA to LDS writes at once or only at the wait that covers it.
    """

    waves: Literal["up", "down", "mixed"] = "up"
    workgroups: Literal["up", "down", "mixed"] = "up"
    dma: Literal["early", "late"] = "late"
    seed: int = 0

    def order(self, kind: Literal["waves", "workgroups"], count: int, turn: int) -> Sequence[int]:
        """A permutation of ``range(count)`` for the ``turn``-th time that an order is asked for."""
        choice = self.waves if kind == "waves" else self.workgroups
        if choice == "up":
            return range(count)
        if choice == "down":
            return range(count - 1, -1, -1)
        permutation = np.random.default_rng((self.seed, turn, count)).permutation(count)
        return [int(i) for i in permutation]


SCHEDULES = (
    Schedule(),
    Schedule(waves="down", workgroups="down", dma="early"),
    Schedule(waves="mixed", workgroups="mixed", seed=1),
    Schedule(waves="mixed", workgroups="mixed", dma="early", seed=2),
)
"""Orders that a test sweeps: both extremes and two seeded mixtures."""


# ---- What the waves of a launch share ----

Addresses = npt.NDArray[np.int64]
Lanes = npt.NDArray[np.intp]


@dataclass(eq=False, slots=True)
class Request:
    """Who accesses global memory: filled into the log. ``accesses`` collects what was logged."""

    wave: int
    epoch: int
    line: int
    scalar: bool = False
    accesses: list[Access] = field(default_factory=list)


@dataclass(eq=False)
class Machine:
    """Given to every wave; ``workgroup`` is the linear number of the one that runs now."""

    memory: Memory
    log: GlobalLog
    schedule: Schedule
    workgroup: int = 0
    bank_conflicts: dict[int, tuple[int, int]] | None = None
    """Assembly line to (accesses, extra passes) of LDS, where they are counted."""

    def load(
        self, addresses: Addresses, size: int, lanes: Lanes, request: Request
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_] | None]:
        """``size`` bytes at each address (bytes) of the ``lanes``: ``[dwords, n]``.

        The second result, None where every byte is defined, says which dwords are. Bytes and words are
        zero-extended.
        """
        region = self._holding(addresses, size, lanes)
        if region is not None:
            return self._load_from(region, addresses, size, request)
        values = np.empty((max(size // 4, 1), addresses.size), np.uint32)
        defined: npt.NDArray[np.bool_] | None = None
        for region, which in self._parts(addresses, size, lanes):
            values[:, which], known = self._load_from(region, addresses[which], size, request)
            if known is not None:
                if defined is None:
                    defined = np.ones(values.shape, np.bool_)
                defined[:, which] = known
        return values, defined

    def load_scalars(
        self, address: int, dwords: int, request: Request
    ) -> tuple[list[int], list[bool] | None]:
        """As ``load``, for one address: a value for each dword, and which of them are defined."""
        region = self.memory.find(address, 4 * dwords)
        first = address - region.words_address >> 2
        defined: list[bool] | None = None
        if region.defined is not None:
            at = address - region.address
            defined = [bool(region.defined[byte : byte + 4].all()) for byte in range(at, at + 4 * dwords, 4)]
        if region.writable:
            self._log(region, np.array([address], np.int64), 4 * dwords, False, request)
        return region.words[first : first + dwords].tolist(), defined

    def _load_from(
        self, region: Region, addresses: Addresses, size: int, request: Request
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_] | None]:
        dwords = max(size // 4, 1)
        if size >= 4:
            values = region.words.take(cells(addresses - region.words_address >> 2, dwords))
        else:
            parts = region.bytes[cells(addresses - region.address, size)].astype(np.uint32)
            values = parts[:1] if size == 1 else parts[:1] | parts[1:] << np.uint32(8)
        defined: npt.NDArray[np.bool_] | None = None
        if region.defined is not None:
            known = region.defined.take(cells(addresses - region.address, size))
            if not known.all():
                defined = np.all(known.reshape(dwords, -1, addresses.size), axis=1)
        self._log(region, addresses, size, False, request)
        return values, defined

    def store(
        self, addresses: Addresses, size: int, lanes: Lanes, values: npt.NDArray[np.uint32], request: Request
    ) -> None:
        """Writes ``[dwords, n]`` values; of a byte or word store their low bytes."""
        region = self._holding(addresses, size, lanes)
        if region is not None:
            self._store_to(region, addresses, size, lanes, values, request)
            return
        for region, which in self._parts(addresses, size, lanes):
            self._store_to(region, addresses[which], size, lanes[which], values[:, which], request)

    def _store_to(
        self,
        region: Region,
        addresses: Addresses,
        size: int,
        lanes: Lanes,
        values: npt.NDArray[np.uint32],
        request: Request,
    ) -> None:
        if not region.writable:
            raise OutOfBoundsError(f"a store to {region.name!r}, which is read-only", lane=int(lanes[0]))
        if size >= 4:
            words = cells(addresses - region.words_address >> 2, size // 4)
            region.words[words] = values
            kept = bool((region.words.take(words) == values).all())
        else:
            bytes_ = cells(addresses - region.address, size)
            wanted = np.ascontiguousarray(values[0]).view(np.uint8).reshape(-1, 4)[:, :size].T
            region.bytes[bytes_] = wanted
            kept = np.array_equal(region.bytes[bytes_], wanted)
        if not kept:
            raise RaceError(
                f"two lanes of one store write different values to the same byte of {region.name!r}"
            )
        if region.defined is not None:
            region.defined[cells(addresses - region.address, size)] = True
        self._log(region, addresses, size, True, request)

    def _holding(self, addresses: Addresses, size: int, lanes: Lanes) -> Region | None:
        """The region that holds ``size`` bytes at all addresses; None if no single one does."""
        align = min(size, 4)
        if int(np.bitwise_or.reduce(addresses)) & (align - 1):
            at = int(np.argmax((addresses & (align - 1)) != 0))
            raise OutOfBoundsError(
                f"address {int(addresses[at]):#x} is not a multiple of {align}", lane=int(lanes[at])
            )
        low, high = int(addresses.min()), int(addresses.max())
        return self.memory.holding(low, high + size - low)

    def _parts(self, addresses: Addresses, size: int, lanes: Lanes) -> list[tuple[Region, Lanes]]:
        """The regions that hold ``size`` bytes at each address, and which of the addresses each of them
        holds."""
        found: dict[Region, list[int]] = {}
        for at, address in enumerate(addresses.tolist()):
            try:
                found.setdefault(self.memory.find(address, size), []).append(at)
            except OutOfBoundsError as error:
                error.lane = int(lanes[at])
                raise
        return [(region, np.array(which)) for region, which in found.items()]

    def _log(self, region: Region, addresses: Addresses, size: int, write: bool, request: Request) -> None:
        if region.writable:
            access = Access(
                self.workgroup,
                request.wave,
                request.line,
                addresses,
                size,
                write,
                request.scalar,
                request.epoch,
            )
            request.accesses.append(access)
            self.log.add(region, access)


_COLUMNS = [np.arange(count, dtype=np.int64)[:, None] for count in range(17)]


def cells(first: Addresses, count: int) -> Addresses:
    """``[count, n]``: consecutive cells, at most 16, from each of n first ones."""
    return first[None, :] + _COLUMNS[count]
