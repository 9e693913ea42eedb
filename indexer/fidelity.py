"""Measures how much of the selection survives quantisation: top-k recall against unquantised bf16 scoring.

    recall of a row = |selected & best| / free places

Forced blocks are left out of both sets; rows whose free blocks all fit are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from indexer.case import Case
from indexer.case.case import Part, parts
from indexer.oracle import select
from indexer.replay import as_tensor, load_case
from kernel.batch import INIT_SCORE, LOCAL_SCORE, Request
from kernel.contract import BLOCK_TOKENS, HEAD_DIM
from kernel.errors import InvalidArgumentError
from kernel.nvfp4 import quantize_query
from kernel.page import blocks_of

__all__ = ["CaseFidelity", "FormatFidelity", "HeadRecall", "OutOfRangeError", "WorstRow", "case_fidelity"]

_CHUNK_ROWS = 1024
_CHUNK_BLOCKS = 64  # with the rows, 32 MiB of fp32 products at a time


@dataclass(frozen=True, eq=False)
class Recall:
    """Top-k recall of a selection, over the rows where there is something to choose.

    Attributes:
        per_row: ``[counted rows]`` float64, share of the exact selection that was selected, head by head.
        rows: rows of the case.
    """

    per_row: torch.Tensor
    rows: int

    @property
    def counted_rows(self) -> int:
        """Rows with more free blocks than free slots."""
        return self.per_row.numel()

    @property
    def mean(self) -> float:
        """Mean over the counted rows; 1 if there is none, since nothing could be chosen wrongly."""
        return float(self.per_row.mean()) if self.counted_rows else 1.0

    @property
    def worst(self) -> float:
        """Least over the counted rows."""
        return float(self.per_row.min()) if self.counted_rows else 1.0


Reduce = Callable[[torch.Tensor], torch.Tensor]


def _largest(products: torch.Tensor) -> torch.Tensor:
    return products.amax(dim=3)


def unquantised_scores(case: Case) -> torch.Tensor:
    """Scores from the case's own q and k, products summed in fp32, no sentinel: ``[H, total_q, S]`` float32.

    ``max over the causal tokens of the block of q . k``, ``-inf`` where no token of the block is causal.

    Raises:
        InvalidArgumentError: the case holds NVFP4 pages, so what they were quantised from is not known.
    """
    if case.index_k is None:
        raise InvalidArgumentError(
            "index_k", "missing", "fidelity needs the keys before quantisation", "record a case with index_k"
        )
    return block_scores(case, as_tensor(case.index_q).float(), as_tensor(case.index_k))


def block_scores(
    case: Case, queries: torch.Tensor, keys: torch.Tensor, reduce: Reduce = _largest
) -> torch.Tensor:
    """Scores of any queries and keys in a case's place: ``[H, total_q, S]`` float32, no sentinel.

    Args:
        case: for its lengths.
        queries: ``[total_q, H, 128]`` float32.
        keys: ``[total_k, 128]``, of any float type.
        reduce: products ``[H, n, blocks, 128]`` to a value for each block, of which the score is the largest.
    """
    shape = (case.num_heads, case.total_q, case.num_score_blocks)
    scores = torch.full(shape, -torch.inf, dtype=torch.float32, device="cpu")
    starts = case.cu_seqlens_q.tolist()
    for row, request_keys in enumerate(torch.split(keys, case.seq_lens.tolist())):
        request = Request(row, starts[row], starts[row + 1] - starts[row], request_keys.shape[0])
        _score_request(queries.transpose(0, 1), request_keys, request, scores, reduce)
    return scores


def with_sentinels(case: Case, scores: torch.Tensor) -> torch.Tensor:
    """Scores ``[H, total_q, S]`` with a case's init and local blocks forced."""
    num_blocks = torch.from_numpy(case.num_blocks_per_query()).long()[:, None]
    blocks = torch.arange(scores.shape[2], dtype=torch.int64, device="cpu")
    forced = scores.masked_fill((blocks < case.init_blocks) & (blocks < num_blocks), INIT_SCORE)
    local = (blocks >= num_blocks - case.local_blocks) & (blocks < num_blocks)
    return forced.masked_fill(local, LOCAL_SCORE)


