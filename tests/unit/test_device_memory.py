"""The memory of the host, and of the container around it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from indexer.cache import memory_bytes

HOST = torch.device("cpu")


def test_the_host_s_memory_is_at_most_what_the_system_reports() -> None:
    assert 0 < memory_bytes(HOST) <= psutil.virtual_memory().total


@pytest.mark.parametrize(("text", "limited"), [("12345\n", True), ("max\n", False), (None, False)])
def test_a_container_s_limit_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, limited: bool
) -> None:
    limit = tmp_path / "memory.max"
    if text is not None:
        limit.write_text(text)
    monkeypatch.setattr("indexer.cache._CONTAINER_LIMITS", (limit,))
    assert (memory_bytes(HOST) == 12345) == limited
    assert limited or memory_bytes(HOST) == psutil.virtual_memory().total
