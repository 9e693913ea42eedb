"""Scores cases one after another on one backend, keeping nothing between them."""

from __future__ import annotations

import torch

from indexer.case import Case
from indexer.pipeline import score_and_select
from indexer.replay import as_tensor
from indexer.result import ScoreResult
from indexer.scorer import IndexScorer
from indexer.stages import StageTimes
from kernel.backends.base import Order, Precision
from kernel.batch import ScoreBatch
from kernel.checks import (
    check_finite,
    check_forced_blocks,
    check_order,
    check_topk,
    checked_batch,
)
from kernel.contract import BLOCK_TOKENS, MAX_SEQ_LEN, PAGE_BYTES
from kernel.nvfp4 import build_lut, quantize_query
from kernel.page import PAGE_STRIDE_ALIGNMENT, blocks_of


class CaseScorer:
    """Scores whole cases on the backend of a scorer, whose cache it leaves alone. Takes any H.

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
        most = blocks_of(MAX_SEQ_LEN)
        check_forced_blocks("init_blocks", init_blocks)
        check_forced_blocks("local_blocks", local_blocks)
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
                init_blocks=min(init_blocks, most),
                local_blocks=min(local_blocks, most),
            )

    def run(
        self, batch: ScoreBatch, *, topk: int, order: Order, times: StageTimes, return_scores: bool
    ) -> ScoreResult:
        """Score and select what :meth:`batch` made; may be repeated."""
        return score_and_select(
            self._backend, batch, topk=topk, order=order, times=times, return_scores=return_scores
        )

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
