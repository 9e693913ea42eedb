"""Reports on a compiled prefill scorer without a GPU, as an object and as JSON fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernel.backends.flydsl import geometry as geo
from kernel.backends.flydsl.geometry import PrefillArguments, packed
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, PAGE_BYTES
from kernel.errors import IndexerError
from kernel.gfx950.hazards import HazardDistance, hazard_distances
from kernel.gfx950.isa import row_of
from kernel.gfx950.launch import RunOptions, RunReport, run
from kernel.gfx950.memory import Memory
from kernel.gfx950.parse import parse_program
from kernel.gfx950.program import Instruction, Kernel, Program
from kernel.gfx950.report.model import (
    Loop,
    ModelClocks,
    Resources,
    Target,
    at_most,
    count_classes,
    model_clocks,
    natural_loops,
    no_spills,
    resources_of,
    vgprs,
    wait_states,
    waves,
)
from kernel.gfx950.report.timeline import Prediction, predict, utilisation_beside
from kernel.nvfp4 import build_lut
from kernel.page import blocks_of
from kernel.plan import MAXIMA_BLOCKS, STORE_BLOCKS, TILE_ROWS, WorkItem, pack_items

# ---- A small launch on the interpreter: the paths that waves take, LDS bank conflicts ----
#
# The work items are tiles of 512 query rows: one whose first query starts a block, which meets groups of
# fully visible blocks, blocks seen whole, its diagonal and, with few heads, blocks that only later waves see;
# and tiles that start inside a block, whose diagonals the compiler could not foresee. Results are not read.

POSITIONS = (10 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 8, 2 * BLOCK_TOKENS + 64)
"""Positions of the tiles' first queries."""
_PAGES = 16
_THREADS = 256


@dataclass(frozen=True)
class InterpretedRun:
    """What the interpreter counted, and the work item of each workgroup."""

    report: RunReport
    items: tuple[WorkItem, ...]
    num_heads: int


