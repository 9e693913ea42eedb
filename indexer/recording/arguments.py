"""The arguments of a capture, checked before anything large is copied: nothing here reads a cache."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias, get_args

import numpy as np
import torch

from indexer.case import EngineOrder
from indexer.case.case import MAX_FORCED_BLOCKS
from indexer.case.container import Array, shown
from indexer.case.engine import MAX_LAYER
from indexer.recording.host import host_array
from kernel.checks import check_tensor, check_topk
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, MAX_SEQ_LEN, SUPPORTED_HEADS
from kernel.errors import InvalidArgumentError
from kernel.page import as_pages
from kernel.scalars import as_int, check_bool

Integers: TypeAlias = "torch.Tensor | Array | Sequence[int] | Sequence[Sequence[int]]"
"""Whole numbers as engines keep them: on a device, or on the host."""
KEY_PAGES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
"""Types of a cache that holds keys as they are."""
_QUERIES = KEY_PAGES
_NEW_KEYS = (torch.bfloat16, torch.float16, torch.float32)
_SCORES = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int32, torch.int64)
_INT32 = np.iinfo(np.int32)


def check_fields(
    *,
    topk: object,
    init_blocks: object,
    local_blocks: object,
    order: object,
    layer: object,
    source: object,
    max_bytes: object,
    wrapped_pages: object,
) -> None:
    """Refuse a field of a case that is no tensor.

    Raises:
        InvalidArgumentError: naming the field, its value, the limit and the remedy.
    """
    check_topk("topk", topk)  # type: ignore[arg-type]
    _check_range("init_blocks", init_blocks, 0, MAX_FORCED_BLOCKS)
    _check_range("local_blocks", local_blocks, 0, MAX_FORCED_BLOCKS)
    _check_range("max_bytes", max_bytes, 1, None)
    if layer is not None:
        _check_range("layer", layer, 0, MAX_LAYER)
    if order not in get_args(EngineOrder):
        raise InvalidArgumentError("order", shown(order), "must be 'score', 'block' or 'any'", "pass one")
    if not isinstance(source, str):
        raise InvalidArgumentError("source", shown(source), "must be a str", "pass a text for people")
    check_bool("wrapped_pages", wrapped_pages)


def check_tensors(
    index_q: torch.Tensor,
    pages: torch.Tensor,
    *,
    topk: int,
    scores: torch.Tensor | None,
    block_ids: torch.Tensor | None,
    new_keys: torch.Tensor | None,
) -> None:
    """Refuse a tensor of another type, layout or shape; each may lie on a device of its own.

    Raises:
        InvalidArgumentError: naming the tensor, its value, the limit and the remedy.
    """
    check_tensor("index_q", index_q, dtypes=_QUERIES, shape=(None, None, HEAD_DIM), device=None)
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
    if scores is not None:
        check_tensor("scores", scores, dtypes=_SCORES, shape=(heads, None, None), device=None)
    if block_ids is not None:
        check_tensor("block_ids", block_ids, dtypes=_INTEGERS, shape=(heads, None, topk), device=None)
    if new_keys is not None:
        check_tensor("new_keys", new_keys, dtypes=_NEW_KEYS, shape=(None, HEAD_DIM), device=None)
    for name, tensor in (
        ("index_q", index_q),
        ("pages", pages),
        ("scores", scores),
        ("block_ids", block_ids),
        ("new_keys", new_keys),
    ):
        if tensor is not None and tensor.device.type == "meta":
            raise InvalidArgumentError(f"{name}.device", "meta", "holds no values", "pass the real tensor")


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
