"""Which tensors torch operations make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class TensorSizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the storage bytes of every tensor that an operation gives back while the mode is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storage_bytes: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation and look at what it made."""
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self.storage_bytes.add(tensor.untyped_storage().nbytes())
        return result


# Memory that runs out at a chosen allocation.


class OutOfMemoryAt(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, an operation that would give back new memory raises torch.OutOfMemoryError.

    Args:
        allocation: the first that fails, counted from 0.
        for_good: whether every later one fails too.
    """

    def __init__(self, allocation: int, *, for_good: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._allocation, self._for_good = allocation, for_good
        self.allocations = 0
        self.failed: list[str] = []
        """Operations that failed."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation, or fail in its place."""
        schema = func._schema  # type: ignore[attr-defined]
        of_values = schema.name == "aten::lift_fresh"  # all that is seen of torch.tensor([...])
        if of_values or all(result.alias_info is None for result in schema.returns):
            number, self.allocations = self.allocations, self.allocations + 1
            if number == self._allocation or (self._for_good and number > self._allocation):
                self.failed.append(str(func))
                raise torch.OutOfMemoryError(f"injected at {func}")
        return func(*args, **(kwargs or {}))