def selection_recall(case: Case, scores: torch.Tensor, block_ids: torch.Tensor) -> Recall:
    """Recall of a selection against the top-k of other scores, forced blocks left out of both.

    ``|selected & best| / slots``: a row's slots are ``topk`` less its forced blocks, and ``best`` are that
    many free blocks of highest score, ties to the lower id. Rows whose free blocks all fit are not counted.

    Args:
        case: for its ``topk``, ``init_blocks``, ``local_blocks`` and lengths.
        scores: ``[H, total_q, S]`` float32 to select the best by.
        block_ids: ``[H, total_q, topk]`` int32, the selection to judge; -1 is no block.
    """
    free_blocks, places, choosing = _free(case, scores.shape[2])
    free, slots = torch.from_numpy(free_blocks), torch.from_numpy(places)
    blocks = torch.arange(scores.shape[2], dtype=torch.int64, device="cpu")
    order = scores.masked_fill(~free, -torch.inf).argsort(dim=2, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(2, order, blocks.expand_as(order))
    best = (rank < slots[:, None]) & free
    common = (_selected(block_ids, blocks.numel()) & best).sum(dim=2)
    recall = common.double() / slots.clamp(min=1)
    rows = scores.shape[0] * scores.shape[1]
    return Recall(recall[:, torch.from_numpy(choosing)].flatten(), rows)


def _free(case: Case, blocks: int) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.bool_]]:
    """``[total_q, S]`` blocks that are not forced, ``[total_q]`` places that are left for them, and
    ``[total_q]`` whether there are more such blocks than places."""
    num_blocks = case.num_blocks_per_query().astype(np.int64)
    block = np.arange(blocks)
    free = (block >= case.init_blocks) & (block < (num_blocks - case.local_blocks)[:, None])
    count = free.sum(axis=1)
    slots = case.topk - (num_blocks - count)
    return free, slots, (slots > 0) & (count > slots)


def _selected(block_ids: torch.Tensor, blocks: int) -> torch.Tensor:
    """``[H, total_q, S]`` which blocks the ids ``[H, total_q, k]`` select."""
    selected = torch.zeros((*block_ids.shape[:2], blocks + 1), dtype=torch.bool, device="cpu")
    selected.scatter_(2, block_ids.masked_fill(block_ids < 0, blocks).long(), True)
    return selected[:, :, :-1]


