"""A GPU and the triton backend on it, or the reason why there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from kernel.backends import registry

if TYPE_CHECKING:
    from kernel.backends.triton.backend import TritonBackend


@pytest.fixture(params=["exact", "fast"])
def gpu_backend(request: pytest.FixtureRequest) -> TritonBackend:
    """The triton backend on a GPU in both precisions, or a skip that says why not."""
    status = registry.status("triton")
    if not status.usable:
        pytest.skip(f"backend triton: {status.reason}")
    return cast("TritonBackend", registry.create("triton", precision=request.param))
