"""``profile``: where a call's time goes, and how far it is from what the device could do."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from client.output import (
    BackendOption,
    JsonOption,
    Precision,
    PrecisionOption,
    TokenOption,
    UrlOption,
    one_line_errors,
    printable,
)

if TYPE_CHECKING:
    from rich.table import Table

    from client.rocprof import TracedKernel
    from indexer.case import Case
    from indexer.profile import PlanBalance
    from indexer.wire import Profile


class CacheUse(str, enum.Enum):
    """Whether the device's caches are flushed before each run."""

    cold = "cold"
    warm = "warm"
    both = "both"


def profile(
    case: Annotated[str, typer.Argument(metavar="CASE", help="A case file.")],
    cache: Annotated[
        CacheUse,
        typer.Option(help="cold: the device's caches are flushed before each run."),
    ] = CacheUse.both,
    repeats: Annotated[
        int, typer.Option(min=1, max=100, help="Runs that are measured, after one that is not.")
    ] = 5,
    scores: Annotated[
        bool, typer.Option("--scores", help="Keep the scores, as a caller that wants them would.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="JSON file for a chrome trace of one more run; Perfetto opens it.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="PNG or SVG file: roofline, and balance of the gfx950 launch plan.")
    ] = None,
    rocprof: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="What rocprofv3 wrote there is shown; see docs/profile.md."),
    ] = None,
    backend: BackendOption = "auto",
    precision: PrecisionOption = Precision.exact,
    url: UrlOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a recorded call several times: each stage's time, and the speed beside the device's own floor.

    With --json: the cold profile's fields (the only one's, if one was asked for), warm with the same fields
    or null, plan with the predicted balance of the gfx950 launch plan or null, and rocprof with its kernels
    or null.
    """
    from client.output import check_output, check_picture, counted, output, status, write_output
    from indexer.case import read_case

    with one_line_errors(as_json, case), status() as on_step:
        call = read_case(case)
        if picture is not None:
            check_picture(picture, case)
        if trace is not None:
            check_output("--trace", trace, case)
            # Its collector writes lines of its own to stderr; read when torch is loaded.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        kernels = None
        if rocprof is not None:
            from client.rocprof import read_rocprof

            kernels = read_rocprof(rocprof)
        shown: list[Profile] = []
        for use in ("cold", "warm") if cache is CacheUse.both else (cache.value,):
            on_step(f"profiling, {use}")
            traced = trace is not None and not shown
            shown.append(_profile(call, use, repeats, scores, traced, backend, precision, url, token))
        if trace is not None:
            write_output("--trace", trace, [json.dumps(shown[0].trace).encode()])
        balance = _balance(call) if url is None or picture is not None else None
        if picture is not None:
            write_output("--picture", picture, [_draw(shown, balance, picture)])
    if as_json:
        print(json.dumps(_fields(shown, balance, kernels, trace)))
        return
    console = output()
    first = shown[0]
    console.print(
        f"{printable(case)}: {counted(first.batch, 'request')}, "
        f"{counted(first.total_q, 'query', 'queries')}, {counted(first.num_heads, 'head')}, "
        f"up to {counted(first.longest_context, 'token')}; "
        f"{printable(first.backend)} on {printable(first.device)}, "
        f"{'cold and warm' if cache is CacheUse.both else cache.value}, {counted(first.repeats, 'run')}",
        markup=False,
    )
    console.print(stage_table(shown))
    console.print(speed_table(shown))
    for one in shown:
        floor = one.floor
        if not one.flop:
            console.print(
                f"{one.cache}: {one.device_ms:.3f} ms; no query, so there is nothing to compare with."
            )
            continue
        console.print(
            f"{one.cache}: {one.device_ms:.3f} ms are {one.times_floor:.2f} times the floor, which "
            f"{floor.bound_by} sets: {max(floor.compute_ms, floor.memory_ms):.3f} ms "
            f"({printable(floor.source)}).",
            markup=False,
        )
    if balance is not None:
        console.print(balance_sentence(balance), markup=False)
    if kernels is not None:
        console.print(kernel_table(kernels))
    for path in (trace, picture):
        if path is not None:
            console.print(f"wrote {printable(str(path))}", markup=False, soft_wrap=True)
    if first.backend == "flydsl" and kernels is None:
        from client.rocprof import rocprof_command

        console.print(f"Counters: {printable(rocprof_command(case))}", markup=False, soft_wrap=True)


def balance_sentence(balance: PlanBalance) -> str:
    """The plan's balance in words."""
    left_out = f" ({balance.decode_requests} decode requests apart)" if balance.decode_requests else ""
    return (
        f"gfx950 plan{left_out}: {balance.items:,} workgroups for {balance.slots} slots of "
        f"{balance.compute_units} CUs; predicted {100 * balance.busy_share:.0f} % busy until the last ends, "
        f"after {balance.slot_blocks[0]:,.1f} blocks."
    )


