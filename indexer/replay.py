"""Runs a case: its arrays as tensors, its keys in a scorer, its rows scored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch

from indexer.case import Case
from indexer.case.container import Array
from indexer.config import IndexerConfig
from indexer.pipeline import (
    TOO_MANY_QUERIES,
    ScoreOptions,
    ScoreResult,
    StageTimes,
    named_out_of_memory,
    score_and_select,
)
from indexer.scorer import IndexScorer
from kernel.backends.base import Order, Precision
from kernel.batch import ScoreBatch
from kernel.checks import check_finite, check_order, check_topk, checked_batch
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, PAGE_BYTES
from kernel.nvfp4 import build_lut, quantize_query
from kernel.page import PAGE_STRIDE_ALIGNMENT, blocks_of
from kernel.step import Step

# Types that numpy has only through ml_dtypes, which torch cannot read: passed as integers of their size.
_CROSSING: dict[np.dtype[Any], tuple[str, torch.dtype]] = {
    np.dtype(ml_dtypes.bfloat16): ("i2", torch.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn): ("u1", torch.float8_e4m3fn),
}


def as_tensor(array: Array, alignment: int = 1) -> torch.Tensor:
    """An array of a case as a host tensor that shares its memory and must not be written to.

    It is copied only where it starts at an address that its dtype or ``alignment`` (bytes) does not allow.
    """
    crossing = _CROSSING.get(array.dtype)
    if crossing is not None:
        array = array.view(crossing[0])
    if not array.flags.aligned or not array.flags.c_contiguous:
        array = array.copy()
    tensor = torch.from_numpy(array if array.flags.writeable else np.asarray(_Writable(array)))
    if tensor.data_ptr() % alignment:
        tensor = tensor.clone()
    return tensor if crossing is None else tensor.view(crossing[1])


@dataclass(frozen=True, eq=False)
class LoadedCase:
    """A case whose keys are where a scorer reads them.

    Attributes:
        case: the case.
        scorer: holds the keys of a case with ``index_k``, and no page for one with ``pages``.
        append_seconds: time to quantise and insert the keys; 0 for a case with ``pages``.
    """

    case: Case
    scorer: IndexScorer
    append_seconds: float
    _sequences: tuple[int, ...]
    _paged: tuple[torch.Tensor, ...]
    _query: torch.Tensor

    def score(self, *, return_scores: bool = True, order: Order = "score") -> ScoreResult:
        """Score the call; may be repeated.

        Raises:
            InvalidArgumentError: scores that do not fit in memory.
        """
        if self._paged:
            return self.scorer.score_paged(
                self._query, *self._paged, return_scores=return_scores, order=order, timings=True
            )
        query_lens = self.case.query_lens.tolist()
        return self.scorer.score(
            self._query,
            self._sequences,
            query_lens,
            return_scores=return_scores,
            order=order,
            timings=True,
        )


def load_case(
    case: Case, backend: str = "auto", *, device: str | None = None, precision: Precision = "exact"
) -> LoadedCase:
    """Build a scorer for a case and give it the keys.

    Args:
        case: the case.
        backend: a backend's name, or ``auto``.
        device: torch device; the backend's default when None.
        precision: ``exact`` or ``fast``.

    Raises:
        InvalidArgumentError: no such backend or device, or a key or query that is not finite.
        BackendUnavailableError: the backend cannot run here.
    """
    own_pages = case.index_k is not None
    config = IndexerConfig(
        num_index_heads=case.num_heads,
        num_pages=sum(map(blocks_of, case.seq_lens.tolist())) if own_pages else 0,
        topk_blocks=case.topk,
        init_blocks=case.init_blocks,
        local_blocks=case.local_blocks,
        backend=backend,
        device=device,
        precision=precision,
    )
    scorer = IndexScorer(config)
    query = as_tensor(case.index_q).to(scorer.device)
    check_finite("index_q", query)  # the scorer checks too, but would not name a place in the file
    if case.index_k is None:
        return LoadedCase(case, scorer, 0.0, (), _paged(case, scorer.device), query)
    keys = as_tensor(case.index_k).to(scorer.device)
    check_finite("index_k", keys)
    sequences = []
    times = StageTimes(scorer.device)
    with times.stage("append"):
        for request_keys in torch.split(keys, case.seq_lens.tolist()):
            sequences.append(scorer.add_sequence())
            scorer.append_keys(sequences[-1], request_keys)
    return LoadedCase(case, scorer, times["append"], tuple(sequences), (), query)


def flop(case: Case) -> int:
    """Work of scoring a case: ``2 * 128 * (visible blocks * 128)``, summed over its rows."""
    visible_blocks = int(case.num_blocks_per_query().sum(dtype=np.int64)) * case.num_heads
    return 2 * HEAD_DIM * visible_blocks * BLOCK_TOKENS


def _paged(case: Case, device: torch.device) -> tuple[torch.Tensor, ...]:
    if case.pages is None or case.block_table is None:
        raise AssertionError("a case has one of the two forms")
    pages = as_tensor(case.pages.reshape(-1, PAGE_BYTES), alignment=PAGE_STRIDE_ALIGNMENT)
    rest = (case.block_table, case.cu_seqlens_q, case.seq_lens)
    return (pages.to(device), *(as_tensor(array).to(device) for array in rest))


class _Writable:
    """Shows a read-only array to torch, which has no read-only tensors, as a writable one."""

    def __init__(self, array: Array) -> None:
        self._owner = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


# ---- Cases one after another on one backend ----


class CaseScorer:
    """Scores whole cases on a scorer's backend, without its cache; keeps nothing between cases. Takes any H.

    Args:
        scorer: whose backend runs; not to be used from another thread meanwhile.
    """

    def __init__(self, scorer: IndexScorer) -> None:
        self._backend = scorer._backend
        self._lut = build_lut(scorer.device)

    @property
    def backend(self) -> str:
        """Name of the backend that runs."""
        return self._backend.name

    @property
    def device(self) -> torch.device:
        """Where cases are scored."""
        return self._backend.device

    @property
    def precision(self) -> Precision:
        """The backend's precision."""
        return self._backend.precision

    def score(
        self,
        case: Case,
        *,
        topk: int | None = None,
        init_blocks: int | None = None,
        local_blocks: int | None = None,
        order: Order = "score",
        return_scores: bool = True,
    ) -> ScoreResult:
        """Insert the case's keys into pages of its own, score its queries and select.

        Args:
            case: the call.
            topk: blocks to select; the case's when None, and so are the next two.
            init_blocks: blocks forced at a row's start.
            local_blocks: blocks forced at a row's end.
            order: ``score`` or ``block``.
            return_scores: whether to keep the scores.

        Raises:
            InvalidArgumentError: an argument is outside the contract, a key or query is not finite, or the
                scores do not fit in memory.
        """
        k = case.topk if topk is None else topk
        check_topk("topk", k)
        check_order(order)
        times = StageTimes(self._backend.device)
        batch = self.batch(
            case,
            case.init_blocks if init_blocks is None else init_blocks,
            case.local_blocks if local_blocks is None else local_blocks,
            times,
        )
        return self.run(batch, topk=k, order=order, times=times, return_scores=return_scores)

    def batch(self, case: Case, init_blocks: int, local_blocks: int, times: StageTimes) -> ScoreBatch:
        """The case on the device, its keys in pages; adds the stages it takes to ``times``."""
        device = self._backend.device
        with times.stage("transfer"):
            query = as_tensor(case.index_q).to(device)
        with times.stage("check"):
            check_finite("index_q", query)
        pages, block_table = self._pages(case, times)
        if query.dtype != torch.float8_e4m3fn:
            with times.stage("quantize_query"):
                query = quantize_query(query)
        with times.stage("check"):
            return checked_batch(
                query,
                pages,
                block_table,
                as_tensor(case.cu_seqlens_q).to(device),
                as_tensor(case.seq_lens).to(device),
                lut=self._lut,
                num_heads=case.num_heads,
                init_blocks=init_blocks,
                local_blocks=local_blocks,
            )

    def run(
        self, batch: ScoreBatch, *, topk: int, order: Order, times: StageTimes, return_scores: bool
    ) -> ScoreResult:
        """Score and select what :meth:`batch` made; may be repeated."""
        options = ScoreOptions(topk, order, batch.init_blocks, batch.local_blocks, return_scores)
        with named_out_of_memory("q.shape[0]", batch.q, *TOO_MANY_QUERIES):
            plan = self._backend.plan(Step.of(batch, order))
            return score_and_select(self._backend, plan, batch.q, batch.pages, options, times)

    def _pages(self, case: Case, times: StageTimes) -> tuple[torch.Tensor, torch.Tensor]:
        device = self._backend.device
        if case.pages is not None and case.block_table is not None:
            with times.stage("transfer"):
                pages = as_tensor(case.pages.reshape(-1, PAGE_BYTES), alignment=PAGE_STRIDE_ALIGNMENT)
                return pages.to(device), as_tensor(case.block_table).to(device)
        if case.index_k is None:
            raise AssertionError("a case has one of the two forms")
        with times.stage("transfer"):
            keys = as_tensor(case.index_k).to(device)
        with times.stage("check"):
            check_finite("index_k", keys)
        with times.stage("insert"):
            block_table, slots, num_pages = _layout(case.seq_lens.tolist())
            pages = torch.zeros(num_pages, PAGE_BYTES, dtype=torch.uint8, device=device)
            if keys.shape[0]:
                self._backend.insert(keys, pages, slots.to(device))
        return pages, block_table.to(device)


def _layout(seq_lens: list[int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Pages of requests one after another: the block table, the slot of each key, and the number of pages."""
    blocks = _host([blocks_of(tokens) for tokens in seq_lens])
    first_pages = blocks.cumsum(0) - blocks
    columns = torch.arange(max(blocks.tolist(), default=0), dtype=torch.int64, device="cpu")
    block_table = (
        (first_pages[:, None] + columns).masked_fill_(columns >= blocks[:, None], -1).to(torch.int32)
    )
    lens = _host(seq_lens)
    starts = lens.cumsum(0) - lens
    slots = torch.arange(sum(seq_lens), dtype=torch.int64, device="cpu")
    slots = slots + torch.repeat_interleave(first_pages * BLOCK_TOKENS - starts, lens)
    return block_table, slots, int(blocks.sum())


def _host(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")
