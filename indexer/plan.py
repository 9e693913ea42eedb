"""A planned step: lengths and options checked once, then run for every layer.

plan = scorer.plan(block_table, query_lens=[5, 1], seq_lens=[4000, 900])    lengths on the host
plan = scorer.plan(block_table, cu_seqlens_q=cu, seq_lens=lens,             lengths on the device, which
                   max_query_len=4, max_seq_len=131072)                     may change until each run
ids = plan.select(q, pages)                                                 once a layer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kernel import operators
from kernel.arguments import as_int, check_int, check_unmasked
from kernel.checks import check_lengths, check_memory, check_tensor
from kernel.contract import HEAD_DIM, MAX_SEQ_LEN
from kernel.errors import InvalidArgumentError
from kernel.nvfp4 import quantize_query
from kernel.page import blocks_of
from kernel.step import DeviceLengths, IntArray, Lengths, Plan

HostInts = Sequence[int] | NDArray[np.integer[Any]]
_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, eq=False)
class IndexPlan:
    """A step that was planned by :meth:`indexer.IndexScorer.plan`; run it once for each layer.

    Runs wait for nothing and read nothing back, so they can be captured in a CUDA or HIP graph and compiled:
    they call ``torch.ops.nvfp4_indexer``. They may run while another thread plans.

    Attributes:
        plan: what the operators take.
        pages: the scorer's own cache, which a run uses when it is given none.
        backend: name of the backend with its options, as operators take it.
        num_heads: H.
        total_q: query tokens, those that pad the batch included.
        topk: blocks selected for a row.
        num_score_blocks: ``S`` of the scores.
    """

    plan: Plan
    pages: torch.Tensor
    backend: str
    num_heads: int
    total_q: int
    topk: int
    num_score_blocks: int

    def select(
        self, q: torch.Tensor, pages: torch.Tensor | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Score and select each row's best blocks.

        Args:
            q: ``[total_q, H, 128]`` float8_e4m3fn or its bytes as uint8; bfloat16, float16 and float32 are
                cast to it, saturating. A row with a NaN is ranked as if all its scores were ``-inf``.
            pages: ``[num_pages, 9216]`` uint8, any page stride; the scorer's own when None. Page ids outside
                it are read as the nearest inside.
            out: ``[H, total_q, k]`` int32 to write to, any strides (a transposed token-major buffer too).

        Returns:
            ``[H, total_q, k]`` int32: ``out``, or a new tensor. -1 where a row has fewer than ``k`` blocks,
            and in rows of no request.

        Raises:
            InvalidArgumentError: a wrong shape, dtype, stride or device.
        """
        if out is not None and not out.is_nested and out.dim() == 3 and out.shape[2] != self.topk:
            raise InvalidArgumentError(
                "out.shape[2]", out.shape[2], f"must be the plan's topk, {self.topk}", "plan with that topk"
            )
        return self._run(torch.ops.nvfp4_indexer.select, self.topk, q, pages, out)

    def score(
        self, q: torch.Tensor, pages: torch.Tensor | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Score every row.

        Args:
            q: as in :meth:`select`.
            pages: as in :meth:`select`.
            out: ``[H, total_q, S]`` float32 to write to, at least the plan's ``S`` wide, ``stride(2) == 1``.

        Returns:
            ``[H, total_q, S]`` float32: ``out``, or a new tensor; ``-inf`` at and past a row's blocks, and in
            rows of no request.

        Raises:
            InvalidArgumentError: a wrong shape, dtype, stride or device.
        """
        return self._run(torch.ops.nvfp4_indexer.score, self.num_score_blocks, q, pages, out)

    def _run(
        self,
        operator: Any,
        columns: int,
        q: torch.Tensor,
        pages: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        dtypes = (*operators.QUERY_DTYPES, *operators.FLOAT_DTYPES)
        check_tensor("q", q, dtypes=dtypes, shape=(None, self.num_heads, HEAD_DIM), device=None, traced=True)
        if q.dtype not in operators.QUERY_DTYPES:
            if not torch.compiler.is_compiling():
                check_memory("q", q)
            q = quantize_query(q)
        pages, plan = self.pages if pages is None else pages, self.plan
        try:
            if out is None:
                found: torch.Tensor = operator(q, pages, plan.tensors, plan.numbers, columns, self.backend)
                return found
            operator.out(q, pages, plan.tensors, plan.numbers, self.backend, out=out)
        except InvalidArgumentError:
            raise
        except Exception:
            operators.refuse_undispatched({"q": q, "pages": pages, "out": out}, "out")
            raise
        return out


# ---- Lengths: of the host checked, of the device bounded ----


def host_lengths(query_lens: HostInts, seq_lens: HostInts, table_rows: int) -> Lengths:
    """Lengths that the host knows.

    Args:
        query_lens: queries of each request.
        seq_lens: keys of each request, this step's included.
        table_rows: rows of the block table.

    Raises:
        InvalidArgumentError: naming the first length that is wrong.
    """
    queries, keys = integers("query_lens", query_lens), integers("seq_lens", seq_lens)
    for name, values in (("query_lens", queries), ("seq_lens", keys)):
        if values.size != table_rows:
            raise InvalidArgumentError(
                name,
                f"{values.size} lengths",
                f"must be one for each of the {table_rows} rows of the block table",
                "pass the lengths of the whole batch",
            )
    check_lengths(queries, keys)
    return Lengths.consecutive(queries, keys)


def integers(argument: str, values: HostInts) -> IntArray:
    """Whole numbers of a list, a tuple, a flat numpy array or a flat CPU tensor, as int64."""
    if isinstance(values, torch.Tensor) and values.device.type == "cpu" and values.dtype in _INTEGERS:
        check_memory(argument, values)
        values = values.numpy()
    check_unmasked(argument, values)
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "iu":
        return values.astype(np.int64)
    if not isinstance(values, (list, tuple)):
        raise InvalidArgumentError(
            argument,
            type(values).__name__,
            "must be a list, a tuple or a flat array of ints",
            "call .tolist(); lengths on a GPU go with cu_seqlens_q",
        )
    if not all(type(value) is int for value in values):
        for row, value in enumerate(values):
            if as_int(value) is None:
                raise InvalidArgumentError(
                    f"{argument}[{row}]", repr(value), "must be an int", "pass whole numbers"
                )
    try:
        return np.array(values, dtype=np.int64).reshape(-1)
    except OverflowError as error:
        raise InvalidArgumentError(
            argument, values, "must fit 64 bits", "pass the lengths of this step"
        ) from error


def device_lengths(
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int | None,
    max_seq_len: int | None,
    block_table: torch.Tensor,
    num_heads: int,
    max_rows: int,
) -> DeviceLengths:
    """Lengths that only the device knows: shapes and bounds are checked, values are not read.

    Raises:
        InvalidArgumentError: a wrong shape, dtype or device, a bound that is missing or out of range.
    """
    batch, device = block_table.shape[0], block_table.device
    check_tensor("cu_seqlens_q", cu_seqlens_q, dtypes=(torch.int32,), shape=(batch + 1,), device=device)
    check_tensor("seq_lens", seq_lens, dtypes=(torch.int32,), shape=(batch,), device=device)
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("seq_lens", seq_lens)):
        if not tensor.is_contiguous():
            raise InvalidArgumentError(
                f"{name}.stride()", tensor.stride(), "must be contiguous", "pass a buffer of its own"
            )
    for name, bound in (("max_query_len", max_query_len), ("max_seq_len", max_seq_len)):
        if bound is None:
            raise InvalidArgumentError(
                name, None, "must be given with cu_seqlens_q", "pass the most that a request may have"
            )
    queries, keys = check_int("max_query_len", max_query_len), check_int("max_seq_len", max_seq_len)
    most = max_rows // num_heads
    if not 1 <= queries <= most:
        raise InvalidArgumentError(
            "max_query_len",
            queries,
            f"must be 1 to {most} with {num_heads} heads",
            "plan longer requests with query_lens on the host",
        )
    if not 1 <= keys <= MAX_SEQ_LEN:
        raise InvalidArgumentError(
            "max_seq_len", keys, f"must be 1 to {MAX_SEQ_LEN}", "pass the longest context of the batch"
        )
    if block_table.shape[1] < blocks_of(keys):
        raise InvalidArgumentError(
            "block_table.shape[1]",
            block_table.shape[1],
            f"must be at least {blocks_of(keys)}, the blocks of max_seq_len = {keys}",
            "widen the block table or lower max_seq_len",
        )
    return DeviceLengths(cu_seqlens_q, seq_lens, queries, keys)


MAX_WORKSPACE_BYTES = 1 << 30
"""Most bytes of a run's scores where lengths are on the device: as its bounds say, whatever the lengths."""


def check_workspace(total_q: int, num_heads: int, lengths: DeviceLengths) -> None:
    """Refuse bounds whose scores, which a selection keeps at each run, take too much memory."""
    blocks = blocks_of(lengths.max_seq_len)
    size = 4 * total_q * num_heads * blocks
    if size > MAX_WORKSPACE_BYTES:
        raise InvalidArgumentError(
            "total_q",
            total_q,
            f"their scores, {num_heads} heads x {blocks} blocks each, take {size} bytes at a run, of "
            f"{MAX_WORKSPACE_BYTES} allowed",
            "plan fewer requests or a shorter max_seq_len, or plan with query_lens on the host",
        )
