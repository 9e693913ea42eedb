"""The kernels of one launcher, compiled at their first launch and kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

Launch = Callable[..., None]
"""A compiled kernel: its arguments in order, the stream last."""


class CompiledKernels:
    """Compiled kernels by what tells them apart; may be used from several threads.

    Each belongs to the GPU that it was first launched on.

    Args:
        compile_and_launch: takes the key and the launch's arguments, the stream's handle last; returns the
            launch without tracing.
    """

    def __init__(self, compile_and_launch: Callable[..., Launch]) -> None:
        self._compile_and_launch = compile_and_launch
        self._kernels: dict[Hashable, Launch] = {}
        self._compiling = threading.Lock()

    def launch(self, key: Hashable, *arguments: int) -> None:
        """Launch, and compile first where this is the first time."""
        kernel = self._kernels.get(key)
        if kernel is None:
            with self._compiling:
                kernel = self._kernels.get(key)
                if kernel is None:
                    self._kernels[key] = self._compile_and_launch(key, *arguments)
                    return
        kernel(*arguments[:-1], _stream(arguments[-1]))


def _stream(handle: int) -> object:
    import flydsl.expr as fx

    return fx.Stream(handle)
