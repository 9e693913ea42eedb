"""What a cheaper format of the keys costs the selection: bf16 against fp8 and NVFP4, row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from indexer.case import Case
from indexer.case.part import parts
from indexer.row_fidelity import (
    SHOWN_ERRORS,
    WORST_ROWS,
    FormatRows,
    OutOfRangeError,
    WorstRow,
    measure_rows,
)

__all__ = ["CaseFidelity", "FormatFidelity", "HeadRecall", "OutOfRangeError", "WorstRow", "case_fidelity"]

GAP_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
MAX_CELLS = 1 << 24
"""Scores that are compared at a time: it takes some hundred bytes for each."""


@dataclass(frozen=True)
class HeadRecall:
    """Recall over the rows of one head that have a choice."""

    head: int
    rows: int
    mean: float
    worst: float


@dataclass(frozen=True, eq=False)
class FormatFidelity:
    """One format of the keys against unquantised bf16.

    Attributes:
        name: ``fp8``, ``nvfp4``, or ``engine`` for ids that an engine recorded.
        mean: recall over rows with a choice, forced blocks left out of both sets.
        worst: least of them.
        heads: by index head.
        score_error: root mean square of what a free block's score is off; None if that is not known.
        lost_mass: mean of the softmax mass that a row's blocks hold less than the best blocks do.
        worst_lost_mass: largest of them.
        per_row: ``[counted rows]`` recall, head by head.
        errors: some of what scores are off, for a histogram; empty if not known.
    """

    name: str
    mean: float
    worst: float
    heads: tuple[HeadRecall, ...]
    score_error: float | None
    lost_mass: float
    worst_lost_mass: float
    per_row: NDArray[np.float64] = field(repr=False)
    errors: NDArray[np.float32] = field(repr=False)


@dataclass(frozen=True, eq=False)
class CaseFidelity:
    """What the formats cost a case.

    Attributes:
        case: its name.
        layer: of the model, None if not known.
        backend: that scored the NVFP4 keys.
        rows: of the case.
        counted_rows: rows with more free blocks than free places.
        kept_mass: mean softmax mass that the best blocks hold.
        gap_quantiles: of the gap at the last place, at :data:`GAP_QUANTILES`.
        formats: fp8, nvfp4, and engine where ids were recorded.
        worst_rows: of nvfp4, those that miss a block.
        gaps: ``[counted rows]``.
    """

    case: str
    layer: int | None
    backend: str
    rows: int
    counted_rows: int
    kept_mass: float
    gap_quantiles: tuple[float, ...]
    formats: tuple[FormatFidelity, ...]
    worst_rows: tuple[WorstRow, ...]
    gaps: NDArray[np.float32] = field(repr=False)


def case_fidelity(case: Case, name: str, backend: str = "auto") -> CaseFidelity:
    """Compare formats on a case.

    The mass is that of a softmax over ``q . k / sqrt(128)`` of the case's queries and keys: what attention
    would lose if its logits were the indexer's.

    Raises:
        InvalidArgumentError: the case has no unquantised keys, no such backend, or a value is not finite.
        OutOfRangeError: a product of them is not.
        BackendUnavailableError: the backend cannot run here.
    """
    pieces, layer = [], None if case.engine is None else case.engine.layer
    for part, request, first in _pieces(case):
        found = measure_rows(part, backend)
        pieces.append(found.placed(request, first))
    rows = np.concatenate([piece.counted for piece in pieces], axis=1)
    kept = np.concatenate([piece.kept for piece in pieces], axis=1)[rows]
    gaps = np.concatenate([piece.gaps for piece in pieces], axis=1)[rows]
    worst = sorted(
        (row for piece in pieces for row in piece.worst), key=lambda row: (row.recall, -row.lost_mass)
    )
    return CaseFidelity(
        case=name,
        layer=layer,
        backend=pieces[0].backend,
        rows=case.rows,
        counted_rows=int(rows.sum()),
        kept_mass=float(kept.mean()) if kept.size else 1.0,
        gap_quantiles=tuple(np.quantile(gaps, GAP_QUANTILES).tolist()) if gaps.size else (),
        formats=tuple(
            _format([piece.formats[index] for piece in pieces], rows)
            for index in range(len(pieces[0].formats))
        ),
        worst_rows=tuple(worst[:WORST_ROWS]),
        gaps=gaps,
    )


def _pieces(case: Case) -> Iterator[tuple[Case, int | None, int]]:
    """A case in parts that fit memory: each with its request, None if it is all of them, and first token."""
    if case.rows * case.num_score_blocks <= MAX_CELLS:
        yield case, None, 0
        return
    for part in parts(case, MAX_CELLS):
        yield part.case, part.request, part.first


def _format(pieces: Sequence[FormatRows], rows: NDArray[np.bool_]) -> FormatFidelity:
    """One format over all pieces; ``rows`` are those that count, ``[H, total_q]``."""
    recall = np.concatenate([piece.recall for piece in pieces], axis=1)
    lost = np.concatenate([piece.lost for piece in pieces], axis=1)[rows]
    cells = sum(piece.cells for piece in pieces)
    per_row, errors = recall[rows], np.concatenate([piece.errors for piece in pieces])
    per_head = [head_recall[head_rows] for head_recall, head_rows in zip(recall, rows)]
    return FormatFidelity(
        name=pieces[0].name,
        mean=float(per_row.mean()) if per_row.size else 1.0,
        worst=float(per_row.min()) if per_row.size else 1.0,
        heads=tuple(
            HeadRecall(head, len(part), float(part.mean()), float(part.min()))
            for head, part in enumerate(per_head)
            if len(part)
        ),
        score_error=float(np.sqrt(sum(piece.squares for piece in pieces) / cells)) if cells else None,
        lost_mass=float(lost.mean()) if lost.size else 0.0,
        worst_lost_mass=float(lost.max()) if lost.size else 0.0,
        per_row=per_row,
        errors=errors[:: max(1, errors.size // SHOWN_ERRORS)],
    )
