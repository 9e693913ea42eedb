"""One call of an engine as a case: pages in use only, renumbered, everything copied to the host."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from indexer.case import Case, EngineOrder, EngineRecord
from indexer.case.container import Array, shown
from indexer.recording.arguments import (
    KEY_PAGES,
    Integers,
    as_int32,
    check_fields,
    check_lengths,
    check_not_in_a_graph,
    check_tensors,
    check_tokens,
    host_integers,
    total_queries,
)
from indexer.recording.host import gather_pages, host_array
from indexer.recording.pages_in_use import PagesInUse, pages_in_use, wrapped_page_ids
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, PAGE_BYTES
from kernel.errors import InvalidArgumentError
from kernel.page import as_pages


def snapshot(
    index_q: torch.Tensor,
    pages: torch.Tensor,
    block_table: Integers,
    cu_seqlens_q: Integers,
    seq_lens: Integers,
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
    check_fields(
        topk=topk,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        order=order,
        layer=layer,
        source=source,
        max_bytes=max_bytes,
        wrapped_pages=wrapped_pages,
    )
    check_tensors(index_q, pages, topk=topk, scores=scores, block_ids=block_ids, new_keys=new_keys)
    check_not_in_a_graph((index_q, pages, block_table, cu_seqlens_q, seq_lens, scores, block_ids, new_keys))
    starts = host_integers("cu_seqlens_q", cu_seqlens_q, 1)
    total_q = total_queries(starts, index_q.shape[0])
    lens, table = host_integers("seq_lens", seq_lens, 1), host_integers("block_table", block_table, 2)
    for name, rows in (("seq_lens", len(lens)), ("block_table", len(table))):
        if rows < len(starts) - 1:
            limit = f"must be at least {len(starts) - 1}, the requests of cu_seqlens_q"
            raise InvalidArgumentError(f"{name}.shape[0]", rows, limit, "pass all of them")
    batch = _real_requests(lens[: len(starts) - 1])
    starts, query_lens = starts[: batch + 1], np.diff(starts[: batch + 1])
    if total_q and not starts[-1]:
        limit = "no request with queries has keys: a call that an engine makes to warm up"
        raise InvalidArgumentError("seq_lens", shown(lens.tolist()), limit, "capture a later call")
    total_q = int(starts[-1])
    check_tokens(total_q, scores=(scores, 1), block_ids=(block_ids, 1), new_keys=(new_keys, 0))
    check_lengths(query_lens, lens[:batch])
    lens = np.where(query_lens > 0, lens[:batch], 0).astype(np.int32)
    used = pages_in_use(table[:batch], query_lens, lens, pages.shape[0])
    blocks = int((-(-lens // BLOCK_TOKENS)).max(initial=0))
    if scores is not None and scores.shape[2] < blocks:
        limit = f"must be at least {blocks}, the blocks of the longest request"
        raise InvalidArgumentError("scores.shape[2]", scores.shape[2], limit, "pass every block")
    index_q = index_q[:total_q]
    scores = None if scores is None else scores[:, :total_q]
    block_ids = None if block_ids is None else block_ids[:, :total_q]
    new_keys = None if new_keys is None else new_keys[:total_q]
    by_keys = pages.dtype in KEY_PAGES
    pages = pages if by_keys else as_pages(pages)
    stride = pages.stride(0) if len(pages) > 1 and not by_keys else PAGE_BYTES
    ids = used.ids
    if wrapped_pages and not by_keys:
        ids = np.concatenate([ids, wrapped_page_ids(ids, stride, len(pages))])
    sizes = {
        "pages": len(ids) * math.prod(pages.shape[1:]) * pages.element_size(),
        "index_q": index_q.numel() * index_q.element_size(),
        "block_table": used.table.nbytes,
        "scores": 0 if scores is None else 4 * scores.numel(),
        "block_ids": 0 if block_ids is None else 4 * block_ids.numel(),
        "new_keys": 0 if new_keys is None else new_keys.numel() * new_keys.element_size(),
    }
    _check_size(sizes, max_bytes)
    return Case(
        index_q=host_array(index_q),
        cu_seqlens_q=starts.astype(np.int32),
        seq_lens=lens,
        index_k=_keys(pages, used, lens) if by_keys else None,
        pages=None if by_keys else gather_pages(pages, ids).numpy(),
        block_table=None if by_keys else used.table,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        topk=topk,
        source=source,
        engine=EngineRecord(
            block_ids=None if block_ids is None else as_int32("block_ids", host_array(block_ids)),
            scores=None if scores is None else host_array(scores).astype(np.float32),
            order=order,
            page_ids=None if by_keys else ids.astype(np.int32),
            page_stride=stride,
            new_keys=None if new_keys is None else host_array(new_keys),
            layer=layer,
        ),
    )


def _real_requests(seq_lens: Array) -> int:
    """Requests up to the last one with keys: those after it are a captured graph's padding."""
    with_keys = np.flatnonzero(seq_lens)
    return int(with_keys[-1]) + 1 if with_keys.size else 0


def _keys(pages: torch.Tensor, used: PagesInUse, seq_lens: Array) -> Array:
    """Keys ``[total_k, 128]`` of a cache that is not quantised, request after request."""
    found = gather_pages(pages, used.ids)
    if found.dtype == torch.float8_e4m3fn:
        found = found.to(torch.bfloat16)  # exact: fewer bits of each kind
    held = host_array(found).reshape(-1, BLOCK_TOKENS, HEAD_DIM)
    requests = [
        held[row[row >= 0]].reshape(-1, HEAD_DIM)[:length] for row, length in zip(used.table, seq_lens)
    ]
    return np.concatenate([held[:0].reshape(-1, HEAD_DIM), *requests])


def _check_size(sizes: Mapping[str, int], max_bytes: int) -> None:
    total = sum(sizes.values())
    if total > max_bytes:
        parts = ", ".join(f"{name} {size}" for name, size in sizes.items() if size)
        raise InvalidArgumentError(
            "max_bytes",
            max_bytes,
            f"the call takes {total} bytes ({parts})",
            "raise it, leave the scores out, or capture a call of fewer requests",
        )
