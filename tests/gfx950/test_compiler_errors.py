"""A kernel that the compiler refuses is an error each time, is in no cache, and is not launched."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import flydsl.compiler as flyc
import flydsl.expr as fx
import pytest
import torch
from flydsl._mlir.dialects import llvm
from flydsl.compiler.jit_function import MlirCompiler
from flydsl.expr.typing import T, as_ir_value

from kernel.backends.flydsl import kernel_cache, ops, toolchain
from kernel.backends.flydsl.ahead import compile_ahead
from kernel.backends.flydsl.launch import CompiledKernels
from kernel.errors import CompileError
from kernel.gfx950.hip import simulated_device


def _lane_as_scalar() -> ops.Value:
    return ops.pin_scalar(as_ir_value(fx.Int32(fx.thread_idx.x)))


def _no_instruction() -> ops.Value:
    return llvm.inline_asm(T.i32, [ops.i32(1)], "s_movv_b32 $0, $1", "=s,s", has_side_effects=True)


def _no_intrinsic() -> ops.Value:
    return llvm.call_intrinsic(T.i32, "llvm.amdgcn.no.such", [ops.i32(1)], [], [])


def _launcher(name: str, value: Callable[[], ops.Value]) -> Callable[..., None]:
    @flyc.kernel(name=name, known_block_size=[64, 1, 1])  # type: ignore[untyped-decorator]
    def kernel(out: fx.Int64) -> None:
        ops.store(value(), ops.pointer(out, ops.GLOBAL), 4)

    @flyc.jit  # type: ignore[untyped-decorator]
    def launch(out: fx.Int64, stream: fx.Stream) -> None:
        kernel(out).launch(grid=(1, 1, 1), block=(64, 1, 1), stream=stream)

    launcher: Callable[..., None] = launch
    return launcher


_REFUSED = [
    (_lane_as_scalar, "illegal VGPR to SGPR copy"),
    (_no_instruction, "invalid instruction"),
    (_no_intrinsic, r"llvm\.amdgcn\.no\.such"),
]


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    toolchain.prepare()
    monkeypatch.setenv(kernel_cache.FOLDER, str(tmp_path))
    monkeypatch.setenv(kernel_cache.ENABLE, "1")
    return tmp_path


@pytest.mark.parametrize(("value", "reason"), _REFUSED)
def test_it_does_not_compile_each_time(
    cache: Path, monkeypatch: pytest.MonkeyPatch, value: Callable[[], ops.Value], reason: str
) -> None:
    monkeypatch.setenv("COMPILE_ONLY", "1")
    for _ in range(2):
        with pytest.raises(CompileError, match=rf"^kernel refused does not compile: .*{reason}"):
            compile_ahead(_launcher("refused", value), "refused", [0])
    assert not list(cache.rglob("*.pkl"))


@pytest.mark.parametrize(("value", "reason"), _REFUSED)
def test_it_is_not_launched(cache: Path, value: Callable[[], ops.Value], reason: str) -> None:
    out = torch.zeros(64, dtype=torch.int32)
    kernels: CompiledKernels[int] = CompiledKernels(
        simulated_device(), lambda _: "refused", lambda _: _launcher("refused", value)
    )
    for _ in range(2):
        with pytest.raises(CompileError, match=reason):
            kernels.launch(0, [out], out.data_ptr())
    assert not out.any()
    assert not list(cache.rglob("*.pkl"))


def test_long_output_is_kept_in_a_file(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def lower() -> None:
        os.write(2, b"error: too long\n" + b"line\n" * 5000)

    with pytest.raises(CompileError, match=r"too long; .* is in ") as found:
        kernel_cache._checked("some", lower)
    assert capfd.readouterr().err == ""
    kept = Path(found.value.output)
    assert kept.read_text().count("line\n") == 5000
    kept.unlink()


def test_warnings_are_written_behind(capfd: pytest.CaptureFixture[str]) -> None:
    assert kernel_cache._checked("some", lambda: os.write(2, b"warning: no error: none\n")) == 24
    assert capfd.readouterr().err == "warning: no error: none\n"


def test_threads_leave_the_compiler_as_it_was(cache: Path) -> None:
    def compile_too() -> None:
        with kernel_cache.raised("second"):
            pass

    before = MlirCompiler.compile
    other = threading.Thread(target=compile_too)
    with kernel_cache.raised("first"):
        other.start()
        time.sleep(0.2)  # the other waits for its turn
    other.join()
    assert before == MlirCompiler.compile
