"""Pages that did not yet, or no longer, hold their keys when the engine read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from indexer.explain.evidence import (
    Evidence,
    Ints,
    PageOf,
    Prediction,
    Scored,
    Steps,
    by_scores,
    by_steps,
    by_table,
    prediction_by_contract,
    score,
)
from indexer.explain.match import (
    Bools,
    Hypothesis,
    match,
    pages_that_match,
    picked_blocks,
    possible_scores,
    score_agrees,
)
from kernel.batch import LOCAL_SCORE
from kernel.contract import BLOCK_TOKENS, MAX_SEQ_LEN, PAGE_BYTES

FAMILY = "stale or unwritten page"
Cells = frozenset[tuple[int, int]]
"""Requests and blocks."""
MAX_CELLS_BY_IDS = 4
"""Pages that are suspected where ids alone tell of them."""
LEAST_ROWS = 3
"""Faulty rows for each page that ids alone tell of."""


def hypotheses(evidence: Evidence, _narrow: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    found = [
        Hypothesis(
            "this step's keys are not yet written, zeros are read",
            FAMILY,
            "The scorer ran before the insert of the same step: a missing wait, or the wrong order of calls.",
            by_steps(lambda e: Steps(first_absent=e.prefix, absent_is_zero=True)),
        ),
        Hypothesis(
            "this step's keys are left out",
            FAMILY,
            "Only the keys before this step's queries are scored: lengths of the step before are used.",
            by_steps(lambda e: Steps(first_absent=e.prefix)),
        ),
    ]
    suspects = _by_scores(evidence) if evidence.scores is not None else _by_ids(evidence)
    for cells in suspects:
        found += _replaced_pages(evidence, cells)
    return found


def _replaced_pages(evidence: Evidence, cells: Cells) -> list[Hypothesis]:
    where = ", ".join(f"block {block} of request {request}" for request, block in sorted(cells)[:4])
    where += "" if len(cells) <= 4 else f" and {len(cells) - 4} more"
    by = "" if evidence.scores is not None else " (by the ids alone: nothing else is recorded)"
    found = [
        Hypothesis(
            "pages are read as unwritten",
            FAMILY,
            f"The pages of {where} score as zero bytes do: they were not written, or not yet.",
            by_steps(lambda _: Steps(page_of=_replaced(cells, _ZERO))),
            fitted=1,
        )
    ]
    sources = pages_that_match(evidence, cells)
    if sources:
        names = ", ".join(
            f"block {block} of request {request} from page {place}"
            for (request, block), place in sorted(sources.items())[:4]
        )
        found.append(
            Hypothesis(
                "pages hold another block's keys",
                FAMILY,
                f"Scored from another page of the file: {names}{by}. The block table or the page was stale.",
                by_steps(lambda _: Steps(page_of=_from(sources))),
                fitted=2 if by else 1,
            )
        )
    found.append(
        Hypothesis(
            "pages held something else",
            FAMILY,
            f"All that is wrong comes from the pages of {where}{by}, and no known fault gives it: they "
            "held other bytes when the engine read them than when they were captured.",
            by_steps(lambda _: Steps(page_of=_replaced(cells, None))),
            fitted=3,
            leaves_open=True,
        )
    )
    return found


_ZERO = np.zeros(PAGE_BYTES, dtype=np.uint8)


def _by_scores(evidence: Evidence) -> list[Cells]:
    """Pages whose scores are wrong in most rows that see them: few, and not all that are seen.

    A score that no content of a page gives, and one that a sentinel decides, tells nothing of a page.
    """
    if evidence.scores is None:
        return []
    right = score(evidence)
    visible = np.arange(right.scores.shape[1]) < evidence.num_blocks[:, None]
    got = evidence.scores[:, : right.scores.shape[1]]
    with np.errstate(invalid="ignore"):
        near = np.abs(got.astype(np.float64) - right.scores) <= right.slack
    wrong = visible & ~near & possible_scores(evidence) & (right.scores < LOCAL_SCORE)
    cells = _cells(evidence.request, wrong & evidence.faulty[:, None])
    seen = _cells(evidence.request, visible)
    suspects = frozenset(
        (request, block)
        for request, block in cells
        if 2 * wrong[evidence.request == request, block].sum()
        >= visible[evidence.request == request, block].sum()
    )
    return [suspects] if suspects and len(suspects) <= max(1, len(seen) // 4) else []


def _by_ids(evidence: Evidence) -> list[Cells]:
    """The least pages without which the picks of nearly all faulty rows are right: the one first that most
    rows miss, or pick, against their score."""
    if evidence.block_ids is None:
        return []
    right = score(evidence)
    picked = picked_blocks(evidence.block_ids, right.scores.shape[1])
    against = _against(evidence, right, picked)
    cells: Cells = frozenset()
    left = evidence.faulty & ~match(by_scores(right), evidence).rows
    faulty = int(left.sum())
    while left.sum() > 0.1 * faulty and len(cells) < MAX_CELLS_BY_IDS:
        votes = _votes(evidence.request, against & left[:, None], cells)
        if not votes:
            return []
        cells |= {max(votes, key=lambda cell: (votes[cell], cell))}
        left &= ~match(by_scores(_without(evidence, right, cells)), evidence).rows
    if not cells or faulty < LEAST_ROWS * len(cells) or left.sum() > 0.1 * faulty:
        return []
    return [cells]


def _against(evidence: Evidence, right: Scored, picked: Bools) -> Bools:
    """``[R, S]`` blocks that are picked or left with a score far enough from the k-th for neither."""
    scores = right.scores
    kth = -np.sort(-scores, axis=1)[:, min(evidence.case.topk, scores.shape[1]) - 1][:, None]
    with np.errstate(invalid="ignore"):
        missed = ~picked & (scores - kth > right.slack)
        extra = picked & (kth - scores > right.slack)
    visible = np.arange(scores.shape[1]) < evidence.num_blocks[:, None]
    return np.asarray((missed | extra) & visible & (scores < LOCAL_SCORE))


def _votes(request: Ints, where: Bools, taken: Cells) -> dict[tuple[int, int], int]:
    rows, blocks = np.nonzero(where)
    cells, counts = np.unique(np.stack([request[rows], blocks]), axis=1, return_counts=True)
    votes = {(int(r), int(b)): int(n) for (r, b), n in zip(cells.T, counts)}
    return {cell: count for cell, count in votes.items() if cell not in taken}


def _without(evidence: Evidence, right: Scored, cells: Cells) -> Scored:
    """The right scores, those of some pages not known."""
    scores = right.scores.copy()
    for request, block in cells:
        rows = (
            (evidence.request == request) & (scores[:, block] < LOCAL_SCORE) & (block < evidence.num_blocks)
        )
        scores[rows, block] = np.nan
    return Scored(scores, right.num_blocks, right.slack)


def _cells(request: Ints, where: Bools) -> Cells:
    rows, blocks = np.nonzero(where)
    return frozenset(zip(request[rows].tolist(), blocks.tolist()))


def _replaced(cells: Cells, page: NDArray[np.uint8] | None) -> PageOf:
    def page_of(evidence: Evidence, request: int, block: int) -> NDArray[np.uint8] | None:
        if (request, block) in cells:
            return page
        return by_table(evidence, request, block)

    return page_of


def _from(sources: dict[tuple[int, int], int]) -> PageOf:
    def page_of(evidence: Evidence, request: int, block: int) -> NDArray[np.uint8] | None:
        place = sources.get((request, block))
        if place is None:
            return by_table(evidence, request, block)
        found: NDArray[np.uint8] = evidence.pages[place]
        return found

    return page_of


# A page id kept in 8 or 16 bits.

PAGE_ID_BITS_FAMILY = "page id wrap"
Page = NDArray[np.uint8]


def page_id_bits_hypotheses(evidence: Evidence) -> list[Hypothesis]:
    """See :mod:`indexer.explain.causes`."""
    record = evidence.case.engine
    if record is None or record.page_ids is None:
        return []
    ids = record.page_ids.astype(np.int64)
    place_of = {int(page_id): place for place, page_id in enumerate(ids)}
    found = []
    for bits in (8, 16):
        limit = 1 << bits
        beyond = ids[ids >= limit] % limit
        # By ids alone, what is not in the file contradicts nothing; nor does it where no page is right.
        held = all(int(page_id) in place_of for page_id in beyond)
        if not len(beyond) or not (held or (evidence.scores is not None and len(beyond) < len(ids))):
            continue
        found.append(
            Hypothesis(
                f"page ids are kept in {bits} bits",
                PAGE_ID_BITS_FAMILY,
                f"Page p of the cache is read from page p mod {limit:,}: those from {limit:,} on are wrong.",
                lambda e, limit=limit: _truncated(e, limit, ids, place_of),  # type: ignore[misc]
            )
        )
    return found


def _truncated(
    evidence: Evidence, limit: int, ids: NDArray[np.int64], place_of: dict[int, int]
) -> Prediction:
    def page_of(e: Evidence, request: int, block: int) -> Page | None:
        place = place_of.get(int(ids[e.table[request, block]]) % limit)
        if place is None:
            return None
        page: Page = e.pages[place]
        return page

    read = score(evidence, Steps(page_of=page_of))
    if evidence.scores is None:
        return by_scores(read)
    # What is read from outside the file is not known, but it is another page: its score is not the right one.
    computed = np.ones(read.scores.shape[1], dtype=bool)
    if evidence.blocks is not None:
        computed[:] = False
        computed[evidence.blocks] = True
    same = np.isnan(read.scores) & computed & score_agrees(prediction_by_contract(evidence), evidence)
    return by_scores(replace(read, scores=np.where(same, np.float32(np.inf), read.scores)))


# A page's offset kept in 32 bits: it wraps at 2^31 or 2^32 bytes.

PAGE_WRAP_FAMILY = "page id wrap"
LIMITS = {"2^31": 1 << 31, "2^32": 1 << 32}


def page_wrap_hypotheses(evidence: Evidence) -> list[Hypothesis]:
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

    return Hypothesis(
        name, PAGE_WRAP_FAMILY, says, by_steps(lambda _: Steps(page_of=page_of)), fitted, fitted > 0
    )


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


# The block table read with the wrong stride, or in the wrong row.

TABLE_STRIDE_FAMILY = "block-table stride"


def table_stride_hypotheses(evidence: Evidence) -> list[Hypothesis]:
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
            _table_stride_reads(
                f"the block table's rows are taken to lie {stride} entries apart",
                f"They lie {width} apart in the file; {stride} is {what}."
                if stride
                else "All requests read row 0.",
                lambda request, block, stride=stride: request * stride + block,  # type: ignore[misc]
            )
        )
    for name, shift in (("next", 1), ("previous", -1)):
        found.append(
            _table_stride_reads(
                f"the {name} request's row of the block table is read",
                "The row of the table is off by one.",
                lambda request, block, shift=shift: ((request + shift) % batch) * width + block,  # type: ignore[misc]
            )
        )
    found.append(
        _table_stride_reads(
            "the block table is read column-major",
            "Block and request are exchanged in the table's address.",
            lambda request, block: block * batch + request,
        )
    )
    return found


def _table_stride_reads(name: str, says: str, place: Callable[[int, int], int]) -> Hypothesis:
    def page_of(evidence: Evidence, request: int, block: int) -> NDArray[np.uint8] | None:
        table, at = evidence.table.reshape(-1), place(request, block)
        if not 0 <= at < table.size or not 0 <= table[at] < len(evidence.pages):
            return None
        page: NDArray[np.uint8] = evidence.pages[table[at]]
        return page

    return Hypothesis(name, TABLE_STRIDE_FAMILY, says, by_steps(lambda _: Steps(page_of=page_of)))
