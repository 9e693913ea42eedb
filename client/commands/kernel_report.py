"""``kernel report``: what the compiler made of the gfx950 kernels, and what a model predicts of them."""

from __future__ import annotations

import dataclasses
import json

from client.failure import one_line_errors
from client.options import JsonOption

HONESTY = (
    "Counts are facts of the compiler's output. Clocks, bounds and utilisation are predictions of a model; "
    "nothing here ran on an AMD GPU."
)


def report(as_json: JsonOption = False) -> None:
    """Compile every kernel for gfx950 and report on it: registers, loops, predicted clocks. No GPU needed.

    A loop is one trip of a wave: unmasked is four blocks seen whole, the others one block: whole, diagonal
    (unaligned where the tile starts inside a block), or later than the wave's rows. Predictions are of two
    waves a SIMD on the same path.
    """
    from client.terminal import output, status

    with one_line_errors(as_json), status() as on_step:
        on_step("loading")
        from kernel.backends.flydsl import toolchain
        from kernel.contract import SUPPORTED_HEADS
        from kernel.gfx950.report.kernel_report import report_kernel
        from kernel.gfx950.report.targets import check_targets

        reports = []
        for heads in SUPPORTED_HEADS:
            on_step(f"compiling for H = {heads}")
            name, assembly = toolchain.assembly(heads)
            on_step(f"interpreting and replaying {name}")
            reports.append(report_kernel(assembly, name, heads))
    if as_json:
        kernels = [
            {**found.fields(), "targets": [dataclasses.asdict(target) for target in check_targets(found)]}
            for found in reports
        ]
        print(json.dumps({"note": HONESTY, "kernels": kernels}))
        return
    from client.kernel_table import print_report

    console = output()
    for found in reports:
        print_report(console, found, check_targets(found))
    console.print(HONESTY)
