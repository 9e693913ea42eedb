"""Writes a report as one self-contained HTML page."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from client import engine_report as words
from client.commands.doctor import devices, versions
from client.commands.fidelity import format_cells, worst_cells
from client.commands.profile import profile_here, speed_cells, stage_cells
from client.output import Cells, counted
from indexer.case import Case
from indexer.case.case import part_of
from indexer.explain.verdict import Cause, EngineVerdict, Finding
from indexer.fidelity import CaseFidelity, OutOfRangeError, case_fidelity
from indexer.profile import PlanBalance, plan_balance
from indexer.replay import load_case
from indexer.verify import NotFiniteRow, Verification, finite_rows, verify_case, with_finite_queries
from indexer.wire import Profile
from kernel.contract import BLOCK_TOKENS

if TYPE_CHECKING:
    from kernel.backends.base import Precision


# ---- What a report shows ----

NO_KEYS = "The case holds NVFP4 pages, not the keys they were quantised from: what they cost is not known."
MAX_MAP_CELLS = 1 << 24
"""Most scores that are computed for their picture."""


@dataclass(frozen=True, eq=False)
class Gathered:
    """Parts of a report.

    Attributes:
        name: the case's file.
        case: the case.
        verification: of a backend and of an engine's result.
        fidelity: None if it is not known.
        no_fidelity: why it is not known.
        profiles: cold and warm.
        balance: of the gfx950 plan; None without prefill.
        pictures: PNG files by section, empty without matplotlib.
        environment: names and values of this machine.
    """

    name: str
    case: Case
    verification: Verification
    fidelity: CaseFidelity | None
    no_fidelity: str
    profiles: tuple[Profile, ...]
    balance: PlanBalance | None
    pictures: dict[str, bytes]
    environment: dict[str, str]


def gather(
    case: Case, name: str, backend: str, precision: str, repeats: int, on_step: Callable[[str], None]
) -> Gathered:
    """Runs everything that a report shows.

    Raises:
        InvalidArgumentError: no such backend, or keys that are not finite.
        BackendUnavailableError: the backend cannot run here.
    """
    on_step("verifying")
    verification = verify_case(case, name, backend, precision=cast("Precision", precision))
    scored = with_finite_queries(case, finite_rows(case))
    fidelity, no_fidelity = None, NO_KEYS
    if scored is not case:
        no_fidelity = "Some queries are not finite: what cheaper keys cost them is not known."
    elif case.index_k is not None:
        on_step("comparing formats")
        try:
            fidelity = case_fidelity(case, name, backend)
        except OutOfRangeError as error:  # the rest of the report does not depend on it
            no_fidelity = f"{error.argument} = {error.value}: bf16 keys select nothing to compare with."
    profiles = []
    for cache in ("cold", "warm"):
        on_step(f"profiling, {cache}")
        profiles.append(profile_here(scored, cache, backend, precision, repeats=repeats))
    balance = plan_balance(scored)
    on_step("drawing")
    pictures = _pictures(scored, backend, fidelity, profiles, balance)
    environment = {**versions(), **devices()}
    return Gathered(
        name, case, verification, fidelity, no_fidelity, tuple(profiles), balance, pictures, environment
    )


def _pictures(
    case: Case,
    backend: str,
    fidelity: CaseFidelity | None,
    profiles: list[Profile],
    balance: PlanBalance | None,
) -> dict[str, bytes]:
    try:
        from client.plots import draw_fidelity, draw_profile, draw_score_map, score_map
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("matplotlib"):
            raise
        return {}
    pictures = {"profile": draw_profile(profiles, balance)} if case.rows else {}
    if fidelity is not None and fidelity.counted_rows:
        pictures["fidelity"] = draw_fidelity(fidelity)
    shown, name = _mapped(case)
    if shown is not None:
        result = load_case(shown, backend).score()
        if result.scores is not None:
            scores = np.asarray(result.scores.cpu().numpy())
            cells = score_map(shown, scores, result.block_ids.cpu().numpy())
            pictures["map"] = draw_score_map(cells, name or f"request {cells.request}")
    return pictures


def _mapped(case: Case) -> tuple[Case | None, str]:
    """Returns the case whose scores are drawn, and its name: of a large call the end of one request."""
    if not case.rows or case.rows * case.num_score_blocks <= MAX_MAP_CELLS:
        return (case if case.rows else None), ""
    request = int(np.argmax(case.query_lens * case.seq_lens))
    first, last = (int(place) for place in case.cu_seqlens_q[request : request + 2])
    blocks = -(-int(case.seq_lens[request]) // BLOCK_TOKENS)
    start = max(first, last - max(1, MAX_MAP_CELLS // (blocks * case.num_heads)))
    name = f"request {request}" + (f", its last {last - start:,} queries" if start > first else "")
    return part_of(case, request, start, last), name


SCALE = 1124 / 1625
"""Pixels of the page to one of a picture: the widest pictures fill its 1,124."""
SHOWN_FINDINGS = 40
_STYLE = Path(__file__).with_name("style.css")


def text(value: object) -> str:
    """A value as text."""
    return html.escape(str(value))


def paragraph(value: object, kind: str = "") -> str:
    """A paragraph of text."""
    return f"<p{_class(kind)}>{text(value)}</p>"


def table(cells: Cells) -> str:
    """A table; without any heading it has no head."""
    kinds = [_class("w" if i in cells.words else "") for i in range(len(cells.columns))]
    head = "".join(f"<th{kind}>{text(name)}</th>" for kind, name in zip(kinds, cells.columns))
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{text(cell)}</td>" for kind, cell in zip_longest(kinds, row, fillvalue=""))
        + "</tr>"
        for row in cells.rows
    )
    head = f"<thead><tr>{head}</tr></thead>" if any(cells.columns) else ""
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def picture(png: bytes, alt: str) -> str:
    """A PNG file inside the page, at the scale that the widest of them needs: letters are of one size."""
    width, height = (int.from_bytes(png[at : at + 4], "big") * SCALE for at in (16, 20))
    size = f'width="{width:.0f}" height="{height:.0f}"'
    return f'<img alt="{text(alt)}" {size} src="data:image/png;base64,{base64.b64encode(png).decode()}">'


def badge(ok: bool, right: str, wrong: str) -> str:
    """A word in green or red."""
    return label(right if ok else wrong, "ok" if ok else "bad")


def label(words: str, kind: str) -> str:
    """Words on green (``ok``), red (``bad``) or amber (``open``)."""
    return f'<span class="badge {kind}">{text(words)}</span>'


def items(lines: Iterable[object]) -> str:
    """A list."""
    return f"<ul>{''.join(f'<li>{text(line)}</li>' for line in lines)}</ul>"


def tile(label: str, value: str, note: str = "") -> str:
    """A figure with its name."""
    return (
        f'<div class="tile"><div class="label">{text(label)}</div><div class="value">{text(value)}</div>'
        f'<div class="note">{text(note)}</div></div>'
    )


def section(title: str, *parts: str) -> str:
    """A section with a heading."""
    name = title.lower().replace(" ", "-")
    return f'<section id="{text(name)}"><h2>{text(title)}</h2>{"".join(parts)}</section>'


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


# ---- Sections ----


def engine_section(verdict: EngineVerdict) -> str:
    """Verdict, causes, and the first differences."""
    shown = words.some_of_each_kind(verdict, SHOWN_FINDINGS)
    parts = [f"<p>{verdict_badge(verdict)}</p>", paragraph(words.row_counts(verdict))]
    at_fault = words.selection_faults(verdict)
    if at_fault is not None:
        parts.append(paragraph(at_fault))
    parts += [*_causes(verdict), _counts(verdict)]
    if verdict.total_findings:
        parts += _differences(verdict, shown)
    return section("Engine", *parts)


def verdict_badge(verdict: EngineVerdict) -> str:
    """The verdict in a few words, coloured."""
    headline, style = words.headline_of(verdict)
    kinds = {"bold green": "ok", "bold red": "bad", "bold yellow": "open"}
    return label(headline.lower(), kinds[style])


def not_judged_section(count: int, rows: Sequence[NotFiniteRow]) -> str:
    """Rows that were left out."""
    shown = rows[: words.MAX_NAMED]
    lines = [words.not_finite(row) for row in shown]
    if count > len(shown):
        lines.append(f"and {count - len(shown):,} more")
    why = f"{count:,} rows were left out: their queries are not finite, and no answer to them is right."
    return section("Not judged", paragraph(why), items(lines))


def _counts(verdict: EngineVerdict) -> str:
    rows: list[tuple[str, str]] = []
    error = words.score_error(verdict)
    if error is not None:
        rows.append(("largest score error, in sum|q k|", error))
    if verdict.fault_rows:
        rows.append(("faulty rows by request", words.by_number(verdict.fault_rows_by_request)))
        rows.append(("faulty rows by head", words.by_number(verdict.fault_rows_by_head)))
    written = words.written_keys(verdict)
    if written is not None:
        rows.append(("keys of this step", written))
    return table(Cells(("", ""), rows, words=(0, 1))) if rows else ""


def _differences(verdict: EngineVerdict, shown: Sequence[Finding]) -> list[str]:
    parts = [
        "<h3>Differences by kind</h3>",
        table(Cells(("kind", "how many", "shown here"), words.kind_counts(verdict, shown), words=(0, 1))),
    ]
    if shown:
        parts.append(f"<h3>{text(words.shown_of(verdict, shown))}</h3>")
        parts.append(table(words.finding_cells(shown)))
        parts.append(paragraph(words.COLUMN_NOTE, "soft"))
    return parts


def _causes(verdict: EngineVerdict) -> list[str]:
    written = verdict.written.cause if verdict.written is not None else None
    parts = []
    if len(verdict.causes) > 1:
        parts.append(paragraph("These rows do not tell the following causes apart."))
    if verdict.untried:
        parts.append(paragraph(f"Not tried for want of time: {'; '.join(verdict.untried)}."))
    parts += [_cause(cause, "cause") for cause in verdict.causes]
    if written is not None:
        parts.append(_cause(written, "cause"))
    if verdict.fault_rows and not verdict.causes:
        part = " These explain a part:" if verdict.candidates else ""
        parts.append(paragraph(f"No single fault that is known here explains it.{part}"))
        parts += [_cause(cause, "cause maybe") for cause in verdict.candidates]
    return parts


def _cause(cause: Cause, kind: str) -> str:
    return (
        f'<div class="{kind}"><b>{text(words.named(cause))}</b> ({text(cause.family)})'
        f"{paragraph(cause.says)}{paragraph(words.evidence(cause), 'soft')}</div>"
    )


def report_page(gathered: Gathered) -> str:
    """The whole page, with nothing outside of it."""
    parts = [_summary(gathered)]
    if gathered.verification.unjudged_rows:
        verification = gathered.verification
        parts.append(not_judged_section(verification.unjudged_rows, verification.not_finite))
    if gathered.verification.engine is not None:
        parts.append(engine_section(gathered.verification.engine))
    parts.append(_verification(gathered))
    parts.append(_fidelity(gathered))
    parts.append(_profile(gathered))
    if "map" in gathered.pictures:
        alt = "score map of head 0 with the selected blocks outlined"
        parts.append(section("Scores and selection", picture(gathered.pictures["map"], alt)))
    parts.append(section("Machine", table(Cells(("", ""), list(gathered.environment.items()), words=(0, 1)))))
    titles = [part.split("<h2>")[1].split("</h2>")[0] for part in parts]
    links = "".join(f'<a href="#{title.lower().replace(" ", "-")}">{title}</a>' for title in titles)
    name = text(Path(gathered.name).name)
    style = _STYLE.read_text(encoding="utf-8")
    source = text(gathered.case.source) or "no source stated"
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>nvfp4-indexer report: {name}</title><style>{style}</style></head>"
        f"<body><header><div><h1>{name}</h1><p>{source}</p><nav>{links}</nav></div></header>"
        f"<main>{''.join(parts)}<footer>Made by nvfp4-indexer report. It holds no key and no query.</footer>"
        "</main></body></html>\n"
    )


def _summary(gathered: Gathered) -> str:
    case, verification = gathered.case, gathered.verification
    engine = verification.engine
    tiles = [
        tile(
            "Call",
            counted(case.rows, "row"),
            f"{counted(case.total_q, 'query', 'queries')}, {counted(case.num_heads, 'head')}",
        ),
        tile("Requests", f"{case.batch:,}", f"up to {counted(int(case.seq_lens.max(initial=0)), 'key')}"),
        tile(
            "Selection",
            f"best {case.topk}",
            f"{case.init_blocks} init, {case.local_blocks} local blocks forced",
        ),
    ]
    if engine is not None:
        tiles.append(tile("Engine's faulty rows", f"{engine.fault_rows:,}", f"of {engine.rows:,}"))
    if gathered.fidelity is not None and gathered.fidelity.counted_rows:
        nvfp4 = gathered.fidelity.formats[1]
        tiles.append(tile("Recall of NVFP4 keys", f"{nvfp4.mean:.4f}", f"worst row {nvfp4.worst:.3f}"))
    warm = gathered.profiles[-1]
    times = f"{warm.times_floor:,.1f} times the floor" if warm.flop else "no query"
    tiles.append(tile("Time, warm", f"{warm.device_ms:,.2f} ms", times))
    words = [f"<p>{badge(verification.backend_ok, 'backend right', 'backend wrong')} "]
    if engine is not None:
        words.append(verdict_badge(engine))
        if engine.causes:
            words.append(f" <b>{text(' or '.join(cause.name for cause in engine.causes))}</b>")
    return section("Summary", "".join(words) + "</p>", f'<div class="tiles">{"".join(tiles)}</div>')


def _verification(gathered: Gathered) -> str:
    found = gathered.verification
    row = (
        found.backend,
        f"{found.rows:,}",
        f"{found.topk_mismatches:,}",
        f"{found.max_score_error:.2g}",
        f"{found.score_tolerance:.2g}",
        f"{found.seconds:.2f}",
    )
    return section(
        "Backend",
        paragraph(
            "This machine's backend against the oracle, and against the outputs that the case expects."
        ),
        table(
            Cells(("backend", "rows", "wrong rows", "largest score error", "allowed", "seconds, cold"), [row])
        ),
        paragraph("Score errors are in units of the cell's sum of |q k|.", "soft"),
    )


def _fidelity(gathered: Gathered) -> str:
    shown = gathered.fidelity
    if shown is None:
        return section("Fidelity", paragraph(gathered.no_fidelity))
    if not shown.counted_rows:
        return section(
            "Fidelity", paragraph("Every row has room for all the blocks it sees: nothing is chosen.")
        )
    parts = [
        paragraph(
            f"Blocks that unquantised bf16 keys select and cheaper keys select too, forced blocks left out, "
            f"over the {shown.counted_rows:,} of {shown.rows:,} rows that have a choice."
        )
    ]
    if "fidelity" in gathered.pictures:
        parts.append(picture(gathered.pictures["fidelity"], "recall by head and row, margins and errors"))
    mass = (
        "Mass is that of a softmax over q.k / sqrt(128) of the case's own queries and keys: what attention "
        f"would lose if its logits were the indexer's. The best blocks hold {100 * shown.kept_mass:.2f} % of "
        "it; less than nothing is lost where other blocks hold more."
    )
    parts += [table(format_cells(shown)), paragraph(mass, "soft")]
    if shown.worst_rows:
        parts += ["<h3>Rows that NVFP4 costs most</h3>", table(worst_cells(shown))]
    else:
        parts.append(paragraph("No row misses a block with NVFP4 keys."))
    return section("Fidelity", *parts)


def _profile(gathered: Gathered) -> str:
    cold = gathered.profiles[0]
    parts = []
    if "profile" in gathered.pictures:
        parts.append(picture(gathered.pictures["profile"], "roofline, and balance of the gfx950 plan"))
    floor = cold.floor
    about = (
        f"{cold.backend} on {cold.device}, {cold.precision}, median of {counted(cold.repeats, 'run')}. "
        f"The floor is the longer of work and bytes at the device's own speed ({floor.source}): "
        f"{max(floor.compute_ms, floor.memory_ms):,.3f} ms, set by {floor.bound_by}."
    )
    plan = [] if gathered.balance is None else [paragraph(_plan(gathered.balance))]
    return section(
        "Profile",
        paragraph(about),
        *parts,
        table(stage_cells(gathered.profiles)),
        table(speed_cells(gathered.profiles)),
        *plan,
    )


def _plan(balance: PlanBalance) -> str:
    return (
        f"gfx950 launch plan, predicted: {balance.items:,} workgroups for {balance.slots} slots of "
        f"{balance.compute_units} compute units, {100 * balance.busy_share:.0f} % busy until the last ends."
    )
