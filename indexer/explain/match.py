"""Compares predictions with what the engine recorded, row by row, and holds the registry of causes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from indexer.explain.evidence import (
    CHUNK_PAGES,
    Evidence,
    IdOrder,
    Prediction,
    Scored,
    by_scores,
    right_keys,
    right_queries,
    score,
)
from indexer.explain.verdict import Bools, Floats, Ids, Ints, picked_blocks
from kernel.backends.reference.quantizer import E4M3_MAX
from kernel.batch import LOCAL_SCORE
from kernel.contract import BLOCK_TOKENS, HEAD_DIM


@dataclass(frozen=True, eq=False)
class Match:
    """Rows that a prediction reproduces, and how much of it the file leaves undetermined.

    Attributes:
        rows: ``[R]``.
        cells: visible cells and ids that agree, to break ties between rows.
        unknown: undetermined cells of faulty rows.
        determined: ``[R]`` rows of which the file determines all cells, or one that the row reads.
    """

    rows: Bools
    cells: int
    unknown: int
    determined: Bools


def match(prediction: Prediction, evidence: Evidence) -> Match:
    """Compares a prediction with the engine's result."""
    scores = prediction.scores.scores
    visible = evidence.visible
    rows = np.ones(len(scores), dtype=bool)
    cells = 0
    unknown = np.isnan(scores) & visible
    if evidence.scores is not None:
        got = evidence.recorded
        agrees = score_agrees(prediction, evidence) | ~visible
        rows &= agrees.all(axis=1)
        # Cells that no row sees may hold anything, but predicting them counts in a fault's favour.
        cells += int((agrees & visible & ~unknown).sum()) + int(((got == scores) & ~visible).sum())
    if evidence.block_ids is not None:
        chosen = ids_agree(prediction, evidence)
        rows &= chosen
        cells += int(chosen.sum())
    # A sentinel does not depend on the page, so it says nothing of what was read.
    read = visible & ~unknown & (scores < LOCAL_SCORE)
    determined = np.asarray(read.any(axis=1) | ~unknown.any(axis=1))
    return Match(rows, cells, int(unknown[evidence.faulty].sum()), determined)


def reproduces_any(prediction: Prediction, evidence: Evidence) -> bool:
    """Whether a prediction reproduces any row, as :func:`match` finds it."""
    rows = np.ones(len(evidence.request), dtype=bool)
    if evidence.scores is not None:
        rows &= (score_agrees(prediction, evidence) | ~evidence.visible).all(axis=1)
    if evidence.block_ids is not None and rows.any():
        rows &= ids_agree(prediction, evidence)
    return bool(rows.any())


def score_agrees(prediction: Prediction, evidence: Evidence) -> Bools:
    """``[R, S]`` cells whose recorded score is the predicted one; of undetermined cells, one that some page
    could give."""
    scores, got = prediction.scores.scores, evidence.recorded
    with np.errstate(invalid="ignore"):
        near = np.abs(got.astype(np.float64) - scores) <= prediction.scores.slack
    open_cells = np.isnan(scores)
    if open_cells.any():
        open_cells &= possible_scores(evidence)
    if evidence.blocks is not None:
        computed = np.zeros(scores.shape[1], dtype=bool)
        computed[evidence.blocks] = True
        open_cells |= np.isnan(scores) & ~computed
    return np.asarray(near | (got == scores) | (np.isnan(got) & np.isneginf(scores)) | open_cells)


def possible_scores(evidence: Evidence) -> Bools:
    """``[R, S]`` recorded scores that some page could give: keys are at most 448 and never NaN, so
    ``|score| <= 448 * sum_i |q_i|`` within fp32 rounding."""
    got = evidence.recorded.astype(np.float64)
    most = E4M3_MAX * np.abs(right_queries(evidence).astype(np.float64)).sum(axis=1)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.abs(got) <= most[:, None] * (1 + evidence.tolerance))


