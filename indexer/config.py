"""What an :class:`indexer.IndexScorer` is built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from kernel.backends.base import Order, Precision
from kernel.backends.registry import BACKEND_NAMES
from kernel.checks import check_forced_blocks, check_heads, check_order, check_topk
from kernel.errors import InvalidArgumentError


@dataclass(frozen=True)
class IndexerConfig:
    """Geometry and defaults of a scorer, checked at construction.

    Attributes:
        num_index_heads: index heads of this rank: 1, 2 or 4.
        num_pages: pages of the scorer's own cache, 9,216 bytes each, one for every 128 tokens of a sequence.
            0 for a scorer that is only given other people's pages (``score_paged``).
        topk_blocks: blocks selected for a row, 1 to 64.
        init_blocks: blocks forced at a row's start, 0 or more.
        local_blocks: blocks forced at a row's end, 0 or more.
        order: order of a row's block ids: ``score`` (descending) or ``block`` (ascending).
        backend: a backend's name, or ``auto`` for the best that runs here.
        device: torch device of the cache and of every tensor given; the backend's default when None.
        precision: ``exact`` or ``fast``, see :data:`kernel.backends.base.Precision`.

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
    device: str | None = None
    precision: Precision = "exact"

    def __post_init__(self) -> None:
        check_heads(self.num_index_heads)
        if not isinstance(self.num_pages, int) or isinstance(self.num_pages, bool) or self.num_pages < 0:
            raise InvalidArgumentError(
                "num_pages", repr(self.num_pages), "must be an int, 0 or more", "one page holds 128 tokens"
            )
        check_topk("topk_blocks", self.topk_blocks)
        check_forced_blocks("init_blocks", self.init_blocks)
        check_forced_blocks("local_blocks", self.local_blocks)
        check_order(self.order)
        names = ("auto", *BACKEND_NAMES)
        if self.backend not in names:
            raise InvalidArgumentError(
                "backend", repr(self.backend), "no such backend", f"use one of {', '.join(names)}"
            )
        if self.device is not None and not isinstance(self.device, str):
            raise InvalidArgumentError(
                "device", repr(self.device), "must be a string or None", "write it as 'cpu' or 'cuda:0'"
            )
        if self.precision not in get_args(Precision):
            raise InvalidArgumentError(
                "precision", repr(self.precision), "must be 'exact' or 'fast'", "use one of them"
            )
