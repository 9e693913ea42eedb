"""Which layout of the gfx950 decode scorer is faster: pages in registers, or staged in LDS. Needs the GPU.

    python -m tests.benchmarks.bench_decode_layouts [--rounds N]

Cold: calls rotate over block tables of a cache larger than twice the last-level cache. A time is the median
of the rounds between two events. Both layouts must give the same bits. The winner belongs into
:class:`kernel.backends.flydsl.score_decode_launch.DecodeLauncher` as its default.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from kernel.backends.flydsl.decode_layout import LAYOUTS, Layout
from kernel.backends.flydsl.rocm import RocmDevice
from kernel.backends.flydsl.score_decode_launch import DecodeLauncher, DeviceRequests
from kernel.batch import Request, ScoreBatch
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, PAGE_BYTES
from kernel.nvfp4 import build_lut
from kernel.plan import MAXIMA_BLOCKS

CALLS = ((32, 1, 131_072), (32, 4, 131_072), (1, 1, 524_288), (1, 1, 131_072), (128, 1, 8_192))
"""Requests, queries of each, keys of each."""
HEADS = 4
COLD_BYTES = 2 * 256 * 2**20
"""Twice the last-level cache."""


def call(requests: int, queries: int, keys: int, device: torch.device) -> list[ScoreBatch]:
    """The same call over several block tables, together larger than ``COLD_BYTES``."""
    blocks = keys // BLOCK_TOKENS
    tables = -(-COLD_BYTES // (requests * blocks * PAGE_BYTES)) + 1
    num_pages = tables * requests * blocks
    pages = torch.randint(0, 256, (num_pages, PAGE_BYTES), dtype=torch.uint8, device=device)
    ids = torch.randperm(num_pages, device=device).to(torch.int32).view(tables, requests, blocks)
    q = torch.randint(0, 0x78, (requests * queries, HEADS, HEAD_DIM), dtype=torch.uint8, device=device)
    rows = tuple(Request(row, row * queries, queries, keys) for row in range(requests))
    lut = build_lut(device)
    return [ScoreBatch(q.view(torch.float8_e4m3fn), pages, table, lut, rows, 0, 1) for table in ids]


def time_us(launcher: DecodeLauncher, batches: list[ScoreBatch], maxima: bool, rounds: int) -> float:
    """Microseconds of a launch, cold."""
    first = batches[0]
    shape = (HEADS, first.total_q, first.block_table.shape[1])
    scores = torch.empty(shape, device=first.q.device)
    groups = torch.empty((*shape[:2], -(-shape[2] // MAXIMA_BLOCKS)), device=first.q.device)
    requests = DeviceRequests.of(first.requests, first.q.device)
    times: list[float] = []
    for _ in range(rounds + 2):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        began, ended = events
        began.record()
        for batch in batches:
            launcher.launch(batch, requests, scores, groups if maxima else None, fill=False)
        ended.record()
        ended.synchronize()
        times.append(1000 * began.elapsed_time(ended) / len(batches))
    return statistics.median(times[2:])


def same_bits(launchers: dict[Layout, DecodeLauncher], batch: ScoreBatch) -> bool:
    """Whether the layouts agree."""
    found = []
    for launcher in launchers.values():
        scores = torch.zeros(HEADS, batch.total_q, batch.block_table.shape[1], device=batch.q.device)
        launcher(batch, scores)
        found.append(scores)
    return torch.equal(found[0].view(torch.int32), found[1].view(torch.int32))


def main() -> None:
    """Print a line for each call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds of each call")
    rounds = parser.parse_args().rounds
    device = RocmDevice(torch.device("cuda"))
    launchers = {layout: DecodeLauncher(device, layout) for layout in LAYOUTS}
    for requests, queries, keys in CALLS:
        batches = call(requests, queries, keys, device.torch_device)
        if not same_bits(launchers, batches[0]):
            raise SystemExit(f"the layouts disagree on {requests} x {queries} x {keys}")
        num_bytes = requests * keys // BLOCK_TOKENS * PAGE_BYTES
        for maxima in (False, True):
            times = [time_us(launcher, batches, maxima, rounds) for launcher in launchers.values()]
            shown = ", ".join(
                f"{layout} {us:.1f} us ({num_bytes / us / 1e6:.2f} TB/s)"
                for layout, us in zip(launchers, times)
            )
            print(f"{requests} x {queries} x {keys:,}{', with maxima' if maxima else ''}: {shown}")


if __name__ == "__main__":
    main()
