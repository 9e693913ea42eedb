"""``demo``: a case end to end, explained."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from client.failure import MISMATCH, one_line_errors
from client.options import BackendOption, JsonOption

if TYPE_CHECKING:
    from client.demonstration import Demonstration

DEFAULT_PICTURE = Path("out/demo.png")


def demo(
    case: Annotated[
        str | None, typer.Argument(metavar="[CASE]", help="A case file; a real one if left out.")
    ] = None,
    picture: Annotated[Path, typer.Option(help="PNG file to draw the score map to.")] = DEFAULT_PICTURE,
    backend: BackendOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Append, score and select a recorded call, and show what was picked, how well, and how fast.

    Exit code 0 only if the selection is right by the oracle, and by the expected outputs of the case if any.
    """
    from client.demo_case import demo_case
    from client.terminal import output, status
    from indexer.case import read_case

    with one_line_errors(as_json, case):
        path = os.path.relpath(demo_case()) if case is None else case
        call = read_case(path)
        with status() as on_step:
            on_step("loading torch")
            from client.demo_report import print_report, report_fields
            from client.demonstration import demonstrate

            shown = demonstrate(call, backend, on_step)
            on_step("drawing")
            drawn = _draw(shown, path, picture)
    if as_json:
        print(json.dumps(report_fields(shown, path, drawn)))
    else:
        print_report(output(), shown, path, drawn)
    if not shown.ok:
        raise typer.Exit(MISMATCH)


def _draw(shown: Demonstration, path: str, picture: Path) -> Path | None:
    if shown.case.rows == 0:
        return None
    try:
        from client.score_map import draw_score_map, score_map
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("matplotlib"):
            raise
        return None
    cells = score_map(shown.case, shown.scores, shown.block_ids)
    request = f", request {cells.request}" if shown.case.batch > 1 else ""
    title = (
        f"{Path(path).stem}{request}, head {cells.head}: block scores, each row's best {cells.topk} blocks"
    )
    draw_score_map(cells, title, picture)
    return picture
