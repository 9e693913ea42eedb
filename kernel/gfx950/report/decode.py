"""Reports on a compiled decode scorer without a GPU, as an object and as JSON fields.

Its page loop scores four pages a trip. A small launch on the interpreter, whose split over the waves is
known, tells which instructions a trip issues; the trip's first block then tells its role:

    page      four blocks that every row sees whole and without sentinels
    group     the same, the last of a group of 16 blocks: its maximum is stored
    forced    some row's sentinel or end among them

The loop is the same in both layouts of page staging; what a page takes of the LDS is not. Results are not
read. Clocks and times are PREDICTIONS.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from kernel.backends.flydsl import geometry as geo
from kernel.backends.flydsl.geometry import DecodeArguments, Layout, packed
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, PAGE_BYTES
from kernel.gfx950.hazards import HazardDistance, hazard_distances
from kernel.gfx950.isa import row_of
from kernel.gfx950.launch import RunOptions, RunReport, run
from kernel.gfx950.memory import Memory
from kernel.gfx950.parse import parse_program
from kernel.gfx950.program import Kernel
from kernel.gfx950.report.model import (
    CLOCKS_PER_US,
    COMPUTE_UNITS,
    LDS_BYTES_PER_CLOCK,
    LDS_PASS_CLOCKS,
    MEMORY_BYTES_PER_US,
    SIMDS,
    Resources,
    Target,
    at_most,
    dma_bytes,
    natural_loops,
    no_spills,
    resources_of,
    vgprs,
    wait_states,
    waves,
)
from kernel.gfx950.report.prefill import LoopReport, Trip, UnknownLoopsError, loop_report, trips_of
from kernel.gfx950.report.timeline import MEMORY_CLOCKS, WORKGROUPS
from kernel.nvfp4 import build_lut
from kernel.plan import MAXIMA_BLOCKS

DECODE_ROLES = ("page", "group", "forced")
TRIP_BLOCKS = 4
MEMORY_PAGE_CLOCKS = PAGE_BYTES * COMPUTE_UNITS * CLOCKS_PER_US / MEMORY_BYTES_PER_US
"""Clocks of a CU for a page, as its share of the memory's rate allows."""
START_LATENCIES = 4
"""Memory latencies one behind the other before the first page is there: arguments, lengths, page id, page."""
SHAPES = ((32, 131_072), (1, 524_288))
"""Requests and their keys, as MiniMax-M3 is served, that times are predicted for."""

_GROUPS = 9
_BLOCKS = _GROUPS * MAXIMA_BLOCKS
_LOCAL_BLOCKS = 1
_SEQ_LEN = _BLOCKS * BLOCK_TOKENS - 50
_PAGES = 16


