"""What a kernel without a main loop issues and moves for each unit of its work, and the time that predicts.

Counts are facts of an interpreted run. Microseconds are a PREDICTION: vector instructions at their rate,
bytes at the memory's, the larger of the two, as if they overlapped wholly and nothing else took time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kernel.gfx950.hazards import HazardDistance, hazard_distances
from kernel.gfx950.report.model import SIMDS, VALU_CLOCKS
from kernel.gfx950.report.resources import Resources, resources
from kernel.gfx950.run_report import RunReport

COMPUTE_UNITS = 256
CLOCKS_PER_US = 2400
BYTES_PER_US = 8e6
"""8 TB/s."""
CACHE_LINE_BYTES = 128
"""What a read from memory moves at least."""


@dataclass(frozen=True)
class Shape:
    """A shape that the kernel is reported for.

    Attributes:
        name: for people. unit: what is counted, such as "row". units: how many a call has.
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
        return self.shape.bytes_per_unit * self.shape.units / BYTES_PER_US

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
        count for name, count in report.by_mnemonic().items() if name.startswith("v_cmp") and "64" in name
    )
    classes = {name: count / units for name, count in report.by_class().items()}
    return Work(shape, classes, wide / units)


def report_of(report: RunReport, works: tuple[Work, ...]) -> WorkReport:
    """The report on the kernel of a run.

    Raises:
        ValueError: the kernel has no metadata of a whole assembly text.
    """
    kernel = report.kernel
    if kernel.metadata is None:
        raise ValueError(f"{kernel.name} has no metadata")
    return WorkReport(kernel.name, resources(kernel.metadata), tuple(hazard_distances(kernel)), works)
