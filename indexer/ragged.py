"""Which rows of ``q`` belong to which sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernel.batch import Request
from kernel.errors import InvalidArgumentError
from kernel.scalars import as_int


def ragged_requests(
    total_q: int, seq_lens: Sequence[int], query_lens: Sequence[int] | NDArray[np.integer[Any]] | None
) -> tuple[Request, ...]:
    """Lay the rows of ``q`` out over the sequences of a call: each sequence's rows are its last positions.

    Args:
        total_q: rows of ``q``.
        seq_lens: tokens of each sequence of the call.
        query_lens: queries of each sequence. None: all rows belong to the only sequence, or each of several
            sequences has one row.

    Raises:
        InvalidArgumentError: the lengths do not fit each other.
    """
    if query_lens is None:
        lens = _implied_lens(total_q, len(seq_lens))
    else:
        lens = _checked_lens(query_lens, total_q, len(seq_lens))
    requests = []
    start = 0
    for row, (query_len, seq_len) in enumerate(zip(lens, seq_lens)):
        if query_len > seq_len:
            raise InvalidArgumentError(
                f"query_lens[{row}]",
                query_len,
                f"must be at most the {seq_len} tokens of its sequence",
                "append this step's keys before scoring its queries",
            )
        requests.append(Request(row, start, query_len, seq_len))
        start += query_len
    return tuple(requests)


def _implied_lens(total_q: int, num_sequences: int) -> list[int]:
    if num_sequences == 1:
        return [total_q]
    if total_q == num_sequences:
        return [1] * num_sequences
    raise InvalidArgumentError(
        "query_lens",
        None,
        f"must be given: {total_q} rows of q do not say how many belong to each of {num_sequences} sequences",
        "pass the number of queries of each sequence",
    )


def _checked_lens(
    query_lens: Sequence[int] | NDArray[np.integer[Any]], total_q: int, num_sequences: int
) -> list[int]:
    if not isinstance(query_lens, (list, tuple)) and not (
        isinstance(query_lens, np.ndarray) and query_lens.ndim == 1
    ):
        raise InvalidArgumentError(
            "query_lens",
            type(query_lens).__name__,
            "must be a list, a tuple or a flat array of ints",
            "call .tolist()",
        )
    lens: list[int] = []
    for row, query_len in enumerate(query_lens):
        number = as_int(query_len)
        if number is None or number < 0:
            raise InvalidArgumentError(
                f"query_lens[{row}]", repr(query_len), "must be an int, 0 or more", "pass whole numbers"
            )
        lens.append(number)
    if len(lens) != num_sequences:
        raise InvalidArgumentError(
            "query_lens", lens, f"must hold {num_sequences} lengths", "pass one for each sequence"
        )
    if sum(lens) != total_q:
        raise InvalidArgumentError(
            "query_lens", lens, f"must add up to q.shape[0] = {total_q}", "lay q out in their order"
        )
    return lens
