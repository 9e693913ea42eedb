"""The operators ``torch.ops.nvfp4_indexer``: what a compiled or captured model calls.

    insert(keys, pages!, slots, backend)                            quantise and scatter
    select(q, pages, plan, numbers, topk, backend) -> block_ids     score and select, no score buffer
    select.out(q, pages, plan, numbers, backend, out!)              the same into a given tensor
    score(q, pages, plan, numbers, num_blocks, backend) -> scores   scores alone
    score.out(q, pages, plan, numbers, backend, out!)
    topk(scores, num_blocks, topk, by_block, backend) -> block_ids  select from given scores
    topk.out(scores, num_blocks, by_block, backend, out!)

``plan`` and ``numbers`` are those of a :class:`kernel.step.Plan`; ``backend`` is the name that :func:`spec`
gives. No operator waits for the device or copies from it. A compiler sees them as opaque: it neither fuses
nor reorders what they do, so a compiled model selects the blocks that an eager one selects, bit for bit.

Shapes, dtypes, strides and devices are checked at every call. Values are not: page ids, slots, offsets and
lengths are clamped on the device, and a row with a NaN query is ranked as if all its scores were ``-inf``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from kernel.backends import registry
from kernel.backends.base import Backend, Precision, ScaleChoice
from kernel.checks import (
    as_pages,
    check_cells,
    check_device,
    check_memory,
    check_tensor,
    check_topk,
    check_writable,
)
from kernel.contract import HEAD_DIM
from kernel.errors import InvalidArgumentError
from kernel.step import HEADER, Plan, PlanHeader

NAMESPACE = "nvfp4_indexer"
QUERY_DTYPES = (torch.float8_e4m3fn, torch.uint8)
"""Queries, or their bytes."""
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# ---- Backends by name ----

_BACKENDS: dict[tuple[str, torch.device], Backend] = {}
_CREATING = threading.RLock()


def spec(name: str, precision: Precision = "exact", scale_choice: ScaleChoice = "six") -> str:
    """The name of a backend with its options, as operators take it: ``triton:exact:six``."""
    return f"{name}:{precision}:{scale_choice}"


def backend_of(name: str, device: torch.device) -> Backend:
    """The backend that operators run on a device; made at its first use and kept.

    Args:
        name: as :func:`spec` gives it; precision and scale choice may be left out.
        device: of the tensors.

    Raises:
        InvalidArgumentError: no such backend, or it cannot use the device.
        BackendUnavailableError: it cannot run here.
    """
    found = _BACKENDS.get((name, device))
    if found is None:
        with _CREATING:
            found = _BACKENDS.get((name, device))
            if found is None:
                kind, *options = name.split(":", 2)
                precision, scale_choice = [*options, *("exact", "six")[len(options) :]]
                found = _BACKENDS[name, device] = registry.create(
                    kind, device, cast("Precision", precision), cast("ScaleChoice", scale_choice)
                )
    return found


def refuse_undispatched(tensors: dict[str, torch.Tensor | None], written: str) -> None:
    """After an operator's call failed: refuse by name what torch's dispatcher cannot take.

    Args:
        tensors: arguments of the operator.
        written: which of them it writes to.

    Raises:
        InvalidArgumentError: naming one of them.
    """
    for name, tensor in tensors.items():
        if tensor is not None:
            check_memory(name, tensor)
    target = tensors[written]
    if target is not None:
        check_writable(written, target)


# ---- Checks: shapes, dtypes, strides and devices, never values ----


def _check_call(
    q: torch.Tensor, pages: torch.Tensor, plan: Plan
) -> tuple[torch.Tensor, torch.Tensor, PlanHeader]:
    """The queries, contiguous, the pages as ``[num_pages, 9216]``, and the plan's header."""
    numbers = plan.numbers
    if numbers.dtype != torch.int64 or numbers.dim() != 1 or numbers.shape[0] < HEADER or not plan.tensors:
        raise InvalidArgumentError(
            "numbers", f"{tuple(numbers.shape)} {numbers.dtype}", "no plan's numbers", "pass plan.numbers"
        )
    if plan.given:
        check_memory("numbers", numbers)
        for at, tensor in enumerate(plan.tensors):
            check_memory(f"plan[{at}]", tensor)
            if not tensor.is_contiguous():
                raise InvalidArgumentError(
                    f"plan[{at}].stride()", tensor.stride(), "must be contiguous", "pass plan.tensors"
                )
    header = plan.header
    shape = (header.total_q, header.num_heads, HEAD_DIM)
    device = plan.tensors[0].device
    check_tensor("q", q, dtypes=QUERY_DTYPES, shape=shape, device=device)
    pages = as_pages(pages, device)
    if header.num_score_blocks and not pages.shape[0]:
        raise InvalidArgumentError(
            "pages.shape[0]", 0, "the plan's requests have keys", "pass the pages that hold them"
        )
    if q.dtype != torch.float8_e4m3fn:
        q = q.view(torch.float8_e4m3fn)
    return q.contiguous(), pages, header


