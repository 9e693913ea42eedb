"""What an :class:`indexer.IndexScorer` is built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch

from kernel.arguments import as_int
from kernel.backends.base import Order, Precision, ScaleChoice
from kernel.backends.registry import BACKEND_NAMES, device_name
from kernel.checks import check_forced_blocks, check_heads, check_order, check_precision, check_topk
from kernel.errors import InvalidArgumentError


@dataclass(frozen=True)
class IndexerConfig:
    """Geometry and defaults of a scorer, checked at construction.

    Attributes:
        num_index_heads: index heads of this rank: 1, 2 or 4.
        num_pages: pages of the scorer's own cache, 9,216 bytes each, one for every 128 tokens of a sequence.
            0 for a scorer that is only given other people's pages (``score_paged``).
        topk_blocks: blocks selected for a row, 1 to ``MAX_TOPK`` (64).
        init_blocks: blocks forced at a row's start, 0 or more.
        local_blocks: blocks forced at a row's end, 0 or more.
        order: order of a row's block ids: ``score`` (descending) or ``block`` (ascending).
        backend: a backend's name, or ``auto`` for the best that runs here.
        device: torch device, or its name, of the cache and of every tensor given; the backend's default when
            None. Kept as a name.
        precision: ``exact`` or ``fast``, see :data:`kernel.backends.base.Precision`.
        scale_choice: how appended keys get their scales: ``six`` (the contract) or ``four_over_six``, see
            :data:`kernel.backends.base.ScaleChoice`; backends ``cpu`` and ``reference`` only.

    Raises:
        InvalidArgumentError: a field is outside its limits; the message names it.
    """

    num_index_heads: int
    num_pages: int
    topk_blocks: int = 16
    init_blocks: int = 0
    local_blocks: int = 1
    order: Order = "score"
    backend: str = "auto"
    device: str | torch.device | None = None
    precision: Precision = "exact"
    scale_choice: ScaleChoice = "six"

    def __post_init__(self) -> None:
        num_pages = as_int(self.num_pages)
        if num_pages is None or num_pages < 0:
            raise InvalidArgumentError(
                "num_pages", repr(self.num_pages), "must be an int, 0 or more", "one page holds 128 tokens"
            )
        self._keep(
            num_index_heads=check_heads(self.num_index_heads),
            num_pages=num_pages,
            topk_blocks=check_topk("topk_blocks", self.topk_blocks),
            init_blocks=check_forced_blocks("init_blocks", self.init_blocks),
            local_blocks=check_forced_blocks("local_blocks", self.local_blocks),
            device=device_name(self.device),
        )
        check_order(self.order)
        names = ("auto", *BACKEND_NAMES)
        if self.backend not in names:
            raise InvalidArgumentError(
                "backend", repr(self.backend), "no such backend", f"use one of {', '.join(names)}"
            )
        check_precision(self.precision)
        if self.scale_choice not in get_args(ScaleChoice):
            raise InvalidArgumentError(
                "scale_choice", repr(self.scale_choice), "must be 'six' or 'four_over_six'", "use one of them"
            )

    def _keep(self, **fields: int | str | None) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)