def ids_agree(prediction: Prediction, evidence: Evidence) -> Bools:
    """``[R]`` rows whose ids are a top-k of the prediction in the stated order; equal and close scores may
    stand in any order."""
    written = evidence.ids
    ids = written if prediction.read_ids is None else prediction.read_ids(evidence, written)
    scores, slack = prediction.ranked.scores, prediction.ranked.slack
    num_blocks = np.minimum(prediction.ranked.num_blocks, scores.shape[1])
    is_id = ids >= 0
    in_row = is_id & (ids < num_blocks[:, None])
    picked = picked_blocks(np.where(in_row, ids, -1), scores.shape[1])
    wanted = np.minimum(num_blocks, prediction.topk or evidence.case.topk)
    valid = (is_id == in_row).all(axis=1) & (picked.sum(axis=1) == wanted) & (is_id.sum(axis=1) == wanted)
    known = ~np.isnan(scores)
    visible = np.arange(scores.shape[1]) < num_blocks[:, None]
    with np.errstate(invalid="ignore"):
        low, high = scores - slack, scores + slack
    worst = np.where(picked & known, high, np.inf).min(axis=1, initial=np.inf)
    best = np.where(visible & ~picked & known, low, -np.inf).max(axis=1, initial=-np.inf)
    fits = best <= worst
    order = prediction.order or evidence.order
    if order != "any":
        fits &= _in_order(ids, written, order, low, high)
    return np.asarray(valid & fits)


def _in_order(ids: Ids, written: Ids, order: IdOrder, low: Floats, high: Floats) -> Bools:
    """``[R]`` rows whose ids ascend or descend as ``order`` says, ``-1`` behind them."""
    is_id = ids >= 0
    padded = (is_id[:, 1:] <= is_id[:, :-1]).all(axis=1)
    if order in ("block", "last block"):
        ascends = _ascends(ids, order) | _ascends(written, order)  # by what they stand for, or as numbers
        return np.asarray(padded & ascends)
    place = ids.clip(0, low.shape[1] - 1).astype(np.int64)
    floor = np.where(is_id, np.take_along_axis(low, place, axis=1), -np.inf)
    ceiling = np.where(is_id, np.take_along_axis(high, place, axis=1), np.inf)
    if order == "lowest score":
        floor, ceiling = np.where(is_id, -ceiling, -np.inf), np.where(is_id, -floor, np.inf)
    before = np.minimum.accumulate(np.where(np.isnan(ceiling), np.inf, ceiling), axis=1)[:, :-1]
    after = np.where(np.isnan(floor), -np.inf, floor)[:, 1:]
    return np.asarray(padded & (after <= before).all(axis=1))


def _ascends(ids: Ids, order: IdOrder) -> Bools:
    both = (ids[:, 1:] >= 0) & (ids[:, :-1] >= 0)
    step = np.diff(ids.astype(np.int64), axis=1)
    if order == "last block":
        step = -step
    return np.asarray(((step > 0) | ~both).all(axis=1))


def disagreements(evidence: Evidence, right: Prediction) -> Ints:
    """``[R]`` bits of evidence in a row's deviations from the contract: 8 for a score; for ids ``2 m - 1`` of
    ``m`` wrong blocks, or one less than the ids out of place.

    One wrong block counts one bit only: noise, like many faults, first swaps a row's k-th and next block.
    """
    bits = np.zeros(len(evidence.request), dtype=np.int64)
    scores = right.scores.scores
    if evidence.scores is not None:
        bits += 8 * (evidence.visible & ~score_agrees(right, evidence)).sum(axis=1)
    if evidence.block_ids is not None:
        best = np.argsort(-np.nan_to_num(scores, nan=-np.inf), axis=1, kind="stable")
        k = evidence.block_ids.shape[1]
        wanted = np.full(evidence.block_ids.shape, -1, dtype=np.int32)
        count = min(k, best.shape[1])
        seen = np.arange(count) < evidence.num_blocks[:, None]
        wanted[:, :count] = np.where(seen, best[:, :count], -1)
        if evidence.order == "block":
            last = np.iinfo(np.int32).max
            wanted = np.sort(np.where(wanted < 0, last, wanted), axis=1)
            wanted[wanted == last] = -1
        held = (evidence.block_ids[:, :, None] == wanted[:, None, :]).any(axis=2).sum(axis=1)
        displaced = np.zeros(len(bits), dtype=np.int64)
        if evidence.order != "any":
            displaced = (evidence.block_ids != wanted).sum(axis=1)
        bits += np.maximum(np.maximum(2 * (k - held) - 1, displaced - 1), 0)
    return bits


# ---- Which page of the file explains what an engine has for a block ----

MAX_CELLS = 16
"""Blocks to find pages for, at most."""
MAX_PAGES = 4096
"""Pages tried, at most."""
LEAST_ROWS = 2
"""Rows that must agree: a single score may match another page by chance."""
LEAST_CONTRADICTIONS = 2
"""Rows in which every other page must be wrong, where only ids were recorded."""
Cell = tuple[int, int]


