"""A kernel that the compiler refuses is an error each time, is in no cache, and is not launched."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
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

from kernel.backends.flydsl import geometry, jit, ops, toolchain
from kernel.backends.flydsl.jit import compile_ahead
from kernel.backends.flydsl.launch import CompiledKernels
from kernel.errors import CompileError, DeviceUnavailableError
from kernel.gfx950.hip import simulated_device
from tests.support.cases import ROOT
from tests.support.process import call, printed_by


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
    monkeypatch.setenv(toolchain.CACHE_FOLDER, str(tmp_path))
    monkeypatch.setenv(toolchain.CACHE_ENABLE, "1")
    return tmp_path


@pytest.mark.parametrize(("value", "reason"), _REFUSED)
def test_it_does_not_compile_each_time(
    cache: Path, monkeypatch: pytest.MonkeyPatch, value: Callable[[], ops.Value], reason: str
) -> None:
    monkeypatch.setenv("COMPILE_ONLY", "1")
    for _ in range(2):
        with pytest.raises(CompileError, match=rf"^kernel refused does not compile: .*{reason}"):
            compile_ahead(_launcher("refused", value), "refused")
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
        jit._checked("some", lower)
    assert capfd.readouterr().err == ""
    kept = Path(found.value.output)
    assert kept.read_text().count("line\n") == 5000
    kept.unlink()


def test_warnings_are_written_behind(capfd: pytest.CaptureFixture[str]) -> None:
    assert jit._checked("some", lambda: os.write(2, b"warning: no error: none\n")) == 24
    assert capfd.readouterr().err == "warning: no error: none\n"


def test_threads_leave_the_compiler_as_it_was(cache: Path) -> None:
    def compile_too() -> None:
        with jit.raised("second"):
            pass

    before = MlirCompiler.compile
    other = threading.Thread(target=compile_too)
    with jit.raised("first"):
        other.start()
        time.sleep(0.2)  # the other waits for its turn
    other.join()
    assert before == MlirCompiler.compile


# ---- Everything that the simulated device needs comes from pip: no ROCm, no LLVM, no C compiler ----

BUNDLED = ("ziglang", "rocm")

PROGRAM = """
import os, shutil
from pathlib import Path

shutil.which = lambda *_args, **_kwargs: None  # nothing on the path, nothing in Debian's folders
import torch
from kernel.backends import registry
from kernel.backends.flydsl.launch import InsertLauncher
from kernel.gfx950.hip import simulated_device
from tests.support.compare import assert_same_bits, oracle_inserted

print(registry.status("flydsl-sim").reason)
keys = torch.randn(9, 128).to(torch.bfloat16)
pages, slots = torch.zeros(1, 9216, dtype=torch.uint8), torch.arange(9)
expected = oracle_inserted(keys, pages, slots)
InsertLauncher(simulated_device())(keys, pages, slots)
assert_same_bits(pages, expected)
print(Path(os.environ["ROCM_PATH"], "llvm", "bin", "ld.lld").read_text())
"""


@pytest.mark.nightly
@pytest.mark.skipif(Path("/opt/rocm").exists(), reason="ROCm is installed, and its tools come first")
def test_compile_and_launch_with_what_pip_installed(tmp_path: Path) -> None:
    """In a home without caches and an environment without a path: compile, build HIP, disassemble, run."""
    missing = [package for package in BUNDLED if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}; pip install 'nvfp4-indexer[sim]'")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={"PATH": str(tmp_path), "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "ziglang cc" in done.stdout
    assert "librocmllvm.so" in done.stdout
    assert "ziglang/zig ld.lld" in done.stdout


# Compiling ahead of time: ``nvfp4-indexer kernel compile`` fills a cache that later processes load from.

LAUNCH = """
from tests.gfx950.scorers import scored
from tests.support.calls import random_call
from tests.support.compare import assert_same_bits, oracle_scores
call = random_call([(150, 3)], 4)
assert_same_bits(scored(call)[0], oracle_scores(call))
"""


@pytest.mark.nightly
@pytest.mark.parametrize("names", [("score_prefill_h4",), ()])
def test_a_compiled_kernel_runs_without_a_compiler(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The command, of one kernel or all; then a launch, in a process that may only load from the cache."""
    if names:
        monkeypatch.setattr(geometry, "kernel_names", lambda: names)
    done = call("kernel", "compile", "--json", "--cache", str(tmp_path))
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["kernels"] == list(geometry.kernel_names())
    assert result["cache"] == str(tmp_path)
    printed_by("-c", LAUNCH, FLYDSL_RUNTIME_RUN_ONLY="1", FLYDSL_RUNTIME_CACHE_DIR=str(tmp_path))


PRINTED = """
import sys
from kernel.backends.flydsl.toolchain import assembly
from kernel.gfx950 import parse_program
print([i.mnemonic for i in parse_program(assembly(sys.argv[1])).kernels[sys.argv[1]].instructions])
"""
LAUNCHED = f"""
import sys
from kernel.gfx950 import parse_program
from kernel.gfx950.hip import code_object, simulated_device
{LAUNCH}
launch, = [one for one in simulated_device().launches if one.kernel == sys.argv[1]]
loaded = code_object.parse(launch.image)
code = loaded.kernels[launch.kernel]
program = parse_program(code_object.listing(loaded, code), {{launch.kernel: code.metadata}})
print([i.mnemonic for i in program.kernels[launch.kernel].instructions])
"""


@pytest.mark.nightly
def test_the_assembly_is_what_is_launched() -> None:
    """Read back from its text before the last pass, this kernel gets other instructions."""
    name = "score_prefill_h4"
    launched = printed_by("-c", LAUNCHED, name, FLYDSL_RUNTIME_ENABLE_CACHE="0")
    assert launched.count("v_mfma") > 100
    assert printed_by("-c", PRINTED, name) == launched


def test_another_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYDSL_GPU_ARCH", "gfx942")
    with pytest.raises(DeviceUnavailableError, match="FLYDSL_GPU_ARCH=gfx942"):
        toolchain.prepare()


def test_compiling_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not COMPILE_ONLY: with it every later launch of the process would do nothing."""
    monkeypatch.delenv("COMPILE_ONLY", raising=False)
    monkeypatch.delenv("FLYDSL_RUNTIME_CACHE_DIR", raising=False)
    monkeypatch.setattr(geometry, "kernel_names", lambda: ("insert_bf16",))
    assert toolchain.compile_kernels(tmp_path) == ["insert_bf16"]
    assert "COMPILE_ONLY" not in os.environ
    assert "FLYDSL_RUNTIME_CACHE_DIR" not in os.environ
    assert list(tmp_path.rglob("*.pkl"))
