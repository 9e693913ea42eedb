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
from kernel.gfx950.parse import Instruction
from kernel.gfx950.run_report import instruction_class

SIMDS = 4
"""SIMDs of a compute unit."""
LANES = 64
MFMA_CLOCKS = {"v_mfma_f32_16x16x128_f8f6f4": 32}
"""Clocks that an MFMA holds the matrix pipe: 65,536 FLOP of the published 5.03 PFLOP/s, of 1,024 SIMDs at 2.4
GHz."""
VALU_CLOCKS = 4
"""Clocks of a vector instruction: 64 lanes on 16-lane hardware."""
LDS_BYTES_PER_CLOCK = 128
LDS_PASS_CLOCKS = 2
"""Clocks of one pass over 64 banks of 4 bytes: what a bank conflict costs."""
_LANE_BYTES = {"b128": 16, "b96": 12, "b64": 8, "u64": 8, "f64": 8, "b32": 4, "u32": 4, "f32": 4, "i32": 4}
_DMA_LANE_BYTES = {"buffer_load_dword": 4, "buffer_load_dwordx4": 16}


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
    """Instructions of a trip by :func:`kernel.gfx950.run_report.instruction_class`."""
    return Counter(map(instruction_class, trip))


def model_clocks(trip: Sequence[Instruction]) -> ModelClocks:
    """Clocks of each pipe for one trip.

    Raises:
        UnknownRateError: the trip has an instruction whose rate is not known.
    """
    counts = count_classes(trip)
    lds_bytes = sum(lds_lane_bytes(i) * LANES for i in trip if i.mnemonic.startswith("ds_"))
    return ModelClocks(
        mfma=sum(mfma_clocks(i) for i in trip if instruction_class(i) == "mfma"),
        valu=counts["valu"] * VALU_CLOCKS,
        lds=SIMDS * lds_bytes // LDS_BYTES_PER_CLOCK,
    )


def mfma_clocks(instruction: Instruction) -> int:
    """Clocks that an MFMA holds the matrix pipe.

    Raises:
        UnknownRateError: an MFMA of another shape, or of operands of other widths than 8 bits.
    """
    eight_bits = all(instruction.modifiers.get(name, 0) in (0, 1) for name in ("cbsz", "blgp"))
    clocks = MFMA_CLOCKS.get(instruction.mnemonic)
    if clocks is None or not eight_bits:
        raise UnknownRateError(f"line {instruction.line}: {instruction.text}: its clocks are not known")
    return clocks


def lds_lane_bytes(instruction: Instruction) -> int:
    """Bytes that an LDS instruction moves for each lane.

    Raises:
        UnknownRateError: not a read or write of 32 to 128 bits a lane.
    """
    operation, width = instruction.mnemonic.split("_")[1], instruction.mnemonic.split("_")[-1]
    size = _LANE_BYTES.get(width)
    if size is None or not operation.startswith(("read", "write")):
        raise UnknownRateError(f"line {instruction.line}: {instruction.text}: its bytes are not known")
    return size * (2 if operation.startswith(("read2", "write2")) else 1)


def dma_bytes(instruction: Instruction) -> int:
    """Bytes that a load brings from memory into LDS for a wave: 0 if it loads registers.

    Raises:
        UnknownRateError: a DMA of another width than 32 or 128 bits a lane.
    """
    if not instruction.modifiers.get("lds"):
        return 0
    size = _DMA_LANE_BYTES.get(instruction.mnemonic)
    if size is None:
        raise UnknownRateError(f"line {instruction.line}: {instruction.text}: its bytes are not known")
    return size * LANES
