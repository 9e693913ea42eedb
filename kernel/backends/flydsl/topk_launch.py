"""Launching the top-k kernels."""

from __future__ import annotations

import torch

from kernel.backends.base import Order
from kernel.backends.flydsl.compiled import Launch, kernels_on
from kernel.backends.flydsl.runtime import Device
from kernel.backends.flydsl.topk_variants import MAX_BLOCKS, WAVES, Variant, variant_for
from kernel.errors import InvalidArgumentError

_MAX_HEADS = 65_535
"""Workgroups of a grid's second dimension."""
_MAX_LAUNCH_TOKENS = 1 << 24
"""A grid may hold 2^32 threads, so launches are chunked."""


class TopkLauncher:
    """Selects rows' best blocks on one device; see :class:`kernel.backends.flydsl.launch.PrefillLauncher`."""

    def __init__(self, device: Device) -> None:
        self._kernels = kernels_on(device, _name, _build)

    def __call__(
        self,
        scores: torch.Tensor,
        num_blocks: torch.Tensor,
        block_ids: torch.Tensor,
        order: Order,
        maxima: torch.Tensor | None = None,
    ) -> None:
        """Select; asynchronous on a GPU.

        Args:
            scores: ``[H, total_q, S]`` float32; only the first ``num_blocks`` cells of a row are read.
            num_blocks: ``[total_q]`` int32.
            block_ids: ``[H, total_q, k]`` int32, written.
            order: see :data:`kernel.backends.base.Order`.
            maxima: ``[H, total_q, ceil(S / 16)]`` float32, the greatest score of each 16 blocks below
                ``num_blocks``: then only they and the ``k`` best groups of a row are read.

        Raises:
            LaunchError: a HIP call failed; outputs are undefined.
            InvalidArgumentError: a row is longer than the kernels can count.
        """
        heads, tokens, columns = scores.shape
        k = block_ids.shape[2]
        if columns > MAX_BLOCKS:
            raise InvalidArgumentError(
                "scores.shape[2]", columns, f"must be at most {MAX_BLOCKS}", "shorten the rows"
            )
        if not (heads and tokens and k):
            return
        if heads > _MAX_HEADS:
            raise InvalidArgumentError("scores.shape[0]", heads, f"must be at most {_MAX_HEADS}", "split it")
        scores, num_blocks = _with_rows_of_cells(scores), num_blocks.contiguous()
        tensors = [scores, num_blocks, block_ids]
        if maxima is not None:
            maxima = _with_rows_of_cells(maxima)
            tensors.append(maxima)
        written = block_ids if block_ids.stride(2) == 1 or k == 1 else torch.empty_like(block_ids)
        variant = variant_for(k, columns, maxima is not None)
        rows = WAVES * variant.rows_per_wave
        for first in range(0, tokens, _MAX_LAUNCH_TOKENS):
            num = min(tokens - first, _MAX_LAUNCH_TOKENS)
            arguments = (
                *_place(scores, first),
                *(_place(maxima, first) if maxima is not None else (0, 0, 0)),
                num_blocks.data_ptr() + 4 * first,
                *_place(written, first),
                columns,
                num,
                k,
                int(order == "block"),
                -(-num // rows),
                heads,
            )
            self._kernels.launch(variant, [*tensors, written], *arguments)
        if written is not block_ids:
            block_ids.copy_(written)


def _name(variant: Variant) -> str:
    return variant.name


def _build(variant: Variant) -> Launch:
    from kernel.backends.flydsl import topk

    return topk.build(variant)


def _place(rows: torch.Tensor, first: int) -> tuple[int, int, int]:
    """Address of a tensor's row ``[0, first]``, and its strides in cells."""
    return rows.data_ptr() + 4 * first * rows.stride(1), rows.stride(0), rows.stride(1)


def _with_rows_of_cells(rows: torch.Tensor) -> torch.Tensor:
    """A tensor whose last dimension is contiguous."""
    return rows if rows.shape[2] < 2 or rows.stride(2) == 1 else rows.contiguous()
