"""``report``: everything that the other commands say about a case, in one HTML file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from client.output import (
    MISMATCH,
    BackendOption,
    CaseArgument,
    JsonOption,
    Precision,
    PrecisionOption,
    check_output,
    one_line_errors,
    output,
    printable,
    status,
    write_output,
)
from indexer.case import read_case


def report(
    case: CaseArgument,
    out: Annotated[Path, typer.Option(help="HTML file to write, whole or not at all.")] = Path(
        "out/report.html"
    ),
    repeats: Annotated[int, typer.Option(min=1, max=100, help="Runs that a profile measures.")] = 5,
    backend: BackendOption = "auto",
    precision: PrecisionOption = Precision.exact,
    as_json: JsonOption = False,
) -> None:
    """Verify, explain, compare formats, profile: one HTML file without outside parts, to be mailed.

    It holds the verdict over the backend and over an engine's recorded result, the fault that explains it,
    what NVFP4 costs where the keys before quantisation are known, stage times beside the device's own
    ceilings, the score map, and this machine. It holds no key and no query. Exit code as verify.
    """
    with one_line_errors(as_json, case), status() as on_step:
        call = read_case(case)
        check_output("--out", out, case)
        on_step("loading torch")
        from client.report.page import gather, report_page

        gathered = gather(call, case, backend, precision.value, repeats, on_step)
        on_step("writing")
        page = report_page(gathered).encode()
        write_output("--out", out, [page])
    if as_json:
        fields = {"case": case, "ok": gathered.verification.ok, "out": str(out), "bytes": len(page)}
        print(json.dumps(fields))
    else:
        verdict = "RIGHT" if gathered.verification.ok else "WRONG"
        output().print(f"{verdict}; wrote {printable(str(out))}, {len(page) / 1e6:.1f} MB", soft_wrap=True)
    if not gathered.verification.ok:
        raise typer.Exit(MISMATCH)
