"""A decode step captured once in a CUDA or HIP graph and replayed for any lengths.

A replay reads queries, pages, block table, offsets and lengths from the buffers it was captured with, and
nothing on the host: the caller writes the next step into those buffers and replays.
"""

from __future__ import annotations

import torch

from kernel.backends.base import Order
from kernel.backends.triton.backend import TritonBackend, current_device
from kernel.backends.triton.decode import MAX_ROWS
from kernel.backends.triton.plan import GROUP_BLOCKS
from kernel.backends.triton.topk import DecodeRows, select_decoded
from kernel.batch import ScoreBatch
from kernel.checks import check_forced_blocks, check_order, check_tensor, check_topk
from kernel.contract import HEAD_DIM
from kernel.errors import InvalidArgumentError
from kernel.page import as_pages


class DecodeGraph:
    """One decode step with fixed buffers.

    Lengths and page ids are read by kernels and cannot be refused: a page id outside the cache is read as the
    nearest one inside it, a length past the block table as its width, and queries of a request past
    ``max_queries`` get no ids. Nothing is read or written out of bounds, whatever they are. Requests of no
    query pad the batch; rows of ``q`` past the last request get ``-1``.

    Args:
        backend: whose kernels and precision are used.
        q: ``[total_q, H, 128]`` float8_e4m3fn, contiguous.
        pages: see :func:`kernel.page.as_pages`.
        block_table: ``[batch, max_blocks]`` int32, contiguous.
        cu_seqlens_q: ``[batch + 1]`` int32.
        seq_lens: ``[batch]`` int32.
        max_queries: most queries of a request; times H at most 64.
        topk: blocks to select, 1 to ``MAX_TOPK`` (64).
        order: of the block ids.
        init_blocks: blocks forced at a row's start.
        local_blocks: blocks forced at a row's end.

    Attributes:
        block_ids: ``[H, total_q, topk]`` int32, written by every replay.

    Raises:
        InvalidArgumentError: a buffer or a number outside the contract.
    """

    def __init__(
        self,
        backend: TritonBackend,
        q: torch.Tensor,
        pages: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        max_queries: int = 1,
        topk: int = 16,
        order: Order = "score",
        init_blocks: int = 0,
        local_blocks: int = 1,
    ) -> None:
        device = backend.device
        batch = seq_lens.shape[0]
        check_tensor("q", q, dtypes=(torch.float8_e4m3fn,), shape=(None, None, HEAD_DIM), device=device)
        check_tensor("pages", pages, dtypes=(torch.uint8,), shape=None, device=device)
        check_tensor("block_table", block_table, dtypes=(torch.int32,), shape=(batch, None), device=device)
        check_tensor("cu_seqlens_q", cu_seqlens_q, dtypes=(torch.int32,), shape=(batch + 1,), device=device)
        check_tensor("seq_lens", seq_lens, dtypes=(torch.int32,), shape=(batch,), device=device)
        check_topk("topk", topk)
        check_order(order)
        check_forced_blocks("init_blocks", init_blocks)
        check_forced_blocks("local_blocks", local_blocks)
        for name, tensor in (("q", q), ("block_table", block_table)):
            if not tensor.is_contiguous():
                raise InvalidArgumentError(
                    f"{name}.stride()", tensor.stride(), "must be contiguous", "capture a contiguous buffer"
                )
        heads, rows = q.shape[1], q.shape[0] * q.shape[1]
        if not 1 <= max_queries * heads <= MAX_ROWS:
            raise InvalidArgumentError(
                "max_queries",
                max_queries,
                f"must be 1 to {MAX_ROWS // heads}",
                "score longer requests as prefill",
            )
        if not batch or not rows or not block_table.shape[1]:
            raise InvalidArgumentError("q.shape", tuple(q.shape), "an empty step", "capture one of some rows")
        self._backend = backend
        # Without requests: a replay reads their lengths from the device.
        self._batch = ScoreBatch(
            q, as_pages(pages), block_table, backend.decode_table, (), init_blocks, local_blocks
        )
        self._order = order
        groups = -(-block_table.shape[1] // GROUP_BLOCKS)
        self._scores = torch.empty((groups, rows, GROUP_BLOCKS), dtype=torch.float32, device=device)
        table_rows = torch.arange(batch, dtype=torch.int32, device=device)
        starts = cu_seqlens_q[:-1]
        self._rows = DecodeRows(table_rows, starts, cu_seqlens_q[1:], seq_lens, starts, max_queries)
        self.block_ids = torch.empty((heads, q.shape[0], topk), dtype=torch.int32, device=device)

        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self.enqueue()  # compiles what is to be captured
        torch.cuda.current_stream(device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # Torch's own stream for captures lies on the device that was current at the first capture.
        with current_device(device), torch.cuda.graph(self._graph, stream=side):
            self.enqueue()

    def replay(self) -> torch.Tensor:
        """Run the step on what the buffers hold now; ``block_ids`` is valid once the current stream gets
        there."""
        self._graph.replay()
        return self.block_ids

    def enqueue(self) -> None:
        """Queue the step on the current stream, for a caller who captures it in a graph of its own."""
        with current_device(self._backend.device):
            blocks = self._batch.block_table.numel()
            self._backend.decode(self._batch, self._rows, self._scores, grouped=True, blocks=blocks)
            pdl = self._backend.tuning.hopper
            select_decoded(self._scores, self._rows, self.block_ids, self._order, pdl=pdl)
