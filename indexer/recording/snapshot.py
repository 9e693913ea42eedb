"""Copies one call of an engine to the host as a case: pages in use only, renumbered."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, get_args

import ml_dtypes
import numpy as np
import torch

from indexer.case import Case, EngineOrder, EngineRecord
from indexer.case.case import MAX_FORCED_BLOCKS, MAX_LAYER
from indexer.case.container import Array, shown
from kernel.arguments import as_int, check_bool, check_unmasked
from kernel.checks import as_pages, check_not_transformed, check_tensor, check_topk
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, MAX_SEQ_LEN, PAGE_BYTES, SUPPORTED_HEADS
from kernel.errors import InvalidArgumentError

# ---- Pages in use ----

WRAPS = (1 << 31, 1 << 32)
"""Bytes at which an offset of 32 bits wraps, signed and unsigned."""


@dataclass(frozen=True, eq=False)
class PagesInUse:
    """Pages of a call.

    Attributes:
        ids: ``[num_pages]`` int64 page ids of the engine that the call uses, ascending.
        table: ``[batch, max_blocks]`` int32, the block table by place in ``ids``; -1 in columns not in use.
    """

    ids: Array
    table: Array


def pages_in_use(block_table: Array, query_lens: Array, seq_lens: Array, num_pages: int) -> PagesInUse:
    """The pages of the requests that have queries.

    Raises:
        InvalidArgumentError: the table is too narrow, or a page id in use lies outside the cache.
    """
    blocks = np.where(query_lens > 0, -(-seq_lens.astype(np.int64) // BLOCK_TOKENS), 0)
    width = block_table.shape[1]
    if blocks.max(initial=0) > width:
        limit = f"must be at least {blocks.max()}, the blocks of the longest request"
        raise InvalidArgumentError("block_table.shape[1]", width, limit, "pass the whole table")
    used = np.arange(width) < blocks[:, None]
    outside = used & ((block_table < 0) | (block_table >= num_pages))
    for row, column in np.argwhere(outside)[:1]:
        raise InvalidArgumentError(
            f"block_table[{row}, {column}]",
            int(block_table[row, column]),
            f"must lie in [0, {num_pages}), the pages of the cache",
            "call it where the engine scores, after the table is set",
        )
    ids, places = np.unique(block_table[used].astype(np.int64), return_inverse=True)
    table = np.full(block_table.shape, -1, dtype=np.int32)
    table[used] = places.reshape(-1)
    return PagesInUse(ids, table)


def wrapped_page_ids(ids: Array, page_stride: int, num_pages: int) -> Array:
    """Ids of the other pages of a cache that offsets of 32 bits would read in place of ``ids``."""
    offsets = ids * page_stride
    found = [ids[:0]]
    for wrap in WRAPS:
        first = offsets[offsets >= wrap] % wrap
        found += [first // page_stride, (first + PAGE_BYTES - 1) // page_stride]
    others = np.setdiff1d(np.concatenate(found), ids)
    return others[others < num_pages]


# ---- Copies on the host ----

GATHER_BYTES = 64 << 20
"""Memory of the engine's device that a capture takes for pages, at most."""
# numpy knows these types only through ml_dtypes, torch knows nothing of that: they cross as integers.
_CROSSING = {
    torch.bfloat16: (torch.int16, np.dtype(ml_dtypes.bfloat16)),
    torch.float8_e4m3fn: (torch.uint8, np.dtype(ml_dtypes.float8_e4m3fn)),
}


def host_array(tensor: torch.Tensor) -> Array:
    """A copy on the host, contiguous, that the engine cannot write to. Waits for that copy and no other."""
    tensor = tensor.detach().contiguous()
    copy = tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()
    crossing = _CROSSING.get(copy.dtype)
    if crossing is None:
        return copy.numpy()
    return copy.view(crossing[0]).numpy().view(crossing[1])


