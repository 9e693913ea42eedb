"""A kernel that LLVM refuses is an error, although FlyDSL has an object file of it."""

from __future__ import annotations

import os

import flydsl.compiler as flyc
import flydsl.expr as fx
import pytest
from flydsl.expr.typing import as_ir_value

from kernel.backends.flydsl import compiler_errors, device, kernel_cache, toolchain
from kernel.backends.flydsl.ahead import compile_ahead
from kernel.errors import CompileError


@flyc.kernel(name="lane_as_scalar", known_block_size=[64, 1, 1])  # type: ignore[untyped-decorator]
def _kernel(out: fx.Int64) -> None:
    """Asks for a lane's own number in a scalar register."""
    number = device.pin_scalar(as_ir_value(fx.Int32(fx.thread_idx.x)))
    device.store(number, device.pointer(out, device.GLOBAL), 4)


@flyc.jit  # type: ignore[untyped-decorator]
def _launch(out: fx.Int64, stream: fx.Stream) -> None:
    _kernel(out).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)


def test_a_kernel_that_llvm_refuses_is_an_error(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    toolchain.prepare()
    monkeypatch.setenv("COMPILE_ONLY", "1")
    monkeypatch.setenv(kernel_cache.ENABLE, "0")
    with pytest.raises(CompileError, match=r"lane_as_scalar does not compile: .*illegal VGPR to SGPR copy"):
        compile_ahead(_launch, "lane_as_scalar", [0])
    assert "illegal VGPR to SGPR copy" in capfd.readouterr().err


def test_what_is_no_error_is_written_behind(capfd: pytest.CaptureFixture[str]) -> None:
    with compiler_errors.raised("some"):
        os.write(2, b"warning: an error: is none here\n")
    assert capfd.readouterr().err == "warning: an error: is none here\n"


def test_an_exception_of_the_compiler_comes_first(capfd: pytest.CaptureFixture[str]) -> None:
    def compile_kernel() -> None:
        with compiler_errors.raised("some"):
            os.write(2, b"error: too late\n")
            raise KeyError

    with pytest.raises(KeyError):
        compile_kernel()
    assert capfd.readouterr().err == "error: too late\n"
