"""Compiling a launcher without launching it, for FlyDSL's cache or as an object file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl.compiler.jit_function import _disk_cache_key

from kernel.backends.flydsl import kernel_cache
from kernel.errors import DeviceUnavailableError


def compile_ahead(
    launch: Callable[..., None], name: str, numbers: Sequence[int], objects: Path | None = None
) -> str:
    """Compile into FlyDSL's cache, with COMPILE_ONLY set so that nothing is launched.

    Args:
        launch: FlyDSL's launcher; its last argument is the stream.
        name: the kernel's symbol.
        numbers: what stands for the launcher's other arguments.
        objects: a folder to export ``name.o`` to, with the code object and a launch that returns a code.

    Returns:
        The name.

    Raises:
        CompileError: LLVM refused the kernel.
        DeviceUnavailableError: the cache or the folder cannot be written.
    """
    arguments = (*numbers, fx.Stream(None))
    with kernel_cache.compiling(name), kernel_cache.raised(name):
        flyc.compile(launch, *arguments)
    jit: Any = launch
    if objects is None and jit.cache_manager is not None:
        _keep(jit)
    if objects is not None:
        # flyc.compile gives no handle with COMPILE_ONLY, and without it launches what takes numbers: the
        # handle is made of what was compiled.
        key, _ = jit._last_compiled
        bound = jit._sig.bind(*arguments)
        jit._resolve_arguments(bound.arguments)
        compiled = jit._make_compiled_function(key, bound, None)
        try:
            compiled.export_to_c(str(objects), name, name)
        except RuntimeError as error:  # of the tools that it runs
            raise DeviceUnavailableError(
                f"FlyDSL cannot export {name}: {error}",
                f"see that {objects.parent} and {tempfile.gettempdir()} have room, that ld and objcopy work",
            ) from error
    return name


def _keep(jit: Any) -> None:
    """Write what was compiled last to the cache if it is not there: FlyDSL goes on where it could not."""
    key, artifact = jit._last_compiled
    file = jit.cache_manager._cache_file(_disk_cache_key(key))
    if file.exists():
        return
    try:
        jit.cache_manager._write_cache_file(file, artifact)
    except OSError as error:
        raise kernel_cache.unusable(str(error)) from error