def _check_written(name: str, out: torch.Tensor, dtype: torch.dtype, like: torch.Tensor, rows: int) -> None:
    shape = (like.shape[1], rows, None)
    check_tensor(name, out, dtypes=(dtype,), shape=shape, device=like.device)
    check_cells(name, out)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


# ---- What the operators do ----


def _insert(keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, backend: str) -> None:
    check_tensor("keys", keys, dtypes=FLOAT_DTYPES, shape=(None, HEAD_DIM), device=pages.device)
    check_tensor("slots", slots, dtypes=(torch.int64,), shape=(keys.shape[0],), device=pages.device)
    pages = as_pages(pages)
    if keys.shape[0] and pages.shape[0]:
        backend_of(backend, pages.device).insert(_detached(keys), pages, slots)


def _select_out(
    q: torch.Tensor,
    pages: torch.Tensor,
    plan: Sequence[torch.Tensor],
    numbers: torch.Tensor,
    backend: str,
    *,
    out: torch.Tensor,
) -> None:
    whole = Plan.again(numbers, plan)
    q, pages, _ = _check_call(q, pages, whole)
    _check_written("out", out, torch.int32, q, q.shape[0])
    check_topk("out.shape[2]", out.shape[2])
    backend_of(backend, q.device).select_plan(whole, q, pages, out)


def _select(
    q: torch.Tensor,
    pages: torch.Tensor,
    plan: Sequence[torch.Tensor],
    numbers: torch.Tensor,
    topk: int,
    backend: str,
) -> torch.Tensor:
    out = q.new_empty((q.shape[1], q.shape[0], topk), dtype=torch.int32)
    _select_out(q, pages, plan, numbers, backend, out=out)
    return out


def _score_out(
    q: torch.Tensor,
    pages: torch.Tensor,
    plan: Sequence[torch.Tensor],
    numbers: torch.Tensor,
    backend: str,
    *,
    out: torch.Tensor,
) -> None:
    whole = Plan.again(numbers, plan)
    q, pages, header = _check_call(q, pages, whole)
    _check_written("out", out, torch.float32, q, q.shape[0])
    if out.shape[2] < header.num_score_blocks:
        raise InvalidArgumentError(
            "out.shape[2]",
            out.shape[2],
            f"must be at least {header.num_score_blocks}, the blocks of the longest request",
            "widen the score buffer",
        )
    if out.shape[2] > 1 and out.stride(2) != 1:
        raise InvalidArgumentError(
            "out.stride(2)", out.stride(2), "must be 1", "keep a row's blocks next to each other"
        )
    backend_of(backend, q.device).score_plan(whole, q, pages, _detached(out))


def _score(
    q: torch.Tensor,
    pages: torch.Tensor,
    plan: Sequence[torch.Tensor],
    numbers: torch.Tensor,
    num_blocks: int,
    backend: str,
) -> torch.Tensor:
    out = q.new_empty((q.shape[1], q.shape[0], num_blocks), dtype=torch.float32)
    _score_out(q, pages, plan, numbers, backend, out=out)
    return out


def _topk_out(
    scores: torch.Tensor, num_blocks: torch.Tensor, by_block: bool, backend: str, *, out: torch.Tensor
) -> None:
    check_tensor("scores", scores, dtypes=(torch.float32,), shape=(None, None, None), device=None)
    heads, total_q, _ = scores.shape
    device = scores.device
    check_tensor("num_blocks", num_blocks, dtypes=(torch.int32,), shape=(total_q,), device=device)
    check_tensor("out", out, dtypes=(torch.int32,), shape=(heads, total_q, None), device=device)
    check_cells("out", out)
    check_topk("out.shape[2]", out.shape[2])
    if scores.shape[2] > 1 and scores.stride(2) != 1:
        scores = scores.contiguous()
    # An extent past the row would be read out of bounds.
    extents = num_blocks.clamp(0, scores.shape[2])
    backend_of(backend, device).topk(_detached(scores), extents, out, "block" if by_block else "score")


