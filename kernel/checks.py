"""The contract's checks on a scoring call: everything a backend may rely on is checked here, once."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from kernel.arguments import check_int, has_shape, shape_remedy
from kernel.batch import Request, ScoreBatch
from kernel.contract import (
    BLOCK_TOKENS,
    HEAD_DIM,
    MAX_SEQ_BLOCKS,
    MAX_SEQ_LEN,
    MAX_TOPK,
    PAGE_BYTES,
    SUPPORTED_HEADS,
)
from kernel.errors import InvalidArgumentError
from kernel.page import PAGE_STRIDE_ALIGNMENT
from kernel.step import IntArray, Lengths
from kernel.threads import on_one_thread


def check_heads(num_heads: int) -> int:
    """Refuse a number of index heads that is not supported."""
    num_heads = check_int("num_index_heads", num_heads)
    if num_heads not in SUPPORTED_HEADS:
        raise InvalidArgumentError(
            "num_index_heads",
            num_heads,
            f"must be one of {SUPPORTED_HEADS}",
            "score the heads in such groups",
        )
    return num_heads


def check_topk(argument: str, topk: int) -> int:
    """Refuse a number of selected blocks outside 1..``MAX_TOPK``."""
    topk = check_int(argument, topk)
    if not 1 <= topk <= MAX_TOPK:
        raise InvalidArgumentError(argument, topk, f"must be 1 to {MAX_TOPK}", "ask for fewer or more blocks")
    return topk


def check_forced_blocks(argument: str, blocks: int) -> int:
    """Refuse a negative number of init or local blocks."""
    blocks = check_int(argument, blocks)
    if blocks < 0:
        raise InvalidArgumentError(argument, blocks, "must be 0 or more", "use 0 to force none")
    return blocks


def check_order(order: str) -> None:
    """Refuse an order that is neither ``score`` nor ``block``."""
    if order not in ("score", "block"):
        raise InvalidArgumentError("order", repr(order), "must be 'score' or 'block'", "use one of them")


def check_precision(precision: str) -> None:
    """Refuse an unknown precision."""
    if precision not in ("exact", "fast"):
        raise InvalidArgumentError(
            "precision", repr(precision), "must be 'exact' or 'fast'", "use one of them"
        )


def check_finite(argument: str, values: torch.Tensor) -> None:
    """Refuse NaN and infinity, naming the first position that holds one."""
    with on_one_thread() if values.is_cpu else nullcontext():
        if values.numel() and values.dtype != torch.float8_e4m3fn:
            # One copy of both, where isfinite takes five operations more.
            if all(map(math.isfinite, torch.stack(values.detach().aminmax()).tolist())):
                return
        elif bool(all_finite(values)):
            return
    wide = values.float() if values.dtype == torch.float8_e4m3fn else values
    position = tuple((~torch.isfinite(wide)).nonzero()[0].tolist())
    raise InvalidArgumentError(
        f"{argument}[{', '.join(map(str, position))}]",
        values[position].item(),
        "must be finite",
        "find where it became NaN or infinite before the indexer",
    )


def check_tensor(
    argument: str,
    tensor: torch.Tensor,
    *,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, ...] | None,
    device: torch.device | None,
    traced: bool = False,
) -> None:
    """Refuse a wrong type, layout, dtype, shape (None: any size, or any shape) or device (None: any), and
    memory that does not hold the values, see :func:`check_memory`.

    With ``traced`` a compiler may look on, and torch's dispatcher comes next: memory is left to the operator.
    """
    if not isinstance(tensor, torch.Tensor):
        raise _no_tensor(argument, tensor)
    if tensor.layout != torch.strided:
        raise InvalidArgumentError(
            f"{argument}.layout", tensor.layout, "must be torch.strided", "call .to_dense()"
        )
    if tensor.is_nested:
        raise _fault(argument, tensor)
    if tensor.dtype not in dtypes:
        raise InvalidArgumentError(
            f"{argument}.dtype",
            tensor.dtype,
            f"must be one of {', '.join(map(str, dtypes))}",
            _dtype_remedy(tensor.dtype, dtypes),
        )
    if shape is not None and not has_shape(tensor.shape, shape):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise InvalidArgumentError(
            f"{argument}.shape", tuple(tensor.shape), f"must be [{wanted}]", shape_remedy(tensor.shape, shape)
        )
    if device is not None and tensor.device != device:
        raise _elsewhere(argument, tensor, device)
    if not (traced or _holds_its_values(tensor)):
        raise _fault(argument, tensor)


def check_device(argument: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Refuse what is no tensor, or lies elsewhere."""
    if not isinstance(tensor, torch.Tensor):
        raise _no_tensor(argument, tensor)
    if tensor.device != device:
        raise _elsewhere(argument, tensor, device)


