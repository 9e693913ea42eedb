"""Calls of a million tokens over the ranks of this machine's GPUs, beside one scorer on one of them.

    torchrun --standalone --nproc-per-node 2 -m tests.benchmarks.bench_ranks [--precision fast] [--rounds N]

A time is the median over the rounds of the slowest rank's, from the call to the last of its work on the
GPU, host included. The ids of both must be the same, or it fails.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from indexer import DistributedIndexScorer, IndexerConfig, IndexScorer, ScoreResult
from kernel.contract import BLOCK_TOKENS, HEAD_DIM
from tests.benchmarks.scaling_model import CALLS, CONTEXT_BLOCKS, HEADS, TOPK, Work

STAGES = ("select", "exchange", "merge")


@dataclass(frozen=True)
class Timed:
    """A call's median times in milliseconds."""

    total: float
    stages: dict[str, float]
    block_ids: torch.Tensor


def timed(call: Callable[[], ScoreResult], rounds: int, device: torch.device) -> Timed:
    """Make a call so many times, all ranks at once, and once before."""
    result = call()
    totals, stages = [], []
    for _ in range(rounds):
        torch.cuda.synchronize(device)
        dist.all_reduce(torch.zeros(1))  # all begin at once; a barrier would take a GPU that it guesses
        began = time.perf_counter()
        result = call()
        torch.cuda.synchronize(device)
        totals.append(time.perf_counter() - began)
        stages.append([result.timings.get(stage, 0.0) for stage in STAGES])
    own = torch.tensor([[total, *each] for total, each in zip(totals, stages)], dtype=torch.float64)
    dist.all_reduce(own, dist.ReduceOp.MAX)
    medians = [1e3 * statistics.median(column) for column in own.T.tolist()]
    return Timed(medians[0], dict(zip(STAGES, medians[1:])), result.block_ids)


def filled(scorer: IndexScorer, sequences: int) -> list[int]:
    """Sequences of a million random keys each, the same on all ranks."""
    generator = torch.Generator(scorer.device).manual_seed(0)
    made = [scorer.add_sequence() for _ in range(sequences)]
    for seq in made:
        shape = (CONTEXT_BLOCKS * BLOCK_TOKENS, HEAD_DIM)
        keys = torch.randn(shape, generator=generator, device=scorer.device, dtype=torch.bfloat16)
        scorer.append_keys(seq, keys)
    return made


def line(work: Work, single: IndexScorer, ranks: DistributedIndexScorer, rounds: int) -> str:
    """A row of the table."""
    generator = torch.Generator(single.device).manual_seed(1)
    shape = (work.requests * work.query_len, HEADS, HEAD_DIM)
    queries = torch.randn(shape, generator=generator, device=single.device).to(torch.float8_e4m3fn)
    lens = [work.query_len] * work.requests

    def call(scorer: IndexScorer) -> ScoreResult:
        return scorer.score(
            queries, scorer.sequences[: work.requests], lens, return_scores=False, timings=True
        )

    one, all_ranks = (timed(partial(call, scorer), rounds, single.device) for scorer in (single, ranks))
    if not torch.equal(one.block_ids, all_ranks.block_ids):
        raise AssertionError(f"{work.name}: the ids over ranks differ")
    stages = " | ".join(f"{all_ranks.stages[stage]:.3g}" for stage in STAGES)
    speed_up = one.total / all_ranks.total
    return f"| {work.name} | {one.total:.3g} | {all_ranks.total:.3g} | {stages} | {speed_up:.2f} |"


def main() -> None:
    """Print the table on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", default="fast")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    dist.init_process_group("cpu:gloo,cuda:nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    most = max(work.requests for work in CALLS)

    def config(num_pages: int) -> IndexerConfig:
        return IndexerConfig(
            HEADS,
            num_pages,
            topk_blocks=TOPK,
            backend="triton",
            precision=arguments.precision,
        )

    single = IndexScorer(config(most * CONTEXT_BLOCKS))
    ranks = DistributedIndexScorer(config(-(-most * CONTEXT_BLOCKS // size)))
    for scorer in (single, ranks):
        filled(scorer, most)
    lines = [line(work, single, ranks, arguments.rounds) for work in CALLS]
    if rank == 0:
        print(
            f"| call ({arguments.precision}) | 1 GPU | {size} | {' | '.join(STAGES)} | speed-up |", flush=True
        )
        print("\n".join(["|---|---|---|---|---|---|---|", *lines]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
