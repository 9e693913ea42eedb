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
from kernel.checks import check_tensor, check_topk
from kernel.contract import HEAD_DIM
from kernel.errors import InvalidArgumentError
from kernel.page import as_pages
from kernel.step import HEADER, Plan, PlanHeader

NAMESPACE = "nvfp4_indexer"
QUERY_DTYPES = (torch.float8_e4m3fn, torch.uint8)
"""Queries, or their bytes."""
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# ---- Backends by name ----

_BACKENDS: dict[tuple[str, torch.device], Backend] = {}
_CREATING = threading.Lock()


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
    header = plan.header
    shape = (header.total_q, header.num_heads, HEAD_DIM)
    device = plan.tensors[0].device
    check_tensor("q", q, dtypes=QUERY_DTYPES, shape=shape, device=device)
    check_tensor("pages", pages, dtypes=(torch.uint8,), shape=None, device=device)
    if header.num_score_blocks and not pages.shape[0]:
        raise InvalidArgumentError(
            "pages.shape[0]", 0, "the plan's requests have keys", "pass the pages that hold them"
        )
    if q.dtype != torch.float8_e4m3fn:
        q = q.view(torch.float8_e4m3fn)
    return q.contiguous(), as_pages(pages), header


def _check_written(name: str, out: torch.Tensor, dtype: torch.dtype, like: torch.Tensor, rows: int) -> None:
    shape = (like.shape[1], rows, None)
    check_tensor(name, out, dtypes=(dtype,), shape=shape, device=like.device)


# ---- What the operators do ----


def _insert(keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, backend: str) -> None:
    check_tensor("keys", keys, dtypes=FLOAT_DTYPES, shape=(None, HEAD_DIM), device=pages.device)
    check_tensor("slots", slots, dtypes=(torch.int64,), shape=(keys.shape[0],), device=pages.device)
    pages = as_pages(pages)
    if keys.shape[0] and pages.shape[0]:
        backend_of(backend, pages.device).insert(keys, pages, slots)


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
    backend_of(backend, q.device).score_plan(whole, q, pages, out)


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
    check_topk("out.shape[2]", out.shape[2])
    if scores.shape[2] > 1 and scores.stride(2) != 1:
        scores = scores.contiguous()
    # An extent past the row would be read out of bounds.
    extents = num_blocks.clamp(0, scores.shape[2])
    backend_of(backend, device).topk(scores, extents, out, "block" if by_block else "score")


def _topk(
    scores: torch.Tensor, num_blocks: torch.Tensor, topk: int, by_block: bool, backend: str
) -> torch.Tensor:
    out = scores.new_empty((*scores.shape[:2], topk), dtype=torch.int32)
    _topk_out(scores, num_blocks, by_block, backend, out=out)
    return out


# ---- What a compiler needs to know: shapes of results ----


def _shape_of_select(
    q: torch.Tensor, _pages: object, _plan: object, _numbers: object, topk: int, _backend: str
) -> torch.Tensor:
    return q.new_empty((q.shape[1], q.shape[0], topk), dtype=torch.int32)


def _shape_of_score(
    q: torch.Tensor, _pages: object, _plan: object, _numbers: object, num_blocks: int, _backend: str
) -> torch.Tensor:
    return q.new_empty((q.shape[1], q.shape[0], num_blocks), dtype=torch.float32)


def _shape_of_topk(
    scores: torch.Tensor, _num_blocks: object, topk: int, _by_block: bool, _backend: str
) -> torch.Tensor:
    return scores.new_empty((*scores.shape[:2], topk), dtype=torch.int32)


def _no_result(*_args: object, **_kwargs: object) -> None:
    return None


# ---- Definitions ----

_RUN = "Tensor q, Tensor pages, Tensor[] plan, Tensor numbers"
_OPERATORS: dict[str, tuple[str, Callable[..., object], Callable[..., object]]] = {
    "insert": ("(Tensor keys, Tensor(a!) pages, Tensor slots, str backend) -> ()", _insert, _no_result),
    "select": (f"({_RUN}, int topk, str backend) -> Tensor", _select, _shape_of_select),
    "select.out": (f"({_RUN}, str backend, *, Tensor(a!) out) -> ()", _select_out, _no_result),
    "score": (f"({_RUN}, int num_blocks, str backend) -> Tensor", _score, _shape_of_score),
    "score.out": (f"({_RUN}, str backend, *, Tensor(a!) out) -> ()", _score_out, _no_result),
    "topk": (
        "(Tensor scores, Tensor num_blocks, int topk, bool by_block, str backend) -> Tensor",
        _topk,
        _shape_of_topk,
    ),
    "topk.out": (
        "(Tensor scores, Tensor num_blocks, bool by_block, str backend, *, Tensor(a!) out) -> ()",
        _topk_out,
        _no_result,
    ),
}
"""Name to schema, implementation, and the shapes of its results for a compiler."""
_library: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
for _name, (_schema, _implementation, _fake) in _OPERATORS.items():
    _library.define(f"{_name}{_schema}")
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _implementation, _key)
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_library)
