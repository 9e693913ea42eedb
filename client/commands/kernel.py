"""``kernel``: the gfx950 kernels as such."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from client.commands.first_run import first_run
from client.output import JsonOption, one_line_errors, output, status

if TYPE_CHECKING:
    from kernel.gfx950.report.decode import DecodeReport
    from kernel.gfx950.report.model import Target
    from kernel.gfx950.report.prefill import KernelReport
    from kernel.gfx950.report.work import WorkReport

# ``kernel report``: what the compiler made of the gfx950 kernels, and what a model predicts of them.

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
    with one_line_errors(as_json), status() as on_step:
        on_step("loading")
        from kernel.backends.flydsl import geometry, toolchain
        from kernel.backends.flydsl.geometry import LAYOUTS, VARIANTS, KeyType
        from kernel.contract import SUPPORTED_HEADS
        from kernel.gfx950.report.decode import check_decode_targets, report_decode
        from kernel.gfx950.report.prefill import check_targets, report_kernel
        from kernel.gfx950.report.work import check_work_targets, report_insert, report_topk

        found: list[tuple[KernelReport | DecodeReport | WorkReport, Sequence[Target]]] = []
        for heads in SUPPORTED_HEADS:
            name = geometry.prefill_name(heads)
            on_step(f"compiling {name}")
            assembly = toolchain.assembly(name)
            on_step(f"interpreting and replaying {name}")
            prefill = report_kernel(assembly, name, heads)
            found.append((prefill, check_targets(prefill)))
        for layout, heads in itertools.product(LAYOUTS, SUPPORTED_HEADS):
            name = geometry.decode_name(heads, layout)
            on_step(f"compiling {name}")
            assembly = toolchain.assembly(name)
            on_step(f"interpreting and replaying {name}")
            decode = report_decode(assembly, name, heads, layout)
            found.append((decode, check_decode_targets(decode)))
        for variant in VARIANTS:
            on_step(f"compiling and interpreting {variant.name}")
            work = report_topk(toolchain.assembly(variant.name), variant)
            found.append((work, check_work_targets(work)))
        for key_type in KeyType:
            on_step(f"compiling and interpreting the insert of {key_type.value} keys")
            name = geometry.insert_name(key_type)
            work = report_insert(toolchain.assembly(name), name, key_type)
            found.append((work, check_work_targets(work)))
    if as_json:
        kernels = [
            {**report.fields(), "targets": [dataclasses.asdict(target) for target in targets]}
            for report, targets in found
        ]
        print(json.dumps({"note": HONESTY, "kernels": kernels}))
        return
    from client.kernel_tables import print_report

    console = output()
    for report, targets in found:
        print_report(console, report, targets)
    console.print(HONESTY)


kernel = typer.Typer(
    name="kernel",
    help="Compile and export the gfx950 kernels, report on them, and try them on their first GPU.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@kernel.callback()
def _group() -> None:
    """Compile and export the gfx950 kernels, and report on them."""


kernel.command("report")(report)
kernel.command("first-run")(first_run)


@kernel.command("compile")
def compile_(
    cache: Annotated[
        Path | None, typer.Option(help="FlyDSL's cache; FLYDSL_RUNTIME_CACHE_DIR or its default if left out.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compile every kernel for gfx950 into FlyDSL's cache, with no GPU, so that no first call compiles.

    A cache is bound to the ROCm installation: compile where the kernels will run, in the final image. With
    --cache DIR, processes find it if FLYDSL_RUNTIME_CACHE_DIR is DIR.
    """
    from kernel.backends.flydsl.toolchain import compile_kernels

    with one_line_errors(as_json), status() as on_step:
        on_step("compiling for gfx950")
        started = time.perf_counter()
        kernels = compile_kernels(cache)
        seconds = time.perf_counter() - started
    if as_json:
        print(
            json.dumps(
                {"kernels": kernels, "cache": None if cache is None else str(cache), "seconds": seconds}
            )
        )
    else:
        output().print(f"Compiled {', '.join(kernels)} in {seconds:.1f} s.")


@kernel.command("export")
def export(
    out: Annotated[Path, typer.Option(help="Folder for nvfp4-indexer-kernels.so, made if missing.")],
    as_json: JsonOption = False,
) -> None:
    """Compile every kernel for gfx950 into one shared library, with no GPU. What uses it needs no FlyDSL.

    The backends flydsl and flydsl-sim take the library that NVFP4_INDEXER_KERNEL_LIBRARY names. It belongs to
    this version of the package, and another one refuses it.
    """
    from kernel.backends.flydsl.kernel_library import export_library

    with one_line_errors(as_json), status() as on_step:
        on_step("compiling for gfx950")
        started = time.perf_counter()
        library, kernels = export_library(out)
        seconds = time.perf_counter() - started
    if as_json:
        print(json.dumps({"library": str(library), "kernels": kernels, "seconds": seconds}))
    else:
        output().print(f"Exported {', '.join(kernels)} to {library} in {seconds:.1f} s.")
