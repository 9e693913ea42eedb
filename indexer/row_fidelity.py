"""What cheaper formats of the keys cost each row of a call that is small enough to hold all its scores."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from indexer.case import Case
from indexer.fidelity import block_scores, selection_recall, unquantised_scores, with_sentinels
from indexer.oracle import select
from indexer.replay import as_tensor, load_case
from kernel.contract import HEAD_DIM
from kernel.errors import InvalidArgumentError
from kernel.nvfp4 import quantize_query

WORST_ROWS = 10
SHOWN_ERRORS = 100_000
"""Errors of scores that are kept for a histogram."""
_ATTENTION_SCALE = HEAD_DIM**-0.5


class OutOfRangeError(InvalidArgumentError):
    """A product of queries and keys before quantisation is not finite in fp32."""


@dataclass(frozen=True)
class WorstRow:
    """A row whose NVFP4 selection lost most.

    Attributes:
        request: of the batch.
        head: index head.
        token: query token, in the whole call.
        position: in its request.
        recall: of the row.
        gap: between the scores at the last place and the next, unquantised.
        missed: free blocks that the best selection has and this one has not.
        lost_mass: softmax mass that the row's blocks hold less.
    """

    request: int
    head: int
    token: int
    position: int
    recall: float
    gap: float
    missed: tuple[int, ...]
    lost_mass: float


@dataclass(frozen=True, eq=False)
class FormatRows:
    """One format of the keys, row by row.

    Attributes:
        name: ``fp8``, ``nvfp4`` or ``engine``.
        recall: ``[H, total_q]``, of the rows that count.
        lost: ``[H, total_q]`` softmax mass that the row's blocks hold less than the best do.
        squares: sum of the squares of what free blocks' scores are off.
        cells: how many they are; 0 if scores are not known.
        errors: some of what they are off.
    """

    name: str
    recall: NDArray[np.float64]
    lost: NDArray[np.float64]
    squares: float
    cells: int
    errors: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class RowFidelity:
    """What the formats cost the rows of a call.

    Attributes:
        backend: that scored the NVFP4 keys.
        counted: ``[H, total_q]`` rows with more free blocks than free places.
        kept: ``[H, total_q]`` softmax mass that the best blocks hold.
        gaps: ``[H, total_q]`` score at the last place less the next.
        formats: fp8, nvfp4, and engine where ids were recorded.
        worst: of nvfp4, those that miss a block.
    """

    backend: str
    counted: NDArray[np.bool_]
    kept: NDArray[np.float64]
    gaps: NDArray[np.float32]
    formats: tuple[FormatRows, ...]
    worst: tuple[WorstRow, ...]

    def placed(self, request: int | None, first: int) -> RowFidelity:
        """The same as a part of a larger call, that begins at token ``first`` in one of its requests."""
        if request is None:
            return self
        worst = (replace(row, request=request, token=row.token + first) for row in self.worst)
        return replace(self, worst=tuple(worst))


def measure_rows(case: Case, backend: str) -> RowFidelity:
    """Score a call with bf16, fp8 and NVFP4 keys and compare what its rows select.

    Raises:
        InvalidArgumentError: the case has no unquantised keys, no such backend, or a value is not finite.
        OutOfRangeError: a product of them is not.
        BackendUnavailableError: the backend cannot run here.
    """
    exact = unquantised_scores(case)
    keys = (
        as_tensor(case.index_k)
        if case.index_k is not None
        else torch.empty(0, dtype=torch.float32, device="cpu")
    )
    result = load_case(case, backend).score()  # which refuses values that are not finite
    _check_scores(case, exact)
    mass = _block_mass(case, keys)
    best = select(with_sentinels(case, exact).numpy(), case)
    kept = _held(mass, best)
    cast = quantize_query(as_tensor(case.index_q)).float()
    saturated = keys.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    fp8 = block_scores(case, cast, saturated)
    fp8_ids = select(with_sentinels(case, fp8).numpy(), case)
    nvfp4_ids = result.block_ids.cpu().numpy()
    nvfp4 = None if result.scores is None else result.scores.cpu()
    rows, gaps = _counted(case, exact), _gaps(case, exact)
    formats = [
        _format("fp8", case, exact, fp8_ids, fp8, mass, kept, rows),
        _format("nvfp4", case, exact, nvfp4_ids, nvfp4, mass, kept, rows),
    ]
    record = case.engine
    if record is not None and record.block_ids is not None:
        # Whatever a faulty engine wrote: an id of no block selects nothing.
        known = (record.block_ids >= 0) & (record.block_ids < case.num_score_blocks)
        ids = np.where(known, record.block_ids, -1).astype(np.int32)
        formats.append(_format("engine", case, exact, ids, None, mass, kept, rows))
    worst = _worst_rows(case, formats[1], rows, gaps, best, nvfp4_ids)
    return RowFidelity(result.backend, rows, kept, gaps, tuple(formats), worst)


def _check_scores(case: Case, exact: torch.Tensor) -> None:
    """Refuse scores that left the range of fp32: nothing can be said about a set that infinities select."""
    blocks = torch.arange(exact.shape[2], dtype=torch.int64, device="cpu")
    seen = blocks < torch.from_numpy(case.num_blocks_per_query()).long()[:, None]
    for head, token, block in (seen & ~exact.isfinite()).nonzero()[:1].tolist():
        raise OutOfRangeError(
            f"index_q . index_k [head {head}, token {token}, block {block}]",
            exact[head, token, block].item(),
            "must be finite in fp32",
            "scale the queries or the keys down",
        )


def _format(
    name: str,
    case: Case,
    exact: torch.Tensor,
    ids: NDArray[np.int32],
    scores: torch.Tensor | None,
    mass: torch.Tensor,
    kept: NDArray[np.float64],
    rows: NDArray[np.bool_],
) -> FormatRows:
    recall = np.ones(rows.shape)
    recall[rows] = selection_recall(case, exact, torch.from_numpy(np.ascontiguousarray(ids))).per_row.numpy()
    errors = np.zeros(0, dtype=np.float32)
    if scores is not None:
        free = torch.isfinite(exact) & (scores < 1e29) & torch.from_numpy(rows)[:, :, None]
        errors = (scores[free] - exact[free]).abs().numpy()
    return FormatRows(
        name=name,
        recall=recall,
        lost=kept - _held(mass, ids),
        squares=float(np.square(errors, dtype=np.float64).sum()),
        cells=errors.size,
        errors=errors[:: max(1, errors.size // SHOWN_ERRORS)],
    )


def _block_mass(case: Case, keys: torch.Tensor) -> torch.Tensor:
    """``[H, total_q, S]`` share of a row's softmax over all its keys that each block holds."""

    def reduce(products: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(products * _ATTENTION_SCALE, dim=3)

    logits = block_scores(case, as_tensor(case.index_q).float(), keys, reduce)
    return torch.softmax(logits, dim=2) if logits.shape[2] else logits


def _held(mass: torch.Tensor, ids: NDArray[np.int32]) -> NDArray[np.float64]:
    """``[H, total_q]`` mass of the blocks that rows selected, each once."""
    places = torch.from_numpy(np.ascontiguousarray(ids)).long()
    blocks = mass.shape[2]
    selected = torch.zeros((*mass.shape[:2], blocks + 1), dtype=torch.bool, device="cpu")
    selected.scatter_(2, places.masked_fill(places < 0, blocks), True)
    return np.asarray(mass.masked_fill(~selected[:, :, :-1], 0).double().sum(dim=2).numpy())


def _free(case: Case) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """``[total_q, S]`` blocks that are not forced, and ``[total_q]`` places that are left for them."""
    num_blocks = case.num_blocks_per_query().astype(np.int64)
    blocks = np.arange(case.num_score_blocks)
    free = (blocks >= case.init_blocks) & (blocks < (num_blocks - case.local_blocks)[:, None])
    return free, case.topk - (num_blocks - free.sum(axis=1))


def _counted(case: Case, exact: torch.Tensor) -> NDArray[np.bool_]:
    """``[H, total_q]`` rows that have a choice."""
    free, slots = _free(case)
    of_tokens = (slots > 0) & (free.sum(axis=1) > slots)
    counted: NDArray[np.bool_] = np.broadcast_to(of_tokens, exact.shape[:2]).copy()
    return counted


def _gaps(case: Case, exact: torch.Tensor) -> NDArray[np.float32]:
    """``[H, total_q]`` score at the last place less the next; 0 where there is no choice."""
    free, slots = _free(case)
    ordered = -np.sort(-np.where(free, exact.numpy(), -np.inf), axis=2)
    padded = np.pad(ordered, ((0, 0), (0, 0), (0, 1)), constant_values=-np.inf)
    last = slots.clip(1, ordered.shape[2] or 1)
    place = np.broadcast_to((last - 1)[None, :, None], (*exact.shape[:2], 1))
    with np.errstate(invalid="ignore"):
        gaps = np.take_along_axis(padded, place, 2) - np.take_along_axis(padded, place + 1, 2)
    found: NDArray[np.float32] = np.nan_to_num(gaps[:, :, 0], nan=0.0, posinf=0.0, neginf=0.0)
    return found


def _worst_rows(
    case: Case,
    shown: FormatRows,
    rows: NDArray[np.bool_],
    gaps: NDArray[np.float32],
    best: NDArray[np.int32],
    ids: NDArray[np.int32],
) -> tuple[WorstRow, ...]:
    places = np.argwhere(rows)
    found = []
    recall, lost = shown.recall[rows], shown.lost
    order = np.lexsort((-lost[rows], recall))
    for index in order[recall[order] < 1][:WORST_ROWS].tolist():
        head, token = (int(n) for n in places[index])
        request = int(np.searchsorted(case.cu_seqlens_q, token, side="right")) - 1
        end = int(case.cu_seqlens_q[request + 1])
        found.append(
            WorstRow(
                request=request,
                head=head,
                token=token,
                position=int(case.seq_lens[request]) - end + token,
                recall=float(recall[index]),
                gap=float(gaps[head, token]),
                missed=tuple(sorted(set(best[head, token].tolist()) - set(ids[head, token].tolist()))),
                lost_mass=float(lost[head, token]),
            )
        )
    return tuple(found)
