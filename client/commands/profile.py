"""``profile``: where a call's time goes, and how far it is from what the device could do."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from client.output import (
    BackendOption,
    CaseArgument,
    Cells,
    JsonOption,
    Precision,
    PrecisionOption,
    TokenOption,
    UrlOption,
    check_output,
    check_picture,
    counted,
    importing_plots,
    one_line_errors,
    output,
    printable,
    status,
    write_output,
)
from client.rocprof import TracedKernel, read_rocprof, rocprof_command
from indexer.case import Case, read_case

if TYPE_CHECKING:
    from indexer.profile import PlanBalance
    from indexer.replay import CaseScorer
    from indexer.wire import Profile


class CacheUse(str, enum.Enum):
    """Whether the device's caches are flushed before each run."""

    cold = "cold"
    warm = "warm"
    both = "both"


def profile(
    case: CaseArgument,
    cache: Annotated[
        CacheUse, typer.Option(help="cold: the device's caches are flushed before each run.")
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

    def run(use: str, traced: bool) -> Profile:
        if url is None:
            return profile_here(
                call, use, backend, precision.value, repeats=repeats, scores=scores, trace=traced
            )
        from client.client import remote_client

        with remote_client(url, token, backend, precision.value) as client:
            return client.profile(
                call, cache=cast("Any", use), repeats=repeats, return_scores=scores, trace=traced
            )

    with one_line_errors(as_json, case), status() as on_step:
        call = read_case(case)
        if picture is not None:
            check_picture(picture, case)
        if trace is not None:
            check_output("--trace", trace, case)
            # Silences the trace collector's own lines on stderr; it is read when torch is loaded.
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        kernels = None if rocprof is None else read_rocprof(rocprof)
        shown: list[Profile] = []
        for use in ("cold", "warm") if cache is CacheUse.both else (cache.value,):
            on_step(f"profiling, {use}")
            shown.append(run(use, traced=trace is not None and not shown))
        if trace is not None:
            write_output("--trace", trace, [json.dumps(shown[0].trace).encode()])
        balance = None
        if url is None or picture is not None:
            from indexer.profile import plan_balance

            balance = plan_balance(call)
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
        f"{'cold and warm' if cache is CacheUse.both else cache.value}, {counted(first.repeats, 'run')}"
    )
    console.print(stage_cells(shown).table())
    console.print(speed_cells(shown).table())
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
            f"({printable(floor.source)})."
        )
    if balance is not None:
        console.print(balance_sentence(balance))
    if kernels is not None:
        console.print(_kernel_cells(kernels).table("rocprofv3"))
    for path in (trace, picture):
        if path is not None:
            console.print(f"wrote {printable(str(path))}", soft_wrap=True)
    if first.backend == "flydsl" and kernels is None:
        console.print(f"Counters: {printable(rocprof_command(case))}", soft_wrap=True)


def balance_sentence(balance: PlanBalance) -> str:
    """Returns the plan's balance in words."""
    left_out = f" ({balance.decode_requests} decode requests apart)" if balance.decode_requests else ""
    return (
        f"gfx950 plan{left_out}: {balance.items:,} workgroups for {balance.slots} slots of "
        f"{balance.compute_units} CUs; predicted {100 * balance.busy_share:.0f} % busy until the last ends, "
        f"after {balance.slot_blocks[0]:,.1f} blocks."
    )


def _fields(
    shown: list[Profile],
    balance: PlanBalance | None,
    kernels: tuple[TracedKernel, ...] | None,
    trace: Path | None,
) -> dict[str, Any]:
    fields = dataclasses.asdict(shown[0])
    fields["trace"] = None if trace is None else str(trace)
    warm = [dataclasses.asdict(one) for one in shown[1:]]
    for one in warm:
        del one["trace"]
    fields["warm"] = warm[0] if warm else None
    fields["plan"] = None if balance is None else dataclasses.asdict(balance)
    fields["rocprof"] = None if kernels is None else [dataclasses.asdict(kernel) for kernel in kernels]
    return fields


def _draw(shown: list[Profile], balance: PlanBalance | None, picture: Path) -> bytes:
    with importing_plots(picture):
        from client.plots import draw_profile
    return draw_profile(shown, balance, picture.suffix.lower()[1:])


def profile_here(
    call: Case,
    cache: str,
    backend: str,
    precision: str,
    *,
    repeats: int,
    scores: bool = False,
    trace: bool = False,
) -> Profile:
    """Profiles a case in this process."""
    from indexer.profile import profile_case

    scorer = case_scorer(call, backend, precision)
    return profile_case(scorer, call, cache=cast("Any", cache), repeats=repeats, scores=scores, trace=trace)


def case_scorer(call: Case, backend: str, precision: str) -> CaseScorer:
    """Returns what scores a case of as many heads, again and again, in this process."""
    from indexer.config import IndexerConfig
    from indexer.replay import CaseScorer
    from indexer.scorer import IndexScorer

    config = IndexerConfig(
        num_index_heads=call.num_heads, num_pages=0, backend=backend, precision=cast("Any", precision)
    )
    return CaseScorer(IndexScorer(config))


def stage_cells(shown: Sequence[Profile]) -> Cells:
    """Times of each stage, a group of columns for each profile."""
    groups = ((f"{one.cache}: median ms", "least ms", "most ms") for one in shown)
    rows = [
        (
            printable(stages[0].stage),
            *(f"{ms:,.3f}" for stage in stages for ms in (stage.median_ms, stage.min_ms, stage.max_ms)),
        )
        for stages in zip(*(one.stages for one in shown))
    ]
    return Cells(("stage", *itertools.chain.from_iterable(groups)), rows)


def speed_cells(shown: Sequence[Profile]) -> Cells:
    """Work, what was achieved, and what the device does alone."""
    first = shown[0]
    speeds = [(one.tflops, one.tbps) for one in shown] + [(first.floor.tflops, first.floor.tbps)]
    compute = (f"{tflops:.4g} TFLOP/s" for tflops, _ in speeds)
    memory = (f"{tbps:.4g} TB/s" for _, tbps in speeds)
    rows = [
        ("compute", f"{first.flop / 1e9:,.3f} GFLOP", *compute),
        ("memory", f"{first.bytes / 1e6:,.3f} MB", *memory),
    ]
    return Cells(("", "work", *(one.cache for one in shown), "device alone"), rows)


def _kernel_cells(kernels: Sequence[TracedKernel]) -> Cells:
    rows = [
        (
            printable(kernel.name),
            f"{kernel.dispatches:,}",
            *(f"{us:,.2f}" for us in (kernel.total_us, kernel.median_us, kernel.min_us)),
            printable(", ".join(f"{name} {value:,.0f}" for name, value in kernel.counters.items())),
        )
        for kernel in kernels
    ]
    columns = ("kernel", "dispatches", "total us", "median us", "least us", "counters, mean of a dispatch")
    return Cells(columns, rows, words=(0, 5))
