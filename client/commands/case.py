"""``case``: case files as such."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from client.output import (
    JsonOption,
    check_output,
    counted,
    one_line_errors,
    output,
    printable,
    status,
    write_output,
)
from kernel.contract import MAX_SEQ_LEN, MAX_TOPK
from kernel.errors import InvalidArgumentError

case = typer.Typer(name="case", help="Case files as such.", no_args_is_help=True, rich_markup_mode=None)
M3_HEADS = 4
"""Index heads of MiniMax-M3."""


@case.command()
def make(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="m3, needle, low-contrast, ties or ragged; see below.")
    ],
    out: Annotated[Path, typer.Option(help="Case file to write, whole or not at all.")],
    context: Annotated[int, typer.Option(help=f"Keys of a request, up to {MAX_SEQ_LEN:,}.")] = 8192,
    queries: Annotated[int, typer.Option(help="Query tokens of a request.")] = 64,
    tp: Annotated[int, typer.Option(help="Tensor parallel size: 1, 2 or 4; H is 4 / TP.")] = 1,
    batch: Annotated[int, typer.Option(help="Requests; ragged has ten of its own.")] = 1,
    topk: Annotated[int, typer.Option(help=f"Blocks a row selects, 1 to {MAX_TOPK}.")] = 16,
    seed: Annotated[int, typer.Option(help="The same seed and options give the same bytes.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Make a case of keys of MiniMax-M3's shape: 4 / TP heads, 128 dims, one local block.

    m3: queries and keys of unit rms that share a mean. needle: one key of each request lies along its
    queries, and its block, which the file's source names, must be every row's best. low-contrast: keys that
    hardly differ. ties: whole blocks repeat, so equal scores are at every place. ragged: m3 over prefill,
    decode, padding and lengths beside block ends.
    """
    from indexer.case import case_buffers
    from indexer.made_cases import Shape, make_case

    with one_line_errors(as_json), status() as on_step:
        if tp not in (1, 2, 4):
            raise InvalidArgumentError("--tp", tp, "must be 1, 2 or 4", "MiniMax-M3 has 4 index heads")
        check_output("--out", out)
        on_step("making")
        made = make_case(kind, Shape(context, queries, M3_HEADS // tp, batch, topk), seed)
        buffers = case_buffers(made)
        on_step("writing")
        write_output("--out", out, buffers)
    size = sum(memoryview(buffer).nbytes for buffer in buffers)
    if as_json:
        fields = {
            "out": str(out),
            "kind": kind,
            "seed": seed,
            "bytes": size,
            "batch": made.batch,
            "rows": made.rows,
            "keys": made.total_k,
            "source": made.source,
        }
        print(json.dumps(fields))
        return
    console = output()
    console.print(
        f"wrote {printable(str(out))}: {counted(made.batch, 'request')}, "
        f"{counted(made.total_q, 'query', 'queries')}, {counted(made.num_heads, 'head')}, "
        f"{counted(made.total_k, 'key')}, {_size(size)}",
        soft_wrap=True,
    )
    console.print(printable(made.source), soft_wrap=True)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:,.1f} kB"