def _no_tensor(argument: str, value: object) -> InvalidArgumentError:
    return InvalidArgumentError(
        argument, type(value).__name__, "must be a torch.Tensor", "call torch.as_tensor() on it"
    )


def _elsewhere(argument: str, tensor: torch.Tensor, device: torch.device) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{argument}.device", tensor.device, f"must be {device}", f"call .to('{device}')"
    )


def _dtype_remedy(dtype: torch.dtype, dtypes: tuple[torch.dtype, ...]) -> str:
    if dtype == torch.float64 and torch.float32 in dtypes:
        return "call .to(torch.float32), which keeps most digits, or .to(torch.bfloat16)"
    if dtypes == (torch.uint8,) and dtype.itemsize == 1:
        return "call .view(torch.uint8)"
    return f"call .to({dtypes[0]})"


# ---- Tensors that are what their memory says: kernels are given addresses, and know nothing of torch ----

_TENSOR = torch.Tensor


def check_memory(argument: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose memory does not hold its values, or which has none: views that are negated when
    they are read, zero tensors, fake and nested ones, those of ``torch.func``, subclasses that compute
    otherwise, storages that were freed.
    """
    if tensor.is_nested or tensor.is_quantized or not _holds_its_values(tensor):
        raise _fault(argument, tensor)


def check_not_transformed(what: str) -> None:
    """Refuse a call inside a transform of ``torch.func``: what torch makes there, copies of ordinary tensors
    included, has no memory.

    Args:
        what: is called, for the message.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise InvalidArgumentError(
            "torch.func", "a transform", f"{what} cannot be transformed", "make the call outside of it"
        )


def _holds_its_values(tensor: torch.Tensor, extent: int | None = None) -> bool:
    """See :func:`check_memory`; ``extent`` are the bytes from the first to the last, where they are known."""
    kind = type(tensor)
    if (kind is not _TENSOR and not _is_plain(kind)) or tensor.is_neg():
        return False
    try:
        storage, address = tensor.untyped_storage(), tensor.data_ptr()
        start = storage.data_ptr()
    except (RuntimeError, ValueError):  # torch's, for a tensor without a storage
        return False
    if not start:
        return not tensor.numel()
    if extent is not None:
        end = address + extent
    elif tensor.is_contiguous():
        end = address + tensor.nbytes
    else:
        end = _address_range(tensor)[1]
    return end <= start + storage.nbytes()


@functools.cache
def _is_plain(kind: type[torch.Tensor]) -> bool:
    """Whether a subclass of torch's leaves all operations as they are."""
    functions = [
        getattr(of.__torch_function__, "__func__", of.__torch_function__)
        for of in (kind, torch.Tensor, torch.nn.Parameter)
    ]
    return functions[0] in functions[1:] and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _fault(argument: str, tensor: torch.Tensor) -> InvalidArgumentError:
    """What is wrong with the memory of such a tensor."""
    kind = type(tensor)
    if tensor.device.type == "meta":
        return InvalidArgumentError(f"{argument}.device", "meta", "holds no values", "pass the real tensor")
    if tensor.is_nested:
        value, remedy = "a nested tensor", "pass its parts, or .to_padded_tensor()"
    elif torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        value, remedy = "a tensor of a torch.func transform", "make the call outside of the transform"
    elif not _is_plain(kind):
        value, remedy = f"a {kind.__name__}", "pass the plain tensor that it stands for"
    elif tensor.is_quantized:
        value, remedy = f"a tensor of {tensor.dtype}", "call .dequantize()"
    elif tensor.layout != torch.strided:
        value, remedy = f"a tensor of layout {tensor.layout}", "call .to_dense()"
    elif tensor.is_neg():
        value, remedy = "a view that is negated when it is read", "call .resolve_neg()"
    elif tensor._is_zerotensor():
        value, remedy = "a zero tensor without memory", "call .clone()"
    else:
        value = f"a tensor on a storage of {tensor.untyped_storage().nbytes()} bytes"
        remedy = "pass one whose storage was not freed or cut"
    return InvalidArgumentError(argument, value, "must be a tensor whose memory holds its values", remedy)


def as_pages(pages: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """View a cache as ``[num_pages, 9216]`` uint8 without copying, keeping its page stride.

    Args:
        pages: uint8, ``[num_pages, 9216]`` or any ``[num_pages, ...]`` of 9,216 contiguous bytes a page
            (``[num_pages, 128, 72]`` as engines shape it). ``stride(0)`` may exceed 9,216.
        device: where they must lie; anywhere when None.

    Raises:
        InvalidArgumentError: wrong dtype, shape, stride, alignment or device; see also :func:`check_memory`.
    """
    check_tensor("pages", pages, dtypes=(torch.uint8,), shape=None, device=device, traced=True)
    if pages.dim() < 2 or pages.shape[1:].numel() != PAGE_BYTES:
        raise InvalidArgumentError(
            "pages.shape", tuple(pages.shape), f"must be [num_pages, {PAGE_BYTES}]", "pass one page a row"
        )
    if pages.dim() == 2:
        num_pages, stride = pages.shape[0], pages.stride(0)
        if (
            num_pages > 1
            and pages.stride(1) == 1
            and stride >= PAGE_BYTES
            and _holds_its_values(pages, (num_pages - 1) * stride + PAGE_BYTES)
            and not (stride | pages.data_ptr()) % PAGE_STRIDE_ALIGNMENT
        ):
            return pages  # as most calls pass them
    check_memory("pages", pages)
    expected = 1
    for size, stride in zip(reversed(pages.shape[1:]), reversed(pages.stride()[1:])):
        if size != 1 and stride != expected:
            raise InvalidArgumentError(
                "pages.stride()",
                pages.stride(),
                "the bytes of a page must be contiguous",
                "only stride(0) is free",
            )
        expected *= size
    num_pages = pages.shape[0]
    stride = pages.stride(0) if num_pages > 1 else max(pages.stride(0), PAGE_BYTES)
    if stride < PAGE_BYTES or stride % PAGE_STRIDE_ALIGNMENT:
        raise InvalidArgumentError(
            "pages.stride(0)",
            stride,
            f"must be at least {PAGE_BYTES} and a multiple of {PAGE_STRIDE_ALIGNMENT}",
            "pad each page",
        )
    if pages.data_ptr() % PAGE_STRIDE_ALIGNMENT:
        raise InvalidArgumentError(
            "pages.data_ptr()",
            pages.data_ptr(),
            f"must be a multiple of {PAGE_STRIDE_ALIGNMENT}",
            "start the view at an aligned byte",
        )
    return pages.as_strided((num_pages, PAGE_BYTES), (stride, 1))


def check_slots(slots: torch.Tensor, num_pages: int) -> None:
    """Refuse a slot past the pages, where slots are on the host; negative ones are skipped."""
    limit = num_pages * BLOCK_TOKENS
    if slots.numel() and int(slots.max()) >= limit:
        raise InvalidArgumentError(
            "slots", int(slots.max()), f"must be below {limit}", "use pages of this cache"
        )


def checked_batch(
    q: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    lut: torch.Tensor,
    num_heads: int,
    init_blocks: int,
    local_blocks: int,
) -> ScoreBatch:
    """Check a paged scoring call against the contract and make it a :class:`ScoreBatch`.

    Args:
        q: ``[total_q, H, 128]`` float8_e4m3fn.
        pages: see :func:`as_pages`.
        block_table: ``[batch, max_blocks]`` int32; columns past a request's blocks may hold anything.
        cu_seqlens_q: ``[batch + 1]`` int32, exclusive prefix sum of the query lengths.
        seq_lens: ``[batch]`` int32, keys of each request, this step's tokens included.
        lut: ``[256, 8]`` uint8.
        num_heads: H that the caller was built for.
        init_blocks: 0 or more.
        local_blocks: 0 or more.

    Raises:
        InvalidArgumentError: naming the argument, its value, the limit and the remedy.
    """
    # More than a context holds is all of it; a kernel's integers end sooner than Python's.
    init_blocks = min(check_forced_blocks("init_blocks", init_blocks), MAX_SEQ_BLOCKS)
    local_blocks = min(check_forced_blocks("local_blocks", local_blocks), MAX_SEQ_BLOCKS)
    pages = as_pages(pages)
    shape = (None, num_heads, HEAD_DIM)
    check_tensor("q", q, dtypes=(torch.float8_e4m3fn,), shape=shape, device=pages.device)
    requests = checked_requests(q.shape[0], pages, block_table, cu_seqlens_q, seq_lens)
    return ScoreBatch(
        q=q.contiguous(),
        pages=pages,
        block_table=block_table.contiguous(),
        lut=lut,
        requests=requests,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
    )


def check_ragged_tensors(
    block_table: torch.Tensor, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, device: torch.device
) -> None:
    """Refuse a block table, offsets or lengths of a wrong shape, dtype or device; values are not read."""
    check_tensor("block_table", block_table, dtypes=(torch.int32,), shape=(None, None), device=device)
    batch = block_table.shape[0]
    check_tensor("cu_seqlens_q", cu_seqlens_q, dtypes=(torch.int32,), shape=(batch + 1,), device=device)
    check_tensor("seq_lens", seq_lens, dtypes=(torch.int32,), shape=(batch,), device=device)


def checked_requests(
    total_q: int,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
) -> tuple[Request, ...]:
    """Check the lengths and the block table of a paged call; see :func:`checked_batch`.

    Args:
        total_q: rows of ``q``.
        pages: ``[num_pages, 9216]`` uint8, checked.
        block_table: ``[batch, max_blocks]`` int32.
        cu_seqlens_q: ``[batch + 1]`` int32.
        seq_lens: ``[batch]`` int32.

    Raises:
        InvalidArgumentError: naming the argument, its value, the limit and the remedy.
    """
    check_ragged_tensors(block_table, cu_seqlens_q, seq_lens, pages.device)
    lengths = _lengths(cu_seqlens_q.tolist(), seq_lens.tolist(), total_q)
    _check_block_table(block_table, lengths, num_pages=pages.shape[0])
    return lengths.requests()


def check_scores_buffer(
    scores: torch.Tensor, q: torch.Tensor, num_score_blocks: int, read: Mapping[str, torch.Tensor]
) -> None:
    """Refuse a score buffer that does not fit a call: ``[H, total_q, S]`` float32, cells contiguous, in
    memory of its own, apart from what is read, and one that torch lets be written."""
    shape = (q.shape[1], q.shape[0], None)
    check_tensor("scores", scores, dtypes=(torch.float32,), shape=shape, device=q.device)
    if scores.shape[2] < num_score_blocks:
        raise InvalidArgumentError(
            "scores.shape[2]",
            scores.shape[2],
            f"must be at least {num_score_blocks}, the blocks of the longest request",
            "widen the score buffer",
        )
    if scores.shape[2] > 1 and scores.stride(2) != 1:
        raise InvalidArgumentError(
            "scores.stride(2)", scores.stride(2), "must be 1", "keep a row's blocks next to each other"
        )
    check_cells("scores", scores)
    check_writable("scores", scores)
    check_apart("scores", scores, read)


def check_cells(argument: str, written: torch.Tensor) -> None:
    """Refuse a tensor to write to of which two cells are one, an expanded view for one."""
    if written.is_contiguous():
        return
    extent = 1
    for size, stride in sorted(zip(written.shape, written.stride()), key=lambda axis: axis[1]):
        if size > 1 and stride < extent and written.numel():
            raise InvalidArgumentError(
                f"{argument}.stride()",
                written.stride(),
                "two cells must not share memory",
                "pass a buffer of its own",
            )
        extent += (size - 1) * stride


def check_writable(argument: str, written: torch.Tensor) -> None:
    """Refuse a tensor that torch does not let be written."""
    if written.is_inference() and not torch.is_inference_mode_enabled():
        raise InvalidArgumentError(
            argument,
            "an inference tensor",
            "torch does not let it be written outside torch.inference_mode()",
            "make it outside that mode, or call this in it",
        )


def check_apart(argument: str, written: torch.Tensor, read: Mapping[str, torch.Tensor]) -> None:
    """Refuse a tensor to write to that lies in the memory of one that is read, from its first byte to its
    last."""
    first, end = _address_range(written)
    for name, tensor in read.items():
        other_first, other_end = _address_range(tensor)
        if tensor.device == written.device and max(first, other_first) < min(end, other_end):
            raise InvalidArgumentError(
                f"{argument}.data_ptr()",
                first,
                f"must not share memory with {name}",
                f"call torch.empty_like({argument}) for a buffer of its own",
            )


def all_finite(values: torch.Tensor) -> torch.Tensor:
    """Whether no value is NaN or infinite: one bool on the device, not waited for."""
    if not values.numel():
        return torch.ones((), dtype=torch.bool, device=values.device)
    if values.dtype == torch.float8_e4m3fn:  # NaN is its only value that is not finite
        return (values.view(torch.uint8) & 0x7F).max() < 0x7F
    # NaN passes through min and max: one read and no temporary, where isfinite makes several of that size.
    return torch.stack(values.detach().aminmax()).isfinite().all()


def call_values(
    q: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    num_pages: int,
) -> torch.Tensor:
    """See :meth:`kernel.backends.base.Backend.call_values`."""
    columns = torch.arange(block_table.shape[1], dtype=torch.int32, device=block_table.device)
    given: tuple[Any, ...] = (block_table, cu_seqlens_q, seq_lens, columns)
    if block_table.device.type == "cpu":
        given = tuple(
            tensor.numpy() for tensor in given
        )  # a third of torch's time where there are few values
    table, offsets, lens, columns = given
    used = (lens + (BLOCK_TOKENS - 1)) // BLOCK_TOKENS * (offsets[1:] > offsets[:-1])
    outside = ((table < 0) | (table >= num_pages)) & (columns < used[:, None])
    illegal = torch.as_tensor(outside.any(), dtype=torch.bool, device=q.device)
    flags = torch.stack((~all_finite(q), illegal))
    return torch.cat((cu_seqlens_q, seq_lens, flags.to(torch.int32)))


def _address_range(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of a tensor's lowest byte, and that past its highest one; strides are not negative."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _lengths(cu_seqlens_q: list[int], seq_lens: list[int], total_q: int) -> Lengths:
    if cu_seqlens_q[0] != 0:
        raise InvalidArgumentError(
            "cu_seqlens_q[0]", cu_seqlens_q[0], "must be 0", "pass exclusive prefix sums"
        )
    for i, (start, end) in enumerate(pairwise(cu_seqlens_q)):
        if end < start:
            raise InvalidArgumentError(
                f"cu_seqlens_q[{i + 1}]",
                end,
                f"must be at least cu_seqlens_q[{i}] = {start}",
                "pass exclusive prefix sums of the query lengths",
            )
    if cu_seqlens_q[-1] != total_q:
        raise InvalidArgumentError(
            "cu_seqlens_q[-1]",
            cu_seqlens_q[-1],
            f"must be total_q = {total_q}",
            "pass q and its offsets together",
        )
    lengths = Lengths.consecutive(np.diff(cu_seqlens_q), np.array(seq_lens, dtype=np.int64))
    check_lengths(lengths.query_lens, lengths.seq_lens)
    return lengths


def check_lengths(query_lens: IntArray, seq_lens: IntArray) -> None:
    """Refuse lengths outside the contract, naming the first request that has one."""
    negative = np.flatnonzero(query_lens < 0)
    if negative.size:
        row = int(negative[0])
        raise InvalidArgumentError(
            f"query_lens[{row}]", int(query_lens[row]), "must be 0 or more", "pass 0 for a request of no row"
        )
    missing = np.flatnonzero(seq_lens < query_lens)
    if missing.size:
        row = int(missing[0])
        raise InvalidArgumentError(
            f"seq_lens[{row}]",
            int(seq_lens[row]),
            f"must be at least its {query_lens[row]} queries",
            "count this step's tokens in",
        )
    too_long = np.flatnonzero(seq_lens > MAX_SEQ_LEN)
    if too_long.size:
        row = int(too_long[0])
        raise InvalidArgumentError(
            f"seq_lens[{row}]",
            int(seq_lens[row]),
            f"must be at most {MAX_SEQ_LEN}",
            "shorten the context to what the model was made for",
        )


def check_table_width(block_table: torch.Tensor, lengths: Lengths) -> None:
    """Refuse a block table that is narrower than the longest request."""
    if block_table.shape[1] < lengths.max_blocks:
        row = int(lengths.num_blocks.argmax())
        raise InvalidArgumentError(
            "block_table.shape[1]",
            block_table.shape[1],
            f"must be at least {lengths.max_blocks}, the blocks of seq_lens[{lengths.table_rows[row]}] = "
            f"{lengths.seq_lens[row]}",
            "widen the block table",
        )


def _check_block_table(block_table: torch.Tensor, lengths: Lengths, num_pages: int) -> None:
    check_table_width(block_table, lengths)
    device = block_table.device
    used_blocks = torch.from_numpy(lengths.num_blocks).to(device)
    columns = torch.arange(block_table.shape[1], dtype=torch.int64, device=device)
    outside = ((block_table < 0) | (block_table >= num_pages)) & (columns < used_blocks[:, None])
    if bool(outside.any()):
        row, column = outside.nonzero()[0].tolist()
        raise InvalidArgumentError(
            f"block_table[{row}, {column}]",
            int(block_table[row, column]),
            f"must lie in [0, {num_pages}), the pages of the cache",
            "only columns past a request's blocks may hold anything",
        )
