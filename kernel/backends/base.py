"""What a backend is."""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from kernel import checks
from kernel.batch import ScoreBatch
from kernel.step import Plan, Step

Precision = Literal["exact", "fast"]
"""``exact``: score error at most ``2^-16 * sum_i |q_i k_i|``. ``fast``: ``2^-9`` of it."""
Order = Literal["score", "block"]
"""Order of a row's block ids: score descending, or block id ascending; ``-1`` last in both."""

ScaleChoice = Literal["six", "four_over_six"]
"""How insert chooses a group's scale. ``six``: amax/6, the contract. ``four_over_six``: amax/4 where the
group's largest error, as it is scored, is then strictly smaller. Pages of either are read alike."""

SCORE_TOLERANCE: dict[Precision, float] = {"exact": 2.0**-16, "fast": 2.0**-9}
"""Largest score error allowed, in units of ``sum_i |q_i k_i|``."""


class Backend(Protocol):
    """Operations on checked arguments. Every output tensor is given by the caller and written in place."""

    name: str
    device: torch.device
    precision: Precision
    max_decode_queries: int
    """Queries up to which a request is decoded: scored by a kernel that reads its pages once and is bound by
    memory, where its heads' rows fit that kernel. 0 for a backend with one path. Either path gives the same
    bits."""
    max_device_rows: int
    """Rows, queries times heads, of a request whose lengths only the device knows."""

    def insert(self, keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
        """Quantise keys to NVFP4 and scatter them into pages.

        Args:
            keys: ``[n, 128]`` float32, bfloat16 or float16, finite.
            pages: ``[num_pages, 9216]`` uint8, written in place.
            slots: ``[n]`` int64, ``page_id * 128 + token``; a negative slot is skipped. Distinct.
        """
        ...

    def plan(self, step: Step) -> Plan:
        """Turn a step into what its runs read. Reads nothing from the device; one copy to it at most."""
        ...

    def score_plan(self, plan: Plan, q: torch.Tensor, pages: torch.Tensor, scores: torch.Tensor) -> None:
        """Score every row of the plan's requests.

        ``score = max over the causal tokens of the block of q . k``; sentinels as the contract has them;
        ``-inf`` at and past the row's ``nb``. Waits for nothing and copies nothing.

        Args:
            plan: of this backend.
            q: ``[total_q, H, 128]`` float8_e4m3fn, contiguous.
            pages: ``[num_pages, 9216]`` uint8, any page stride.
            scores: ``[H, total_q, S]`` float32, any strides with ``stride(2) == 1``; all ``S`` cells of a
                row of the plan's requests are written. Other rows are left alone where the host knows the
                lengths, and are ``-inf`` where it does not.
        """
        ...

    def select_plan(self, plan: Plan, q: torch.Tensor, pages: torch.Tensor, block_ids: torch.Tensor) -> None:
        """Score and select without a score buffer: the ids that score and :meth:`topk` would give.

        Memory does not grow with the context, but for the oracle's. Waits for nothing and copies nothing.

        Args:
            plan: of this backend.
            q: ``[total_q, H, 128]`` float8_e4m3fn, contiguous.
            pages: ``[num_pages, 9216]`` uint8, any page stride.
            block_ids: ``[H, total_q, k]`` int32, any strides, written. Rows of no request are left alone
                where the host knows the lengths, and are -1 where it does not.
        """
        ...

    def topk(
        self, scores: torch.Tensor, num_blocks: torch.Tensor, block_ids: torch.Tensor, order: Order
    ) -> None:
        """Select each row's best blocks: score descending, ties to the lower id, NaN as ``-inf``.

        Args:
            scores: ``[H, total_q, S]`` float32; only the first ``num_blocks`` cells of a row are read.
            num_blocks: ``[total_q]`` int32, at most ``S``.
            block_ids: ``[H, total_q, k]`` int32, written; ``-1`` where a row has fewer than ``k`` blocks.
            order: see :data:`Order`.
        """
        ...

    def call_values(
        self,
        q: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        num_pages: int,
    ) -> torch.Tensor:
        """The values of a paged call that the host must know, in one tensor, for one copy.

        Args:
            q: queries of any accepted dtype.
            block_table: ``[batch, columns]`` int32.
            cu_seqlens_q: ``[batch + 1]`` int32.
            seq_lens: ``[batch]`` int32.
            num_pages: of the cache.

        Returns:
            ``[2 * batch + 3]`` int32: ``cu_seqlens_q``, ``seq_lens``, whether a query is not finite, whether
            a page id that a request uses lies outside the cache.
        """
        ...

    def score(self, batch: ScoreBatch, scores: torch.Tensor) -> None:
        """Plan a call and score it, see :meth:`score_plan`."""
        ...

    def select(self, batch: ScoreBatch, block_ids: torch.Tensor, order: Order) -> None:
        """Plan a call and select from it, see :meth:`select_plan`."""
        ...


class PlannedBackend:
    """Calls that are planned and run once; by default one path."""

    max_decode_queries: int = 0
    max_device_rows: int = 64

    def plan(self, step: Step) -> Plan:
        """See :class:`Backend`."""
        raise NotImplementedError

    def score_plan(self, plan: Plan, q: torch.Tensor, pages: torch.Tensor, scores: torch.Tensor) -> None:
        """See :class:`Backend`."""
        raise NotImplementedError

    def select_plan(self, plan: Plan, q: torch.Tensor, pages: torch.Tensor, block_ids: torch.Tensor) -> None:
        """See :class:`Backend`."""
        raise NotImplementedError

    def call_values(
        self,
        q: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        num_pages: int,
    ) -> torch.Tensor:
        """See :class:`Backend`."""
        return checks.call_values(q, block_table, cu_seqlens_q, seq_lens, num_pages)

    def score(self, batch: ScoreBatch, scores: torch.Tensor) -> None:
        """See :class:`Backend`."""
        self.score_plan(self.plan(Step.of(batch)), batch.q, batch.pages, scores)

    def select(self, batch: ScoreBatch, block_ids: torch.Tensor, order: Order) -> None:
        """See :class:`Backend`."""
        self.select_plan(self.plan(Step.of(batch, order)), batch.q, batch.pages, block_ids)
