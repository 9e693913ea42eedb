"""FlyDSL's jit: a launcher from a kernel's declared arguments, compiled at its first launch or ahead of it.

Imports FlyDSL; :func:`kernel.backends.flydsl.toolchain.prepare` comes first.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl._mlir.dialects.gpu import ObjectAttr
from flydsl.compiler.diagnostics import DSLCompileError
from flydsl.compiler.jit_function import MlirCompiler, _disk_cache_key

from kernel.backends.flydsl import toolchain
from kernel.backends.flydsl.geometry import THREADS, Launch, formats
from kernel.errors import CompileError, DeviceUnavailableError

Arguments = TypeVar("Arguments")
_TYPES = {"i": fx.Int32, "q": fx.Int64}
_STDERR = 2
_MOST_LINES = 40
"""Lines of a refused kernel's output that are printed; FlyDSL adds the kernel's whole IR, some thousands."""
_one_at_a_time = threading.RLock()


def launcher(
    entry: str,
    name: str,
    arguments: type[Arguments],
    trace: Callable[[Arguments], None],
    *,
    grid: tuple[str, ...] = ("workgroups",),
    waves_per_simd: int | None = None,
) -> Launch:
    """A kernel of ``THREADS`` threads a workgroup and its launcher, neither compiled yet.

    Args:
        entry: name of the launcher, and of its folder in FlyDSL's cache.
        name: the kernel's symbol.
        arguments: of :mod:`kernel.backends.flydsl.geometry`.
        trace: traces the kernel's body.
        grid: names of the grid's dimensions, one or two.
        waves_per_simd: waves that the register allocator must leave room for; LLVM's choice when None.
    """
    declared = _parameters({key: _TYPES[kind] for key, kind in formats(arguments).items()})
    dimensions = _parameters(dict.fromkeys(grid, fx.Int32))

    def kernel(**values: Any) -> None:
        trace(arguments(**values))

    # FlyDSL takes parameters from the signature and passes them by name.
    kernel.__signature__ = Signature(declared)  # type: ignore[attr-defined]
    traced = flyc.kernel(kernel, name=name, known_block_size=[THREADS, 1, 1])

    def launch(stream: fx.Stream, **values: Any) -> None:
        workgroups = (*(values.pop(dimension) for dimension in grid), 1, 1)[:3]
        traced(**values, value_attrs={"rocdl.waves_per_eu": waves_per_simd}).launch(
            grid=workgroups, block=(THREADS, 1, 1), stream=stream
        )

    launch.__signature__ = Signature(  # type: ignore[attr-defined]
        [*declared, *dimensions, *_parameters({"stream": fx.Stream})]
    )
    jit: Launch = flyc.jit(launch)
    jit.func.__name__ = entry  # type: ignore[attr-defined]
    return jit


def _parameters(types: dict[str, Any]) -> list[Parameter]:
    return [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=kind) for name, kind in types.items()]


def compiled(launch: Launch, name: str, *arguments: int | fx.Stream) -> Launch:
    """Compile and launch; with COMPILE_ONLY set only compile.

    Args:
        launch: of :func:`launcher`.
        name: the kernel's symbol.
        arguments: the launcher's.

    Returns:
        The same launch without tracing.

    Raises:
        CompileError: FlyDSL, MLIR or LLVM refused the kernel; no cache holds anything of it.
        DeviceUnavailableError: compiling is forbidden and the kernel is not in the cache, or the cache cannot
            be written.
    """
    with toolchain.compiling(name), raised(name):
        handle: Launch = flyc.compile(launch, *arguments)
    return handle


def compile_ahead(launch: Launch, name: str, objects: Path | None = None) -> str:
    """Compile into FlyDSL's cache, with COMPILE_ONLY set so that nothing is launched.

    Args:
        launch: FlyDSL's launcher; its last argument is the stream.
        name: the kernel's symbol.
        objects: a folder to export ``name.o`` to, with the code object and a launch that returns a code.

    Returns:
        The name.

    Raises:
        CompileError: see :func:`compiled`.
        DeviceUnavailableError: the cache or the folder cannot be written.
    """
    jit: Any = launch
    jit._ensure_sig()
    arguments = (*[0] * (len(jit._sig.parameters) - 1), fx.Stream(None))
    compiled(launch, name, *arguments)
    if objects is None:
        if jit.cache_manager is not None:
            _keep(jit)
        return name
    # With COMPILE_ONLY flyc.compile returns no handle, and without it launches: the handle is made here.
    key, _ = jit._last_compiled
    bound = jit._sig.bind(*arguments)
    jit._resolve_arguments(bound.arguments)
    handle = jit._make_compiled_function(key, bound, None)
    try:
        handle.export_to_c(str(objects), name, name)
    except RuntimeError as error:  # of the tools that FlyDSL runs
        raise DeviceUnavailableError(
            f"FlyDSL cannot export {name}: {error}",
            f"see that {objects.parent} and {tempfile.gettempdir()} have room, that ld and objcopy work",
        ) from error
    return name


def assembly(launch: Launch, name: str) -> str:
    """Compile to assembly text, with COMPILE_ONLY set and FlyDSL's cache off.

    The last pass prints instructions instead of encoding them. FlyDSL's own dump would read the module back
    from text before it, which gives LLVM's passes another order of uses, and so other instructions.

    Raises:
        CompileError: see :func:`compiled`.
    """
    texts: list[bytes] = []
    with _one_at_a_time:
        lower = MlirCompiler.compile

        def printed(source: str, *, func_name: str, config: Any) -> Any:
            *passes, encode = config.fragments
            as_text = encode.replace("format=fatbin", "format=isa")
            module = lower(source, func_name=func_name, config=replace(config, fragments=[*passes, as_text]))
            for operation in module.body.operations:
                if operation.operation.name == "gpu.binary":
                    texts.extend(ObjectAttr(one).object for one in operation.attributes["objects"])
            return module

        MlirCompiler.compile = printed
        try:
            compile_ahead(launch, name)
        finally:
            MlirCompiler.compile = lower
    (text,) = texts
    return text.decode()


def _keep(jit: Any) -> None:
    """Write what was compiled last to the cache if it is not there: FlyDSL only logs a failed write."""
    key, artifact = jit._last_compiled
    file = jit.cache_manager._cache_file(_disk_cache_key(key))
    if file.exists():
        return
    try:
        jit.cache_manager._write_cache_file(file, artifact)
    except OSError as error:
        raise toolchain.unusable_cache(str(error)) from error


# ---- Refused kernels: LLVM only prints its errors, and FlyDSL goes on without the kernel ----


@contextmanager
def raised(name: str) -> Iterator[None]:
    """Context of FlyDSL's compiler that raises what it, MLIR or LLVM refuse.

    Args:
        name: the kernel.

    Raises:
        CompileError: the kernel was refused; no cache holds anything of it.
    """
    with _one_at_a_time:
        lower = MlirCompiler.compile
        MlirCompiler.compile = lambda *arguments, **named: _checked(name, lower, *arguments, **named)
        try:
            yield
        except DSLCompileError as error:  # before LLVM
            raise CompileError(name, _first_line(error)) from error
        finally:
            MlirCompiler.compile = lower


def _checked(name: str, lower: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """``lower(...)``, whose stderr is held back until it returns."""
    with tempfile.TemporaryFile() as printed:
        try:
            with _stderr_to(printed):
                lowered = lower(*arguments, **named)
        except Exception as error:
            reason = next(_errors(printed), _first_line(error))
            raise CompileError(name, reason, _output(printed)) from error
        reason = next(_errors(printed), "")
        if reason:
            raise CompileError(name, reason, _output(printed))
        _print(printed)
    return lowered


@contextmanager
def _stderr_to(file: BinaryIO) -> Iterator[None]:
    sys.stderr.flush()
    before = os.dup(_STDERR)
    os.dup2(file.fileno(), _STDERR)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, _STDERR)
        os.close(before)


def _errors(printed: BinaryIO) -> Iterator[str]:
    """Errors of LLVM and its assembler."""
    printed.seek(0)
    for line in printed:
        before, found, reason = line.decode(errors="replace").partition("error:")
        if found and (not before or before.startswith(("<", "ld.lld"))):
            yield reason.strip()


def _output(printed: BinaryIO) -> str:
    """Prints short output; saves longer output to a file and returns its name."""
    printed.seek(0)
    if sum(1 for _ in printed) <= _MOST_LINES:
        _print(printed)
        return ""
    printed.seek(0)
    with tempfile.NamedTemporaryFile(prefix="nvfp4-indexer-compiler-", suffix=".txt", delete=False) as kept:
        shutil.copyfileobj(printed, kept)
    return kept.name


def _print(printed: BinaryIO) -> None:
    printed.seek(0)
    with os.fdopen(os.dup(_STDERR), "wb") as stderr:
        shutil.copyfileobj(printed, stderr)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
