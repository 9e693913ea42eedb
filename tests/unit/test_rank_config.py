"""What each rank of a sidecar is built from."""

from __future__ import annotations

import pytest
import torch

from indexer import IndexerConfig
from kernel.errors import InvalidArgumentError
from server.ranks import rank_config


@pytest.mark.parametrize(("pages", "each"), [(12, 4), (13, 5), (1, 1)])
def test_pages_are_shared_out_rounded_up(pages: int, each: int) -> None:
    config = IndexerConfig(4, pages, backend="cpu")
    assert {rank_config(config, rank, 3).num_pages for rank in range(3)} == {each}
    assert rank_config(config, 2, 3).device is None


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.ranks.registry.resolve", lambda _: "triton")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    config = IndexerConfig(4, 12)
    assert [rank_config(config, rank, 3).device for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:2"]
    with pytest.raises(InvalidArgumentError, match="context_parallel = 4: 3 GPUs are there"):
        rank_config(config, 0, 4)
    with pytest.raises(InvalidArgumentError, match="device = cuda:1: must be 'cuda' for 3 ranks"):
        rank_config(IndexerConfig(4, 12, device="cuda:1"), 0, 3)
