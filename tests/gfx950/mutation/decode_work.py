"""How many matrix instructions each wave of a decode launch is due to run: the split, told once more.

Scores stay right where a wave takes more than its share, or multiplies what nobody asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kernel.gfx950 import RunReport
from kernel.plan import MAXIMA_BLOCKS
from tests.gfx950.mutation.decode_launches import DecodeLaunch
from tests.gfx950.mutation.launch import WrongWorkError

_WAVES = 4
_TRIP = 4
_PAGE_MFMAS = 8


def check_work(launch: DecodeLaunch, report: RunReport) -> None:
    """Raises WrongWorkError if a wave ran other matrix instructions than it is due."""
    mfmas = [at for at, one in enumerate(report.kernel.instructions) if one.mnemonic.startswith("v_mfma")]
    for workgroup in range(1 << launch.log_workgroups):
        for wave in range(_WAVES):
            due = _PAGE_MFMAS * sum(_pages(launch, workgroup, wave))
            done = int(np.isin(report.traces[workgroup, wave], mfmas).sum())
            if done != due:
                raise WrongWorkError(
                    f"{launch.name}: wave {wave} of workgroup {workgroup} ran {done} MFMAs instead of {due}"
                )


def _pages(launch: DecodeLaunch, workgroup: int, wave: int) -> Iterator[int]:
    """Pages that a wave multiplies for each request: its blocks, and those of a diagonal once more."""
    blocks = [_num_blocks(launch, *column) for column in launch.requests.T[:, 1:].tolist()]
    unit = MAXIMA_BLOCKS if launch.maxima else 1
    total = sum(-(-count // unit) for count in blocks)
    shared = launch.maxima and total <= 2 << launch.log_workgroups
    share = workgroup if shared else _WAVES * workgroup + wave
    shares = 1 << launch.log_workgroups if shared else _WAVES << launch.log_workgroups
    first, end = share * total // shares, (share + 1) * total // shares
    before = 0
    for number, count in enumerate(blocks):
        units = -(-count // unit)
        mine = range(unit * max(first - before, 0), min(unit * min(end - before, units), count))
        before += units
        if shared:
            quarter = (wave + number) % _WAVES
            mine_of_group = [block for block in mine if block % MAXIMA_BLOCKS // _TRIP == quarter]
        else:
            mine_of_group = list(mine)
        diagonal = sum(block >= _first_diagonal(launch, number) for block in mine_of_group)
        yield len(mine_of_group) + diagonal


def _num_blocks(launch: DecodeLaunch, start: int, end: int, seq_len: int) -> int:
    """Blocks that a request has scores for; numbers wrap as the device's do."""
    if seq_len <= 0 or _wrapped(end - start) <= 0:
        return 0
    return min(-(-seq_len // 128), launch.columns, launch.call.block_table.shape[1])


def _first_diagonal(launch: DecodeLaunch, number: int) -> int:
    """The first block that some row sees in part, where it is scored: past every block with local blocks."""
    if launch.call.local_blocks:
        return 1 << 30
    _, start, end, seq_len = launch.requests[:, number].tolist()
    return max((_wrapped(_wrapped(seq_len - _wrapped(end - start)) + 1)) >> 7, 0)


def _wrapped(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31
