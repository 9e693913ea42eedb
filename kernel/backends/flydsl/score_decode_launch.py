"""Launching the decode scorer. Its grid and arguments depend on shapes only, never on what lengths hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernel.backends.flydsl import kernel_names
from kernel.backends.flydsl.compiled import Launch, kernels_on
from kernel.backends.flydsl.decode_layout import DEFAULT, Layout
from kernel.backends.flydsl.launch import aligned, operand_arguments
from kernel.backends.flydsl.runtime import Device
from kernel.batch import Request, ScoreBatch
from kernel.errors import InvalidArgumentError
from kernel.plan import MAXIMA_BLOCKS

MAX_ROWS = 16
"""Query rows (``query_len * H``) of a request that the kernel scores; requests of more are prefill."""
_WAVES = 4
_WORKGROUPS_PER_COMPUTE_UNIT = 2
_INT32 = 2**31


def by_rows(batch: ScoreBatch) -> tuple[ScoreBatch, ScoreBatch]:
    """The requests of at most ``MAX_ROWS`` query rows, those of more; none without queries."""
    most = MAX_ROWS // batch.num_heads
    few = batch.subset(request for request in batch.requests if 0 < request.query_len <= most)
    return few, batch.subset(request for request in batch.requests if request.query_len > most)


@dataclass(frozen=True)
class DeviceRequests:
    """The requests of a launch as the kernel reads them: four contiguous ``[batch]`` int32 tensors on the
    device.

    Attributes:
        table_rows: the request's row in the block table.
        query_starts: its first query token in ``q``.
        query_ends: the token after its last; a request without queries pads the batch.
        seq_lens: its keys; a request without keys pads the batch.
    """

    table_rows: torch.Tensor
    query_starts: torch.Tensor
    query_ends: torch.Tensor
    seq_lens: torch.Tensor

    @staticmethod
    def of(requests: Sequence[Request], device: torch.device) -> DeviceRequests:
        """Bring requests to the device."""
        rows = [(r.table_row, r.query_start, r.query_start + r.query_len, r.seq_len) for r in requests]
        return DeviceRequests(*torch.from_numpy(np.array(rows, np.int32).T.copy()).to(device))


class DecodeLauncher:
    """Scores batches of few query rows a request on one device.

    One launcher serves one device. May be used from several threads.

    Args:
        device: where to launch.
        layout: where pages are on their way.

    Raises:
        DeviceUnavailableError: what is missing there, or for compiling.
    """

    def __init__(self, device: Device, layout: Layout = DEFAULT) -> None:
        self._device = device

        def name_of(heads: int) -> str:
            return kernel_names.score_decode(heads, layout)

        def build(heads: int) -> Launch:
            from kernel.backends.flydsl import score_decode

            return score_decode.build(heads, layout)

        self._kernels = kernels_on(device, name_of, build)

    def __call__(
        self,
        batch: ScoreBatch,
        scores: torch.Tensor,
        maxima: torch.Tensor | None = None,
        *,
        fill: bool = True,
    ) -> None:
        """Score the batch's requests, each of at most ``MAX_ROWS`` query rows; see :meth:`launch`."""
        requests = [request for request in batch.requests if request.query_len]
        if requests:
            self.launch(batch, DeviceRequests.of(requests, scores.device), scores, maxima, fill=fill)

    def launch(
        self,
        batch: ScoreBatch,
        requests: DeviceRequests,
        scores: torch.Tensor,
        maxima: torch.Tensor | None = None,
        *,
        fill: bool = True,
    ) -> None:
        """Score requests whose lengths only the device knows; asynchronous on a GPU.

        Nothing on the host but shapes and addresses decides the launch, so a captured one may be replayed
        after any of the tensors' values have changed. Values are not believed: a page id outside the cache
        reads as a page of zeros, a request has no more blocks than its row of the block table and the scores
        have columns and no more than ``MAX_ROWS`` query rows, rows past ``total_q`` are not written.

        Args:
            batch: queries, pages, block table, LUT and forced blocks, on this device; its own requests are
                not looked at.
            requests: what to score.
            scores: ``[H, total_q, S]`` float32 with ``stride(2) == 1``.
            maxima: ``[H, total_q, ceil(S / 16)]`` float32 with ``stride(2) == 1``: the greatest score of each
                16 blocks, sentinels included.
            fill: write ``-inf`` from a request's last block to ``S``, else nothing there.

        Raises:
            LaunchError: a HIP call failed; outputs are undefined.
            InvalidArgumentError: a number does not fit the 32 bits it has on the device.
        """
        num_requests, columns = requests.seq_lens.shape[0], scores.shape[2]
        height, width = batch.block_table.shape
        if not num_requests or not columns or not width or not batch.total_q:
            return
        _check_widths(batch, num_requests, columns)
        log_workgroups = grid_log2(
            num_requests, min(columns, width), maxima is not None, self._device.compute_units
        )
        q, lut = aligned(batch.q), aligned(batch.lut)
        numbers = (requests.table_rows, requests.query_starts, requests.query_ends, requests.seq_lens)
        tensors = [q, batch.pages, lut, scores, batch.block_table, *numbers]
        if maxima is not None:
            tensors.append(maxima)
        arguments = (
            *operand_arguments(batch, q, lut, scores, maxima),
            *(tensor.data_ptr() for tensor in numbers),
            height,
            width,
            num_requests,
            batch.total_q,
            batch.pages.shape[0],
            columns,
            columns if fill else 0,
            min(batch.init_blocks, columns),
            min(batch.local_blocks, columns),
            log_workgroups,
            1 << log_workgroups,
        )
        self._kernels.launch(batch.num_heads, tensors, *arguments)


def grid_log2(num_requests: int, blocks: int, maxima: bool, compute_units: int) -> int:
    """Log2 of the workgroups of a launch: what fills the device, or fewer where shapes leave no more work.

    Args:
        num_requests: requests, padding included.
        blocks: the most that one may have.
        maxima: whether group maxima are wanted; a workgroup then has a group of 16 blocks at least.
        compute_units: of the device.
    """
    most = num_requests * -(-blocks // (MAXIMA_BLOCKS if maxima else _WAVES))
    fill = (_WORKGROUPS_PER_COMPUTE_UNIT * compute_units).bit_length() - 1
    return min(fill, (most - 1).bit_length())


def _check_widths(batch: ScoreBatch, num_requests: int, columns: int) -> None:
    limits = (
        ("block_table.numel()", batch.block_table.numel(), _INT32),
        ("num_requests * S", num_requests * min(columns, batch.block_table.shape[1]), _INT32),
        ("total_q * H", batch.total_q * batch.num_heads, _INT32 - MAX_ROWS),
        ("scores.shape[2]", columns, _INT32 - 2 * MAXIMA_BLOCKS),
        ("pages.shape[0]", batch.pages.shape[0], _INT32),
    )
    for name, value, limit in limits:
        if value >= limit:
            raise InvalidArgumentError(name, value, f"must be below {limit}", "split the batch")
