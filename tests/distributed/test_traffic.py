"""The bytes that ranks send each other are those of the formula, counted where they are handed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from indexer import IndexerConfig
from indexer.distributed.ranks import HEADER_BYTES, candidate_bytes, share_bytes
from tests.benchmarks.scaling_model import table
from tests.distributed.test_same_bytes import values
from tests.support import rank_calls
from tests.support.rank_pool import Rank, RankPool

TOKENS, QUERIES = 1500, 37
PERFORMANCE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"


def counted(rank: Rank, name: str, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Bytes given to torch.distributed in a call, and those that the scorer counts, sent and received."""
    scorer = rank.scorers[name]
    before = (scorer.bytes_sent, scorer.bytes_received)
    handed: list[int] = []
    isend, all_gather = dist.isend, dist.all_gather_into_tensor

    def counting(tensor: torch.Tensor, *rest: Any, **named: Any) -> Any:
        handed.append(tensor.nbytes)
        return isend(tensor, *rest, **named)

    def counting_all(gathered: torch.Tensor, tensor: torch.Tensor, **named: Any) -> Any:
        handed.append((scorer._ranks.size - 1) * tensor.nbytes)
        return all_gather(gathered, tensor, **named)

    there = [value.to(scorer.device) if isinstance(value, torch.Tensor) else value for value in arguments]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", counting)
        patch.setattr(dist, "all_gather_into_tensor", counting_all)
        getattr(scorer, method)(*there, **options)
    return sum(handed), scorer.bytes_sent - before[0], scorer.bytes_received - before[1]


@pytest.mark.parametrize(("ranks", "groups"), [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2)])
def test_bytes_of_every_call(pool: RankPool, ranks: int, groups: int) -> None:
    check_bytes_of_every_call(pool, IndexerConfig(4, 16, backend="cpu"), ranks, groups)


def check_bytes_of_every_call(pool: RankPool, config: IndexerConfig, ranks: int, groups: int) -> None:
    """Fail unless every call sends and receives what the formula says."""
    name = f"traffic {ranks} {groups} {config}"
    pool.run(rank_calls.make, name, config, ranks, groups, ranks=range(ranks))
    keys, queries = (torch.from_numpy(values(0, *shape)) for shape in ((TOKENS, 128), (QUERIES, 4, 128)))
    rows = QUERIES * 4 // groups
    columns = -(-TOKENS // 128)

    def check(each: int, method: str, *arguments: Any, **options: Any) -> None:
        total = (ranks - 1) * each
        outcomes = pool.run(counted, name, method, arguments, options, ranks=range(ranks))
        assert outcomes == [(total, total, total)] * ranks, method

    check(HEADER_BYTES, "add_sequence")
    check(HEADER_BYTES, "append_keys", 0, keys)
    for topk in (1, 16, 64):
        each = HEADER_BYTES + rows * candidate_bytes(topk)
        check(each, "score", queries, [0], return_scores=False, topk=topk)
    check(HEADER_BYTES + rows * share_bytes(columns, ranks // groups), "score", queries, [0])
    check(HEADER_BYTES, "fork_sequence", 0)
    check(HEADER_BYTES, "free_sequence", 0)


def test_the_formula() -> None:
    assert HEADER_BYTES == 256
    assert candidate_bytes(16) == 128
    assert share_bytes(8192, 8) == 4096
    assert share_bytes(12, 5) == 12


def test_the_prediction_that_the_documents_show_is_the_models() -> None:
    assert "\n".join(table()) in PERFORMANCE.read_text()
