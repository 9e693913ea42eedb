"""Instruction counts of one trip of a loop, and the clocks that each pipe of a CU needs for them.

The clocks are a PREDICTION: counts times rates, nothing else. They say which pipe bounds a loop, not how long
it takes; :mod:`kernel.gfx950.report.timeline` asks what waits and latencies add.

One trip is that of a wave on each of a CU's four SIMDs. A SIMD has a matrix pipe and a vector pipe of its
own; the LDS serves all four, so a wave's LDS bytes count four times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kernel.errors import IndexerError
from kernel.gfx950.hazards import HazardDistance, successors
from kernel.gfx950.isa import is_dma, row_of
from kernel.gfx950.program import Instruction, Kernel

COMPUTE_UNITS = 256
SIMDS = 4
"""SIMDs of a compute unit."""
CLOCKS_PER_US = 2400
MEMORY_BYTES_PER_US = 8e6
"""8 TB/s."""
LANES = 64
MFMA_CLOCKS = {"matrix of 8 passes": 32}
"""Clocks that an MFMA holds the matrix pipe: 65,536 FLOP of the published 5.03 PFLOP/s, of 1,024 SIMDs at 2.4
GHz."""
VALU_CLOCKS = 4
"""Clocks of a vector instruction: 64 lanes on 16-lane hardware."""
LDS_BYTES_PER_CLOCK = 128
LDS_PASS_CLOCKS = 2
"""Clocks of one pass over 64 banks of 4 bytes: what a bank conflict costs."""


class UnknownRateError(IndexerError, ValueError):
    """An instruction whose rate the model does not know."""


@dataclass(frozen=True)
class ModelClocks:
    """Clocks that one trip occupies each pipe; a prediction."""

    mfma: int
    valu: int
    lds: int

    @property
    def bound(self) -> str:
        """The pipe with the most clocks: "mfma", "valu" or "lds"; the matrix pipe if it ties."""
        pipes = {"mfma": self.mfma, "valu": self.valu, "lds": self.lds}
        return max(pipes, key=lambda pipe: pipes[pipe])

    @property
    def most(self) -> int:
        """Clocks of the bounding pipe: no trip can be faster."""
        return max(self.mfma, self.valu, self.lds)

    @property
    def mfma_share(self) -> float:
        """Matrix clocks over those of the bounding pipe: 1 where the matrix pipe bounds the loop."""
        return self.mfma / self.most if self.most else 0.0


def count_classes(trip: Sequence[Instruction]) -> Counter[str]:
    """Instructions of a trip by their class in the table of instructions."""
    return Counter(row_of(instruction).kind for instruction in trip)


def model_clocks(trip: Sequence[Instruction]) -> ModelClocks:
    """Clocks of each pipe for one trip.

    Raises:
        UnknownRateError: the trip has an instruction whose rate is not known.
    """
    counts = count_classes(trip)
    lds_bytes = sum(lds_lane_bytes(i) * LANES for i in trip if row_of(i).kind in ("lds_read", "lds_write"))
    return ModelClocks(
        mfma=sum(mfma_clocks(i) for i in trip if row_of(i).kind == "mfma"),
        valu=counts["valu"] * VALU_CLOCKS,
        lds=SIMDS * lds_bytes // LDS_BYTES_PER_CLOCK,
    )


def mfma_clocks(instruction: Instruction) -> int:
    """Clocks that an MFMA holds the matrix pipe.

    Raises:
        UnknownRateError: an MFMA of another shape, or of operands of other widths than 8 bits.
    """
    eight_bits = all(instruction.modifiers.get(name, 0) in (0, 1) for name in ("cbsz", "blgp"))
    clocks = MFMA_CLOCKS.get(row_of(instruction).hazard)
    if clocks is None or not eight_bits:
        raise UnknownRateError(f"line {instruction.line}: {instruction.text}: its clocks are not known")
    return clocks


def lds_lane_bytes(instruction: Instruction) -> int:
    """Bytes that an LDS instruction moves for each lane.

    Raises:
        UnknownRateError: not a read or write of 32 to 128 bits a lane.
    """
    row = row_of(instruction)
    if row.kind not in ("lds_read", "lds_write") or row.lane_bytes < 4:
        raise UnknownRateError(f"line {instruction.line}: {instruction.text}: its bytes are not known")
    return row.lane_bytes


def dma_bytes(instruction: Instruction) -> int:
    """Bytes that a load brings from memory into LDS for a wave: 0 if it loads registers.

    Raises:
        UnknownRateError: a DMA of another width than 32 or 128 bits a lane.
    """
    if not is_dma(instruction):
        return 0
    size = row_of(instruction).lane_bytes
    if size not in (4, 16):
        raise UnknownRateError(f"line {instruction.line}: {instruction.text}: its bytes are not known")
    return size * LANES


# ---- Natural loops, from the branches ----


@dataclass(frozen=True)
class Loop:
    """A natural loop: instruction indices. Every trip enters at ``header``."""

    header: int
    body: frozenset[int]


@dataclass(frozen=True)
class _Flow:
    """Basic blocks by the index of their first instruction: ``end`` (exclusive) and successors."""

    end: dict[int, int]
    successors: dict[int, tuple[int, ...]]


def natural_loops(kernel: Kernel) -> list[Loop]:
    """Every loop of the kernel, outer ones before those that they hold; loops of one header are one loop."""
    flow = _basic_blocks(kernel)
    dominators = _dominators(flow.successors)
    bodies: dict[int, set[int]] = {}
    for block, following in flow.successors.items():
        for header in following:
            if header in dominators.get(block, ()):
                bodies.setdefault(header, {header}).update(_reaching(block, header, flow.successors))
    loops = [
        Loop(header, frozenset(i for block in body for i in range(block, flow.end[block])))
        for header, body in bodies.items()
    ]
    return sorted(loops, key=lambda loop: (-len(loop.body), loop.header))


def _basic_blocks(kernel: Kernel) -> _Flow:
    count = len(kernel.instructions)
    following = [tuple(successors(kernel, at)) for at in range(count)]
    jumps = [at for at in range(count) if following[at] != (at + 1,)]  # branches and ends
    starts = sorted({0, *(to for at in jumps for to in (at + 1, *following[at]))} - {count})
    end = dict(zip(starts, [*starts[1:], count]))
    return _Flow(end, {start: following[stop - 1] for start, stop in end.items()})


def _dominators(successors: dict[int, tuple[int, ...]]) -> dict[int, set[int]]:
    """Of each block that can be reached from the first, the blocks on every way to it."""
    order: list[int] = []
    seen = {0}
    stack = [(0, iter(successors[0]))]
    while stack:
        block, rest = stack[-1]
        following = next((b for b in rest if b not in seen), None)
        if following is None:
            order.append(block)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(successors[following])))
    order.reverse()
    predecessors: dict[int, list[int]] = {block: [] for block in order}
    for block in order:
        for following in successors[block]:
            predecessors[following].append(block)
    dominators = {block: set(order) for block in order}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            found = set.intersection(*(dominators[p] for p in predecessors[block])) | {block}
            if found != dominators[block]:
                dominators[block] = found
                changed = True
    return dominators


def _reaching(block: int, header: int, successors: dict[int, tuple[int, ...]]) -> set[int]:
    """Blocks that reach ``block`` without passing ``header``."""
    predecessors: dict[int, list[int]] = {}
    for source, targets in successors.items():
        for target in targets:
            predecessors.setdefault(target, []).append(source)
    found, waiting = {header}, [block]
    while waiting:
        at = waiting.pop()
        if at not in found:
            found.add(at)
            waiting += predecessors.get(at, [])
    return found


# ---- Resources, and the waves that a SIMD holds ----

SIMD_VGPRS = 512
"""Vector registers of a lane on a SIMD, of both kinds, for all its waves."""
_VGPR_GRANULE = 8
SIMD_SGPRS = 800
_SGPR_GRANULE = 16
_MOST_WAVES = 8
"""Waves a SIMD holds at most."""
CU_LDS_BYTES = 160 * 1024
_LDS_GRANULE = 1280
"""Bytes that LDS is handed out in (granulated_lds_size in the user guide of LLVM's AMDGPU back end)."""


@dataclass(frozen=True)
class Resources:
    """What the compiler's output asks for; facts.

    Attributes:
        vgpr: vector registers of a lane, accumulator registers included. agpr: accumulator registers.
        sgpr: scalar registers of a wave. vgpr_spills, sgpr_spills: registers spilled. scratch_bytes: a lane.
        lds_bytes: a workgroup. waves_per_simd: waves that fit a SIMD at once, of whole workgroups.
    """

    vgpr: int
    agpr: int
    sgpr: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int
    lds_bytes: int
    waves_per_simd: int


def resources_of(kernel: Kernel) -> Resources:
    """Read the compiler's notes.

    Raises:
        ValueError: the kernel has no metadata.
        KeyError: a note is missing, so the metadata is not that of a whole assembly text or code object.
    """
    metadata = kernel.metadata
    if metadata is None:
        raise ValueError(f"{kernel.name} has no metadata")
    notes = metadata.notes
    workgroup_waves = -(-notes["max_flat_workgroup_size"] // LANES)
    return Resources(
        vgpr=notes["vgpr_count"],
        agpr=notes["agpr_count"],
        sgpr=notes["sgpr_count"],
        vgpr_spills=notes["vgpr_spill_count"],
        sgpr_spills=notes["sgpr_spill_count"],
        scratch_bytes=metadata.scratch_bytes,
        lds_bytes=metadata.lds_bytes,
        waves_per_simd=waves_per_simd(
            notes["vgpr_count"], notes["sgpr_count"], metadata.lds_bytes, workgroup_waves
        ),
    )


def waves_per_simd(vgpr: int, sgpr: int, lds_bytes: int, workgroup_waves: int) -> int:
    """Waves of a kernel that a SIMD holds at once, limited by registers and by LDS."""
    by_registers = min(
        SIMD_VGPRS // _granules(vgpr, _VGPR_GRANULE),
        SIMD_SGPRS // _granules(sgpr, _SGPR_GRANULE),
        _MOST_WAVES,
    )
    waves_per_workgroup = -(-workgroup_waves // SIMDS)  # on each SIMD
    workgroups = by_registers // waves_per_workgroup
    if lds_bytes:
        workgroups = min(workgroups, CU_LDS_BYTES // _granules(lds_bytes, _LDS_GRANULE))
    return workgroups * waves_per_workgroup


def _granules(count: int, granule: int) -> int:
    return max(-(-count // granule), 1) * granule


# ---- Targets that all kernels share ----

MAX_VGPRS = 256
MIN_WAVES_PER_SIMD = 2


@dataclass(frozen=True)
class Target:
    """What is wanted, what was found, and the reason where the target was missed and one is known."""

    name: str
    wanted: str
    found: str
    met: bool
    reason: str = ""


def at_most(name: str, limit: float, found: float, form: str = "", unit: str = "") -> Target:
    """``found``, shown in the format ``form``, is not above ``limit``."""
    return Target(name, f"<= {limit}{unit}", f"{found:{form}}{unit}", found <= limit)


def vgprs(has: Resources) -> Target:
    """Registers of a lane."""
    return at_most("VGPR", MAX_VGPRS, has.vgpr)


def no_spills(has: Resources) -> Target:
    """No register goes to memory."""
    spills = has.vgpr_spills + has.sgpr_spills
    return Target("spills, scratch", "0", f"{spills}, {has.scratch_bytes} B", spills + has.scratch_bytes == 0)


def waves(has: Resources) -> Target:
    """Waves that a SIMD holds at once."""
    found = has.waves_per_simd
    return Target("waves a SIMD", f">= {MIN_WAVES_PER_SIMD}", str(found), found >= MIN_WAVES_PER_SIMD)


def wait_states(hazards: Sequence[HazardDistance]) -> Target:
    """No dependent instructions are closer than gfx950 needs."""
    close = [hazard for hazard in hazards if not hazard.ok]
    return Target("wait states", "as gfx950 needs", f"{len(close)} kinds too close", not close)
