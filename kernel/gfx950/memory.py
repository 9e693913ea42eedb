"""Global memory of the interpreter: registered ranges of host memory, at their host addresses unless told
otherwise."""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kernel.gfx950.errors import OutOfBoundsError

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