def gather_pages(pages: torch.Tensor, ids: Array) -> torch.Tensor:
    """Pages ``[len(ids), ...]`` on the host: a copy, so the engine may go on writing.

    Args:
        pages: ``[num_pages, ...]`` with any strides, on any device.
        ids: int64, each below ``num_pages``.
    """
    found = torch.empty((len(ids), *pages.shape[1:]), dtype=pages.dtype, device="cpu")
    # A GPU that serves has little memory left: only so much of it is taken at a time.
    step = max(1, GATHER_BYTES // max(1, math.prod(pages.shape[1:]) * pages.element_size()))
    for first in range(0, len(ids), step):
        places = torch.from_numpy(ids[first : first + step]).to(pages.device)
        found[first : first + step] = pages.detach().index_select(0, places)
    return found


# ---- Arguments of a capture, checked before anything large is copied ----

Integers: TypeAlias = "torch.Tensor | Array | Sequence[int] | Sequence[Sequence[int]]"
"""Whole numbers as engines keep them: on a device, or on the host."""
KEY_PAGES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
"""Types of a cache that holds keys as they are."""
_NEW_KEYS = (torch.bfloat16, torch.float16, torch.float32)
_SCORES = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int32, torch.int64)
_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True, eq=False, kw_only=True)
class CaptureOptions:
    """What a capture takes beside queries, pages and lengths, see :func:`indexer.recording.capture`."""

    topk: int
    init_blocks: int
    local_blocks: int
    scores: torch.Tensor | None
    block_ids: torch.Tensor | None
    order: EngineOrder
    new_keys: torch.Tensor | None
    layer: int | None
    source: str
    max_bytes: int
    wrapped_pages: bool

    def check(self) -> None:
        """Refuse a field that is no tensor.

        Raises:
            InvalidArgumentError: naming the field, its value, the limit and the remedy.
        """
        check_topk("topk", self.topk)
        _check_range("init_blocks", self.init_blocks, 0, MAX_FORCED_BLOCKS)
        _check_range("local_blocks", self.local_blocks, 0, MAX_FORCED_BLOCKS)
        _check_range("max_bytes", self.max_bytes, 1, None)
        if self.layer is not None:
            _check_range("layer", self.layer, 0, MAX_LAYER)
        if self.order not in get_args(EngineOrder):
            limit = "must be 'score', 'block' or 'any'"
            raise InvalidArgumentError("order", shown(self.order), limit, "pass one")
        if not isinstance(self.source, str):
            raise InvalidArgumentError(
                "source", shown(self.source), "must be a str", "pass a human-readable text"
            )
        check_bool("wrapped_pages", self.wrapped_pages)

    def check_tensors(self, index_q: torch.Tensor, pages: torch.Tensor) -> None:
        """Refuse a tensor of another type, layout or shape; each may lie on a device of its own.

        Raises:
            InvalidArgumentError: naming the tensor, its value, the limit and the remedy.
        """
        check_tensor("index_q", index_q, dtypes=KEY_PAGES, shape=(None, None, HEAD_DIM), device=None)
        heads = index_q.shape[1]
        if heads not in SUPPORTED_HEADS:
            limit = f"must be one of {SUPPORTED_HEADS}"
            raise InvalidArgumentError("index_q.shape[1]", heads, limit, "capture the heads in such groups")
        if isinstance(pages, torch.Tensor) and pages.dtype in KEY_PAGES:
            check_tensor("pages", pages, dtypes=KEY_PAGES, shape=None, device=None)
            if math.prod(pages.shape[1:]) != BLOCK_TOKENS * HEAD_DIM or pages.shape[-1] != HEAD_DIM:
                limit = f"must be [num_pages, {BLOCK_TOKENS}, {HEAD_DIM}]"
                raise InvalidArgumentError("pages.shape", tuple(pages.shape), limit, "pass one page a row")
        else:
            as_pages(pages)
        for name, tensor, dtypes, shape in (
            ("scores", self.scores, _SCORES, (heads, None, None)),
            ("block_ids", self.block_ids, _INTEGERS, (heads, None, self.topk)),
            ("new_keys", self.new_keys, _NEW_KEYS, (None, HEAD_DIM)),
        ):
            if tensor is not None:
                check_tensor(name, tensor, dtypes=dtypes, shape=shape, device=None)


def check_tokens(total_q: int, **tensors: tuple[torch.Tensor | None, int]) -> None:
    """Refuse tensors with fewer than ``total_q`` tokens along the axis that is named with each."""
    for name, (tensor, axis) in tensors.items():
        if tensor is not None and tensor.shape[axis] < total_q:
            limit = f"must be at least {total_q}, the queries of cu_seqlens_q"
            raise InvalidArgumentError(f"{name}.shape[{axis}]", tensor.shape[axis], limit, "pass all of them")


def check_not_in_a_graph(tensors: Iterable[object]) -> None:
    """Refuse a call whose stream records a CUDA or HIP graph: copying to the host would break the graph."""
    on_gpu = [
        tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda"
    ]
    for device in {tensor.device for tensor in on_gpu}:
        with torch.cuda.device(device):  # each has a current stream of its own
            capturing = torch.cuda.is_current_stream_capturing()
        if capturing:
            raise InvalidArgumentError(
                "stream",
                "is recording a graph",
                "a copy to the host would break it",
                "capture a call that runs eagerly",
            )