def interpret(program: Program, kernel_name: str, num_heads: int) -> InterpretedRun:
    """Run one tile at each of ``POSITIONS``, with traces and bank conflicts.

    Args:
        program: holds the kernel.
        kernel_name: the prefill scorer for ``num_heads``.
        num_heads: index heads, H.

    Raises:
        InterpreterError: the kernel is wrong.
    """
    random = np.random.default_rng(0)
    tokens = TILE_ROWS // num_heads
    columns = max(blocks_of(position + tokens) for position in POSITIONS)
    items = tuple(
        WorkItem(0, k * tokens, tokens, position, 0, blocks_of(position + tokens), columns)
        for k, position in enumerate(POSITIONS)
    )
    queries = random.integers(0, 0x7F, (len(items) * tokens, num_heads, HEAD_DIM)).astype(np.uint8)
    pages = random.integers(0, 256, (_PAGES, PAGE_BYTES)).astype(np.uint8)
    table = (np.arange(columns, dtype=np.int32) * 5) % _PAGES
    scores = np.empty((num_heads, len(items) * tokens, columns), np.float32)
    maxima = np.empty((*scores.shape[:2], -(-columns // MAXIMA_BLOCKS)), np.float32)
    lut = build_lut(torch.device("cpu")).numpy()
    work = np.frombuffer(pack_items(items), np.int32).copy()

    memory = Memory()
    q_at, pages_at, lut_at, table_at, work_at = memory.addresses_of(
        {"q": queries, "pages": pages, "lut": lut, "table": table, "work": work}
    )
    scores_at, maxima_at = memory.addresses_of({"scores": scores, "maxima": maxima}, outputs=True)
    arguments = PrefillArguments(
        q=q_at, pages=pages_at, page_stride=PAGE_BYTES, lut=lut_at,
        scores=scores_at, score_head_stride=scores[0].size, score_token_stride=columns,
        maxima=maxima_at, maxima_head_stride=maxima[0].size, maxima_token_stride=maxima.shape[2],
        table=table_at, work=work_at, num_pages=_PAGES, score_blocks=columns, init_blocks=0, local_blocks=1,
    )  # fmt: skip
    report = run(
        program, kernel_name, grid=(len(items), 1, 1), block=(_THREADS, 1, 1), kernargs=packed(arguments),
        memory=memory, options=RunOptions(trace=True, bank_conflicts=True),
    )  # fmt: skip
    return InterpretedRun(report, items, num_heads)


# ---- Loops by role, found by what waves do and not by how the code looks ----
#
# A block costs a wave exactly one barrier, so a trip round a loop that passes barriers scores as many blocks
# as it passes. An interpreted run tells which instructions each trip of each wave issued; counting blocks
# tells which of them a trip scored, and the wave's query positions then tell its role:
#
#     unmasked    a trip of four blocks: seen whole, without sentinels
#     whole       a trip of one block that every row of the wave sees whole
#     diagonal    of one that the wave's rows see in part, where the tile starts at a block boundary
#     unaligned   the same where it does not
#     later       of one after all of the wave's rows
#
# What does not fit is an error: the kernel's structure has changed, and this file must follow.

ROLES = ("unmasked", "whole", "diagonal", "unaligned", "later")


class UnknownLoopsError(IndexerError, RuntimeError):
    """The kernel's loops are not those that the report knows."""


@dataclass(frozen=True)
class Trip:
    """What a wave issues in one trip of a role."""

    role: str
    blocks: int
    """Blocks scored."""
    path: tuple[int, ...]
    """Indices of the kernel's instructions, in order."""
    seen: int
    """Trips of the role in the run, whichever their paths."""
    paths: int
    """Different paths among them."""

    def instructions(self, kernel: Kernel) -> list[Instruction]:
        """The instructions in the order they were issued."""
        return [kernel.instructions[at] for at in self.path]


def find_trips(run: InterpretedRun) -> list[Trip]:
    """One trip of each role, in the order of ``ROLES``.

    Of a role's paths the most frequent one; of ``unaligned`` trips, which differ by position, the one with
    the most model clocks.

    Raises:
        UnknownLoopsError: a role is missing, a path has two roles, or the loops are not as described above.
    """
    kernel = run.report.kernel
    barriers = frozenset(at for at, i in enumerate(kernel.instructions) if row_of(i).kind == "barrier")
    loops = [loop for loop in natural_loops(kernel) if loop.body & barriers]
    found: dict[str, Counter[tuple[int, ...]]] = {role: Counter() for role in ROLES}
    for (workgroup, wave), trace in sorted(run.report.traces.items()):
        item = run.items[workgroup]
        block = item.first_block
        for path in trips_of(trace, loops):
            blocks = sum(at in barriers for at in path)
            if blocks:
                found[_role(item, wave, run.num_heads, block, blocks)][path] += 1
                block += blocks
        if block != item.end_block:
            raise UnknownLoopsError(
                f"{kernel.name}: wave {wave} of workgroup {workgroup} passed {block} blocks, not "
                f"{item.end_block}"
            )
    _check_roles(kernel, found)
    return [_representative(kernel, role, found[role]) for role in ROLES]


def trips_of(trace: npt.NDArray[np.int32], loops: list[Loop]) -> Iterator[tuple[int, ...]]:
    """The trips of one wave round each of the loops, outer ones first; without those of the loops inside."""
    innermost = np.full(int(trace.max()) + 1, -1)
    for number, loop in enumerate(loops):
        body = np.array(sorted(loop.body))
        innermost[body[body < innermost.size]] = number
    headers = np.array([loop.header for loop in loops])
    where = innermost[trace]
    # A trip begins at its loop's header and ends where the loop, or one inside it, is entered or left.
    edges = np.flatnonzero(np.diff(where, prepend=-2) != 0)
    starts = np.flatnonzero(np.isin(trace, headers))
    cuts = np.union1d(edges, starts)
    for first, last in zip(cuts, [*cuts[1:], trace.size]):
        if where[first] >= 0 and trace[first] == headers[where[first]]:
            yield tuple(trace[first:last].tolist())


def _role(item: WorkItem, wave: int, num_heads: int, block: int, blocks: int) -> str:
    """By the positions of the wave's rows: its N-tiles lie 16 tokens apart
    (:mod:`kernel.backends.flydsl.prefill`)."""
    tokens = geo.MFMA_ROWS // num_heads
    first = item.position + wave // num_heads * BLOCK_TOKENS + wave % num_heads * tokens
    last = first + geo.WAVE_TOKENS - geo.MFMA_ROWS + tokens - 1
    whole = (block + blocks) * BLOCK_TOKENS - 1 <= first
    if blocks == STORE_BLOCKS and whole:
        return "unmasked"
    if blocks != 1:
        raise UnknownLoopsError(
            f"a trip of a wave at position {first} scored {blocks} blocks from block {block}"
        )
    if whole:
        return "whole"
    if block * BLOCK_TOKENS > last:
        return "later"
    return "unaligned" if item.position % BLOCK_TOKENS else "diagonal"


def _check_roles(kernel: Kernel, found: dict[str, Counter[tuple[int, ...]]]) -> None:
    role_of: dict[tuple[int, ...], str] = {}
    for role, paths in found.items():
        if not paths:
            raise UnknownLoopsError(f"{kernel.name}: no wave took a trip of role {role}")
        for path in paths:
            if role_of.setdefault(path, role) != role:
                raise UnknownLoopsError(f"{kernel.name}: one path is both {role_of[path]} and {role}")


def _representative(kernel: Kernel, role: str, paths: Counter[tuple[int, ...]]) -> Trip:
    def weight(path: tuple[int, ...]) -> tuple[int, int]:
        cost = model_clocks([kernel.instructions[at] for at in path]).most if role == "unaligned" else 0
        return cost, paths[path]

    blocks = STORE_BLOCKS if role == "unmasked" else 1
    return Trip(role, blocks, max(paths, key=weight), paths.total(), len(paths))


@dataclass(frozen=True)
class LoopReport:
    """One trip of a role, of one wave."""

    trip: Trip
    classes: dict[str, int]
    """Instructions by class; facts."""
    nop_states: int
    """Wait states that ``s_nop`` fills."""
    model: ModelClocks
    prediction: Prediction
    beside_unmasked: float | None
    """Predicted utilisation where the other workgroup is in its unmasked loop; for diagonals only, which
    rarely run side by side."""

    def fields(self) -> dict[str, Any]:
        """As JSON: counts are facts, everything that says clocks, model or predicted is a prediction."""
        count = self.classes.get
        return {
            "role": self.trip.role,
            "blocks": self.trip.blocks,
            "instructions": len(self.trip.path),
            "mfma": count("mfma", 0),
            "valu": count("valu", 0),
            "salu": count("salu", 0),
            "branches": count("branch", 0),
            "lds_read": count("lds_read", 0),
            "lds_write": count("lds_write", 0),
            "memory_loads": count("vmem_load", 0),
            "memory_stores": count("vmem_store", 0),
            "scalar_loads": count("smem", 0),
            "waits": count("wait", 0),
            "barriers": count("barrier", 0),
            "nops": count("nop", 0),
            "nop_states": self.nop_states,
            "model_clocks": {"mfma": self.model.mfma, "valu": self.model.valu, "lds": self.model.lds},
            "bound": self.model.bound,
            "mfma_share": round(self.model.mfma_share, 4),
            "predicted_utilisation": round(self.prediction.utilisation, 4),
            "predicted_utilisation_lowest": round(self.prediction.lowest, 4),
            "predicted_utilisation_highest": round(self.prediction.highest, 4),
            "predicted_utilisation_beside_unmasked": (
                None if self.beside_unmasked is None else round(self.beside_unmasked, 4)
            ),
            "predicted_clocks": round(self.prediction.clocks),
            "predicted_stall_clocks": {
                reason: round(clocks) for reason, clocks in self.prediction.stalls.items() if clocks >= 1
            },
            "interpreted_trips": self.trip.seen,
            "interpreted_paths": self.trip.paths,
        }


@dataclass(frozen=True)
class KernelReport:
    """One compiled kernel."""

    name: str
    heads: int
    resources: Resources
    loops: tuple[LoopReport, ...]
    hazards: tuple[HazardDistance, ...]
    run: InterpretedRun

    def loop(self, role: str) -> LoopReport:
        """The loop of a role."""
        return next(loop for loop in self.loops if loop.trip.role == role)

    def fields(self) -> dict[str, Any]:
        """As JSON; ``interpreted`` are counts of a run on a CPU."""
        return {
            "name": self.name,
            "heads": self.heads,
            **asdict(self.resources),
            "loops": [loop.fields() for loop in self.loops],
            "hazards": [hazard.fields() for hazard in self.hazards],
            "interpreted": {
                "workgroups": self.run.report.workgroups,
                "blocks": sum(item.end_block - item.first_block for item in self.run.items),
                "instructions": self.run.report.instructions,
                "by_class": self.run.report.by_class(),
                "lds": [
                    {"mnemonic": mnemonic, "accesses": accesses, "extra_passes": extra}
                    for mnemonic, (accesses, extra) in self.run.report.lds_traffic().items()
                ],
            },
        }


def loop_report(
    kernel: Kernel, trip: Trip, extra_passes: Mapping[int, float], beside: Sequence[int] | None = None
) -> LoopReport:
    """Count a trip and predict its clocks.

    Args:
        kernel: whose trip it is.
        trip: one trip of a role.
        extra_passes: mean extra LDS passes of an access, by assembly line.
        beside: another trip, which the other workgroup repeats in a second prediction.
    """
    instructions = trip.instructions(kernel)
    nops = [i for i in instructions if row_of(i).kind == "nop"]
    return LoopReport(
        trip,
        dict(count_classes(instructions)),
        sum(int(i.operands[0].number) + 1 for i in nops),
        model_clocks(instructions),
        predict(kernel, trip.path, extra_passes),
        None if beside is None else utilisation_beside(kernel, trip.path, beside, extra_passes),
    )


def report_kernel(assembly: str, name: str, heads: int) -> KernelReport:
    """Analyse one prefill scorer.

    Args:
        assembly: the compiler's text, metadata included.
        name: the kernel's symbol.
        heads: the index heads it was compiled for, H.

    Raises:
        InterpreterError: the kernel is wrong, or has an instruction that is not known.
        UnknownLoopsError: its loops are not those that the report knows.
        UnknownRateError: it has an instruction whose rate is not known.
    """
    program = parse_program(assembly)
    kernel = program.kernels[name]
    run = interpret(program, name, heads)
    extra_passes = run.report.extra_passes()

    trips = find_trips(run)
    unmasked = next(trip for trip in trips if trip.role == "unmasked")

    def loop(trip: Trip) -> LoopReport:
        beside = unmasked.path if trip.role in ("diagonal", "unaligned") else None
        return loop_report(kernel, trip, extra_passes, beside)

    return KernelReport(
        name,
        heads,
        resources_of(kernel),
        tuple(loop(trip) for trip in trips),
        tuple(hazard_distances(kernel)),
        run,
    )


# ---- Targets ----

MAX_LDS_BYTES = 40 * 1024
MAX_UNMASKED_VALU = 845
"""Vector instructions of four blocks and a wave."""
MIN_UNMASKED_UTILISATION = 0.97
MAX_DIAGONAL_CLOCKS = 1.06
"""Model clocks of a diagonal block, of the MFMA clocks of a whole one."""
MIN_DIAGONAL_UTILISATION = 0.9


def check_targets(report: KernelReport) -> list[Target]:
    """Every target, met or not."""
    has, whole = report.resources, report.loop("whole")
    unmasked, diagonal = report.loop("unmasked"), report.loop("diagonal")
    valu, bound = unmasked.classes["valu"], unmasked.model.bound
    ratio = diagonal.model.most / whole.model.mfma
    return [
        vgprs(has),
        no_spills(has),
        at_most("LDS", MAX_LDS_BYTES, has.lds_bytes, unit=" B"),
        waves(has),
        wait_states(report.hazards),
        Target("unmasked: bound", "mfma", bound, bound == "mfma"),
        at_most("unmasked: VALU", MAX_UNMASKED_VALU, valu),
        _utilisation(unmasked, MIN_UNMASKED_UTILISATION),
        at_most("diagonal: clocks of a whole block's MFMA (prediction)", MAX_DIAGONAL_CLOCKS, ratio, ".2f"),
        _utilisation(diagonal, MIN_DIAGONAL_UTILISATION),
    ]


def _utilisation(loop: LoopReport, wanted: float) -> Target:
    found = loop.prediction.utilisation
    return Target(
        f"{loop.trip.role}: MFMA utilisation (prediction)",
        f">= {wanted}",
        f"{found:.3f}",
        found >= wanted,
        "" if found >= wanted else _reason(loop),
    )


def _reason(loop: LoopReport) -> str:
    """Where the clocks go that the matrix pipe is idle."""
    waits = ", ".join(
        f"{reason} {clocks:.0f}"
        for reason, clocks in loop.prediction.stalls.items()
        if reason != "matrix pipe" and clocks >= loop.prediction.clocks / 100
    )
    issue = 4 * (loop.classes["valu"] + loop.classes["mfma"])
    beside = ""
    if loop.beside_unmasked is not None:
        beside = f"; use {loop.beside_unmasked:.3f} beside a workgroup in its unmasked loop"
    return (
        f"a trip takes {loop.prediction.clocks:.0f} clocks where two waves' MFMAs take {2 * loop.model.mfma} "
        f"and their vector issue {2 * issue}; waits: {waits or 'nothing else'}{beside} (prediction)"
    )
