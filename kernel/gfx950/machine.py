"""What the waves of a launch share: global memory, the log of who touched it, and the schedule."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kernel.gfx950.errors import OutOfBoundsError, RaceError
from kernel.gfx950.memory import Memory, Region
from kernel.gfx950.races import Access, GlobalLog
from kernel.gfx950.schedule import Schedule

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
        dwords = max(size // 4, 1)
        values = np.empty((dwords, addresses.size), np.uint32)
        defined: npt.NDArray[np.bool_] | None = None
        for region, which in self._locate(addresses, size, lanes):
            chosen = addresses[which]
            if size >= 4:
                values[:, which] = region.words[_cells(chosen - region.words_address >> 2, dwords)]
            else:
                parts = region.bytes[_cells(chosen - region.address, size)].astype(np.uint32)
                values[0, which] = parts[0] if size == 1 else parts[0] | parts[1] << np.uint32(8)
            if region.defined is not None:
                known = region.defined[_cells(chosen - region.address, size)]
                if not known.all():
                    if defined is None:
                        defined = np.ones(values.shape, np.bool_)
                    defined[:, which] = known.reshape(dwords, -1, chosen.size).all(axis=1)
            self._log(region, chosen, size, False, request)
        return values, defined

    def store(
        self, addresses: Addresses, size: int, lanes: Lanes, values: npt.NDArray[np.uint32], request: Request
    ) -> None:
        """Writes ``[dwords, n]`` values; of a byte or word store their low bytes."""
        dwords = max(size // 4, 1)
        for region, which in self._locate(addresses, size, lanes):
            if not region.writable:
                raise OutOfBoundsError(
                    f"a store to {region.name!r}, which is read-only", lane=int(lanes[which[0]])
                )
            chosen = addresses[which]
            bytes_ = _cells(chosen - region.address, size)
            if size >= 4:
                words = _cells(chosen - region.words_address >> 2, dwords)
                region.words[words] = values[:, which]
                kept = np.array_equal(region.words[words], values[:, which])
            else:
                wanted = np.ascontiguousarray(values[0, which]).view(np.uint8).reshape(-1, 4)[:, :size].T
                region.bytes[bytes_] = wanted
                kept = np.array_equal(region.bytes[bytes_], wanted)
            if not kept:
                raise RaceError(
                    f"two lanes of one store write different values to the same byte of {region.name!r}"
                )
            if region.defined is not None:
                region.defined[bytes_] = True
            self._log(region, chosen, size, True, request)

    def _locate(self, addresses: Addresses, size: int, lanes: Lanes) -> list[tuple[Region, Lanes]]:
        """The regions that hold ``size`` bytes at each address, and which of the addresses each of them
        holds."""
        align = min(size, 4)
        crooked = (addresses & (align - 1)) != 0
        if np.count_nonzero(crooked):
            at = int(np.argmax(crooked))
            raise OutOfBoundsError(
                f"address {int(addresses[at]):#x} is not a multiple of {align}", lane=int(lanes[at])
            )
        low, high = int(addresses.min()), int(addresses.max())
        region = self.memory.holding(low, high + size - low)
        if region is not None:
            return [(region, np.arange(addresses.size))]
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


def _cells(first: Addresses, count: int) -> Addresses:
    """``[count, n]``: consecutive cells from each of n first ones."""
    return first[None, :] + np.arange(count)[:, None]
