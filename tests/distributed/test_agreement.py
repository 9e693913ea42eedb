"""Ranks that were configured differently are told which argument it is; equal values of two types agree."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from indexer import IndexerConfig
from indexer.distributed import DistributedIndexScorer
from indexer.distributed.ranks import HEADER_BYTES, Agreement, candidate_bytes, share_bytes
from indexer.distributed.share import HeldRequest, ShareScorer, Stripe
from indexer.pipeline import ScoreOptions
from kernel.backends import registry
from kernel.batch import Request
from kernel.errors import InvalidArgumentError, RankDisagreementError
from kernel.nvfp4 import build_lut
from server.ranks import rank_config
from tests.benchmarks.scaling_model import table
from tests.distributed.test_same_bytes import values
from tests.support import process_group
from tests.support.process_group import Rank, RankPool, thread_ranks_of

CONFIG = IndexerConfig(4, 8, backend="cpu")


def made(options: Sequence[dict[str, Any]]) -> list[RankDisagreementError | None]:
    """What making a scorer raises on each rank."""

    def make(rank: int, group: Any) -> RankDisagreementError | None:
        fields = {**vars(CONFIG), **options[rank]}
        own = {name: fields.pop(name) for name in ("head_groups", "deadline_seconds") if name in fields}
        try:
            DistributedIndexScorer(IndexerConfig(**fields), group, **own)
        except RankDisagreementError as error:
            return error
        return None

    return thread_ranks_of(len(options), make)


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("num_pages", (8, 9)),
        ("head_groups", (1, 2)),
        ("deadline_seconds", (30, 30.5)),
        ("order", ("score", "block")),
        ("precision", ("exact", "fast")),
        ("backend", ("cpu", "reference")),
        ("init_blocks", (0, 10**9 - 1)),
    ],
)
def test_the_argument_that_differs_is_named(argument: str, values: tuple[object, object]) -> None:
    for error in made([{argument: value} for value in values]):
        assert error is not None
        assert error.ranks == (1,)
        reason = f"({argument} = {values[1]!r}, and {values[0]!r} on rank 0)"
        assert error.reason == f"was configured differently {reason}"
        assert error.remedy == f"pass the same {argument} on every rank"


def test_every_argument_that_differs_is_named_with_a_rank() -> None:
    for error in made([{}, {"num_pages": 9}, {}, {"order": "block"}]):
        assert error is not None
        assert error.ranks == (1, 3)
        assert (
            "rank 1: num_pages = 9, and 8 on rank 0; rank 3: order = 'block', and 'score' on rank 0"
            in str(error)
        )
        assert error.remedy == "pass the same num_pages and order on every rank"


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("head_groups", (np.int64(1), 1)),
        ("num_pages", (np.int32(8), 8)),
        ("deadline_seconds", (30, 30.0)),
        ("deadline_seconds", (np.float64(1.5), 1.5)),
        ("backend", ("auto", "cpu")),
    ],
)
def test_equal_values_agree(argument: str, values: tuple[object, object]) -> None:
    if argument == "backend" and torch.cuda.is_available():
        values = ("cpu", "cpu")  # auto is another one there
    assert made([{argument: value} for value in values]) == [None, None]


def test_values_too_long_for_a_header_still_disagree() -> None:
    def settle(rank: int, group: Any) -> str:
        agreement = Agreement(group, {"name": "x" * 300 + str(rank)}, lambda: 0)
        with pytest.raises(RankDisagreementError) as caught, agreement.settled("construct", changes=True):
            pass
        return str(caught.value)

    message = "rank 1: was configured differently; pass the same arguments on every rank"
    assert thread_ranks_of(2, settle) == [message] * 2


# What each rank of a sidecar is built from.


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


# A rank's part of a call costs the device as many operations for many short requests as for few.


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(requests: int) -> int:
    """Operations of one piece of so many decode requests of 20 blocks, beside the backend's own."""
    call_requests = tuple(Request(row, row, 1, 2500) for row in range(requests))
    options = ScoreOptions(4, "score", 2, 2, False)
    held = [HeldRequest(request, 0, Stripe(1, 2), array("i", range(10))) for request in call_requests]
    scorer = ShareScorer(registry.create("cpu"), torch.zeros(10, 9216, dtype=torch.uint8), build_lut("cpu"))
    q = torch.zeros(requests, 1, 128).to(torch.float8_e4m3fn)
    counting = Counting()
    with counting:
        pieces = list(scorer.pieces(q, held, options))
    assert len(pieces) == 1
    return counting.count


def test_operations_do_not_grow_with_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernel.backends.cpu.CpuBackend.score", lambda *_: None)
    assert operations(100) == operations(3)


# The bytes that ranks send each other are those of the formula, counted where they are handed over.

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
    pool.run(process_group.make, name, config, ranks, groups, ranks=range(ranks))
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
