"""Methods that torch.compile must not trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def untraced(method: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make a method run as it is written where torch.compile traces its caller: the graph breaks there.

    A compiler may add and multiply in another order, which changes bits, and it cannot trace reads of numbers
    on the host, nor tables of complex pairs.
    """

    @functools.wraps(method)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if torch.compiler.is_compiling():
            # Not as a decorator: that imports the compiler, seconds for all who compile nothing.
            plain: Callable[_Arguments, _Result] = torch.compiler.disable(method)  # type: ignore[no-untyped-call]
            return plain(*args, **kwargs)
        return method(*args, **kwargs)

    return run
