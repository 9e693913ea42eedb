"""``demo``: a case end to end, explained."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from client.output import (
    FAILURE,
    MISMATCH,
    BackendOption,
    JsonOption,
    check_output,
    one_line_errors,
    output,
    printable,
    report_failure,
    status,
    write_output,
)
from indexer.case import read_case
from kernel.errors import InvalidArgumentError

if TYPE_CHECKING:
    from client.demonstration import Demonstration

DEFAULT_PICTURE = Path("out/demo.png")
DEMO_CASE = "code_8k_l20.safetensors"
"""The case that is shown when none is named."""


def demo(
    case: Annotated[
        str | None, typer.Argument(metavar="[CASE]", help="A case file; a real one if left out.")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="PNG file to draw the score map to. If left out: out/demo.png, or no picture where that "
            "cannot be written."
        ),
    ] = None,
    backend: BackendOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Append, score and select a recorded call, and show what was picked, how well, and how fast.

    Exit code 0 only if the selection is right by the oracle, and by the expected outputs of the case if any.
    """
    target = DEFAULT_PICTURE if picture is None else picture
    with one_line_errors(as_json, case):
        path = os.path.relpath(demo_case()) if case is None else case
        call = read_case(path)
        failed = _refusal(target, path)
        if failed is not None and picture is not None:
            raise failed
        with status() as on_step:
            on_step("loading torch")
            from client.demonstration import demonstrate, print_report, report_fields

            shown = demonstrate(call, backend, on_step)
            no_picture = _cannot_draw(shown)
            if failed is None and no_picture is None:
                on_step("drawing")
                failed = _draw(shown, path, target)
    if no_picture is None and failed is not None:
        no_picture = str(failed)
    if as_json:
        print(json.dumps(report_fields(shown, path, target, no_picture)))
    else:
        print_report(output(), shown, path, target, no_picture)
    if failed is not None and picture is not None:
        report_failure(failed, as_json)
        raise typer.Exit(FAILURE)
    if not shown.ok:
        raise typer.Exit(MISMATCH)


def _refusal(picture: Path, path: str) -> InvalidArgumentError | None:
    """Returns why a picture cannot be written, as far as can be told beforehand."""
    try:
        check_output("--picture", picture, path)
    except InvalidArgumentError as error:
        return error
    if picture.suffix.lower() not in ("", ".png"):
        return InvalidArgumentError(
            "--picture", picture, f"is drawn as PNG, not {picture.suffix}", "end its name in .png"
        )
    return None


def _cannot_draw(shown: Demonstration) -> str | None:
    if shown.case.rows == 0:
        return "the case has no rows"
    try:
        import client.plots  # noqa: F401 - only to see whether it can be imported
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("matplotlib"):
            raise
        return "matplotlib is missing; pip install 'nvfp4-indexer[plot]'"
    return None


def _draw(shown: Demonstration, path: str, picture: Path) -> InvalidArgumentError | None:
    from client.plots import draw_score_map, score_map

    cells = score_map(shown.case, shown.scores, shown.block_ids)
    name = printable(Path(path).stem) + (f", request {cells.request}" if shown.case.batch > 1 else "")
    try:
        write_output("--picture", picture, [draw_score_map(cells, name)])
    except InvalidArgumentError as error:
        return error
    return None


def demo_case() -> Path:
    """Returns the path of the case in the installed package, or in the repository.

    Raises:
        InvalidArgumentError: neither is there.
    """
    package = Path(__file__).resolve().parents[1]
    places = (package / "data" / DEMO_CASE, package.parent / "tests" / "data" / DEMO_CASE)
    for place in places:
        if place.is_file():
            return place
    raise InvalidArgumentError("CASE", "not given", f"{DEMO_CASE} is not installed", "name a case file")