@dataclass(frozen=True)
class DecodeReport:
    """One compiled decode scorer."""

    name: str
    heads: int
    layout: Layout
    resources: Resources
    loops: tuple[LoopReport, ...]
    hazards: tuple[HazardDistance, ...]
    conflict_clocks: float
    """Clocks of a CU's LDS for a page's bank conflicts where its scale bytes are random; a prediction."""
    dma_clocks: float
    """Clocks of a CU's LDS to take a page's bytes from memory, which neither ``model_clocks`` nor the replay
    count; a prediction."""

    def loop(self, role: str) -> LoopReport:
        """The trip of a role."""
        return next(loop for loop in self.loops if loop.trip.role == role)

    def per_page(self, kind: str) -> float:
        """Instructions of a class for a page, over a whole group of 16."""
        trips = MAXIMA_BLOCKS // TRIP_BLOCKS
        page, group = (self.loop(role).classes.get(kind, 0) for role in ("page", "group"))
        return ((trips - 1) * page + group) / MAXIMA_BLOCKS

    @property
    def model_clocks(self) -> dict[str, float]:
        """Clocks of a CU for a page, by pipe; a prediction."""
        model = self.loop("page").model
        clocks = {"mfma": model.mfma, "valu": model.valu, "lds": model.lds}
        # The LDS serves the waves of all SIMDs, and is counted for all of them.
        return {pipe: count / TRIP_BLOCKS / SIMDS for pipe, count in clocks.items()}

    @property
    def predicted_clocks(self) -> float:
        """Clocks of a CU for a page where two waves a SIMD repeat the page trip; a prediction."""
        waves = WORKGROUPS * SIMDS
        return self.loop("page").prediction.clocks / (TRIP_BLOCKS * waves)

    def predicted_us(self, requests: int, keys: int) -> float:
        """Time of a call of whole blocks: the slower of memory and compute behind the start; a prediction."""
        pages = requests * keys / BLOCK_TOKENS
        memory = pages * PAGE_BYTES / MEMORY_BYTES_PER_US
        compute = pages * self.predicted_clocks / COMPUTE_UNITS / CLOCKS_PER_US
        return START_LATENCIES * MEMORY_CLOCKS / CLOCKS_PER_US + max(memory, compute)

    def fields(self) -> dict[str, Any]:
        """As JSON; counts are facts, everything that says clocks or predicted is a prediction."""
        return {
            "name": self.name,
            "heads": self.heads,
            "layout": self.layout,
            **asdict(self.resources),
            "loops": [loop.fields() for loop in self.loops],
            "page": {
                "valu": round(self.per_page("valu"), 2),
                "mfma": self.per_page("mfma"),
                "lds_read": self.per_page("lds_read"),
                "memory_loads": self.per_page("vmem_load"),
                "model_clocks": {pipe: round(clocks, 1) for pipe, clocks in self.model_clocks.items()},
                "lds_conflict_clocks": round(self.conflict_clocks, 1),
                "lds_dma_clocks": round(self.dma_clocks, 1),
                "predicted_clocks": round(self.predicted_clocks, 1),
                "memory_clocks": round(MEMORY_PAGE_CLOCKS, 1),
            },
            "calls": [
                {
                    "requests": requests,
                    "keys": keys,
                    "predicted_us": round(self.predicted_us(requests, keys), 1),
                }
                for requests, keys in SHAPES
            ],
            "hazards": [hazard.fields() for hazard in self.hazards],
        }


def report_decode(assembly: str, name: str, heads: int, layout: Layout) -> DecodeReport:
    """Analyse one decode scorer.

    Args:
        assembly: the compiler's text, metadata included.
        name: the kernel's symbol.
        heads: the index heads it was compiled for, H.
        layout: its page staging.

    Raises:
        InterpreterError: the kernel is wrong, or has an instruction that is not known.
        UnknownLoopsError: its loops are not those that the report knows.
        UnknownRateError: it has an instruction whose rate is not known.
    """
    report = _interpret(assembly, name, heads)
    kernel, extra_passes = report.kernel, report.extra_passes()
    trips = find_trips(report)
    page = next(trip for trip in trips if trip.role == "page").instructions(kernel)
    return DecodeReport(
        name,
        heads,
        layout,
        resources_of(kernel),
        tuple(loop_report(kernel, trip, extra_passes) for trip in trips),
        tuple(hazard_distances(kernel)),
        LDS_PASS_CLOCKS * sum(extra_passes.get(i.line, 0.0) for i in page) / TRIP_BLOCKS,
        sum(map(dma_bytes, page)) / LDS_BYTES_PER_CLOCK / TRIP_BLOCKS,
    )


def find_trips(report: RunReport) -> list[Trip]:
    """One trip of each role, the most frequent of its paths, in the order of ``ROLES``.

    Raises:
        UnknownLoopsError: there is no one loop of four pages, or its trips are not those of the split.
    """
    kernel = report.kernel
    mfmas = frozenset(at for at, i in enumerate(kernel.instructions) if row_of(i).kind == "mfma")
    found: dict[str, Counter[tuple[int, ...]]] = {role: Counter() for role in DECODE_ROLES}
    loops = [loop for loop in natural_loops(kernel) if loop.body & mfmas]
    for (_, wave), trace in sorted(report.traces.items()):
        paths = [
            path
            for path in trips_of(trace, loops)
            if sum(at in mfmas for at in path) == TRIP_BLOCKS * geo.M_TILES
        ]
        blocks = list(_first_blocks(wave))
        if len(paths) != len(blocks):
            raise UnknownLoopsError(f"{kernel.name}: wave {wave} made {len(paths)} trips, not {len(blocks)}")
        for path, block in zip(paths, blocks):
            found[_role(block)][path] += 1
    return [_most_frequent(kernel, role, found[role]) for role in DECODE_ROLES]


def _most_frequent(kernel: Kernel, role: str, paths: Counter[tuple[int, ...]]) -> Trip:
    if not paths:
        raise UnknownLoopsError(f"{kernel.name}: no wave took a trip of role {role}")
    ((path, _),) = paths.most_common(1)
    return Trip(role, TRIP_BLOCKS, path, paths.total(), len(paths))