def pages_that_match(evidence: Evidence, cells: frozenset[Cell]) -> dict[Cell, int]:
    """For each (request, block) the page whose keys give the engine's scores in every row that sees the whole
    block; without scores, the only page that its ids allow. Empty unless each block has one."""
    if len(cells) > MAX_CELLS:
        return {}
    rows_of = {}
    for request, block in cells:
        whole = evidence.position // BLOCK_TOKENS > block
        rows = np.flatnonzero((evidence.request == request) & whole)
        if len(rows) < LEAST_ROWS:
            return {}
        rows_of[request, block] = rows
    best, slack = _scores_of_pages(evidence)
    found: dict[Cell, int] = {}
    bounds = None if evidence.scores is not None else _bounds_by_ids(evidence)
    for (request, block), rows in rows_of.items():
        if evidence.scores is not None:
            near = np.abs(best[rows] - evidence.scores[rows, block][:, None]) <= slack[rows]
            pages = np.flatnonzero(near.all(axis=0))[:1]
        elif bounds is not None:
            pages = _only_page(best[rows], slack[rows], rows, block, bounds)
        if not len(pages):
            return {}
        found[request, block] = int(pages[0])
    return found


def _scores_of_pages(evidence: Evidence) -> tuple[Floats, Floats]:
    """``[R, pages]`` scores that whole pages of the file would give, and how far sums in fp32 may differ."""
    queries = right_queries(evidence)
    norms = np.sqrt(np.square(queries, dtype=np.float64).sum(axis=1)).astype(np.float32)
    count = min(len(evidence.pages), MAX_PAGES)
    best: Floats = np.empty((len(queries), count), dtype=np.float32)
    largest: Floats = np.empty(count, dtype=np.float32)
    for first in range(0, count, CHUNK_PAGES):
        chunk = slice(first, min(first + CHUNK_PAGES, count))
        keys = right_keys(evidence.pages[chunk])
        products = (queries @ keys.reshape(-1, HEAD_DIM).T).reshape(len(queries), -1, BLOCK_TOKENS)
        best[:, chunk] = products.max(axis=2)
        largest[chunk] = np.sqrt(np.einsum("ptd,ptd->pt", keys, keys).max(axis=1))
    return best, (2 * evidence.tolerance * norms[:, None] * largest).astype(np.float32)


def _bounds_by_ids(evidence: Evidence) -> tuple[Bools, Floats, Floats]:
    """Selected blocks ``[R, S]``, and the right scores of the selected and of the others: a selected block
    must not score below the best other, another one not above the worst selected."""
    right = score(evidence).scores
    picked = picked_blocks(evidence.ids, right.shape[1])
    return picked, np.where(picked, right, np.inf), np.where(evidence.visible & ~picked, right, -np.inf)


def _only_page(
    best: Floats, slack: Floats, rows: Ints, block: int, bounds: tuple[Bools, Floats, Floats]
) -> Ints:
    """The page that the ids of ``rows`` allow, if all others are wrong in some of them."""
    picked, picks, others = bounds
    taken = picked[rows, block][:, None]
    apart = np.arange(picked.shape[1]) != block
    floor = others[rows][:, apart].max(axis=1)[:, None]
    ceiling = picks[rows][:, apart].min(axis=1)[:, None]
    wrong = np.where(taken, best + 2 * slack < floor, best - 2 * slack > ceiling).sum(axis=0)
    pages = np.flatnonzero(wrong == 0)
    if len(pages) != 1 or (np.delete(wrong, pages) < LEAST_CONTRADICTIONS).any():
        return pages[:0]
    return pages


# ---- The few, most informative columns in which a hypothesis is tried first ----

WIDE = 256
"""Blocks of a call up to which all columns are computed."""
DRAWN_COLUMNS = 16
"""Columns drawn at random, whatever the engine has there."""
COLUMNS_A_ROW = 3
"""Of each row and kind."""
SCREENED_ROWS = 6


def narrowed(evidence: Evidence, right: Prediction) -> Evidence:
    """The same rows in some columns: of each row a few where the engine is wrong, a few that it selects and
    its ends, and a few at random, seeded by the call."""
    columns = evidence.num_score_blocks
    if columns <= WIDE:
        return evidence
    random = np.random.default_rng(columns)
    taken = [random.choice(columns, DRAWN_COLUMNS, replace=False)]
    visible = evidence.visible
    if evidence.scores is not None:
        taken.append(_some(visible & ~score_agrees(right, evidence), random))
    if evidence.block_ids is not None:
        picked = picked_blocks(evidence.block_ids, columns)
        best = np.argsort(-np.nan_to_num(right.ranked.scores, nan=-np.inf), axis=1, kind="stable")
        wanted = picked_blocks(best[:, : evidence.case.topk].astype(np.int32), columns) & visible
        taken += [_some(cells, random) for cells in (picked & ~wanted, wanted & ~picked, picked & wanted)]
    ends = evidence.num_blocks[:, None] - np.arange(1, COLUMNS_A_ROW + 1)
    taken += [ends[ends >= 0], np.arange(COLUMNS_A_ROW)]
    return evidence.narrowed(np.unique(np.concatenate(taken)).astype(np.int64))


