"""``bench``: how fast a backend scores and selects on this machine."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from client.failure import one_line_errors
from client.options import BackendOption, JsonOption, Precision, PrecisionOption

if TYPE_CHECKING:
    import torch

    from indexer import IndexScorer

CACHE_BYTES = 128 << 20
"""Pages that a call's sets rotate over are together larger than the last-level caches it is likely to
meet."""


def bench(
    queries: Annotated[int, typer.Option(min=1, help="Query tokens of the request, its last ones.")] = 512,
    keys: Annotated[int, typer.Option(min=1, help="Tokens of its context.")] = 32_768,
    heads: Annotated[int, typer.Option(help="Index heads: 1, 2 or 4.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Calls that are timed, each on other pages.")] = 9,
    backend: BackendOption = "auto",
    precision: PrecisionOption = Precision.exact,
    as_json: JsonOption = False,
) -> None:
    """Time one call on random pages, cold: selection alone, and with scores.

    FLOP are counted from the blocks that a row sees. Compare backends on one machine only.
    """
    from client.terminal import output, status
    from indexer import IndexerConfig, IndexScorer

    with one_line_errors(as_json), status() as on_step:
        on_step("making pages")
        scorer = IndexScorer(IndexerConfig(heads, num_pages=0, backend=backend, precision=precision.value))
        calls = _calls(scorer, queries, keys, heads)
        seconds = {}
        for name, return_scores in (("select", False), ("score + top-k", True)):
            on_step(name)
            seconds[name] = _median_seconds(scorer, calls, rounds, return_scores)
    positions = range(max(keys - queries, 0), keys)
    flop = 2 * 128 * 128 * heads * sum(position // 128 + 1 for position in positions)
    found = {name: {"ms": 1e3 * value, "tflops": flop / value / 1e12} for name, value in seconds.items()}
    if as_json:
        shape = {"queries": queries, "keys": keys, "heads": heads, "rounds": rounds}
        print(
            json.dumps({"backend": scorer.backend, "precision": precision.value, **shape, "measured": found})
        )
        return
    console = output()
    console.print(
        f"{scorer.backend} ({precision.value}) on {scorer.device}: {queries} queries x {heads} heads x "
        f"{keys:,} keys, cold, median of {rounds}"
    )
    for name, measured in found.items():
        console.print(f"{name:>14}: {measured['ms']:.3f} ms, {measured['tflops']:.3g} TFLOP/s")


def _calls(scorer: IndexScorer, queries: int, keys: int, heads: int) -> list[tuple[torch.Tensor, ...]]:
    """Arguments of ``score_paged`` on disjoint sets of permuted pages of one cache."""
    import torch

    from kernel.contract import CODE_BYTES, HEAD_DIM, PAGE_BYTES, SCALE_BYTES

    blocks = -(-keys // 128)
    sets = -(-CACHE_BYTES // (blocks * PAGE_BYTES))
    generator = torch.Generator().manual_seed(0)
    pages = torch.randint(0, 256, (sets * blocks, PAGE_BYTES), dtype=torch.uint8, generator=generator)
    pages[:, CODE_BYTES:] = torch.randint(
        0x20, 0x48, (sets * blocks, SCALE_BYTES), dtype=torch.uint8, generator=generator
    )
    pages = pages.to(scorer.device)
    q = torch.randn(queries, heads, HEAD_DIM, generator=generator).to(torch.float8_e4m3fn).to(scorer.device)
    tables = torch.randperm(sets * blocks, generator=generator).to(torch.int32).view(sets, 1, blocks)
    lengths = [torch.tensor(values, dtype=torch.int32).to(scorer.device) for values in ([0, queries], [keys])]
    return [(q, pages, table.to(scorer.device), *lengths) for table in tables]


def _median_seconds(
    scorer: IndexScorer, calls: list[tuple[torch.Tensor, ...]], rounds: int, return_scores: bool
) -> float:
    """Median of the rounds' times, after one call that does not count."""
    wait = _waiter(scorer)
    times = []
    for counted in range(-1, rounds):
        q, pages, block_table, cu_seqlens_q, seq_lens = calls[counted % len(calls)]
        wait()
        start = time.perf_counter()
        scorer.score_paged(q, pages, block_table, cu_seqlens_q, seq_lens, return_scores=return_scores)
        wait()
        if counted >= 0:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _waiter(scorer: IndexScorer) -> Callable[[], None]:
    """A function that returns once the device has done what it was given."""
    import torch

    if scorer.device.type == "cuda":
        return lambda: torch.cuda.synchronize(scorer.device)
    return lambda: None