def _first_blocks(wave: int) -> Iterator[int]:
    """First blocks of a wave's trips: each wave has an equal share of the groups."""
    first, end = (MAXIMA_BLOCKS * (share * _GROUPS // geo.WAVES) for share in (wave, wave + 1))
    yield from range(first, end, TRIP_BLOCKS)


def _role(block: int) -> str:
    if block + TRIP_BLOCKS > _BLOCKS - _LOCAL_BLOCKS:
        return "forced"
    return "page" if (block + TRIP_BLOCKS) % MAXIMA_BLOCKS else "group"


def _interpret(assembly: str, name: str, heads: int) -> RunReport:
    """One workgroup, one request of one query, group maxima wanted."""
    random = np.random.default_rng(0)
    arrays = {
        "q": random.integers(0, 0x7F, (1, heads, HEAD_DIM)).astype(np.uint8),
        "pages": random.integers(0, 256, (_PAGES, PAGE_BYTES)).astype(np.uint8),
        "lut": build_lut(torch.device("cpu")).numpy(),
        "table": (np.arange(_BLOCKS, dtype=np.int32) * 5) % _PAGES,
        "requests": np.array([0, 0, 1, _SEQ_LEN], np.int32),
    }
    scores = np.empty((heads, 1, _BLOCKS), np.float32)
    maxima = np.empty((heads, 1, _GROUPS), np.float32)
    memory = Memory()
    q_at, pages_at, lut_at, table_at, requests_at = memory.addresses_of(arrays)
    scores_at, maxima_at = memory.addresses_of({"scores": scores, "maxima": maxima}, outputs=True)
    table_rows, query_starts, query_ends, seq_lens = (requests_at + 4 * field for field in range(4))
    arguments = DecodeArguments(
        q=q_at, pages=pages_at, page_stride=PAGE_BYTES, lut=lut_at,
        scores=scores_at, score_head_stride=_BLOCKS, score_token_stride=_BLOCKS,
        maxima=maxima_at, maxima_head_stride=_GROUPS, maxima_token_stride=_GROUPS,
        table=table_at, table_rows=table_rows,
        query_starts=query_starts, query_ends=query_ends, seq_lens=seq_lens, num_blocks=0,
        table_height=1, table_width=_BLOCKS, batch=1, total_q=1, num_pages=_PAGES,
        max_query_len=1, max_seq_len=_BLOCKS * BLOCK_TOKENS,
        fill_end=0, init_blocks=0, local_blocks=_LOCAL_BLOCKS, log_workgroups=0,
    )  # fmt: skip
    return run(
        parse_program(assembly), name, grid=(1, 1, 1), block=(geo.THREADS, 1, 1), kernargs=packed(arguments),
        memory=memory, options=RunOptions(trace=True, bank_conflicts=True),
    )  # fmt: skip


# ---- Targets ----

MAX_PAGE_VALU: dict[Layout, float] = {"registers": 304.5, "staged": 306.5}
"""Vector instructions of a page and wave. Staged, a trip of four pages has 9 more: 8 copies, 1 address."""
MAX_PAGE_LOADS: dict[Layout, float] = {"registers": 10.0, "staged": 9.0}
"""Each of 1,024 bytes; in registers the scales are two of 512."""
MAX_CLOCKS_OF_MEMORY = 0.5
"""Clocks of a page on a CU, of those that the memory's rate allows."""


def check_decode_targets(report: DecodeReport) -> list[Target]:
    """Every target, met or not."""
    has = report.resources
    valu, loads = report.per_page("valu"), report.per_page("vmem_load")
    model = max(report.model_clocks.values()) / MEMORY_PAGE_CLOCKS
    predicted = report.predicted_clocks / MEMORY_PAGE_CLOCKS
    return [
        vgprs(has),
        no_spills(has),
        waves(has),
        wait_states(report.hazards),
        at_most("page: VALU", MAX_PAGE_VALU[report.layout], valu, ".2f"),
        at_most("page: loads", MAX_PAGE_LOADS[report.layout], loads, ".2f"),
        at_most("page: model clocks of memory's (prediction)", MAX_CLOCKS_OF_MEMORY, model, ".3f"),
        at_most("page: replayed clocks of memory's (prediction)", MAX_CLOCKS_OF_MEMORY, predicted, ".3f"),
    ]
