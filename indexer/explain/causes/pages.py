"""Faults in which page is read for a block: its table entry, its address, and when it was written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import replace

import numpy as np

from indexer.explain.evidence import (
    Evidence,
    PageOf,
    Prediction,
    Scored,
    Steps,
    by_page,
    by_scores,
    by_steps,
    by_table,
    prediction_by_contract,
    request_blocks,
    score,
)
from indexer.explain.match import (
    Cell,
    Family,
    Hypothesis,
    as_is,
    match,
    pages_that_match,
    possible_scores,
    score_agrees,
)
from indexer.explain.verdict import Bools, Bytes, Ints, picked_blocks
from kernel.batch import LOCAL_SCORE
from kernel.contract import BLOCK_TOKENS, MAX_SEQ_LEN, PAGE_BYTES

_ZERO = np.zeros(PAGE_BYTES, dtype=np.uint8)

# ---- The block table read with the wrong stride, or in the wrong row ----


def _by_place(place: Callable[[int, int], int]) -> Callable[[Evidence], Prediction]:
    """Predicts from another place in the flat table for each request and block."""

    def page_of(evidence: Evidence, request: int, block: int) -> Bytes | None:
        table, at = evidence.table.reshape(-1), place(request, block)
        if not 0 <= at < table.size or not 0 <= table[at] < len(evidence.pages):
            return None
        return evidence.page(table[at])

    return by_page(page_of)


TABLE = Family("block-table stride", _by_place, when=lambda e: e.case.batch > 1)


@TABLE.generator
def _strides(evidence: Evidence, _narrow: Evidence) -> Iterator[Hypothesis]:
    batch, width = evidence.table.shape
    strides = {
        "the blocks of the longest request": int(request_blocks(evidence.case).max(initial=1)),
        "one too few": width - 1,
        "one too many": width + 1,
        "the batch": batch,
        **{f"a multiple of {n}": -(-width // n) * n for n in (4, 8, 16, 64)},
        "a power of two": 1 << (width - 1).bit_length(),
        "the longest context": MAX_SEQ_LEN // BLOCK_TOKENS,
        "0": 0,
    }
    seen = {width}
    for what, stride in strides.items():
        if stride not in seen:
            seen.add(stride)
            far = f"They lie {width} apart in the file; {stride} is {what}."
            yield TABLE.hypothesis(
                f"the block table's rows are taken to lie {stride} entries apart",
                far if stride else "All requests read row 0.",
                lambda request, block, stride=stride: request * stride + block,  # type: ignore[misc]
            )
    for name, shift in (("next", 1), ("previous", -1)):
        yield TABLE.hypothesis(
            f"the {name} request's row of the block table is read",
            "The row of the table is off by one.",
            lambda request, block, shift=shift: ((request + shift) % batch) * width + block,  # type: ignore[misc]
        )
    yield TABLE.hypothesis(
        "the block table is read column-major",
        "Block and request are exchanged in the table's address.",
        lambda request, block: block * batch + request,
    )


# ---- A page's offset kept in 32 bits, or its id in 8 or 16 ----


def _has_page_ids(evidence: Evidence) -> bool:
    return evidence.case.engine is not None and evidence.case.engine.page_ids is not None


PAGE_OFFSET = Family("page id wrap", by_page, when=_has_page_ids)
PAGE_ID = Family("page id wrap", as_is, when=_has_page_ids)


def _page_ids(evidence: Evidence) -> Ints:
    return np.asarray(evidence.engine.page_ids, dtype=np.int64)


@PAGE_OFFSET.generator
def _offsets(evidence: Evidence, _narrow: Evidence) -> Iterator[Hypothesis]:
    ids = _page_ids(evidence)
    offsets = ids * evidence.engine.page_stride
    place_of = {int(page_id): place for place, page_id in enumerate(ids)}
    for name, limit in (("2^31", 1 << 31), ("2^32", 1 << 32)):
        if not (offsets >= limit).any():
            continue

        def beyond(
            read: Callable[[Evidence, int], Bytes | None], offsets: Ints = offsets, limit: int = limit
        ) -> PageOf:
            """Pages from ``limit`` on read in another way."""

            def page_of(evidence: Evidence, request: int, block: int) -> Bytes | None:
                place = evidence.table[request, block]
                offset = int(offsets[place])
                return read(evidence, offset) if offset >= limit else evidence.page(place)

            return page_of

        if (offsets < limit).any():
            yield PAGE_OFFSET.hypothesis(
                f"pages past {name} bytes are read from somewhere else",
                f"Exactly the pages from byte {limit} of the cache on are wrong; what is read is not "
                "in the file (capture with wrapped_pages=True).",
                beyond(lambda _e, _offset: None),
                fitted=2,
                leaves_open=True,
            )
        yield PAGE_OFFSET.hypothesis(
            f"pages past {name} bytes are read as zero",
            f"Reads from byte {limit} of the cache on are out of the range that the kernel was given.",
            beyond(lambda _e, _offset: _ZERO),
        )
        far = offsets[offsets >= limit] % limit
        if any(_wrapped(evidence, place_of, int(offset)) is not None for offset in far):
            # Without any of the pages that would be read it is the same as "somewhere else".
            yield PAGE_OFFSET.hypothesis(
                f"page offsets wrap at {name}",
                f"The offset is kept in 32 bits: pages from byte {limit} on are read {name} lower.",
                beyond(lambda e, offset, limit=limit: _wrapped(e, place_of, offset % limit)),  # type: ignore[misc]
            )


def _wrapped(evidence: Evidence, place_of: dict[int, int], start: int) -> Bytes | None:
    """9,216 bytes of the cache from ``start`` on, zeros between pages; None if the file lacks one of them."""
    stride = evidence.engine.page_stride
    page_id, offset = divmod(start, stride)
    window = np.zeros(stride + PAGE_BYTES, dtype=np.uint8)
    for part in range(2):
        needed = offset < PAGE_BYTES if part == 0 else offset + PAGE_BYTES > stride
        if not needed:
            continue
        if page_id + part not in place_of:
            return None
        first = part * stride
        window[first : first + PAGE_BYTES] = evidence.pages[place_of[page_id + part]][: len(window) - first]
    return window[offset : offset + PAGE_BYTES]


@PAGE_ID.generator
def _ids_in_bits(evidence: Evidence, _narrow: Evidence) -> Iterator[Hypothesis]:
    ids = _page_ids(evidence)
    place_of = {int(page_id): place for place, page_id in enumerate(ids)}
    for bits in (8, 16):
        limit = 1 << bits
        beyond = ids[ids >= limit] % limit
        # By ids alone, what is not in the file contradicts nothing; nor does it where no page is right.
        held = all(int(page_id) in place_of for page_id in beyond)
        if len(beyond) and (held or (evidence.scores is not None and len(beyond) < len(ids))):
            places = np.array([place_of.get(int(page_id) % limit, -1) for page_id in ids])
            yield PAGE_ID.hypothesis(
                f"page ids are kept in {bits} bits",
                f"Page p of the cache is read from page p mod {limit:,}: those from {limit:,} on are wrong.",
                lambda e, places=places: _truncated(e, places),  # type: ignore[misc]
            )


def _truncated(evidence: Evidence, places: Ints) -> Prediction:
    """Each page read from another one of the file, ``places``, -1 for one outside it."""

    def page_of(e: Evidence, request: int, block: int) -> Bytes | None:
        place = places[e.table[request, block]]
        return None if place < 0 else e.page(place)

    read = score(evidence, Steps(page_of=page_of))
    if evidence.scores is None:
        return by_scores(read)
    # What is read from outside the file is not known, but it is another page: its score is not the right one.
    same = np.isnan(read.scores) & score_agrees(prediction_by_contract(evidence), evidence)
    if evidence.blocks is not None:
        same &= np.isin(np.arange(evidence.num_score_blocks), evidence.blocks)
    return by_scores(replace(read, scores=np.where(same, np.float32(np.inf), read.scores)))


# ---- Pages that did not yet, or no longer, hold their keys when the engine read them ----

STALE = Family("stale or unwritten page", by_steps)
Cells = frozenset[Cell]
MAX_CELLS_BY_IDS = 4
"""Pages that are suspected where ids alone tell of them."""
LEAST_ROWS = 3
"""Faulty rows for each page that ids alone tell of."""

STALE.add(
    "this step's keys are not yet written, zeros are read",
    "The scorer ran before the insert of the same step: a missing wait, or the wrong order of calls.",
    lambda e: Steps(first_absent=e.prefix, absent_is_zero=True),
)
STALE.add(
    "this step's keys are left out",
    "Only the keys before this step's queries are scored: lengths of the step before are used.",
    lambda e: Steps(first_absent=e.prefix),
)


@STALE.generator
def _replaced_pages(evidence: Evidence, _narrow: Evidence) -> Iterator[Hypothesis]:
    cells = _by_scores(evidence) if evidence.scores is not None else _by_ids(evidence)
    if not cells:
        return
    where = ", ".join(f"block {block} of request {request}" for request, block in sorted(cells)[:4])
    where += "" if len(cells) <= 4 else f" and {len(cells) - 4} more"
    by = "" if evidence.scores is not None else " (by the ids alone: nothing else is recorded)"
    yield STALE.hypothesis(
        "pages are read as unwritten",
        f"The pages of {where} score as zero bytes do: they were not written, or not yet.",
        _replaced(cells, lambda _e, _cell: _ZERO),
        fitted=1,
    )
    sources = pages_that_match(evidence, cells)
    if sources:
        names = ", ".join(
            f"block {block} of request {request} from page {place}"
            for (request, block), place in sorted(sources.items())[:4]
        )
        yield STALE.hypothesis(
            "pages hold another block's keys",
            f"Scored from another page of the file: {names}{by}. The block table or the page was stale.",
            _replaced(sources, lambda e, cell: e.page(sources[cell])),
            fitted=2 if by else 1,
        )
    yield STALE.hypothesis(
        "pages held something else",
        f"All that is wrong comes from the pages of {where}{by}, and no known fault gives it: they "
        "held other bytes when the engine read them than when they were captured.",
        _replaced(cells, lambda _e, _cell: None),
        fitted=3,
        leaves_open=True,
    )


def _replaced(
    cells: Container[Cell], page: Callable[[Evidence, Cell], Bytes | None]
) -> Callable[[Evidence], Steps]:
    """Steps that read other bytes for some blocks."""

    def page_of(evidence: Evidence, request: int, block: int) -> Bytes | None:
        cell = request, block
        return page(evidence, cell) if cell in cells else by_table(evidence, request, block)

    return lambda _: Steps(page_of=page_of)


def _by_scores(evidence: Evidence) -> Cells:
    """Pages whose scores are wrong in most rows that see them: few, and not all that are seen.

    Scores that no page content can give, and those that a sentinel decides, are no evidence of a page.
    """
    right = score(evidence)
    visible = evidence.visible
    with np.errstate(invalid="ignore"):
        near = np.abs(evidence.recorded.astype(np.float64) - right.scores) <= right.slack
    wrong = visible & ~near & possible_scores(evidence) & (right.scores < LOCAL_SCORE)
    seen = _counts(evidence.request, visible)
    wrong_rows = _counts(evidence.request, wrong)
    suspects = frozenset(
        cell
        for cell in _counts(evidence.request, wrong & evidence.faulty[:, None])
        if 2 * wrong_rows[cell] >= seen[cell]
    )
    return suspects if len(suspects) <= max(1, len(seen) // 4) else frozenset()


def _by_ids(evidence: Evidence) -> Cells:
    """The least pages without which the picks of nearly all faulty rows are right: the one first that most
    rows miss, or pick, against their score."""
    right = score(evidence)
    against = _against(evidence, right, picked_blocks(evidence.ids, right.scores.shape[1]))
    cells: Cells = frozenset()
    left = evidence.faulty & ~match(by_scores(right), evidence).rows
    faulty = int(left.sum())
    while left.sum() > 0.1 * faulty and len(cells) < MAX_CELLS_BY_IDS:
        votes = _counts(evidence.request, against & left[:, None])
        votes = {cell: count for cell, count in votes.items() if cell not in cells}
        if not votes:
            return frozenset()
        cells |= {max(votes, key=lambda cell: (votes[cell], cell))}
        left &= ~match(by_scores(_without(evidence, right, cells)), evidence).rows
    if faulty < LEAST_ROWS * len(cells) or left.sum() > 0.1 * faulty:
        return frozenset()
    return cells


def _against(evidence: Evidence, right: Scored, picked: Bools) -> Bools:
    """``[R, S]`` blocks that are picked or left with a score far enough from the k-th for neither."""
    scores = right.scores
    kth = -np.sort(-scores, axis=1)[:, min(evidence.case.topk, scores.shape[1]) - 1][:, None]
    with np.errstate(invalid="ignore"):
        missed = ~picked & (scores - kth > right.slack)
        extra = picked & (kth - scores > right.slack)
    return np.asarray((missed | extra) & evidence.visible & (scores < LOCAL_SCORE))


def _without(evidence: Evidence, right: Scored, cells: Cells) -> Scored:
    """The right scores, those of some pages not known."""
    scores = right.scores.copy()
    for request, block in cells:
        rows = (evidence.request == request) & (scores[:, block] < LOCAL_SCORE)
        scores[rows & (block < evidence.num_blocks), block] = np.nan
    return replace(right, scores=scores)


def _counts(request: Ints, where: Bools) -> dict[Cell, int]:
    """How many rows have each (request, block) marked, those with any."""
    rows, blocks = np.nonzero(where)
    return Counter(zip(request[rows].tolist(), blocks.tolist()))
