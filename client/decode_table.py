"""A decode scorer's report for people, at most 100 columns wide."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from client.kernel_table import COLUMNS, new_table, print_hazards, print_resources, print_targets
from kernel.gfx950.report.decode import MEMORY_PAGE_CLOCKS, SHAPES, TRIP_BLOCKS, DecodeReport
from kernel.gfx950.report.targets import Target

TITLE = f"One trip of a wave, {TRIP_BLOCKS} pages. Clocks, bound and replay are predictions."


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
    table = new_table(TITLE, "role", numbers)
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
