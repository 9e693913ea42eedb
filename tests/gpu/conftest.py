"""A GPU and the triton backend on it, or the reason why there is none."""

from __future__ import annotations

import pytest
import torch

from kernel.backends import registry
from kernel.backends.base import Precision
from kernel.backends.triton.backend import TritonBackend


@pytest.fixture(params=["exact", "fast"])
def gpu_backend(request: pytest.FixtureRequest) -> TritonBackend:
    """The triton backend on a GPU, in both precisions."""
    return gpu(request.param)


def gpu(precision: Precision) -> TritonBackend:
    """The triton backend on a GPU, or a skip that says why not."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    backend = registry.create("triton", precision=precision)
    assert isinstance(backend, TritonBackend)
    return backend
