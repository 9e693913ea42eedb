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
            if isinstance(tensor, torch.Tensor):
                self.storage_bytes.add(tensor.untyped_storage().nbytes())
        return result
