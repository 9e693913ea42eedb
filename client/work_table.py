"""The report on a top-k or insert kernel for people, at most 100 columns wide."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from client.kernel_table import COLUMNS, new_table, print_hazards, print_resources, print_targets
from kernel.gfx950.report.targets import Target
from kernel.gfx950.report.work import WorkReport

TITLE = "Wave-instructions of a row or key. Microseconds are predictions."


def print_work_report(console: Console, report: WorkReport, targets: Sequence[Target]) -> None:
    """Print one kernel: resources, its work at each shape, wait states, targets."""
    print_resources(console, report.name, None, report.resources)
    console.print(_works(report), width=COLUMNS)
    print_hazards(console, report.hazards)
    print_targets(console, targets)


def _works(report: WorkReport) -> Table:
    numbers = ("VALU", "SALU", "LDS", "waits", "bytes", "pred. us\nVALU", "pred. us\nmemory")
    table = new_table(TITLE, "shape", numbers)
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
