"""LDS bank conflicts counted from the addresses of an access.

An ASSUMPTION, not a published fact: 64 banks of 4 bytes; an access of b bytes a lane is served in groups of
256 / b consecutive lanes (so that a group asks for one dword of every bank at best); lanes that ask for the
same dword share it. The cost of a group is the largest number of different dwords that one bank has to
give.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BANKS = 64
_known: dict[tuple[int, bytes], int] = {}
_REMEMBERED = 4096


def extra_cycles(addresses: npt.NDArray[np.int64], lanes: npt.NDArray[np.intp], size: int) -> int:
    """Passes beyond the conflict-free ones, for ``size`` bytes (4, 8, 12 or 16) at the addresses of the
    active lanes."""
    relative = addresses - int(addresses[0])  # moving all addresses alike only rotates the banks
    key = (size, relative.tobytes() + lanes.tobytes())
    found = _known.get(key)
    if found is None:
        if len(_known) >= _REMEMBERED:
            _known.clear()
        found = _known[key] = _count(relative >> 2, lanes, max(size // 4, 1))
    return found


def _count(dwords: npt.NDArray[np.int64], lanes: npt.NDArray[np.intp], width: int) -> int:
    group_lanes = BANKS // width if width != 3 else BANKS // 4
    extra = 0
    for group in np.unique(lanes // group_lanes):
        wanted = np.unique(dwords[lanes // group_lanes == group][:, None] + np.arange(width))
        extra += int(np.bincount(wanted % BANKS, minlength=BANKS).max()) - 1
    return extra
