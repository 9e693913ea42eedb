"""What a launch plan may be asked for: its arguments, and every number that is 32 bits wide on the device."""

from __future__ import annotations

from collections.abc import Sequence

from kernel.batch import Request
from kernel.checks import check_heads
from kernel.contract import MAX_SEQ_LEN
from kernel.errors import InvalidArgumentError
from kernel.scalars import check_int

_INT32 = 2**31
_BEYOND = 1024
"""More than the rows or blocks that a kernel counts past the last one: the rest of a tile or of a group."""


def check_plan(
    requests: Sequence[Request],
    num_heads: int,
    *,
    table_stride: int,
    score_blocks: int,
    slots: int,
    alignment: int,
    alignment_unit: int,
    xcds: int,
) -> None:
    """Refuse what :func:`kernel.plan.plan_prefill` cannot plan; its arguments, and the unit of alignments.

    A request's lengths are bounded by the contract, so positions and ``128 * block`` fit 32 bits; offsets in
    the block table, query rows and score columns are checked here.

    Raises:
        InvalidArgumentError: the first argument at fault.
    """
    check_heads(num_heads)
    _check_least("slots", slots, 1, "pass the workgroups that run at once, two for each compute unit")
    _check_least("xcds", xcds, 1, "pass the number of dies")
    if check_int("alignment", alignment) < alignment_unit or alignment % alignment_unit:
        raise InvalidArgumentError(
            "alignment",
            alignment,
            f"must be a positive multiple of {alignment_unit}",
            f"pass {alignment_unit} blocks or a multiple",
        )
    _check_least("table_stride", table_stride, 0, "pass the columns of the block table")
    _check_least("score_blocks", score_blocks, 0, "pass the columns of the score buffer")
    for at, request in enumerate(requests):
        _check_request(f"requests[{at}]", request, table_stride, score_blocks)
    last_row = max((request.table_row for request in requests), default=0)
    if (last_row + 1) * table_stride >= _INT32:
        raise InvalidArgumentError(
            "block_table.numel()", (last_row + 1) * table_stride, f"must be below {_INT32}", "split the batch"
        )
    tokens = max((request.query_start + request.query_len for request in requests), default=0)
    if tokens * num_heads + _BEYOND >= _INT32:
        raise InvalidArgumentError(
            "total_q * H", tokens * num_heads, f"must be below {_INT32 - _BEYOND}", "split the batch"
        )
    if score_blocks + _BEYOND >= _INT32:
        raise InvalidArgumentError(
            "scores.shape[2]",
            score_blocks,
            f"must be below {_INT32 - _BEYOND}",
            "narrow the score buffer",
        )


def _check_request(name: str, request: Request, table_stride: int, score_blocks: int) -> None:
    _check_least(f"{name}.table_row", request.table_row, 0, "pass its row of the block table")
    _check_least(f"{name}.query_start", request.query_start, 0, "pass its first row of q")
    _check_least(f"{name}.query_len", request.query_len, 0, "pass how many query tokens it has")
    if check_int(f"{name}.seq_len", request.seq_len) < request.query_len:
        raise InvalidArgumentError(
            f"{name}.seq_len",
            request.seq_len,
            f"must be at least its {request.query_len} query tokens",
            "count this step's tokens in",
        )
    if request.seq_len > MAX_SEQ_LEN:
        raise InvalidArgumentError(
            f"{name}.seq_len",
            request.seq_len,
            f"must be at most {MAX_SEQ_LEN}",
            "shorten the context to what the model was made for",
        )
    for argument, columns in (("table_stride", table_stride), ("score_blocks", score_blocks)):
        if columns < request.num_blocks:
            raise InvalidArgumentError(
                argument,
                columns,
                f"must be at least the {request.num_blocks} blocks of {name}",
                "widen it to the longest request",
            )


def _check_least(argument: str, value: int, least: int, remedy: str) -> None:
    if check_int(argument, value) < least:
        raise InvalidArgumentError(argument, value, f"must be at least {least}", remedy)
