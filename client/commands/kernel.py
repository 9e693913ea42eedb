"""``kernel``: the gfx950 kernels as such."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from client.commands.first_run import first_run
from client.commands.kernel_report import report
from client.failure import one_line_errors
from client.options import JsonOption

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
    from client.terminal import output, status
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
    from client.terminal import output, status
    from kernel.backends.flydsl.library_export import export_library

    with one_line_errors(as_json), status() as on_step:
        on_step("compiling for gfx950")
        started = time.perf_counter()
        library, kernels = export_library(out)
        seconds = time.perf_counter() - started
    if as_json:
        print(json.dumps({"library": str(library), "kernels": kernels, "seconds": seconds}))
    else:
        output().print(f"Exported {', '.join(kernels)} to {library} in {seconds:.1f} s.")
