"""A page's offset kept in 32 bits: it wraps at 2^31 or 2^32 bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from indexer.explain.evidence import Evidence
from indexer.explain.hypothesis import Hypothesis
from indexer.explain.prediction import by_steps
from indexer.explain.replica import Steps
from kernel.contract import PAGE_BYTES

FAMILY = "page id wrap"
LIMITS = {"2^31": 1 << 31, "2^32": 1 << 32}
Page = NDArray[np.uint8]


def hypotheses(evidence: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    record = evidence.case.engine
    if record is None or record.page_ids is None:
        return []
    offsets = record.page_ids.astype(np.int64) * record.page_stride
    place_of = {int(page_id): place for place, page_id in enumerate(record.page_ids)}
    found = []
    for name, limit in LIMITS.items():
        if not (offsets >= limit).any():
            continue
        if (offsets < limit).any():
            found.append(
                _reads(
                    f"pages past {name} bytes are read from somewhere else",
                    f"Exactly the pages from byte {limit} of the cache on are wrong; what is read is not "
                    "in the file (capture with wrapped_pages=True).",
                    limit,
                    lambda _e, _offset: None,
                    fitted=2,
                )
            )
        found.append(
            _reads(
                f"pages past {name} bytes are read as zero",
                f"Reads from byte {limit} of the cache on are out of the range that the kernel was given.",
                limit,
                lambda _e, _offset: np.zeros(PAGE_BYTES, dtype=np.uint8),
            )
        )
        beyond = offsets[offsets >= limit] % limit
        if all(_wrapped(evidence, place_of, int(offset)) is None for offset in beyond):
            continue  # without any of the pages that would be read it is no more than "somewhere else"
        found.append(
            _reads(
                f"page offsets wrap at {name}",
                f"The offset is kept in 32 bits: pages from byte {limit} on are read {name} lower.",
                limit,
                lambda e, offset, limit=limit: _wrapped(e, place_of, offset % limit),  # type: ignore[misc]
            )
        )
    return found


def _reads(
    name: str, says: str, limit: int, beyond: Callable[[Evidence, int], Page | None], fitted: int = 0
) -> Hypothesis:
    def page_of(evidence: Evidence, request: int, block: int) -> Page | None:
        record = evidence.case.engine
        if record is None or record.page_ids is None:
            raise AssertionError("only made with page ids")
        place = int(evidence.table[request, block])
        offset = int(record.page_ids[place]) * record.page_stride
        if offset >= limit:
            return beyond(evidence, offset)
        page: Page = evidence.pages[place]
        return page

    return Hypothesis(name, FAMILY, says, by_steps(lambda _: Steps(page_of=page_of)), fitted, fitted > 0)


def _wrapped(evidence: Evidence, place_of: dict[int, int], start: int) -> Page | None:
    """9,216 bytes of the cache from ``start`` on, zeros between pages; None if the file lacks one of them."""
    record = evidence.case.engine
    if record is None:
        raise AssertionError("only made with page ids")
    page_id, offset = divmod(start, record.page_stride)
    window = np.zeros(record.page_stride + PAGE_BYTES, dtype=np.uint8)
    for part in range(2):
        needed = offset < PAGE_BYTES if part == 0 else offset + PAGE_BYTES > record.page_stride
        if not needed:
            continue
        if page_id + part not in place_of:
            return None
        first = part * record.page_stride
        window[first : first + PAGE_BYTES] = evidence.pages[place_of[page_id + part]][: len(window) - first]
    return window[offset : offset + PAGE_BYTES]
