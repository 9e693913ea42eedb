"""Races on global memory: which waves of a launch touched which bytes, and whether anything ordered them.

Waves of one workgroup are ordered by barriers: an access counts from its issue to the wait that covers it,
both in barriers passed, and two accesses of different waves race if these spans meet. Waves of different
workgroups are never ordered within a launch. Scalar loads go through a cache that stores do not update, so
a scalar load of a byte that the launch writes is a race whoever writes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kernel.gfx950.errors import RaceError
from kernel.gfx950.memory import Region

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