def _topk(
    scores: torch.Tensor, num_blocks: torch.Tensor, topk: int, by_block: bool, backend: str
) -> torch.Tensor:
    out = scores.new_empty((*scores.shape[:2], topk), dtype=torch.int32)
    _topk_out(scores, num_blocks, by_block, backend, out=out)
    return out


# ---- What a compiler needs to know: shapes of results ----


#
# A compiler's tensors are fakes of one device. Of a call on real ones torch comes here if one is on "meta".


def _shape_of_select(
    q: torch.Tensor,
    pages: torch.Tensor,
    plan: Sequence[torch.Tensor],
    numbers: torch.Tensor,
    topk: int,
    _backend: str,
) -> torch.Tensor:
    _shape_of_run(q, pages, plan, numbers)
    return q.new_empty((q.shape[1], q.shape[0], topk), dtype=torch.int32)


def _shape_of_score(
    q: torch.Tensor,
    pages: torch.Tensor,
    plan: Sequence[torch.Tensor],
    numbers: torch.Tensor,
    num_blocks: int,
    _backend: str,
) -> torch.Tensor:
    _shape_of_run(q, pages, plan, numbers)
    return q.new_empty((q.shape[1], q.shape[0], num_blocks), dtype=torch.float32)


def _shape_of_run(
    q: torch.Tensor,
    pages: torch.Tensor,
    plan: Sequence[torch.Tensor],
    numbers: torch.Tensor,
    *_: object,
    out: torch.Tensor | None = None,
) -> None:
    tensors = {"q": q, "pages": pages, **{f"plan[{at}]": tensor for at, tensor in enumerate(plan)}}
    _check_one_device(tensors if out is None else {**tensors, "out": out})
    if not q.is_meta:
        check_device("numbers", numbers, torch.device("cpu"))


def _shape_of_topk(
    scores: torch.Tensor, num_blocks: torch.Tensor, topk: int, _by_block: bool, _backend: str
) -> torch.Tensor:
    _check_one_device({"scores": scores, "num_blocks": num_blocks})
    return scores.new_empty((*scores.shape[:2], topk), dtype=torch.int32)


def _shape_of_topk_out(
    scores: torch.Tensor, num_blocks: torch.Tensor, _by_block: bool, _backend: str, *, out: torch.Tensor
) -> None:
    _check_one_device({"scores": scores, "num_blocks": num_blocks, "out": out})


def _shape_of_insert(keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, _backend: str) -> None:
    _check_one_device({"keys": keys, "pages": pages, "slots": slots})


def _check_one_device(tensors: dict[str, torch.Tensor]) -> None:
    devices = [tensor.device for tensor in tensors.values()]
    device = next((device for device in devices if device.type != "meta"), devices[0])
    for name, tensor in tensors.items():
        check_device(name, tensor, device)


# ---- Definitions ----

_RUN = "Tensor q, Tensor pages, Tensor[] plan, Tensor numbers"
_OPERATORS: dict[str, tuple[str, Callable[..., object], Callable[..., object]]] = {
    "insert": ("(Tensor keys, Tensor(a!) pages, Tensor slots, str backend) -> ()", _insert, _shape_of_insert),
    "select": (f"({_RUN}, int topk, str backend) -> Tensor", _select, _shape_of_select),
    "select.out": (f"({_RUN}, str backend, *, Tensor(a!) out) -> ()", _select_out, _shape_of_run),
    "score": (f"({_RUN}, int num_blocks, str backend) -> Tensor", _score, _shape_of_score),
    "score.out": (f"({_RUN}, str backend, *, Tensor(a!) out) -> ()", _score_out, _shape_of_run),
    "topk": (
        "(Tensor scores, Tensor num_blocks, int topk, bool by_block, str backend) -> Tensor",
        _topk,
        _shape_of_topk,
    ),
    "topk.out": (
        "(Tensor scores, Tensor num_blocks, bool by_block, str backend, *, Tensor(a!) out) -> ()",
        _topk_out,
        _shape_of_topk_out,
    ),
}
"""Name to schema, implementation, and the shapes of its results for a compiler."""
_library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
for _name, (_schema, _implementation, _fake) in _OPERATORS.items():
    _library.define(f"{_name}{_schema}")
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _implementation, _key)
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_library)
