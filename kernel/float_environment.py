"""The floating-point environment of C: rounding, and whether denormals count as zero.

It belongs to a thread and is anybody's to change: ``torch.set_flush_denormal`` does, and so do libraries that
are compiled with ``-ffast-math``. Numpy and the CPU's own arithmetic obey it.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_BYTES = 64
"""More than any ``fenv_t`` takes."""


@contextmanager
def default_float_environment() -> Iterator[None]:
    """IEEE arithmetic in this thread: round to nearest even, denormals kept. As before once the body is done.

    Does nothing where C's functions for it are not found.
    """
    functions = _functions()
    if functions is None:
        yield
        return
    get, put = functions
    before = ctypes.create_string_buffer(_BYTES)
    get(before)
    put(ctypes.c_void_p(-1))  # FE_DFL_ENV
    try:
        yield
    finally:
        put(before)


@functools.cache
def _functions() -> tuple[ctypes._NamedFuncPointer, ctypes._NamedFuncPointer] | None:
    """``fegetenv`` and ``fesetenv`` of glibc and musl, whose FE_DFL_ENV is (fenv_t *) -1."""
    if sys.platform != "linux":
        return None
    process = ctypes.CDLL(None)
    return process.fegetenv, process.fesetenv