def host_integers(name: str, value: object, dims: int) -> Array:
    """Whole numbers as an array ``[...]`` int64 of its own on the host.

    Args:
        name: of the argument, for messages.
        value: a tensor of int32 or int64 on any device; or a list, a tuple or a numpy array, as engines keep
            lengths on the host.
        dims: dimensions that it must have.

    Raises:
        InvalidArgumentError: anything else.
    """
    check_unmasked(name, value)
    if isinstance(value, (list, tuple, np.ndarray)):
        found = _array(name, value)
    else:
        check_tensor(name, value, dtypes=_INTEGERS, shape=None, device=None)  # type: ignore[arg-type]
        found = host_array(value)  # type: ignore[arg-type]
    if found.ndim != dims:
        limit = f"must have {dims} dimension{'s' if dims > 1 else ''}"
        raise InvalidArgumentError(f"{name}.shape", list(found.shape), limit, "call .reshape() or slice it")
    return found.astype(np.int64)


def as_int32(name: str, values: Array) -> Array:
    """Integers as int32, refusing the first that does not fit: it would turn into another number."""
    for place in np.argwhere((values < _INT32.min) | (values > _INT32.max))[:1]:
        where = ", ".join(map(str, place))
        value = int(values[tuple(place)])
        raise InvalidArgumentError(f"{name}[{where}]", value, "must fit 32 bits", "pass the call's own")
    return values.astype(np.int32)


def total_queries(starts: Array, most: int) -> int:
    """Query tokens of all requests, from exclusive prefix sums ``[batch + 1]``."""
    if not starts.size or starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] > most:
        limit = f"must be exclusive prefix sums of the query lengths, of {most} tokens at most"
        raise InvalidArgumentError("cu_seqlens_q", starts[:8].tolist(), limit, "pass the call's own")
    return int(starts[-1])


def check_lengths(query_lens: Array, seq_lens: Array) -> None:
    """Refuse requests ``[batch]`` with fewer keys than queries, or more than a context may have."""
    wrong = (query_lens > 0) & ((seq_lens < query_lens) | (seq_lens > MAX_SEQ_LEN))
    for i in np.flatnonzero(wrong)[:1]:
        limit = f"must be {query_lens[i]} (the request's queries) to {MAX_SEQ_LEN}"
        raise InvalidArgumentError(
            f"seq_lens[{i}]", int(seq_lens[i]), limit, "count this step's tokens in; padding goes last"
        )


def _array(name: str, value: object) -> Array:
    try:
        found = np.array(value)  # a copy: the engine may go on writing
    except (ValueError, TypeError, RuntimeError) as error:
        reason = str(error).partition(".")[0]
        raise InvalidArgumentError(name, shown(value), reason, "pass a tensor of integers") from error
    if found.size and found.dtype.kind not in "iu":
        limit = f"must hold integers, not {found.dtype}"
        raise InvalidArgumentError(name, shown(value), limit, "pass a tensor of integers")
    return found


def _check_range(name: str, value: object, least: int, most: int | None) -> None:
    number = as_int(value)
    if number is None or number < least or (most is not None and number > most):
        limit = f"must be a whole number from {least}" + (f" to {most}" if most is not None else " on")
        raise InvalidArgumentError(name, shown(value), limit, "choose one of them")


def snapshot(
    index_q: torch.Tensor,
    pages: torch.Tensor,
    block_table: Integers,
    cu_seqlens_q: Integers,
    seq_lens: Integers,
    options: CaptureOptions,
) -> Case:
    """Copy a call; see :func:`indexer.recording.capture` for the arguments.

    Raises:
        InvalidArgumentError: the call is not one that a case can hold, or larger than ``max_bytes``.
    """
    check_not_transformed("a recorded call")
    options.check()
    options.check_tensors(index_q, pages)
    scores, block_ids, new_keys = options.scores, options.block_ids, options.new_keys
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
    if options.wrapped_pages and not by_keys:
        ids = np.concatenate([ids, wrapped_page_ids(ids, stride, len(pages))])
    sizes = {
        "pages": len(ids) * math.prod(pages.shape[1:]) * pages.element_size(),
        "index_q": index_q.nbytes,
        "block_table": used.table.nbytes,
        "scores": 0 if scores is None else 4 * scores.numel(),
        "block_ids": 0 if block_ids is None else 4 * block_ids.numel(),
        "new_keys": 0 if new_keys is None else new_keys.nbytes,
    }
    _check_size(sizes, options.max_bytes)
    return Case(
        index_q=host_array(index_q),
        cu_seqlens_q=starts.astype(np.int32),
        seq_lens=lens,
        index_k=_keys(pages, used, lens) if by_keys else None,
        pages=None if by_keys else gather_pages(pages, ids).numpy(),
        block_table=None if by_keys else used.table,
        init_blocks=options.init_blocks,
        local_blocks=options.local_blocks,
        topk=options.topk,
        source=options.source,
        engine=EngineRecord(
            block_ids=None if block_ids is None else as_int32("block_ids", host_array(block_ids)),
            scores=None if scores is None else host_array(scores).astype(np.float32),
            order=options.order,
            page_ids=None if by_keys else ids.astype(np.int32),
            page_stride=stride,
            new_keys=None if new_keys is None else host_array(new_keys),
            layer=options.layer,
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