def _score_request(
    query: torch.Tensor, keys: torch.Tensor, request: Request, scores: torch.Tensor, reduce: Reduce
) -> None:
    heads = query.shape[0]
    chunk_queries = max(1, _CHUNK_ROWS // heads)
    for first in range(0, request.query_len, chunk_queries):
        count = min(chunk_queries, request.query_len - first)
        rows = slice(request.query_start + first, request.query_start + first + count)
        positions = request.prefix_len + torch.arange(first, first + count, dtype=torch.int64, device="cpu")
        for first_block in range(0, blocks_of(int(positions[-1]) + 1), _CHUNK_BLOCKS):
            first_token = first_block * BLOCK_TOKENS
            chunk = keys[first_token : first_token + _CHUNK_BLOCKS * BLOCK_TOKENS].float()
            # Into a given tensor: autocast would round the product to its own dtype.
            product = torch.empty((heads * count, chunk.shape[0]), dtype=torch.float32, device="cpu")
            torch.mm(query[:, rows].reshape(-1, HEAD_DIM), chunk.T, out=product)
            products = product.view(heads, count, -1)
            tokens = torch.arange(chunk.shape[0], dtype=torch.int64, device="cpu")
            later = first_token + tokens > positions[:, None]
            products.masked_fill_(later, -torch.inf)
            missing = -chunk.shape[0] % BLOCK_TOKENS
            padded = torch.nn.functional.pad(products, (0, missing), value=-torch.inf)
            best = reduce(padded.view(heads, count, -1, BLOCK_TOKENS))
            scores[:, rows, first_block : first_block + best.shape[2]] = best


# ---- The formats of the keys, row by row, of a call that is small enough to hold all its scores ----

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
        gaps: ``[H, total_q]`` score at the last place less the next; 0 where there is no choice.
        formats: fp8, nvfp4, and engine where ids were recorded.
        worst: of nvfp4, those that miss a block.
    """

    backend: str
    counted: NDArray[np.bool_]
    kept: NDArray[np.float64]
    gaps: NDArray[np.float32]
    formats: tuple[FormatRows, ...]
    worst: tuple[WorstRow, ...]


def measure_rows(case: Case, backend: str) -> RowFidelity:
    """Score a call with bf16, fp8 and NVFP4 keys and compare what its rows select.

    Raises:
        InvalidArgumentError: the case has no unquantised keys, no such backend, or a value is not finite.
        OutOfRangeError: a product of them is not.
        BackendUnavailableError: the backend cannot run here.
    """
    exact = unquantised_scores(case)
    result = load_case(case, backend).score()  # which refuses values that are not finite
    call = _Call(case, exact)
    cast = quantize_query(as_tensor(case.index_q)).float()
    fp8 = block_scores(case, cast, call.keys.float().clamp(-448, 448).to(torch.float8_e4m3fn))
    ids = result.block_ids.cpu().numpy()
    scores = None if result.scores is None else result.scores.cpu()
    formats = [call.format("fp8", call.select(fp8), fp8), call.format("nvfp4", ids, scores)]
    record = case.engine
    if record is not None and record.block_ids is not None:
        # Whatever a faulty engine wrote: an id of no block selects nothing.
        known = (record.block_ids >= 0) & (record.block_ids < case.num_score_blocks)
        engine_ids = np.where(known, record.block_ids, -1).astype(np.int32)
        formats.append(call.format("engine", engine_ids, None))
    worst = tuple(call.worst_rows(formats[1], ids))
    return RowFidelity(result.backend, call.counted, call.kept, call.gaps, tuple(formats), worst)


class _Call:
    """A call before quantisation: its scores, the best selection by them, and what its rows can choose."""

    def __init__(self, case: Case, exact: torch.Tensor) -> None:
        self._case, self._exact = case, exact
        self._check_scores()
        self.keys = as_tensor(np.asarray(case.index_k))
        logits = block_scores(case, as_tensor(case.index_q).float(), self.keys, _log_sum)
        self._mass = torch.softmax(logits, dim=2) if logits.shape[2] else logits
        free, slots, choosing = _free(case, case.num_score_blocks)
        self.counted: NDArray[np.bool_] = np.tile(choosing, (case.num_heads, 1))
        self.gaps = self._gaps(free, slots)
        self._best = self.select(exact)
        self.kept = self._held(self._best)

    def select(self, scores: torch.Tensor) -> NDArray[np.int32]:
        return select(with_sentinels(self._case, scores).numpy(), self._case)

    def _check_scores(self) -> None:
        """Refuse scores that left the range of fp32: nothing can be said of a set that infinities select."""
        blocks = torch.arange(self._exact.shape[2], dtype=torch.int64, device="cpu")
        seen = blocks < torch.from_numpy(self._case.num_blocks_per_query()).long()[:, None]
        for head, token, block in (seen & ~self._exact.isfinite()).nonzero()[:1].tolist():
            raise OutOfRangeError(
                f"index_q . index_k [head {head}, token {token}, block {block}]",
                self._exact[head, token, block].item(),
                "must be finite in fp32",
                "scale the queries or the keys down",
            )

    def format(self, name: str, ids: NDArray[np.int32], scores: torch.Tensor | None) -> FormatRows:
        recall, selection = np.ones(self.counted.shape), torch.from_numpy(np.ascontiguousarray(ids))
        recall[self.counted] = selection_recall(self._case, self._exact, selection).per_row.numpy()
        errors = np.zeros(0, dtype=np.float32)
        if scores is not None:
            free = torch.isfinite(self._exact) & (scores < LOCAL_SCORE)
            free &= torch.from_numpy(self.counted)[:, :, None]
            errors = (scores[free] - self._exact[free]).abs().numpy()
        return FormatRows(
            name=name,
            recall=recall,
            lost=self.kept - self._held(ids),
            squares=float(np.square(errors, dtype=np.float64).sum()),
            cells=errors.size,
            errors=errors[:: max(1, errors.size // SHOWN_ERRORS)],
        )

    def _held(self, ids: NDArray[np.int32]) -> NDArray[np.float64]:
        """``[H, total_q]`` mass of the blocks that rows selected, each once."""
        selected = _selected(torch.from_numpy(np.ascontiguousarray(ids)), self._mass.shape[2])
        return np.asarray(self._mass.masked_fill(~selected, 0).double().sum(dim=2).numpy())

    def _gaps(self, free: NDArray[np.bool_], slots: NDArray[np.int64]) -> NDArray[np.float32]:
        ordered = -np.sort(-np.where(free, self._exact.numpy(), -np.inf), axis=2)
        padded = np.pad(ordered, ((0, 0), (0, 0), (0, 1)), constant_values=-np.inf)
        last = slots.clip(1, ordered.shape[2] or 1)
        place = np.broadcast_to((last - 1)[None, :, None], (*ordered.shape[:2], 1))
        with np.errstate(invalid="ignore"):
            gaps = np.take_along_axis(padded, place, 2) - np.take_along_axis(padded, place + 1, 2)
        return np.asarray(np.nan_to_num(gaps[:, :, 0], nan=0.0, posinf=0.0, neginf=0.0))

    def worst_rows(self, shown: FormatRows, ids: NDArray[np.int32]) -> Iterator[WorstRow]:
        case, positions = self._case, self._case.positions()
        heads, tokens = np.nonzero(self.counted)
        recall = shown.recall[self.counted]
        order = np.lexsort((-shown.lost[self.counted], recall))
        for index in order[recall[order] < 1][:WORST_ROWS].tolist():
            row = head, token = int(heads[index]), int(tokens[index])
            yield WorstRow(
                request=int(case.requests_of(token)),
                head=head,
                token=token,
                position=int(positions[token]),
                recall=float(recall[index]),
                gap=float(self.gaps[row]),
                missed=tuple(sorted(set(self._best[row].tolist()) - set(ids[row].tolist()))),
                lost_mass=float(shown.lost[row]),
            )


def _log_sum(products: torch.Tensor) -> torch.Tensor:
    """Log of the softmax mass of each block, unnormalised."""
    return torch.logsumexp(products * _ATTENTION_SCALE, dim=3)


# ---- A whole case ----

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
    if case.rows * case.num_score_blocks <= MAX_CELLS:
        pieces = [measure_rows(case, backend)]
    else:
        pieces = [_placed(measure_rows(part.case, backend), part) for part in parts(case, MAX_CELLS)]
    rows = np.concatenate([piece.counted for piece in pieces], axis=1)
    kept = np.concatenate([piece.kept for piece in pieces], axis=1)[rows]
    gaps = np.concatenate([piece.gaps for piece in pieces], axis=1)[rows]
    worst = sorted(
        (row for piece in pieces for row in piece.worst), key=lambda row: (row.recall, -row.lost_mass)
    )
    return CaseFidelity(
        case=name,
        layer=None if case.engine is None else case.engine.layer,
        backend=pieces[0].backend,
        rows=case.rows,
        counted_rows=int(rows.sum()),
        kept_mass=float(kept.mean()) if kept.size else 1.0,
        gap_quantiles=tuple(np.quantile(gaps, GAP_QUANTILES).tolist()) if gaps.size else (),
        formats=tuple(
            _whole([piece.formats[index] for piece in pieces], rows)
            for index in range(len(pieces[0].formats))
        ),
        worst_rows=tuple(worst[:WORST_ROWS]),
        gaps=gaps,
    )


def _placed(rows: RowFidelity, part: Part) -> RowFidelity:
    """The worst rows by their request and token in the whole case."""
    worst = (replace(row, request=part.request, token=row.token + part.first) for row in rows.worst)
    return replace(rows, worst=tuple(worst))


def _whole(pieces: Sequence[FormatRows], rows: NDArray[np.bool_]) -> FormatFidelity:
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
