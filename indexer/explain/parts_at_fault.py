"""Parts of a call that hold all of its faulty rows: one head, one request, decode rows, late positions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from indexer.case import Case
from indexer.explain.differences import FAULT, RIGHT, Bools

LEAST_FAULTY = 4
"""Rows: fewer lie in one part by chance."""


def parts_at_fault(case: Case, grades: NDArray[np.int8]) -> Iterator[tuple[str, Bools]]:
    """Each part in words, and its rows ``[H, total_q]``: no row outside it is faulty, and some are right.

    Args:
        case: the call.
        grades: ``[H, total_q]`` of its rows.
    """
    faulty = grades == FAULT
    if faulty.sum() < LEAST_FAULTY:
        return
    head, token = np.arange(case.num_heads)[:, None], np.arange(case.total_q)
    request = np.searchsorted(case.cu_seqlens_q, token, side="right") - 1
    lens = case.seq_lens.astype(np.int64) - case.query_lens
    position = lens[request] + token - case.cu_seqlens_q[request]
    heads, tokens = np.nonzero(faulty)
    start = int(position[tokens].min())
    parts = [
        (f"in head {heads[0]}", head == heads[0]),
        (f"in request {request[tokens[0]]:,}", request == request[tokens[0]]),
        ("in decode rows", case.query_lens[request] == 1),
        (f"from position {start:,} on", position >= start),
    ]
    for words, rows in parts:
        part = np.broadcast_to(rows, grades.shape)
        outside = grades[~part]
        if not (outside == FAULT).any() and (outside >= RIGHT).any():
            yield words, part
