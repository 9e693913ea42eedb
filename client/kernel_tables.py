"""A kernel report for people, at most 100 columns wide."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kernel.gfx950.hazards import HazardDistance
from kernel.gfx950.report.decode import MEMORY_PAGE_CLOCKS, SHAPES, TRIP_BLOCKS, DecodeReport
from kernel.gfx950.report.model import Resources
from kernel.gfx950.report.prefill import KernelReport, LoopReport, Target
from kernel.gfx950.report.work import WorkReport

COLUMNS = 100
TITLE = "One trip of a wave. Clocks, bound, MFMA use and the worst phase's use are predictions."


def print_report(console: Console, report: KernelReport, targets: Sequence[Target]) -> None:
    """Print one kernel: resources, loops, where waves wait, wait states, bank conflicts, targets."""
    print_resources(console, report.name, report.heads, report.resources)
    console.print(_loops(report.loops), width=COLUMNS)
    console.print(Text("Predicted clocks of a trip, and of them a wave's waits:", "italic"))
    for loop in report.loops:
        console.print(f"  {loop.trip.role:<10}{_waits(loop)}", width=COLUMNS)
    beside = [
        f"{loop.trip.role} {100 * loop.beside_unmasked:.1f} %"
        for loop in report.loops
        if loop.beside_unmasked is not None
    ]
    console.print(f"Predicted MFMA use beside a workgroup in its unmasked loop: {', '.join(beside)}")
    print_hazards(console, report.hazards)
    console.print(_bank_conflicts(report), width=COLUMNS)
    print_targets(console, targets)


def print_resources(console: Console, name: str, heads: int | None, has: Resources) -> None:
    """Print what a kernel is, for how many heads if that matters, and what it asks for."""
    console.print(Text(name if heads is None else f"{name} (H = {heads})", "bold"))
    console.print(
        f"{has.vgpr} VGPR ({has.agpr} AGPR of them), {has.sgpr} SGPR, {has.vgpr_spills} + {has.sgpr_spills} "
        f"spills, {has.scratch_bytes} B scratch, {has.lds_bytes:,} B LDS, {has.waves_per_simd} waves a SIMD",
        width=COLUMNS,
    )


def print_hazards(console: Console, hazards: Sequence[HazardDistance]) -> None:
    """Print the wait states that were found."""
    console.print(Text("Fewest wait states of what depends on what, over all paths:", "italic"))
    for hazard in hazards:
        if hazard.seen is not None:
            style = "" if hazard.ok else "bold red"
            line = f"  {hazard.seen:>2} of {hazard.needed:>2} needed: {hazard.kind}"
            console.print(Text(line, style), width=COLUMNS)


def print_targets(console: Console, targets: Sequence[Target]) -> None:
    """Print how many targets are met, and each that is not."""
    missed = [target for target in targets if not target.met]
    console.print(f"{len(targets) - len(missed)} of {len(targets)} targets met.")
    for target in missed:
        reason = f": {target.reason}" if target.reason else ""
        line = f"missed: {target.name} {target.found}, wanted {target.wanted}{reason}"
        console.print(Text(line, "yellow"), width=COLUMNS)
    console.print()


def new_table(title: str, first: str, numbers: Sequence[str]) -> Table:
    """A table whose first column is text and whose next ones are numbers."""
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left"
    )
    table.add_column(first, no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def _loops(loops: Sequence[LoopReport]) -> Table:
    table = new_table(TITLE, "role", ("blocks", "instr.", "MFMA", "VALU", "LDS\nr/w", "waits", "nops"))
    table.add_column("pred. clocks\nMFMA/VALU/LDS", justify="right", no_wrap=True)
    table.add_column("bound")
    table.add_column("MFMA\nuse", justify="right")
    table.add_column("worst\nphase", justify="right")
    for loop in loops:
        count, model = loop.classes.get, loop.model
        table.add_row(
            loop.trip.role,
            str(loop.trip.blocks),
            str(len(loop.trip.path)),
            str(count("mfma", 0)),
            str(count("valu", 0)),
            f"{count('lds_read', 0)}/{count('lds_write', 0)}",
            str(count("wait", 0)),
            str(count("nop", 0)),
            f"{model.mfma}/{model.valu}/{model.lds}",
            model.bound,
            _percent(loop, loop.prediction.utilisation),
            _percent(loop, loop.prediction.lowest),
        )
    return table


def _percent(loop: LoopReport, share: float) -> str:
    return f"{100 * share:.1f} %" if loop.model.mfma else "-"


def _waits(loop: LoopReport) -> str:
    waits = [f"{reason} {clocks:.0f}" for reason, clocks in loop.prediction.stalls.items() if clocks >= 1]
    return f"{loop.prediction.clocks:.0f}: {', '.join(waits) or 'none'}"


def _bank_conflicts(report: KernelReport) -> str:
    shown = (
        f"{mnemonic} {extra / accesses:.2g}"
        for mnemonic, (accesses, extra) in report.run.lds_traffic().items()
    )
    return f"Extra LDS passes an access (interpreted): {', '.join(shown)}"


# A decode scorer's report for people, at most 100 columns wide.

DECODE_TABLE_TITLE = f"One trip of a wave, {TRIP_BLOCKS} pages. Clocks, bound and replay are predictions."


def print_decode_report(console: Console, report: DecodeReport, targets: Sequence[Target]) -> None:
    """Print one kernel: resources, trips, a page, times, wait states, targets."""
    print_resources(console, report.name, report.heads, report.resources)
    console.print(_trips(report), width=COLUMNS)
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
    print_hazards(console, report.hazards)
    print_targets(console, targets)


def _trips(report: DecodeReport) -> Table:
    numbers = ("instr.", "MFMA", "VALU", "LDS\nreads", "page\nloads", "waits", "nops")
    table = new_table(DECODE_TABLE_TITLE, "role", numbers)
    table.add_column("pred. clocks\nMFMA/VALU/LDS", justify="right", no_wrap=True)
    table.add_column("bound")
    table.add_column("replay", justify="right")
    for loop in report.loops:
        count, model = loop.classes.get, loop.model
        table.add_row(
            loop.trip.role,
            str(len(loop.trip.path)),
            *(str(count(kind, 0)) for kind in ("mfma", "valu", "lds_read", "vmem_load", "wait", "nop")),
            f"{model.mfma}/{model.valu}/{model.lds}",
            model.bound,
            f"{loop.prediction.clocks:.0f}",
        )
    return table


# The report on a top-k or insert kernel for people, at most 100 columns wide.

WORK_TABLE_TITLE = "Wave-instructions of a row or key. Microseconds are predictions."


def print_work_report(console: Console, report: WorkReport, targets: Sequence[Target]) -> None:
    """Print one kernel: resources, its work at each shape, wait states, targets."""
    print_resources(console, report.name, None, report.resources)
    console.print(_works(report), width=COLUMNS)
    print_hazards(console, report.hazards)
    print_targets(console, targets)


def _works(report: WorkReport) -> Table:
    numbers = ("VALU", "SALU", "LDS", "waits", "bytes", "pred. us\nVALU", "pred. us\nmemory")
    table = new_table(WORK_TABLE_TITLE, "shape", numbers)
    for work in report.works:
        count = work.classes.get
        table.add_row(
            work.shape.name,
            f"{count('valu', 0):.0f}",
            f"{count('salu', 0):.0f}",
            f"{count('lds_read', 0) + count('lds_write', 0):.0f}",
            f"{count('wait', 0):.0f}",
            f"{work.shape.bytes_per_unit:,}",
            f"{work.valu_us:.1f}",
            f"{work.memory_us:.1f}",
        )
    return table
