"""A kernel with too few wait states does not pass on the simulated device, which has no clock to show it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import flydsl.compiler as flyc
import flydsl.expr as fx
import pytest
import torch
from flydsl._mlir.dialects import llvm
from flydsl.expr.typing import T, as_ir_value

from kernel.backends.flydsl import toolchain
from kernel.backends.flydsl.runtime import launching, preflight
from kernel.errors import LaunchError
from kernel.gfx950 import HazardError
from kernel.gfx950.hip import device as hip_device
from kernel.gfx950.hip import simulated_device

THREADS = 64


@functools.cache
def first_lane(gap: str) -> Callable[..., None]:
    """A launch of ``out[i] = x[0]`` over a wave: a vector instruction writes a scalar, then ``gap``, then one
    reads it, in inline assembly, where LLVM leaves the distance to whoever wrote it."""
    text = f"v_readfirstlane_b32 s20, $1\n{gap}v_mov_b32 $0, s20"

    @flyc.kernel(name="first_lane", known_block_size=[THREADS, 1, 1])  # type: ignore[untyped-decorator]
    def kernel(x: fx.Int64, out: fx.Int64) -> None:
        lane = fx.Int32(fx.thread_idx.x)
        i32 = fx.PointerType.get(T.i32, fx.AddressSpace.Global, 4)
        value = as_ir_value(fx.inttoptr(i32, x)[lane])
        copied = llvm.inline_asm(value.type, [value], text, "=v,v,~{s20}", has_side_effects=True)
        fx.inttoptr(i32, out)[lane] = fx.Int32(copied)

    @flyc.jit  # type: ignore[untyped-decorator]
    def launch(x: fx.Int64, out: fx.Int64, stream: fx.Stream) -> None:
        kernel(x, out).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    def run(x: torch.Tensor, out: torch.Tensor) -> None:
        device = simulated_device()
        toolchain.prepare_linker()
        preflight(device)
        with launching(device, [x, out]) as stream:
            launch(x.data_ptr(), out.data_ptr(), fx.Stream(stream))

    return run


def test_a_kernel_with_enough_wait_states_runs() -> None:
    x, out = torch.arange(7, 7 + THREADS, dtype=torch.int32), torch.zeros(THREADS, dtype=torch.int32)
    first_lane("s_nop 1\n")(x, out)
    assert out.tolist() == [7] * THREADS


@pytest.mark.parametrize(("gap", "seen"), [("", 0), ("s_nop 0\n", 1)])
def test_a_kernel_with_too_few_is_refused_and_both_instructions_are_named(gap: str, seen: int) -> None:
    x, out = torch.arange(THREADS, dtype=torch.int32), torch.full((THREADS,), -1, dtype=torch.int32)
    for _ in range(2):  # not only the first time
        with pytest.raises(LaunchError) as caught:
            first_lane(gap)(x, out)
        cause = caught.value.__cause__
        assert isinstance(cause, HazardError)
        assert cause.kernel == "first_lane"
        assert cause.text is not None
        assert cause.text.startswith("v_mov_b32_e32")
        assert f"line {cause.line}: `{cause.text}`: scalar of a vector instruction" in str(caught.value)
        assert f"{seen} wait states after line" in str(caught.value)
        assert "(`v_readfirstlane_b32 s20, v" in str(caught.value)
        assert out.tolist() == [-1] * THREADS


def test_a_code_object_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    monkeypatch.setattr(hip_device, "check_hazards", lambda kernel: checked.append(kernel.name))
    hip_device._program.cache_clear()
    x, out = torch.arange(THREADS, dtype=torch.int32), torch.zeros(THREADS, dtype=torch.int32)
    for _ in range(3):
        first_lane("s_nop 2\n")(x, out)
    assert checked == ["first_lane"]
