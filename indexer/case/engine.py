"""What an engine made of a call, recorded beside it: its result, and where its pages lay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from indexer.case.array import check_array
from indexer.case.container import Array, refuse, shown
from kernel.contract import HEAD_DIM, PAGE_BYTES
from kernel.scalars import as_int

EngineOrder = Literal["score", "block", "any"]
"""Order that an engine writes a row's ids in; ``any``: only the set counts."""
MAX_STRIDE = 10**9 - 1
"""Largest distance of two pages, bytes."""
MAX_LAYER = 10**6 - 1
_KEY_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True, eq=False, kw_only=True)
class EngineRecord:
    """An engine's result of a call.

    Attributes:
        block_ids: ``[H, total_q, topk]`` int32, logical block ids; -1 is no block.
        scores: ``[H, total_q, S]`` float32; cells past a row's blocks may hold anything.
        order: the order of ``block_ids`` in a row.
        page_ids: ``[num_pages]`` int32: the engine's own id of each page of the case.
        page_stride: bytes from one page to the next in the engine's cache, at least 9,216.
        new_keys: ``[total_q, 128]`` bfloat16, float16 or float32: the keys the engine wrote for the query
            tokens in this step, before quantisation.
        layer: the model's layer, None if not known.
    """

    block_ids: Array | None = None
    scores: Array | None = None
    order: EngineOrder = "any"
    page_ids: Array | None = None
    page_stride: int = PAGE_BYTES
    new_keys: Array | None = None
    layer: int | None = None

    def check(self, *, shape: tuple[int, int, int], num_blocks: int, num_pages: int | None) -> None:
        """Refuse what does not fit the call.

        Args:
            shape: heads, query tokens and top-k of the case.
            num_blocks: the least columns of scores.
            num_pages: pages of the case; None where it holds keys.

        Raises:
            CaseFileError: naming the tensor or field, its value, the limit and the remedy.
        """
        heads, total_q, _ = shape
        if self.order not in get_args(EngineOrder):
            refuse("engine_order", shown(self.order), "must be score, block or any", "write one of them")
        self._check_number("page_stride", self.page_stride, PAGE_BYTES, MAX_STRIDE)
        if self.layer is not None:
            self._check_number("layer", self.layer, 0, MAX_LAYER)
        if self.block_ids is not None:
            check_array("engine_block_ids", self.block_ids, ("I32",), shape)
        if self.scores is not None:
            check_array("engine_scores", self.scores, ("F32",), (heads, total_q, None))
            if self.scores.shape[2] < num_blocks:
                limit = f"must be at least {num_blocks}, the blocks of the longest request"
                refuse("engine_scores.shape[2]", self.scores.shape[2], limit, "write every block")
        if self.new_keys is not None:
            check_array("new_keys", self.new_keys, _KEY_DTYPES, (total_q, HEAD_DIM))
        if self.page_ids is not None:
            if num_pages is None:
                refuse("page_ids", "given", "belong to pages, which the file has not", "leave them out")
            check_array("page_ids", self.page_ids, ("I32",), (num_pages,))
            for i in np.flatnonzero(self.page_ids < 0)[:1]:
                refuse(f"page_ids[{i}]", int(self.page_ids[i]), "must be 0 or more", "write the engine's ids")

    def _check_number(self, name: str, value: object, least: int, most: int) -> None:
        number = as_int(value)
        if number is None or not least <= number <= most:
            refuse(name, shown(value), f"must be a whole number from {least} to {most}", "choose one of them")
        object.__setattr__(self, name, number)
