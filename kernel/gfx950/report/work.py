"""Reports on kernels without a main loop: instructions and bytes per unit of work, and the time they predict.

Counts are facts of an interpreted run. Microseconds are a PREDICTION: vector instructions at their rate,
bytes at the memory's, the larger of the two, as if they overlapped wholly and nothing else took time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kernel.backends.flydsl.geometry import (
    THREADS,
    WAVES,
    InsertArguments,
    KeyType,
    TopkArguments,
    Variant,
    packed,
)
from kernel.batch import LOCAL_SCORE
from kernel.contract import BLOCK_TOKENS, HEAD_DIM, PAGE_BYTES
from kernel.gfx950.hazards import HazardDistance, hazard_distances
from kernel.gfx950.isa import lookup
from kernel.gfx950.launch import RunReport, run
from kernel.gfx950.memory import Memory
from kernel.gfx950.parse import parse_program
from kernel.gfx950.report.model import (
    CLOCKS_PER_US,
    COMPUTE_UNITS,
    MEMORY_BYTES_PER_US,
    SIMDS,
    VALU_CLOCKS,
    Resources,
    Target,
    at_most,
    no_spills,
    resources_of,
    wait_states,
)
from kernel.plan import MAXIMA_BLOCKS

CACHE_LINE_BYTES = 128
"""What a read from memory moves at least."""


@dataclass(frozen=True)
class Shape:
    """A shape that the kernel is reported for.

    Attributes:
        name: human-readable. unit: what is counted, such as "row". units: how many a call has.
        bytes_per_unit: bytes that must move for each, whole cache lines where less is read of them.
    """

    name: str
    unit: str
    units: int
    bytes_per_unit: int


@dataclass(frozen=True)
class Work:
    """A kernel at a shape.

    Attributes:
        classes: wave-instructions of a unit, by class.
        wide: those of its vector instructions that compare 64 bits, whose rate may be half.
    """

    shape: Shape
    classes: dict[str, float]
    wide: float

    @property
    def valu_us(self) -> float:
        """Time of the vector instructions on all SIMDs; a prediction."""
        clocks = self.classes.get("valu", 0.0) * VALU_CLOCKS * self.shape.units
        return clocks / (COMPUTE_UNITS * SIMDS * CLOCKS_PER_US)

    @property
    def memory_us(self) -> float:
        """Time of the bytes; a prediction."""
        return self.shape.bytes_per_unit * self.shape.units / MEMORY_BYTES_PER_US

    @property
    def predicted_us(self) -> float:
        """The longer of the two."""
        return max(self.valu_us, self.memory_us)

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "shape": self.shape.name,
            "unit": self.shape.unit,
            "units": self.shape.units,
            "bytes": self.shape.bytes_per_unit,
            **{name: round(count, 1) for name, count in sorted(self.classes.items())},
            "compares_of_64_bits": round(self.wide, 1),
            "predicted_valu_us": round(self.valu_us, 2),
            "predicted_memory_us": round(self.memory_us, 2),
            "predicted_us": round(self.predicted_us, 2),
        }


@dataclass(frozen=True)
class WorkReport:
    """One compiled kernel at each of its shapes."""

    name: str
    resources: Resources
    hazards: tuple[HazardDistance, ...]
    works: tuple[Work, ...]

    def fields(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "name": self.name,
            **asdict(self.resources),
            "works": [work.fields() for work in self.works],
            "hazards": [hazard.fields() for hazard in self.hazards],
        }


def work_of(shape: Shape, report: RunReport, units: int) -> Work:
    """The work of an interpreted run of ``units`` units."""
    wide = sum(
        count
        for name, count in report.by_mnemonic().items()
        if name.startswith("v_cmp") and lookup(name).wide
    )
    classes = {name: count / units for name, count in report.by_class().items()}
    return Work(shape, classes, wide / units)


def report_of(report: RunReport, works: tuple[Work, ...]) -> WorkReport:
    """The report on the kernel of a run."""
    kernel = report.kernel
    return WorkReport(kernel.name, resources_of(kernel), tuple(hazard_distances(kernel)), works)


# ---- Top-k: rows of random scores that end in a local block's sentinel ----

CALL_ROWS = 32_768
"""Rows of a prefill of 8,192 queries with 4 heads."""
_ROWS = 16


def shape(num_blocks: int, k: int, grouped: bool) -> Shape:
    """Rows of ``num_blocks`` blocks: maxima and ``k`` groups read, or all scores; a length; ids written."""
    cells = 4 * num_blocks
    if grouped and num_blocks > CACHE_LINE_BYTES // 4 * k:
        cells = 4 * -(-num_blocks // MAXIMA_BLOCKS) + CACHE_LINE_BYTES * k
    name = f"{CALL_ROWS:,} rows x {num_blocks:,} blocks, k = {k}"
    return Shape(name, "row", CALL_ROWS, cells + 4 + 4 * k)


def lengths(variant: Variant) -> tuple[int, ...]:
    """Blocks of the rows that a kernel is reported for: its longest, and some shorter ones."""
    if variant.most_groups is None:
        return (8192, 4096, 1024)
    most = variant.most_groups * MAXIMA_BLOCKS or 16_384
    return (most, most // 2, 300)


def report_topk(assembly: str, variant: Variant) -> WorkReport:
    """Run a kernel on rows of each of its :func:`lengths` and count.

    Args:
        assembly: the compiler's text, metadata included.
        variant: the kernel.

    Raises:
        InterpreterError: the kernel is wrong.
    """
    works: list[Work] = []
    for num_blocks in lengths(variant):
        found = _interpret(assembly, variant, num_blocks)
        grouped = variant.most_groups is not None
        works.append(work_of(shape(num_blocks, variant.best, grouped), found, _ROWS))
    return report_of(found, tuple(works))


def _interpret(assembly: str, variant: Variant, num_blocks: int) -> RunReport:
    k, grouped = variant.best, variant.most_groups is not None
    scores = np.random.default_rng(3).standard_normal((_ROWS, num_blocks)).astype(np.float32)
    scores[:, -1] = LOCAL_SCORE
    groups = -(-num_blocks // MAXIMA_BLOCKS)
    padded = np.full((_ROWS, groups * MAXIMA_BLOCKS), -np.inf, np.float32)
    padded[:, :num_blocks] = scores
    maxima = padded.reshape(_ROWS, groups, MAXIMA_BLOCKS).max(-1)
    row_lengths = np.full(_ROWS, num_blocks, np.int32)
    block_ids = np.empty((_ROWS, k), np.int32)
    memory = Memory()
    scores_at, maxima_at, lengths_at = memory.addresses_of(
        {"scores": scores, "maxima": maxima, "lengths": row_lengths}
    )
    (out,) = memory.addresses_of({"block ids": block_ids}, outputs=True)
    arguments = TopkArguments(
        scores=scores_at, score_head_stride=scores.size, score_token_stride=num_blocks,
        maxima=maxima_at if grouped else 0, maxima_head_stride=maxima.size, maxima_token_stride=groups,
        num_blocks=lengths_at, block_ids=out, id_head_stride=block_ids.size, id_token_stride=k,
        columns=num_blocks, num_tokens=_ROWS, k=k, ascending=0,
    )  # fmt: skip
    workgroups = -(-_ROWS // (WAVES * variant.rows_per_wave))
    return run(
        parse_program(assembly), variant.name, grid=(workgroups, 1, 1), block=(THREADS, 1, 1),
        kernargs=packed(arguments), memory=memory,
    )  # fmt: skip


# ---- Insert: random keys to scattered slots ----

CALL_KEYS = 65_536
_KEYS = 64
_PAGES = 2
_THREADS = 256
_KEYS_A_WORKGROUP = 32
_TOKEN_BYTES = PAGE_BYTES // BLOCK_TOKENS
_SLOT_BYTES = 8


def report_insert(assembly: str, name: str, key_type: KeyType) -> WorkReport:
    """Run a kernel and count.

    Args:
        assembly: the compiler's text, metadata included.
        name: the kernel's symbol.
        key_type: the type of its keys.

    Raises:
        InterpreterError: the kernel is wrong.
    """
    value_bytes = key_type.num_bytes
    random = np.random.default_rng(4)
    values = random.standard_normal((_KEYS, HEAD_DIM)).astype(np.float32)
    # The upper half of a float32 is a bfloat16, and some float16.
    keys = values if value_bytes == 4 else (values.view(np.uint32) >> 16).astype(np.uint16)
    slots = random.permutation(_PAGES * BLOCK_TOKENS)[:_KEYS].astype(np.int64)
    pages = np.empty((_PAGES, PAGE_BYTES), np.uint8)
    memory = Memory()
    keys_at, slots_at = memory.addresses_of({"keys": keys, "slots": slots})
    (out,) = memory.addresses_of({"pages": pages}, outputs=True)
    arguments = InsertArguments(
        keys=keys_at, key_stride=HEAD_DIM * value_bytes, slots=slots_at,
        pages=out, page_stride=PAGE_BYTES, num_slots=_PAGES * BLOCK_TOKENS, num_keys=_KEYS,
    )  # fmt: skip
    found = run(
        parse_program(assembly), name, grid=(_KEYS // _KEYS_A_WORKGROUP, 1, 1), block=(_THREADS, 1, 1),
        kernargs=packed(arguments), memory=memory,
    )  # fmt: skip
    key_bytes = HEAD_DIM * value_bytes + _SLOT_BYTES + _TOKEN_BYTES
    shape = Shape(f"{CALL_KEYS:,} keys", "key", CALL_KEYS, key_bytes)
    return report_of(found, (work_of(shape, found, _KEYS),))


# ---- Targets ----

MAX_TOPK_US = 15.0
"""Of 32,768 rows of 4,096 blocks through group maxima: 5 % of the time that scoring them takes."""
MAX_OF_MEMORY = 1.2
"""Time of a kernel that reads everything once, of that of its bytes."""
_TOPK, _SCANS, _INSERT = "topk_group_k16_b4096", ("topk_scan_k16", "topk_scan_k32"), "insert_"


def check_work_targets(report: WorkReport) -> list[Target]:
    """Every target, met or not; times are predictions."""
    return [no_spills(report.resources), wait_states(report.hazards), *_times(report)]


def _times(report: WorkReport) -> Iterator[Target]:
    longest = report.works[0]
    if report.name == _TOPK:
        yield at_most(f"{longest.shape.name} (prediction)", MAX_TOPK_US, longest.predicted_us, ".1f", " us")
    if report.name in _SCANS or report.name.startswith(_INSERT):
        name = f"{longest.shape.name}: time of its bytes' (prediction)"
        yield at_most(name, MAX_OF_MEMORY, longest.predicted_us / longest.memory_us, ".2f")