def _profile(
    call: Case,
    cache: str,
    repeats: int,
    scores: bool,
    trace: bool,
    backend: str,
    precision: Precision,
    url: str | None,
    token: str | None,
) -> Profile:
    if url is None:
        return profile_here(call, cache, repeats, scores, trace, backend, precision.value)
    from client.client import remote_client

    with remote_client(url, token, backend, precision.value) as client:
        return client.profile(
            call, cache=cast("Any", cache), repeats=repeats, return_scores=scores, trace=trace
        )


def _fields(
    shown: list[Profile],
    balance: PlanBalance | None,
    kernels: tuple[TracedKernel, ...] | None,
    trace: Path | None,
) -> dict[str, Any]:
    fields = dataclasses.asdict(shown[0])
    fields["trace"] = None if trace is None else str(trace)
    warm = None
    if len(shown) > 1:
        warm = dataclasses.asdict(shown[1])
        del warm["trace"]
    fields["warm"] = warm
    fields["plan"] = None if balance is None else dataclasses.asdict(balance)
    fields["rocprof"] = None if kernels is None else [dataclasses.asdict(kernel) for kernel in kernels]
    return fields


def _balance(call: Case) -> PlanBalance | None:
    from indexer.profile import plan_balance

    return plan_balance(call)


def _draw(shown: list[Profile], balance: PlanBalance | None, picture: Path) -> bytes:
    from client.output import importing_plots

    with importing_plots(picture):
        from client.plots import draw_profile
    return draw_profile(shown, balance, picture.suffix.lower()[1:])


def profile_here(
    call: Case, cache: str, repeats: int, scores: bool, trace: bool, backend: str, precision: str
) -> Profile:
    """Profile a case in this process."""
    from indexer.config import IndexerConfig
    from indexer.profile import profile_case
    from indexer.replay import CaseScorer
    from indexer.scorer import IndexScorer

    config = IndexerConfig(
        num_index_heads=call.num_heads, num_pages=0, backend=backend, precision=cast("Any", precision)
    )
    scorer = CaseScorer(IndexScorer(config))
    return profile_case(scorer, call, cache=cast("Any", cache), repeats=repeats, scores=scores, trace=trace)


def stage_table(shown: Sequence[Profile]) -> Table:
    """Times of each stage, a group of columns for each profile."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("stage", min_width=max(len(stage.stage) for stage in shown[0].stages))
    for one in shown:
        for column in (f"{one.cache}: median ms", "least ms", "most ms"):
            table.add_column(column, justify="right")
    for index, stage in enumerate(shown[0].stages):
        times = [
            f"{time:.3f}"
            for one in shown
            for time in (one.stages[index].median_ms, one.stages[index].min_ms, one.stages[index].max_ms)
        ]
        table.add_row(printable(stage.stage), *times)
    return table


def speed_table(shown: Sequence[Profile]) -> Table:
    """Work, what was achieved, and what the device does alone."""
    from rich import box
    from rich.table import Table

    first = shown[0]
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    table.add_column("work", justify="right")
    for one in shown:
        table.add_column(one.cache, justify="right")
    table.add_column("device alone", justify="right")
    table.add_row(
        "compute",
        f"{first.flop / 1e9:,.3f} GFLOP",
        *(f"{one.tflops:.4g} TFLOP/s" for one in shown),
        f"{first.floor.tflops:.4g} TFLOP/s",
    )
    table.add_row(
        "memory",
        f"{first.bytes / 1e6:,.3f} MB",
        *(f"{one.tbps:.4g} TB/s" for one in shown),
        f"{first.floor.tbps:.4g} TB/s",
    )
    return table


def kernel_table(kernels: Sequence[TracedKernel]) -> Table:
    """Kernels that rocprofv3 traced."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title="rocprofv3", title_justify="left")
    table.add_column("kernel", overflow="fold")
    for column in ("dispatches", "total us", "median us", "least us"):
        table.add_column(column, justify="right")
    table.add_column("counters, mean of a dispatch", overflow="fold")
    for kernel in kernels:
        counters = ", ".join(f"{name} {value:,.0f}" for name, value in kernel.counters.items())
        times = (kernel.total_us, kernel.median_us, kernel.min_us)
        table.add_row(
            printable(kernel.name),
            f"{kernel.dispatches:,}",
            *(f"{time:,.2f}" for time in times),
            printable(counters),
        )
    return table
