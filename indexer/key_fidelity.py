"""What a cheaper format of the keys costs the selection: bf16 against fp8 and NVFP4, row by row."""

from __future__ import annotations

from dataclasses import dataclass, field

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

GAP_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
WORST_ROWS = 10
_ATTENTION_SCALE = HEAD_DIM**-0.5


class OutOfRangeError(InvalidArgumentError):
    """A product of queries and keys before quantisation is not finite in fp32."""


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
    rows = _counted(case, exact)
    formats = [
        _format("fp8", case, exact, fp8_ids, fp8, mass, kept, rows),
        _format("nvfp4", case, exact, nvfp4_ids, nvfp4, mass, kept, rows),
    ]
    record = case.engine
    if record is not None and record.block_ids is not None:
        formats.append(_format("engine", case, exact, record.block_ids, None, mass, kept, rows))
    gaps = _gaps(case, exact)[rows]
    lost = kept - _held(mass, nvfp4_ids)
    return CaseFidelity(
        case=name,
        layer=None if record is None else record.layer,
        backend=result.backend,
        rows=case.rows,
        counted_rows=int(rows.sum()),
        kept_mass=float(kept[rows].mean()) if rows.any() else 1.0,
        gap_quantiles=tuple(np.quantile(gaps, GAP_QUANTILES).tolist()) if gaps.size else (),
        formats=tuple(formats),
        worst_rows=_worst_rows(case, formats[1], rows, _gaps(case, exact), best, nvfp4_ids, lost),
        gaps=gaps,
    )


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
) -> FormatFidelity:
    recall = selection_recall(case, exact, torch.from_numpy(np.ascontiguousarray(ids)))
    per_row = recall.per_row.numpy()
    per_head = np.split(per_row, np.cumsum(rows.sum(axis=1))[:-1])
    lost = (kept - _held(mass, ids))[rows]
    errors = np.zeros(0, dtype=np.float32)
    if scores is not None:
        free = torch.isfinite(exact) & (scores < 1e29) & torch.from_numpy(rows)[:, :, None]
        errors = (scores[free] - exact[free]).abs().numpy()
    return FormatFidelity(
        name=name,
        mean=recall.mean,
        worst=recall.worst,
        heads=tuple(
            HeadRecall(head, len(part), float(part.mean()), float(part.min()))
            for head, part in enumerate(per_head)
            if len(part)
        ),
        score_error=float(np.sqrt(np.square(errors, dtype=np.float64).mean())) if errors.size else None,
        lost_mass=float(lost.mean()) if lost.size else 0.0,
        worst_lost_mass=float(lost.max()) if lost.size else 0.0,
        per_row=per_row,
        errors=errors[:: max(1, errors.size // 100_000)],
    )


def _block_mass(case: Case, keys: torch.Tensor) -> torch.Tensor:
    """``[H, total_q, S]`` share of a row's softmax over all its keys that each block holds."""

    def reduce(products: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(products * _ATTENTION_SCALE, dim=3)

    logits = block_scores(case, as_tensor(case.index_q).float(), keys, reduce)
    return torch.softmax(logits, dim=2) if logits.shape[2] else logits


def _held(mass: torch.Tensor, ids: NDArray[np.int32]) -> NDArray[np.float64]:
    """``[H, total_q]`` mass of the blocks that rows selected."""
    places = torch.from_numpy(np.ascontiguousarray(ids)).long()
    found = mass.gather(2, places.clamp(0, max(0, mass.shape[2] - 1))) if mass.shape[2] else places.double()
    return np.asarray(found.masked_fill(places < 0, 0).double().sum(dim=2).numpy())


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
    shown: FormatFidelity,
    rows: NDArray[np.bool_],
    gaps: NDArray[np.float32],
    best: NDArray[np.int32],
    ids: NDArray[np.int32],
    lost: NDArray[np.float64],
) -> tuple[WorstRow, ...]:
    places = np.argwhere(rows)
    found = []
    order = np.lexsort((-lost[rows], shown.per_row))
    for index in order[shown.per_row[order] < 1][:WORST_ROWS].tolist():
        head, token = (int(n) for n in places[index])
        request = int(np.searchsorted(case.cu_seqlens_q, token, side="right")) - 1
        end = int(case.cu_seqlens_q[request + 1])
        found.append(
            WorstRow(
                request=request,
                head=head,
                token=token,
                position=int(case.seq_lens[request]) - end + token,
                recall=float(shown.per_row[index]),
                gap=float(gaps[head, token]),
                missed=tuple(sorted(set(best[head, token].tolist()) - set(ids[head, token].tolist()))),
                lost_mass=float(lost[head, token]),
            )
        )
    return tuple(found)
