"""What LLVM says is wrong with a kernel, raised before anything of it is cached or launched: it prints its
errors, and FlyDSL goes on with what is left."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from kernel.errors import CompileError

_STDERR = 2
_MOST_LINES = 40
"""Of a refusal's output that are printed; FlyDSL adds the kernel's whole IR, some thousands."""
_one_at_a_time = threading.RLock()


@contextmanager
def raised(name: str) -> Iterator[None]:
    """Around FlyDSL's compiler, and a launch behind it.

    Args:
        name: the kernel.

    Raises:
        CompileError: the kernel was refused, by FlyDSL, MLIR or LLVM. No cache holds anything of it.
    """
    from flydsl.compiler.diagnostics import DSLCompileError
    from flydsl.compiler.jit_function import MlirCompiler

    with _one_at_a_time:
        lower = MlirCompiler.compile
        MlirCompiler.compile = lambda *arguments, **named: _checked(name, lower, *arguments, **named)
        try:
            yield
        except DSLCompileError as error:  # of what comes before LLVM
            raise CompileError(name, _first_line(error)) from error
        finally:
            MlirCompiler.compile = lower


def _checked(name: str, lower: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """``lower(...)``; what is written to stderr meanwhile is written behind it."""
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
    """Those of LLVM and of its assembler."""
    printed.seek(0)
    for line in printed:
        before, found, reason = line.decode(errors="replace").partition("error:")
        if found and (not before or before.startswith(("<", "ld.lld"))):
            yield reason.strip()


def _output(printed: BinaryIO) -> str:
    """Print what is short; keep what is not in a file, and give its name."""
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
