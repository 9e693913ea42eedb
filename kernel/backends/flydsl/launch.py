"""Launching the prefill scorer: the plan, the packed arguments, the compiled kernels."""

from __future__ import annotations

import torch

from kernel.backends.flydsl import kernel_names
from kernel.backends.flydsl.compiled import Launch, kernels_on
from kernel.backends.flydsl.runtime import Device
from kernel.batch import ScoreBatch
from kernel.plan import MAXIMA_BLOCKS, STORE_BLOCKS, WORK_ITEM_DWORDS, launches
from kernel.plan_cache import PlanCache

_WORKGROUPS_PER_COMPUTE_UNIT = 2
_OPERAND_ALIGNMENT = 16
"""Bytes that queries and LUT entries are loaded at."""


class PrefillLauncher:
    """Scores batches on one device.

    A compiled kernel is kept for each number of heads; each belongs to the GPU that it was first launched on,
    so one launcher serves one device. May be used from several threads.

    Args:
        device: where to launch.

    Raises:
        DeviceUnavailableError: what is missing there, or for compiling.
    """

    def __init__(self, device: Device) -> None:
        self._kernels = kernels_on(device, kernel_names.score_prefill, _build)
        self._device = device
        self._plans = PlanCache()

    def __call__(self, batch: ScoreBatch, scores: torch.Tensor, maxima: torch.Tensor | None = None) -> None:
        """Score the batch; asynchronous on a GPU.

        Args:
            batch: the call, on this device.
            scores: ``[H, total_q, S]`` float32 with ``stride(2) == 1``; every cell of a row of the batch's
                requests is written.
            maxima: ``[H, total_q, ceil(S / 16)]`` float32 with ``stride(2) == 1``, written likewise: the
                greatest score of each 16 blocks, sentinels included.

        Raises:
            LaunchError: a HIP call failed; outputs are undefined.
            DeviceUnavailableError: the kernel may not be compiled here and is not in FlyDSL's cache.
            InvalidArgumentError: a number does not fit the 32 bits it has on the device.
        """
        plan = self._plans.plan(
            batch.requests,
            batch.num_heads,
            table_stride=batch.block_table.shape[1],
            score_blocks=scores.shape[2],
            slots=_WORKGROUPS_PER_COMPUTE_UNIT * self._device.compute_units,
            alignment=STORE_BLOCKS if maxima is None else MAXIMA_BLOCKS,
        )
        if not plan.num_items or not scores.shape[2]:
            return
        work = torch.frombuffer(bytearray(plan.words), dtype=torch.int32).to(scores.device)
        q, lut = aligned(batch.q), aligned(batch.lut)
        tensors = [q, batch.pages, lut, scores, batch.block_table, work]
        if maxima is not None:
            tensors.append(maxima)
        operands = operand_arguments(batch, q, lut, scores, maxima)
        for chunk in launches(plan.num_items):
            arguments = (
                *operands,
                work.data_ptr() + 4 * WORK_ITEM_DWORDS * chunk.start,
                batch.init_blocks,
                batch.local_blocks,
                len(chunk),
            )
            self._kernels.launch(batch.num_heads, tensors, *arguments)


def _build(heads: int) -> Launch:
    from kernel.backends.flydsl import score_prefill

    return score_prefill.build(heads)


def operand_arguments(
    batch: ScoreBatch, q: torch.Tensor, lut: torch.Tensor, scores: torch.Tensor, maxima: torch.Tensor | None
) -> tuple[int, ...]:
    """The arguments that both scorers begin with, up to the block table.

    Args:
        batch: the call, but for its queries and LUT.
        q: its queries, aligned.
        lut: its LUT, aligned.
        scores: written.
        maxima: written, if any are wanted.
    """
    return (
        q.data_ptr(),
        batch.pages.data_ptr(),
        batch.pages.stride(0),
        lut.data_ptr(),
        scores.data_ptr(),
        scores.stride(0),
        scores.stride(1),
        *((0, 0, 0) if maxima is None else (maxima.data_ptr(), maxima.stride(0), maxima.stride(1))),
        batch.block_table.data_ptr(),
    )


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that starts where the kernels' loads of operands may."""
    return tensor if tensor.data_ptr() % _OPERAND_ALIGNMENT == 0 else tensor.clone()
