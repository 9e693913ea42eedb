"""What LLVM says is wrong with a kernel, raised: it prints errors, and FlyDSL goes on with what is left."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from kernel.errors import CompileError

_STDERR = 2


@contextmanager
def raised(name: str) -> Iterator[None]:
    """Around the compilation of a kernel in a process that does nothing beside it: what is written to stderr
    meanwhile is written behind it.

    Args:
        name: the kernel.

    Raises:
        CompileError: LLVM reported an error. What it gave out must not be launched.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as printed:
        stderr = os.dup(_STDERR)
        os.dup2(printed.fileno(), _STDERR)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, _STDERR)
            os.close(stderr)
            printed.seek(0)
            with os.fdopen(os.dup(_STDERR), "wb") as again:
                shutil.copyfileobj(printed, again)
            printed.seek(0)
            text = printed.read().decode(errors="replace")
    errors = [line for line in text.splitlines() if line.startswith("error:")]
    if errors:
        raise CompileError(name, errors[0].removeprefix("error:").strip())
