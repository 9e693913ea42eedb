"""Memory that ran out in a call, on the host or on a GPU, as an error that names the argument at fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kernel.errors import InvalidArgumentError


@contextmanager
def named_out_of_memory(argument: str, rows: torch.Tensor, limit: str, remedy: str) -> Iterator[None]:
    """Name what is too large when memory runs out in the body.

    Args:
        argument: ``NAME.shape[0]``.
        rows: that argument, not yet checked: it is looked at when memory has run out.
        limit: what needs the memory.
        remedy: what to do.

    Raises:
        InvalidArgumentError: in place of MemoryError and torch.OutOfMemoryError.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise InvalidArgumentError(argument, rows.shape[0], limit, remedy) from error


@contextmanager
def named_for_queries(q: torch.Tensor) -> Iterator[None]:
    """The same for a scoring call."""
    limit = "the call needs more memory for them than there is"
    with named_out_of_memory("q.shape[0]", q, limit, "score fewer queries at a time"):
        yield
