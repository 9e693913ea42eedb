"""Prints what ``kernel report`` found of each gfx950 kernel, at most 100 columns wide."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from client.output import Cells
from kernel.gfx950.hazards import HazardDistance
from kernel.gfx950.report.decode import MEMORY_PAGE_CLOCKS, SHAPES, TRIP_BLOCKS, DecodeReport
from kernel.gfx950.report.model import Resources, Target
from kernel.gfx950.report.prefill import KernelReport, LoopReport
from kernel.gfx950.report.work import WorkReport

COLUMNS = 100
LOOPS_TITLE = "One trip of a wave. Clocks, bound, MFMA use and the worst phase's use are predictions."
TRIPS_TITLE = f"One trip of a wave, {TRIP_BLOCKS} pages. Clocks, bound and replay are predictions."
WORKS_TITLE = "Wave-instructions of a row or key. Microseconds are predictions."
CLOCKS = "pred. clocks\nMFMA/VALU/LDS"


def print_report(
    console: Console, report: KernelReport | DecodeReport | WorkReport, targets: Sequence[Target]
) -> None:
    """Prints a kernel's report: resources, work, wait states, targets."""
    heads = "" if isinstance(report, WorkReport) else f" (H = {report.heads})"
    _print_resources(console, report.name + heads, report.resources)
    if isinstance(report, KernelReport):
        _print_prefill(console, report)
    elif isinstance(report, DecodeReport):
        _print_decode(console, report)
    else:
        console.print(_work_cells(report).table(WORKS_TITLE), width=COLUMNS)
    _print_hazards(console, report.hazards)
    if isinstance(report, KernelReport):
        console.print(_bank_conflicts(report), width=COLUMNS)
    _print_targets(console, targets)


def _print_prefill(console: Console, report: KernelReport) -> None:
    console.print(_loop_cells(report.loops).table(LOOPS_TITLE), width=COLUMNS)
    console.print(Text("Predicted clocks of a trip, and of them a wave's waits:", "italic"))
    for loop in report.loops:
        console.print(f"  {loop.trip.role:<10}{_waits(loop)}", width=COLUMNS)
    beside = [
        f"{loop.trip.role} {100 * loop.beside_unmasked:.1f} %"
        for loop in report.loops
        if loop.beside_unmasked is not None
    ]
    console.print(f"Predicted MFMA use beside a workgroup in its unmasked loop: {', '.join(beside)}")


def _print_decode(console: Console, report: DecodeReport) -> None:
    console.print(_trip_cells(report).table(TRIPS_TITLE), width=COLUMNS)
    clocks = report.model_clocks
    console.print(
        f"A page: {report.per_page('valu'):.2f} VALU; predicted clocks of a CU: VALU {clocks['valu']:.0f}, "
        f"MFMA {clocks['mfma']:.0f}, LDS {clocks['lds']:.0f}, replayed {report.predicted_clocks:.0f}; memory "
        f"allows {MEMORY_PAGE_CLOCKS:.0f}. LDS besides: {report.conflict_clocks:.0f} for bank "
        f"conflicts of random scales (replayed), "
        f"{report.dma_clocks:.0f} for what a DMA writes (not replayed)",
        width=COLUMNS,
    )
    times = (
        f"{requests} x {keys:,} keys {report.predicted_us(requests, keys):.1f} us"
        for requests, keys in SHAPES
    )
    console.print(f"Predicted time: {', '.join(times)}", width=COLUMNS)


def _print_resources(console: Console, name: str, has: Resources) -> None:
    console.print(Text(name, "bold"))
    console.print(
        f"{has.vgpr} VGPR ({has.agpr} AGPR of them), {has.sgpr} SGPR, {has.vgpr_spills} + {has.sgpr_spills} "
        f"spills, {has.scratch_bytes} B scratch, {has.lds_bytes:,} B LDS, {has.waves_per_simd} waves a SIMD",
        width=COLUMNS,
    )


