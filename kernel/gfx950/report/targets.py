"""What the prefill scorer is meant to reach, checked on a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernel.gfx950.hazards import HazardDistance
from kernel.gfx950.report.kernel_report import KernelReport, LoopReport
from kernel.gfx950.report.resources import Resources

MAX_VGPRS = 256
MAX_LDS_BYTES = 40 * 1024
MIN_WAVES_PER_SIMD = 2
MAX_UNMASKED_VALU = 845
"""Vector instructions of four blocks and a wave."""
MIN_UNMASKED_UTILISATION = 0.97
MAX_DIAGONAL_CLOCKS = 1.06
"""Model clocks of a diagonal block, of the MFMA clocks of a whole one."""
MIN_DIAGONAL_UTILISATION = 0.9


@dataclass(frozen=True)
class Target:
    """One aim: what is wanted, what was found, and the reason where it was missed and one is known."""

    name: str
    wanted: str
    found: str
    met: bool
    reason: str = ""


def check_targets(report: KernelReport) -> list[Target]:
    """Every aim, met or not."""
    has, whole = report.resources, report.loop("whole")
    unmasked, diagonal = report.loop("unmasked"), report.loop("diagonal")
    valu, bound = unmasked.classes["valu"], unmasked.model.bound
    ratio = diagonal.model.most / whole.model.mfma
    return [
        vgprs(has),
        no_spills(has),
        Target("LDS", f"<= {MAX_LDS_BYTES} B", f"{has.lds_bytes} B", has.lds_bytes <= MAX_LDS_BYTES),
        waves(has),
        wait_states(report.hazards),
        Target("unmasked: bound", "mfma", bound, bound == "mfma"),
        Target("unmasked: VALU", f"<= {MAX_UNMASKED_VALU}", str(valu), valu <= MAX_UNMASKED_VALU),
        _utilisation(unmasked, MIN_UNMASKED_UTILISATION),
        Target(
            "diagonal: clocks of a whole block's MFMA (prediction)",
            f"<= {MAX_DIAGONAL_CLOCKS}",
            f"{ratio:.2f}",
            ratio <= MAX_DIAGONAL_CLOCKS,
        ),
        _utilisation(diagonal, MIN_DIAGONAL_UTILISATION),
    ]


def vgprs(has: Resources) -> Target:
    """Registers of a lane."""
    return Target("VGPR", f"<= {MAX_VGPRS}", str(has.vgpr), has.vgpr <= MAX_VGPRS)


def no_spills(has: Resources) -> Target:
    """No register goes to memory."""
    spills = has.vgpr_spills + has.sgpr_spills
    return Target("spills, scratch", "0", f"{spills}, {has.scratch_bytes} B", spills + has.scratch_bytes == 0)


def waves(has: Resources) -> Target:
    """Waves that a SIMD holds at once."""
    found = has.waves_per_simd
    return Target("waves a SIMD", f">= {MIN_WAVES_PER_SIMD}", str(found), found >= MIN_WAVES_PER_SIMD)


def wait_states(hazards: Sequence[HazardDistance]) -> Target:
    """No dependent instructions are closer than gfx950 needs."""
    close = [hazard for hazard in hazards if not hazard.ok]
    return Target("wait states", "as gfx950 needs", f"{len(close)} kinds too close", not close)


def _utilisation(loop: LoopReport, wanted: float) -> Target:
    found = loop.prediction.utilisation
    return Target(
        f"{loop.trip.role}: MFMA utilisation (prediction)",
        f">= {wanted}",
        f"{found:.3f}",
        found >= wanted,
        "" if found >= wanted else _reason(loop),
    )


def _reason(loop: LoopReport) -> str:
    """Where the clocks go that the matrix pipe is idle."""
    waits = ", ".join(
        f"{reason} {clocks:.0f}"
        for reason, clocks in loop.prediction.stalls.items()
        if reason != "matrix pipe" and clocks >= loop.prediction.clocks / 100
    )
    issue = 4 * (loop.classes["valu"] + loop.classes["mfma"])
    beside = ""
    if loop.beside_unmasked is not None:
        beside = f"; use {loop.beside_unmasked:.3f} beside a workgroup in its unmasked loop"
    return (
        f"a trip takes {loop.prediction.clocks:.0f} clocks where two waves' MFMAs take {2 * loop.model.mfma} "
        f"and their vector issue {2 * issue}; waits: {waits or 'nothing else'}{beside} (prediction)"
    )
