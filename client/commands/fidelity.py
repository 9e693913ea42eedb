"""``fidelity``: what NVFP4 and fp8 keys cost the selection, beside the keys before quantisation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from client.output import BackendOption, JsonOption, one_line_errors, printable

if TYPE_CHECKING:
    from rich.table import Table

    from indexer.fidelity import CaseFidelity


def fidelity(
    cases: Annotated[list[str], typer.Argument(metavar="CASE...", help="Case files with index_k.")],
    picture: Annotated[
        Path | None,
        typer.Option(help="PNG or SVG file of plots; with several cases, the recall of each."),
    ] = None,
    backend: BackendOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Compare the selection from bf16, fp8 and NVFP4 keys: recall by head, mass lost, worst rows.

    Recall is the share of the blocks that unquantised bf16 keys select, forced blocks left out, over the rows
    that have a choice. Mass is that of a softmax over q.k / sqrt(128) of the case's queries and keys: what
    attention would lose if its logits were the indexer's. With --json, one object a line and case.
    """
    from client.output import check_picture, output, status, write_output
    from indexer.case import read_case

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
            f"({printable(one.backend)})",
            markup=False,
        )
        if not one.counted_rows:
            continue
        console.print(_formats(one))
        quantiles = ", ".join(f"{gap:.3g}" for gap in one.gap_quantiles)
        console.print(
            f"Gap at the last place (5, 25, 50, 75, 95 %): {quantiles}. The best blocks hold "
            f"{100 * one.kept_mass:.2f} % of the softmax mass.",
            markup=False,
        )
        if one.worst_rows:
            console.print(_worst(one))
        else:
            console.print("No row misses a block with NVFP4 keys.")
    if picture is not None:
        console.print(f"wrote {printable(str(picture))}", markup=False, soft_wrap=True)


def fidelity_fields(shown: CaseFidelity) -> dict[str, Any]:
    """A case's fidelity as one JSON object."""
    import dataclasses

    fields = {
        field.name: getattr(shown, field.name) for field in dataclasses.fields(shown) if field.name != "gaps"
    }
    fields["formats"] = [
        {
            field.name: getattr(found, field.name)
            for field in dataclasses.fields(found)
            if field.name not in ("per_row", "errors", "heads")
        }
        | {"heads": [dataclasses.asdict(head) for head in found.heads]}
        for found in shown.formats
    ]
    fields["worst_rows"] = [dataclasses.asdict(row) for row in shown.worst_rows]
    return fields


def _draw(shown: list[CaseFidelity], picture: Path) -> bytes:
    from client.output import importing_plots
    from kernel.errors import InvalidArgumentError

    with importing_plots(picture):
        from client.plots import draw_fidelity, draw_layers
    if not any(one.counted_rows for one in shown):
        limit = "there is nothing to draw: no row has a choice"
        raise InvalidArgumentError("--picture", picture, limit, "leave it out, or pass a longer context")
    file_format = picture.suffix.lower()[1:]
    return draw_fidelity(shown[0], file_format) if len(shown) == 1 else draw_layers(shown, file_format)


def _formats(shown: CaseFidelity) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("keys")
    for column in ("head", "rows", "recall mean", "worst", "score rms error", "mass lost", "worst"):
        table.add_column(column, justify="right")
    for found in shown.formats:
        error = "" if found.score_error is None else f"{found.score_error:.3g}"
        table.add_row(
            found.name,
            "all",
            f"{shown.counted_rows:,}",
            f"{found.mean:.4f}",
            f"{found.worst:.3f}",
            error,
            f"{100 * found.lost_mass:.3f} %",
            f"{100 * found.worst_lost_mass:.2f} %",
        )
        for head in found.heads if len(found.heads) > 1 else ():
            table.add_row("", str(head.head), f"{head.rows:,}", f"{head.mean:.4f}", f"{head.worst:.3f}")
    return table


def _worst(shown: CaseFidelity) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title="Rows that NVFP4 keys cost most", title_justify="left")
    for column in ("request", "head", "position", "recall", "gap", "mass lost"):
        table.add_column(column, justify="right")
    table.add_column("blocks missed")
    for row in shown.worst_rows:
        table.add_row(
            str(row.request),
            str(row.head),
            f"{row.position:,}",
            f"{row.recall:.3f}",
            f"{row.gap:.3g}",
            f"{100 * row.lost_mass:.2f} %",
            ", ".join(map(str, row.missed)),
        )
    return table
