"""``demo``: measures a case end to end, and explains what it measured."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from client.output import Cells, printable
from indexer.case import Case
from indexer.fidelity import Recall, selection_recall, unquantised_scores
from indexer.oracle import mismatched_rows, run_oracle, score_error
from indexer.pipeline import ScoreResult
from indexer.replay import LoadedCase, flop, load_case
from kernel.backends.base import SCORE_TOLERANCE
from kernel.batch import INIT_SCORE, LOCAL_SCORE

WARM_SECONDS = 2.0
"""Time after which no further warm run starts, once the fewest are done."""
WARM_RUNS = (3, 9)
"""Fewest and most warm runs."""
SHOWN_ROWS = 4
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class StageTime:
    """One stage of the pipeline.

    Attributes:
        name: what it does.
        cold_seconds: its first run in this process.
        warm_seconds: median of later runs.
        work: of a run, in ``unit``.
        unit: ``key``, ``row`` or ``FLOP``.
    """

    name: str
    cold_seconds: float
    warm_seconds: float
    work: int
    unit: str

    @property
    def throughput(self) -> float:
        """``unit`` a second, warm."""
        return self.work / self.warm_seconds if self.warm_seconds > 0 else float("inf")


@dataclass(frozen=True, eq=False)
class Demonstration:
    """A scored, timed and judged case.

    Attributes:
        case: the case.
        backend: the backend that ran.
        scores: ``[H, total_q, S]`` float32.
        block_ids: ``[H, total_q, k]`` int32.
        num_blocks: ``[total_q]`` int32.
        stages: in the order of the pipeline.
        warm_runs: runs that the warm medians are taken over.
        recall: against unquantised scoring; None for a case without the keys before quantisation.
        score_error: largest error against the oracle and the expected scores, units of ``sum_i |q_i k_i|``.
        score_tolerance: largest error allowed.
        wrong_rows: rows whose selection is not right by the oracle and the expected ids.
        expected_rows: rows that equal the case's expected ids; None where it has none.
    """

    case: Case
    backend: str
    scores: NDArray[np.float32]
    block_ids: NDArray[np.int32]
    num_blocks: NDArray[np.int32]
    stages: tuple[StageTime, ...]
    warm_runs: int
    recall: Recall | None
    score_error: float
    score_tolerance: float
    wrong_rows: int
    expected_rows: int | None

    @property
    def ok(self) -> bool:
        """Whether scores and selection are right."""
        return self.wrong_rows == 0 and self.score_error <= self.score_tolerance


def demonstrate(case: Case, backend: str, on_step: Callable[[str], None]) -> Demonstration:
    """Appends, scores, selects, times and judges a case.

    Args:
        case: the case.
        backend: a backend's name, or ``auto``.
        on_step: called with each step as it starts.

    Raises:
        InvalidArgumentError: no such backend, or keys or queries that are not finite.
        BackendUnavailableError: the backend cannot run here.
    """
    on_step("appending keys, scoring, selecting")
    loaded = load_case(case, backend)
    result = loaded.score()
    runs = [(loaded, result)]
    on_step("the same again, warm")
    began = time.perf_counter()
    fewest, most = WARM_RUNS
    while len(runs) <= fewest or (len(runs) <= most and time.perf_counter() - began < WARM_SECONDS):
        again = load_case(case, backend)
        runs.append((again, again.score()))
    if result.scores is None:
        raise AssertionError("scores were asked for")
    scores, block_ids = result.scores.cpu().numpy(), result.block_ids.cpu().numpy()
    recall = None
    if case.index_k is not None:
        on_step("scoring the unquantised keys")
        recall = selection_recall(case, unquantised_scores(case), torch.from_numpy(block_ids))
    on_step("asking the oracle")
    oracle = run_oracle(case)
    error = score_error(scores, oracle.scores, oracle.bounds)
    if case.expected_scores is not None:
        error = max(error, score_error(scores, case.expected_scores, oracle.bounds))
    tolerance = SCORE_TOLERANCE[result.precision]
    expected = case.expected_block_ids
    return Demonstration(
        case=case,
        backend=result.backend,
        scores=scores,
        block_ids=block_ids,
        num_blocks=result.num_blocks.cpu().numpy(),
        stages=_stages(case, runs),
        warm_runs=len(runs) - 1,
        recall=recall,
        score_error=error,
        score_tolerance=tolerance,
        wrong_rows=mismatched_rows(case, scores, block_ids, oracle, tolerance),
        expected_rows=None if expected is None else int((block_ids == expected).all(axis=2).sum()),
    )


def _stages(case: Case, runs: list[tuple[LoadedCase, ScoreResult]]) -> tuple[StageTime, ...]:
    stages = []

    def add(name: str, seconds: list[float], work: int, unit: str) -> None:
        stages.append(StageTime(name, seconds[0], statistics.median(seconds[1:]), work, unit))

    if case.index_k is not None:
        seconds = [loaded.append_seconds for loaded, _ in runs]
        add("append: quantise keys into pages", seconds, case.total_k, "key")
    for stage, name, work, unit in (
        ("quantize_query", "cast queries to E4M3", case.rows, "row"),
        ("score", "score", flop(case), "FLOP"),
        ("topk", f"select the best {case.topk}", case.rows, "row"),
    ):
        if stage in runs[0][1].timings:
            add(name, [result.timings[stage] for _, result in runs], work, unit)
    return tuple(stages)


# ---- Human-readable text, or one JSON object ----


def print_report(
    console: Console, shown: Demonstration, path: str, picture: Path, no_picture: str | None
) -> None:
    """Prints the explanation of a demonstration.

    Args:
        console: where to.
        shown: the demonstration.
        path: the case's file.
        picture: the score map's file.
        no_picture: why it was not drawn, None if it was.
    """

    def section(title: str, *parts: RenderableType) -> None:
        console.print(Rule(Text(title, "bold"), align="left", style="dim"))
        for part in parts:
            console.print(Padding(part, (0, 0, 0, 2)))
        console.print()

    section("What happens", Text(_explanation(shown, path)))
    section("What was picked", Text(_legend(shown.case)), _picks(shown).table())
    section("How well NVFP4 keys choose", Text(_fidelity(shown)))
    section("How long it took", _times(shown).table())
    where = f"{printable(str(picture))}: score map of head 0, the selection drawn in."
    if no_picture is not None:
        where = f"No picture: {printable(no_picture)}."
    section("Picture", Text(where, overflow="fold"))
    console.print(_verdict(shown))


def _explanation(shown: Demonstration, path: str) -> str:
    case = shown.case
    if case.index_k is None:
        pages = 0 if case.pages is None else len(case.pages)
        keys = f"The {case.total_k:,} keys are already in {pages:,} NVFP4 pages."
    else:
        keys = (
            f"{case.total_k:,} keys of 128 values are quantised to NVFP4 as they are appended: 72 bytes each "
            "in place of 256, 128 keys a page."
        )
    requests = "one request" if case.batch == 1 else f"{case.batch} requests"
    return (
        f"{printable(path)}: {requests}, {case.total_q:,} query tokens, {case.num_heads} index heads.\n"
        + (f"{case.source}\n" if case.source else "")
        + f"{keys} Every row (a query token and a head) scores each block of 128 keys it may see by its best "
        f"q.k, and keeps the {case.topk} best blocks, which is all that attention then reads. "
        f"Backend: {shown.backend}."
    )


def _legend(case: Case) -> str:
    forced = []
    if case.init_blocks:
        forced.append(f"the first {case.init_blocks} (init)")
    if case.local_blocks:
        forced.append(f"the last {case.local_blocks} (local)")
    rule = f"Forced into every row: {' and '.join(forced)}. " if forced else "No block is forced. "
    return rule + "A few rows:"


def _picks(shown: Demonstration) -> Cells:
    rows: list[tuple[str | Text, ...]] = []
    for head, token in _shown_rows(shown.case):
        request, position = _place(shown.case, token)
        numbers = (request, head, position, int(shown.num_blocks[token]))
        rows.append((*(f"{number:,}" for number in numbers), _picked(shown, head, token)))
    columns = ("request", "head", "position", "blocks seen", "picked (block:score, best first)")
    return Cells(columns, rows, words=(4,))


def _picked(shown: Demonstration, head: int, token: int) -> Text:
    line = Text()
    for pick in _row_picks(shown, head, token):
        if pick["forced"]:
            line.append(f"{pick['block']}:{pick['forced']}", "bold red")
        else:
            line.append(f"{pick['block']}", "bold").append(f":{pick['score']:.1f}", "dim")
        line.append("  ")
    return line


def _row_picks(shown: Demonstration, head: int, token: int) -> list[dict[str, Any]]:
    picks = []
    for block in shown.block_ids[head, token].tolist():
        if block >= 0:
            score = float(shown.scores[head, token, block])
            forced = "init" if score >= INIT_SCORE else "local" if score >= LOCAL_SCORE else None
            picks.append({"block": block, "score": score, "forced": forced})
    return picks


def _shown_rows(case: Case) -> list[tuple[int, int]]:
    """A few rows, spread over tokens and heads."""
    count = min(SHOWN_ROWS, case.total_q)
    tokens = [round(i * (case.total_q - 1) / max(count - 1, 1)) for i in range(count)]
    return [(i % case.num_heads, token) for i, token in enumerate(tokens)]


def _place(case: Case, token: int) -> tuple[int, int]:
    """The request of a query token, and its position there."""
    return int(case.requests_of(token)), int(case.positions()[token])


def _fidelity(shown: Demonstration) -> str:
    recall, case = shown.recall, shown.case
    if recall is None:
        return "Not known: the case holds NVFP4 pages, not the keys they were quantised from."
    if not recall.counted_rows:
        return "Nothing to choose: every row has room for all the blocks it sees."
    return (
        f"Top-{case.topk} recall against unquantised bf16 scoring, forced blocks left out: {recall.mean:.4f} "
        f"mean, {recall.worst:.3f} in the worst row "
        f"({recall.counted_rows:,} of {case.rows:,} rows have a choice)."
    )


def _times(shown: Demonstration) -> Cells:
    rows = [
        (one.name, _ms(one.cold_seconds), _ms(one.warm_seconds), _throughput(one)) for one in shown.stages
    ]
    warm = f"warm (median of {shown.warm_runs})"
    return Cells(("stage", "cold (first run)", warm, "warm throughput"), rows)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds < 0.1 else f"{1e3 * seconds:,.0f} ms"


def _throughput(stage: StageTime) -> str:
    rate = stage.throughput
    scale, prefix = next(((scale, prefix) for scale, prefix in _PREFIXES if rate >= scale), (1.0, ""))
    unit = "FLOP/s" if stage.unit == "FLOP" else f" {stage.unit}s/s"
    return f"{rate / scale:.3g} {prefix}{unit}".replace("  ", " ")


def _verdict(shown: Demonstration) -> Text:
    rows = shown.case.rows
    if not shown.ok:
        return Text(
            f"WRONG: {shown.wrong_rows:,} of {rows:,} rows differ from the right selection; score error "
            f"{shown.score_error:.2g} of {shown.score_tolerance:.2g} allowed.",
            "bold red",
        )
    if shown.expected_rows is None:
        agreed = "the oracle agrees"
    elif shown.expected_rows == rows:
        agreed = "all equal the case's expected ids, and the oracle agrees"
    else:
        agreed = f"{shown.expected_rows:,} equal the expected ids, the others are legal; the oracle agrees"
    return Text(f"RIGHT: {rows:,} of {rows:,} rows selected right ({agreed}).", "bold green")


def report_fields(shown: Demonstration, path: str, picture: Path, no_picture: str | None) -> dict[str, Any]:
    """Returns a demonstration as one JSON object; arguments as of :func:`print_report`."""
    recall = shown.recall
    return {
        "case": path,
        "backend": shown.backend,
        "ok": shown.ok,
        "rows": shown.case.rows,
        "topk_mismatches": shown.wrong_rows,
        "max_score_error": shown.score_error,
        "score_tolerance": shown.score_tolerance,
        "rows_equal_expected": shown.expected_rows,
        "recall": None
        if recall is None
        else {"mean": recall.mean, "worst": recall.worst, "rows": recall.counted_rows},
        "stages": [dataclasses.asdict(stage) for stage in shown.stages],
        "warm_runs": shown.warm_runs,
        "picks": [
            {"request": request, "head": head, "position": position, "blocks": _row_picks(shown, head, token)}
            for head, token in _shown_rows(shown.case)
            for request, position in [_place(shown.case, token)]
        ],
        "picture": None if no_picture is not None else str(picture),
        "no_picture": no_picture,
    }
