"""``fidelity``: what NVFP4 and fp8 keys cost the selection, beside the keys before quantisation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from client.output import (
    BackendOption,
    Cells,
    JsonOption,
    check_picture,
    importing_plots,
    one_line_errors,
    output,
    printable,
    status,
    write_output,
)
from indexer.case import read_case
from kernel.errors import InvalidArgumentError

if TYPE_CHECKING:
    from indexer.fidelity import CaseFidelity


def fidelity(
    cases: Annotated[list[str], typer.Argument(metavar="CASE...", help="Case files with index_k.")],
    picture: Annotated[
        Path | None, typer.Option(help="PNG or SVG file of plots; with several cases, the recall of each.")
    ] = None,
    backend: BackendOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Compare the selection from bf16, fp8 and NVFP4 keys: recall by head, mass lost, worst rows.

    Recall is the share of the blocks that unquantised bf16 keys select, forced blocks left out, over the rows
    that have a choice. Mass is that of a softmax over q.k / sqrt(128) of the case's queries and keys: what
    attention would lose if its logits were the indexer's. With --json, one object a line and case.
    """
    shown = []
    with one_line_errors(as_json, cases[0] if len(cases) == 1 else None), status() as on_step:
        calls = [read_case(name) for name in cases]
        if picture is not None:
            check_picture(picture, *cases)
        from indexer.fidelity import case_fidelity

        for name, call in zip(cases, calls):
            on_step(f"scoring {printable(name)}")
            shown.append(case_fidelity(call, name, backend))
            if as_json:
                print(json.dumps(fidelity_fields(shown[-1])), flush=True)
        if picture is not None:
            on_step("drawing")
            write_output("--picture", picture, [_draw(shown, picture)])
    if as_json:
        return
    console = output()
    for one in shown:
        layer = "" if one.layer is None else f", layer {one.layer}"
        console.print(
            f"{printable(one.case)}{layer}: {one.counted_rows:,} of {one.rows:,} rows have a choice "
            f"({printable(one.backend)})"
        )
        if not one.counted_rows:
            continue
        console.print(format_cells(one).table())
        quantiles = ", ".join(f"{gap:.3g}" for gap in one.gap_quantiles)
        console.print(
            f"Gap at the last place (5, 25, 50, 75, 95 %): {quantiles}. The best blocks hold "
            f"{100 * one.kept_mass:.2f} % of the softmax mass."
        )
        if one.worst_rows:
            console.print(worst_cells(one).table("Rows that NVFP4 keys cost most"))
        else:
            console.print("No row misses a block with NVFP4 keys.")
    if picture is not None:
        console.print(f"wrote {printable(str(picture))}", soft_wrap=True)


def fidelity_fields(shown: CaseFidelity) -> dict[str, Any]:
    """A case's fidelity as one JSON object."""
    fields = dataclasses.asdict(shown)
    del fields["gaps"]
    for found in fields["formats"]:
        del found["per_row"], found["errors"]
        found["heads"] = found.pop("heads")  # the longest field comes last
    return fields


def _draw(shown: list[CaseFidelity], picture: Path) -> bytes:
    with importing_plots(picture):
        from client.plots import draw_fidelity, draw_layers
    if not any(one.counted_rows for one in shown):
        limit = "there is nothing to draw: no row has a choice"
        raise InvalidArgumentError("--picture", picture, limit, "leave it out, or pass a longer context")
    file_format = picture.suffix.lower()[1:]
    return draw_fidelity(shown[0], file_format) if len(shown) == 1 else draw_layers(shown, file_format)


def format_cells(shown: CaseFidelity) -> Cells:
    """Recall, score error and lost mass of each format, and its recall by head."""
    rows: list[tuple[str, ...]] = []
    for found in shown.formats:
        error = "" if found.score_error is None else f"{found.score_error:.3g}"
        recall = f"{found.mean:.4f}", f"{found.worst:.3f}"
        masses = f"{100 * found.lost_mass:.3f} %", f"{100 * found.worst_lost_mass:.2f} %"
        rows.append((found.name, "all", f"{shown.counted_rows:,}", *recall, error, *masses))
        for head in found.heads if len(found.heads) > 1 else ():
            rows.append(("", str(head.head), f"{head.rows:,}", f"{head.mean:.4f}", f"{head.worst:.3f}"))
    recalls, losses = ("recall mean", "worst row"), ("mass lost", "worst row")
    columns = ("keys", "head", "rows", *recalls, "score rms error", *losses)
    return Cells(columns, rows)


def worst_cells(shown: CaseFidelity) -> Cells:
    """The rows that NVFP4 keys cost most."""
    rows = [
        (
            str(row.request),
            str(row.head),
            f"{row.position:,}",
            f"{row.recall:.3f}",
            f"{row.gap:.3g}",
            f"{100 * row.lost_mass:.2f} %",
            ", ".join(map(str, row.missed)),
        )
        for row in shown.worst_rows
    ]
    columns = ("request", "head", "position", "recall", "gap at last place", "mass lost", "blocks missed")
    return Cells(columns, rows, words=(6,))
