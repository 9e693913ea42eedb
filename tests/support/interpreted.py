"""Run the triton backend in Triton's interpreter and compare it with the oracle; fails where it differs.

TRITON_INTERPRET=1 python -m tests.support.interpreted
"""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction

from kernel.backends import registry
from kernel.backends.base import Backend
from kernel.backends.triton import backend as planning
from kernel.backends.triton import topk
from tests.support.calls import random_call
from tests.support.compare import (
    assert_same_bits,
    in_block_order,
    inserted,
    oracle_inserted,
    oracle_scores,
    scores_of,
    selected,
    selection_of,
    topk_of,
)


def check_scores(backend: Backend) -> None:
    """Prefill, decode and selection of a ragged call, with forced blocks."""
    call = random_call([(300, 20), (0, 0), (129, 1), (260, 3)], 2, seed=3).forcing(1, 1)
    scores = scores_of(backend, call)
    assert_same_bits(scores, oracle_scores(call))
    expected = selected(scores, call.batch().num_blocks_per_query(), 16)
    assert_same_bits(selection_of(backend, call, 16), expected)
    vars(planning)["MANY_DECODED_ROWS"] = 1  # as if decoded rows were many
    assert_same_bits(selection_of(backend, call, 16), expected)


def check_topk() -> None:
    """Both top-k kernels on ties, NaN, zeros of both signs and -inf."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(-9, 9, (1, 8, 272), generator=generator).float()
    scores[0, 3, 7], scores[0, 2], scores[0, 4] = torch.nan, -0.0, -torch.inf
    num_blocks = torch.tensor([272, 9, 135, 241, 61, 17, 0, 150], dtype=torch.int32)
    expected = selected(scores, num_blocks, 16)
    for many_rows in (0, 1 << 30):
        topk.MANY_ROWS = many_rows
        backend = registry.create("triton")  # the other keeps its choice of a kernel for these shapes
        assert_same_bits(topk_of(backend, scores, num_blocks, 16), expected)
        assert_same_bits(topk_of(backend, scores, num_blocks, 16, "block"), in_block_order(expected))


def check_insert(backend: Backend) -> None:
    """Every byte, a skipped slot, wide magnitudes."""
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-12, 12, (77, 128), generator=generator)
    keys = torch.randn(77, 128, generator=generator) * 2.0**exponents
    slots = torch.randperm(384, generator=generator)[:77]
    slots[3] = -1
    pages = torch.full((3, 9216), 7, dtype=torch.uint8)
    assert_same_bits(inserted(backend, keys, pages, slots), oracle_inserted(keys, pages, slots))


def call_device_functions_at_once() -> None:
    """The launch has made Triton's language the interpreter's; a device function does it again at each call,
    which takes a third of the time."""
    prepared = InterpretedFunction.__call__

    def call(function: Any, *arguments: Any, **named: Any) -> Any:
        if function.fn.__module__.startswith("triton."):  # it reads other modules of the language
            return prepared(function, *arguments, **named)
        return function.rewrite()(*arguments, **named)

    InterpretedFunction.__call__ = call


if __name__ == "__main__":
    call_device_functions_at_once()
    interpreted = registry.create("triton")
    check_scores(interpreted)
    check_topk()
    check_insert(interpreted)
    print("the interpreted kernels agree with the oracle")
