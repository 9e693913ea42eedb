"""``score``: scores and block ids of a recorded call."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from client.output import (
    BackendOption,
    CaseArgument,
    JsonOption,
    Order,
    Precision,
    PrecisionOption,
    TokenOption,
    UrlOption,
    check_output,
    one_line_errors,
    output,
    printable,
    write_output,
)
from indexer.case import read_case
from indexer.case.container import encode_container
from kernel.contract import MAX_TOPK

if TYPE_CHECKING:
    from indexer.case import Case
    from indexer.wire import ScoreReply

FORMAT = "nvfp4-indexer-scores"
"""The metadata field ``format`` of the file that is written."""


def score(
    case: CaseArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Safetensors file to write, in a new folder if need be: scores, block_ids, num_blocks. "
            "Whole or not at all."
        ),
    ] = None,
    topk: Annotated[
        int | None, typer.Option(help=f"Blocks a row selects, 1 to {MAX_TOPK}, instead of the case's.")
    ] = None,
    init_blocks: Annotated[
        int | None, typer.Option(help="Forced first blocks, instead of the case's.")
    ] = None,
    local_blocks: Annotated[
        int | None, typer.Option(help="Forced last blocks, instead of the case's.")
    ] = None,
    order: Annotated[
        Order, typer.Option(help="Order of a row's ids: score descending, or id ascending.")
    ] = Order.score,
    backend: BackendOption = "auto",
    precision: PrecisionOption = Precision.exact,
    url: UrlOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score a recorded call and select each row's best blocks, here or in a sidecar."""
    with one_line_errors(as_json, case):
        call = read_case(case)  # before torch is loaded, to refuse a bad file early
        if out is not None:
            check_output("--out", out, case)
        call = dataclasses.replace(
            call,
            topk=call.topk if topk is None else topk,
            init_blocks=call.init_blocks if init_blocks is None else init_blocks,
            local_blocks=call.local_blocks if local_blocks is None else local_blocks,
            expected_scores=None,  # not used here, and need not fit the options
            expected_block_ids=None,
            engine=None,
        )
        if url is None:
            reply = _score_here(call, order, backend, precision, return_scores=out is not None)
        else:
            from client.client import remote_client

            with remote_client(url, token, backend, precision.value) as client:
                reply = client.score_case(call, order=order.value, return_scores=out is not None)
        if out is not None and reply.scores is not None:
            tensors = {"scores": reply.scores, "block_ids": reply.block_ids, "num_blocks": reply.num_blocks}
            metadata = {
                "format": FORMAT,
                "version": "1",
                "backend": reply.backend,
                "precision": reply.precision,
                "order": order.value,
            }
            write_output("--out", out, encode_container(tensors, metadata))
    if as_json:
        fields = {
            "case": case,
            "backend": reply.backend,
            "precision": reply.precision,
            "rows": call.rows,
            "blocks": call.num_score_blocks,
            "topk": call.topk,
            "out": None if out is None else str(out),
            "seconds": dict(reply.timings),
        }
        print(json.dumps(fields))
        return
    console = output()
    console.print(
        f"{call.rows} rows over up to {call.num_score_blocks} blocks, the best {call.topk} of each "
        f"({printable(reply.backend)}, {printable(reply.precision)})"
    )
    stages = (f"{printable(stage)} {1e3 * seconds:.1f} ms" for stage, seconds in reply.timings.items())
    console.print("  ".join(stages))
    if out is not None:
        console.print(f"wrote {printable(str(out))}: scores, block_ids, num_blocks", soft_wrap=True)


def _score_here(
    call: Case, order: Order, backend: str, precision: Precision, *, return_scores: bool
) -> ScoreReply:
    from indexer.replay import load_case
    from indexer.wire import ScoreReply

    loaded = load_case(call, backend, precision=precision.value)
    result = loaded.score(return_scores=return_scores, order=order.value)
    return ScoreReply(
        block_ids=result.block_ids.cpu().numpy(),
        num_blocks=result.num_blocks.cpu().numpy(),
        scores=None if result.scores is None else result.scores.cpu().numpy(),
        backend=result.backend,
        precision=result.precision,
        order=order.value,
        timings={"append": loaded.append_seconds, **result.timings},
    )
