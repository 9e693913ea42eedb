"""``kernel report``: what the compiler made of the gfx950 kernels, and what a model predicts of them."""

from __future__ import annotations

import dataclasses
import itertools
import json

from client.failure import one_line_errors
from client.options import JsonOption

HONESTY = (
    "Counts are facts of the compiler's output. Clocks, bounds and utilisation are predictions of a model; "
    "nothing here ran on an AMD GPU."
)


def report(as_json: JsonOption = False) -> None:
    """Compile every kernel for gfx950 and report on it: registers, loops, predicted clocks. No GPU needed.

    A loop is one trip of a wave. Prefill: unmasked is four blocks seen whole, the others one block: whole,
    diagonal (unaligned where the tile starts inside a block), or later than the wave's rows. Decode: four
    pages, without more, with the maximum of their group, with sentinels; in both layouts. Predictions are of
    two waves a SIMD on the same path. Of top-k and insert it is what a row or key takes.
    """
    from client.terminal import output, status

    with one_line_errors(as_json), status() as on_step:
        on_step("loading")
        from kernel.backends.flydsl import kernel_names, toolchain
        from kernel.backends.flydsl.decode_layout import LAYOUTS
        from kernel.backends.flydsl.key_type import KeyType
        from kernel.backends.flydsl.topk_variants import VARIANTS
        from kernel.contract import SUPPORTED_HEADS
        from kernel.gfx950.report.decode import report_decode
        from kernel.gfx950.report.decode_targets import check_decode_targets
        from kernel.gfx950.report.insert import report_insert
        from kernel.gfx950.report.kernel_report import report_kernel
        from kernel.gfx950.report.targets import check_targets
        from kernel.gfx950.report.topk import report_topk
        from kernel.gfx950.report.work_targets import check_work_targets

        reports, decode_reports, work_reports = [], [], []
        for heads in SUPPORTED_HEADS:
            name = kernel_names.score_prefill(heads)
            on_step(f"compiling {name}")
            assembly = toolchain.assembly(name)
            on_step(f"interpreting and replaying {name}")
            reports.append(report_kernel(assembly, name, heads))
        for layout, heads in itertools.product(LAYOUTS, SUPPORTED_HEADS):
            name = kernel_names.score_decode(heads, layout)
            on_step(f"compiling {name}")
            assembly = toolchain.assembly(name)
            on_step(f"interpreting and replaying {name}")
            decode_reports.append(report_decode(assembly, name, heads, layout))
        for variant in VARIANTS:
            on_step(f"compiling and interpreting {variant.name}")
            work_reports.append(report_topk(toolchain.assembly(variant.name), variant))
        for key_type in KeyType:
            on_step(f"compiling and interpreting the insert of {key_type.value} keys")
            name = kernel_names.insert(key_type)
            work_reports.append(report_insert(toolchain.assembly(name), name, key_type))
    prefill = [(found, check_targets(found)) for found in reports]
    decode = [(found, check_decode_targets(found)) for found in decode_reports]
    work = [(found, check_work_targets(found)) for found in work_reports]
    if as_json:
        fields = [
            *((found.fields(), targets) for found, targets in prefill),
            *((found.fields(), targets) for found, targets in decode),
            *((found.fields(), targets) for found, targets in work),
        ]
        kernels = [
            {**kernel, "targets": [dataclasses.asdict(target) for target in targets]}
            for kernel, targets in fields
        ]
        print(json.dumps({"note": HONESTY, "kernels": kernels}))
        return
    from client.decode_table import print_decode_report
    from client.kernel_table import print_report
    from client.work_table import print_work_report

    console = output()
    for found, targets in prefill:
        print_report(console, found, targets)
    for found_decode, targets in decode:
        print_decode_report(console, found_decode, targets)
    for found_work, targets in work:
        print_work_report(console, found_work, targets)
    console.print(HONESTY)
