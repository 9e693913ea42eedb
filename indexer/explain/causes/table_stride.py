"""The block table read with the wrong stride, or in the wrong row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from indexer.explain.evidence import Evidence
from indexer.explain.hypothesis import Hypothesis
from indexer.explain.prediction import by_steps
from indexer.explain.replica import Steps
from kernel.contract import BLOCK_TOKENS, MAX_SEQ_LEN

FAMILY = "block-table stride"


def hypotheses(evidence: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    batch, width = evidence.table.shape
    if batch < 2:
        return []
    longest = int((-(-evidence.case.seq_lens.astype(np.int64) // BLOCK_TOKENS)).max(initial=1))
    strides = {
        "the blocks of the longest request": longest,
        "one too few": width - 1,
        "one too many": width + 1,
        "the batch": batch,
        "a multiple of 4": -(-width // 4) * 4,
        "a multiple of 8": -(-width // 8) * 8,
        "a multiple of 16": -(-width // 16) * 16,
        "a multiple of 64": -(-width // 64) * 64,
        "a power of two": 1 << (width - 1).bit_length(),
        "the longest context": MAX_SEQ_LEN // BLOCK_TOKENS,
        "0": 0,
    }
    found, seen = [], {width}
    for what, stride in strides.items():
        if stride in seen:
            continue
        seen.add(stride)
        found.append(
            _reads(
                f"the block table's rows are taken to lie {stride} entries apart",
                f"They lie {width} apart in the file; {stride} is {what}."
                if stride
                else "All requests read row 0.",
                lambda request, block, stride=stride: request * stride + block,  # type: ignore[misc]
            )
        )
    for name, shift in (("next", 1), ("previous", -1)):
        found.append(
            _reads(
                f"the {name} request's row of the block table is read",
                "The row of the table is off by one.",
                lambda request, block, shift=shift: ((request + shift) % batch) * width + block,  # type: ignore[misc]
            )
        )
    found.append(
        _reads(
            "the block table is read column-major",
            "Block and request are exchanged in the table's address.",
            lambda request, block: block * batch + request,
        )
    )
    return found


def _reads(name: str, says: str, place: Callable[[int, int], int]) -> Hypothesis:
    def page_of(evidence: Evidence, request: int, block: int) -> NDArray[np.uint8] | None:
        table, at = evidence.table.reshape(-1), place(request, block)
        if not 0 <= at < table.size or not 0 <= table[at] < len(evidence.pages):
            return None
        page: NDArray[np.uint8] = evidence.pages[table[at]]
        return page

    return Hypothesis(name, FAMILY, says, by_steps(lambda _: Steps(page_of=page_of)))