def _print_hazards(console: Console, hazards: Sequence[HazardDistance]) -> None:
    console.print(Text("Fewest wait states of what depends on what, over all paths:", "italic"))
    for hazard in hazards:
        if hazard.seen is not None:
            style = "" if hazard.ok else "bold red"
            line = f"  {hazard.seen:>2} of {hazard.needed:>2} needed: {hazard.kind}"
            console.print(Text(line, style), width=COLUMNS)


def _print_targets(console: Console, targets: Sequence[Target]) -> None:
    missed = [target for target in targets if not target.met]
    console.print(f"{len(targets) - len(missed)} of {len(targets)} targets met.")
    for target in missed:
        reason = f": {target.reason}" if target.reason else ""
        line = f"missed: {target.name} {target.found}, wanted {target.wanted}{reason}"
        console.print(Text(line, "yellow"), width=COLUMNS)
    console.print()


def _loop_cells(loops: Sequence[LoopReport]) -> Cells:
    columns = ("role", "blocks", "instr.", "MFMA", "VALU", "LDS\nr/w", "waits", "nops", CLOCKS, "bound")
    rows = []
    for loop in loops:
        count, model = loop.classes.get, loop.model
        rows.append(
            (
                loop.trip.role,
                str(loop.trip.blocks),
                str(len(loop.trip.path)),
                *(str(count(kind, 0)) for kind in ("mfma", "valu")),
                f"{count('lds_read', 0)}/{count('lds_write', 0)}",
                *(str(count(kind, 0)) for kind in ("wait", "nop")),
                f"{model.mfma}/{model.valu}/{model.lds}",
                model.bound,
                _percent(loop, loop.prediction.utilisation),
                _percent(loop, loop.prediction.lowest),
            )
        )
    return Cells((*columns, "MFMA\nuse", "worst\nphase"), rows, words=(0, 9))


def _percent(loop: LoopReport, share: float) -> str:
    return f"{100 * share:.1f} %" if loop.model.mfma else "-"


def _waits(loop: LoopReport) -> str:
    waits = [f"{reason} {clocks:.0f}" for reason, clocks in loop.prediction.stalls.items() if clocks >= 1]
    return f"{loop.prediction.clocks:.0f}: {', '.join(waits) or 'none'}"


def _bank_conflicts(report: KernelReport) -> str:
    shown = (
        f"{mnemonic} {extra / accesses:.2g}"
        for mnemonic, (accesses, extra) in report.run.report.lds_traffic().items()
    )
    return f"Extra LDS passes an access (interpreted): {', '.join(shown)}"


def _trip_cells(report: DecodeReport) -> Cells:
    columns = ("role", "instr.", "MFMA", "VALU", "LDS\nreads", "page\nloads", "waits", "nops", CLOCKS)
    rows = []
    for loop in report.loops:
        count, model = loop.classes.get, loop.model
        rows.append(
            (
                loop.trip.role,
                str(len(loop.trip.path)),
                *(str(count(kind, 0)) for kind in ("mfma", "valu", "lds_read", "vmem_load", "wait", "nop")),
                f"{model.mfma}/{model.valu}/{model.lds}",
                model.bound,
                f"{loop.prediction.clocks:.0f}",
            )
        )
    return Cells((*columns, "bound", "replay"), rows, words=(0, 9))


def _work_cells(report: WorkReport) -> Cells:
    columns = ("shape", "VALU", "SALU", "LDS", "waits", "bytes", "pred. us\nVALU", "pred. us\nmemory")
    rows = []
    for work in report.works:
        count = work.classes.get
        rows.append(
            (
                work.shape.name,
                *(f"{count(kind, 0):.0f}" for kind in ("valu", "salu")),
                f"{count('lds_read', 0) + count('lds_write', 0):.0f}",
                f"{count('wait', 0):.0f}",
                f"{work.shape.bytes_per_unit:,}",
                f"{work.valu_us:.1f}",
                f"{work.memory_us:.1f}",
            )
        )
    return Cells(columns, rows)
