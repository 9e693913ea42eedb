"""What the kernels know of requests and tiles: host integers brought to the device without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernel.backends.triton.plan import Chunk
from kernel.batch import Request


@dataclass(frozen=True)
class DeviceChunk:
    """A :class:`kernel.backends.triton.plan.Chunk` whose arrays are on the device."""

    tiles: torch.Tensor
    table_cells: torch.Tensor
    rows: int
    num_blocks: int
    keys_change: bool


def device_chunk(chunk: Chunk, device: torch.device) -> DeviceChunk:
    """Bring a chunk to the device."""
    tiles, table_cells = uploaded(chunk.tiles, device), uploaded(chunk.table_cells, device)
    return DeviceChunk(tiles, table_cells, chunk.rows, chunk.num_blocks, chunk.keys_change)


def uploaded(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """An array on the device; the copy is queued on the current stream, the host does not wait."""
    host = torch.from_numpy(values)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def request_rows(
    requests: Sequence[Request], out_starts: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Table rows, query starts, query ends, lengths and output starts: five ``[n]`` int32 views on the
    device."""
    rows = [
        (
            request.table_row,
            request.query_start,
            request.query_start + request.query_len,
            request.seq_len,
            out_start,
        )
        for request, out_start in zip(requests, out_starts)
    ]
    columns = uploaded(np.array(rows, dtype=np.int32).T.copy(), device)
    return columns[0], columns[1], columns[2], columns[3], columns[4]
