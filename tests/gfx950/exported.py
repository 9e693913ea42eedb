"""A kernel library of the kernels that tests launch, exported once in a test session."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from kernel.backends.flydsl.kernel_library import FILE_NAME
from kernel.backends.flydsl.library_export import export_library

KERNELS = ("score_prefill_h4", "score_decode_h4", "topk_scan_k16", "topk_group_k16_b1024", "insert_bf16")


def library(session: pytest.TempPathFactory) -> Path:
    """The library's path; workers of a session share what one of them exported."""
    folder = session.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with (folder / "kernel_library.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = folder / "kernel_library" / FILE_NAME
        if not path.is_file():
            assert export_library(path.parent, KERNELS) == (path, list(KERNELS))
    return path
