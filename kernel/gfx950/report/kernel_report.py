"""Everything that a compiled prefill scorer shows without a GPU, in one object and as JSON fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kernel.gfx950.hazards import HazardDistance, hazard_distances
from kernel.gfx950.parse import Kernel, parse_program
from kernel.gfx950.report.dynamic import InterpretedRun, interpret
from kernel.gfx950.report.loops import Trip, find_trips
from kernel.gfx950.report.model import ModelClocks, count_classes, model_clocks
from kernel.gfx950.report.resources import Resources, resources
from kernel.gfx950.report.timeline import Prediction, predict, utilisation_beside
from kernel.gfx950.run_report import instruction_class


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
    """Predicted utilisation where the other workgroup is in its unmasked loop; for diagonals only, which are
    seldom beside each other."""

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
                    for mnemonic, (accesses, extra) in self.run.lds_traffic().items()
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
    nops = [i for i in instructions if instruction_class(i) == "nop"]
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
    if kernel.metadata is None:
        raise ValueError(f"the assembly of {name} has no metadata")
    run = interpret(program, name, heads)
    extra_passes = run.extra_passes()

    trips = find_trips(run)
    unmasked = next(trip for trip in trips if trip.role == "unmasked")

    def loop(trip: Trip) -> LoopReport:
        beside = unmasked.path if trip.role in ("diagonal", "unaligned") else None
        return loop_report(kernel, trip, extra_passes, beside)

    return KernelReport(
        name,
        heads,
        resources(kernel.metadata),
        tuple(loop(trip) for trip in trips),
        tuple(hazard_distances(kernel)),
        run,
    )
