"""One call of an engine as a case: pages in use only, renumbered, everything copied to the host."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from indexer.case import Case, EngineOrder, EngineRecord
from indexer.case.container import Array
from indexer.recording.host import host_array, host_int32
from indexer.recording.pages_in_use import PagesInUse, pages_in_use, wrapped_page_ids
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, PAGE_BYTES
from kernel.errors import InvalidArgumentError
from kernel.page import as_pages

_KEY_PAGES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


def snapshot(
    index_q: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    scores: torch.Tensor | None,
    block_ids: torch.Tensor | None,
    order: EngineOrder,
    new_keys: torch.Tensor | None,
    layer: int | None,
    source: str,
    max_bytes: int,
    wrapped_pages: bool,
) -> Case:
    """Copy a call; see :func:`indexer.recording.capture` for the arguments.

    Raises:
        InvalidArgumentError: the call is not one that a case can hold, or larger than ``max_bytes``.
    """
    _check_tensors(index_q=index_q, pages=pages, block_table=block_table)
    _check_not_in_a_graph(index_q)
    by_keys = pages.dtype in _KEY_PAGES
    flat = pages.flatten(1) if by_keys else as_pages(pages)
    stride = flat.stride(0) if len(flat) > 1 and not by_keys else PAGE_BYTES
    starts = host_int32(cu_seqlens_q)
    total_q = _total(starts, index_q.shape[0])
    batch, query_lens = len(starts) - 1, np.diff(starts)
    lens = np.where(query_lens > 0, host_int32(seq_lens[:batch]), 0).astype(np.int32)
    used = pages_in_use(host_int32(block_table[:batch]), query_lens, lens, pages.shape[0])
    index_q = index_q[:total_q]
    if scores is not None:
        scores = scores[:, :total_q].float()
    if block_ids is not None:
        block_ids = block_ids[:, :total_q]
    if new_keys is not None:
        new_keys = new_keys[:total_q]
    rest = {
        "index_q": index_q,
        "block_table": block_table,
        "scores": scores,
        "block_ids": block_ids,
        "new_keys": new_keys,
    }
    ids = used.ids
    if wrapped_pages and not by_keys:
        ids = np.concatenate([ids, wrapped_page_ids(ids, stride, len(flat))])
    _check_size(len(ids) * flat.shape[1] * flat.element_size(), rest, max_bytes)
    return Case(
        index_q=host_array(index_q),
        cu_seqlens_q=starts,
        seq_lens=lens,
        index_k=_keys(flat, used, lens) if by_keys else None,
        pages=None if by_keys else _gather(flat, ids).numpy(),
        block_table=None if by_keys else used.table,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        topk=topk,
        source=source,
        engine=EngineRecord(
            block_ids=None if block_ids is None else host_int32(block_ids),
            scores=None if scores is None else host_array(scores),
            order=order,
            page_ids=None if by_keys else ids.astype(np.int32),
            page_stride=stride,
            new_keys=None if new_keys is None else host_array(new_keys),
            layer=layer,
        ),
    )


def _total(starts: Array, most: int) -> int:
    """Query tokens of all requests."""
    wrong = not starts.size or starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] > most
    if wrong:
        limit = f"must be exclusive prefix sums of the query lengths, of {most} tokens at most"
        raise InvalidArgumentError("cu_seqlens_q", starts[:8].tolist(), limit, "pass the call's own")
    return int(starts[-1])


def _gather(pages: torch.Tensor, ids: Array) -> torch.Tensor:
    """Pages ``[len(ids), ...]`` on the host: a copy, so the engine may go on writing."""
    return pages.index_select(0, torch.from_numpy(ids).to(pages.device)).cpu()


def _keys(pages: torch.Tensor, used: PagesInUse, seq_lens: Array) -> Array:
    """Keys ``[total_k, 128]`` of a cache that is not quantised, request after request."""
    if pages.shape[1] != BLOCK_TOKENS * HEAD_DIM:
        limit = f"must be [num_pages, {BLOCK_TOKENS}, {HEAD_DIM}]"
        raise InvalidArgumentError("pages.shape", tuple(pages.shape), limit, "pass one page a row")
    found = _gather(pages, used.ids)
    if found.dtype == torch.float8_e4m3fn:
        found = found.to(torch.bfloat16)  # exact: fewer bits of each kind
    held = host_array(found).reshape(-1, BLOCK_TOKENS, HEAD_DIM)
    requests = [
        held[row[row >= 0]].reshape(-1, HEAD_DIM)[:length] for row, length in zip(used.table, seq_lens)
    ]
    return np.concatenate([held[:0].reshape(-1, HEAD_DIM), *requests])


def _check_size(page_bytes: int, rest: Mapping[str, torch.Tensor | None], max_bytes: int) -> None:
    sizes = {
        name: tensor.numel() * tensor.element_size() for name, tensor in rest.items() if tensor is not None
    }
    total = page_bytes + sum(sizes.values())
    if total > max_bytes:
        parts = ", ".join(f"{name} {size}" for name, size in {"pages": page_bytes, **sizes}.items())
        raise InvalidArgumentError(
            "max_bytes",
            max_bytes,
            f"the call takes {total} bytes ({parts})",
            "raise it, leave the scores out, or capture a call of fewer requests",
        )


def _check_not_in_a_graph(tensor: torch.Tensor) -> None:
    if tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise InvalidArgumentError(
            "index_q.device",
            tensor.device,
            "its stream is recording a graph, which a copy to the host would break",
            "capture a call that runs eagerly",
        )


def _check_tensors(**tensors: object) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
            shown = type(tensor).__name__ if not isinstance(tensor, torch.Tensor) else tuple(tensor.shape)
            raise InvalidArgumentError(name, shown, "must be a tensor of the contract's shape", "pass one")