def _some(cells: Bools, random: np.random.Generator) -> Ints:
    """Columns of a few of each row's cells."""
    order = np.where(cells, random.random(cells.shape), 2.0)
    first = np.argpartition(order, COLUMNS_A_ROW, axis=1)[:, :COLUMNS_A_ROW]
    rows = np.arange(len(cells))[:, None]
    return np.asarray(first[cells[rows, first]], dtype=np.int64)


def few_faulty(evidence: Evidence, right: Prediction, wrong: Bools) -> Evidence:
    """A few wrong rows of the shortest requests, narrowed: a fault that explains none of them is dropped."""
    rows = np.flatnonzero(wrong)
    order = np.argsort(evidence.seq_len[rows], kind="stable")
    few = np.sort(rows[order][:SCREENED_ROWS])
    scored = right.scores
    of_few = Scored(scored.scores[few], scored.num_blocks[few], scored.slack[few])
    return narrowed(evidence.subset(few), by_scores(of_few))


# ---- Causes: faults that can be computed ----

Predict = Callable[[Evidence], Prediction]
"""What an engine with some fault would have recorded for a sample's rows."""
Rows = Callable[[Evidence, Evidence], Iterable["Hypothesis"]]
"""Makes causes from a sample, and from the same rows in the most informative columns."""
When = Callable[[Evidence], bool]
T = TypeVar("T")


def as_is(predict: Predict) -> Predict:
    """Of families whose causes replace the whole prediction."""
    return predict


def always(_evidence: Evidence) -> bool:
    """The cause applies to every sample."""
    return True


@dataclass(frozen=True)
class Hypothesis:
    """One fault.

    Attributes:
        name: the fault in a few words.
        family: the kind of fault.
        says: what goes wrong and where to look, one sentence.
        predict: what an engine with this fault would give for a sample's rows.
        fitted: how much is fitted to the engine's result, 0 for nothing. Of two faults that explain as much,
            the less fitted one is taken.
        leaves_open: whether the fault itself leaves cells undetermined; otherwise a row of undetermined cells
            only is not explained.
    """

    name: str
    family: str
    says: str
    predict: Predict
    fitted: int = 0
    leaves_open: bool = False


class Family(Generic[T]):
    """Causes of one kind, in the order in which they are tried.

    A cause is one row: its name, its advice and what it puts in place of the contract's, given to
    :meth:`add` or decorated with :meth:`cause`. Causes whose names or numbers depend on the sample come from
    a :meth:`generator`.

    Args:
        name: of the family, the same in every report.
        by: makes a prediction from what a cause replaces: the keys of a page, a row's position, the steps.
        when: whether the family applies to a sample.
    """

    def __init__(self, name: str, by: Callable[[T], Predict], when: When = always) -> None:
        self.name, self._by, self._when = name, by, when
        self._rows: list[Rows] = []

    def add(self, name: str, says: str, replaced: T, when: When = always) -> None:
        """Add a cause for samples for which ``when`` holds."""
        row = self.hypothesis(name, says, replaced)
        self._rows.append(lambda evidence, _: (row,) if when(evidence) else ())

    def cause(self, name: str, says: str, when: When = always) -> Callable[[T], T]:
        """Add the decorated function as a cause, see :meth:`add`."""

        def register(replaced: T) -> T:
            self.add(name, says, replaced, when)
            return replaced

        return register

    def generator(self, rows: Rows) -> Rows:
        """Add causes made from a sample."""
        self._rows.append(rows)
        return rows

    def hypothesis(
        self, name: str, says: str, replaced: T, fitted: int = 0, leaves_open: bool = False
    ) -> Hypothesis:
        """A cause of this family."""
        return Hypothesis(name, self.name, says, self._by(replaced), fitted, leaves_open)

    def hypotheses(self, evidence: Evidence, narrow: Evidence) -> Iterator[Hypothesis]:
        """The causes that apply to the sample."""
        if self._when(evidence):
            for rows in self._rows:
                yield from rows(evidence, narrow)
