"""``profile``: where a call's time goes, and how far it is from what the device could do."""

from __future__ import annotations

import dataclasses
import enum
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from client.failure import one_line_errors, printable
from client.options import BackendOption, JsonOption, Precision, PrecisionOption, TokenOption, UrlOption

if TYPE_CHECKING:
    from rich.table import Table

    from indexer.case import Case
    from indexer.wire import Profile


class CacheUse(str, enum.Enum):
    """Whether the device's caches are flushed before each run."""

    cold = "cold"
    warm = "warm"


def profile(
    case: Annotated[str, typer.Argument(metavar="CASE", help="A case file.")],
    cache: Annotated[
        CacheUse, typer.Option(help="cold: the device's caches are flushed before each run.")
    ] = CacheUse.cold,
    repeats: Annotated[
        int, typer.Option(min=1, max=100, help="Runs that are measured, after one that is not.")
    ] = 5,
    scores: Annotated[
        bool, typer.Option("--scores", help="Keep the scores, as a caller that wants them would.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="JSON file for a chrome trace of one more run; Perfetto opens it.")
    ] = None,
    backend: BackendOption = "auto",
    precision: PrecisionOption = Precision.exact,
    url: UrlOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a recorded call several times: each stage's time, and the speed beside the device's own floor."""
    from client.terminal import output, status
    from indexer.case import read_case

    with one_line_errors(as_json, case), status() as on_step:
        call = read_case(case)
        on_step("profiling")
        if url is None:
            shown = _profile_here(call, cache, repeats, scores, trace is not None, backend, precision)
        else:
            from client.remote import remote_client

            with remote_client(url, token, backend, precision.value) as client:
                shown = client.profile(
                    call,
                    cache=cache.value,
                    repeats=repeats,
                    return_scores=scores,
                    trace=trace is not None,
                )
        if trace is not None:
            trace.parent.mkdir(parents=True, exist_ok=True)
            trace.write_text(json.dumps(shown.trace), encoding="utf-8")
    if as_json:
        fields = dataclasses.asdict(shown)
        fields["trace"] = None if trace is None else str(trace)
        print(json.dumps(fields))
        return
    console = output()
    console.print(
        f"{printable(case)}: {shown.batch} requests, {shown.total_q} queries, {shown.num_heads} heads, up to "
        f"{shown.longest_context} tokens; {printable(shown.backend)} on {printable(shown.device)}, "
        f"{shown.cache}, {shown.repeats} runs",
        markup=False,
    )
    console.print(_stages(shown))
    console.print(_speed(shown))
    floor = shown.floor
    console.print(
        f"{shown.device_ms:.3f} ms are {shown.times_floor:.2f} times the floor, which {floor.bound_by} sets: "
        f"{max(floor.compute_ms, floor.memory_ms):.3f} ms ({printable(floor.source)}).",
        markup=False,
    )
    if trace is not None:
        console.print(f"wrote {printable(str(trace))}", markup=False, soft_wrap=True)


def _profile_here(
    call: Case,
    cache: CacheUse,
    repeats: int,
    scores: bool,
    trace: bool,
    backend: str,
    precision: Precision,
) -> Profile:
    from indexer.case_scorer import CaseScorer
    from indexer.config import IndexerConfig
    from indexer.profile import profile_case
    from indexer.scorer import IndexScorer

    config = IndexerConfig(
        num_index_heads=call.num_heads, num_pages=0, backend=backend, precision=precision.value
    )
    scorer = CaseScorer(IndexScorer(config))
    return profile_case(scorer, call, cache=cache.value, repeats=repeats, scores=scores, trace=trace)


def _stages(shown: Profile) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("stage")
    for column in ("median ms", "least ms", "most ms"):
        table.add_column(column, justify="right")
    for stage in shown.stages:
        times = (stage.median_ms, stage.min_ms, stage.max_ms)
        table.add_row(printable(stage.stage), *(f"{time:.3f}" for time in times))
    return table


def _speed(shown: Profile) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for column in ("work", "achieved", "device alone"):
        table.add_column(column, justify="right")
    table.add_row(
        "compute",
        f"{shown.flop / 1e9:,.3f} GFLOP",
        f"{shown.tflops:.4g} TFLOP/s",
        f"{shown.floor.tflops:.4g} TFLOP/s",
    )
    table.add_row(
        "memory",
        f"{shown.bytes / 1e6:,.3f} MB",
        f"{shown.tbps:.4g} TB/s",
        f"{shown.floor.tbps:.4g} TB/s",
    )
    return table
