"""Whether a mutant changes only what the causal mask hides: products that lose every max.

A mask is the start value of a product, 0 or at most -2^27, and a product of finite 8-bit values adds less
than 2^25. So a cell that starts below ``_HIDDEN`` in both kernels stays below every score in both. Compared
are all matrix multiplications of a run, in order: their start values are equal or hidden in both, and so are
their operands unless all their cells are hidden.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernel.gfx950 import Instruction, Kernel
from kernel.gfx950.isa.decode import Stop, decode, decode_with
from kernel.gfx950.isa.form import Step
from kernel.gfx950.wave import Wave
from tests.gfx950.mutation.launch import Launch
from tests.gfx950.mutation.mutants import Mutant, mutated

_HIDDEN = np.float32(-(2.0**26))
_EVERY_CELL_AT_0 = np.zeros((4, 64), np.float32)


@dataclass(frozen=True)
class _Product:
    """One multiplication: its operands' bytes, its format, and ``[4, 64]`` start values."""

    instruction: int
    operands: tuple[bytes, bytes]
    formats: tuple[object, object]
    start: npt.NDArray[np.float32]


def changes_hidden_products_only(kernel: Kernel, mutant: Mutant, launches: Iterable[Launch]) -> bool:
    """Whether some products differ, and those of every launch are the same, or hidden in both."""
    changed = mutated(kernel, mutant)
    any_differs = False
    for launch in launches:
        ours, theirs = _products(launch, kernel), _products(launch, changed)
        if len(ours) != len(theirs):
            return False
        for one, two in zip(ours, theirs, strict=True):
            same_start = one.start.view(np.uint32) == two.start.view(np.uint32)
            hidden = (one.start <= _HIDDEN) & (two.start <= _HIDDEN)
            same_operands = one.operands == two.operands
            if (one.instruction, one.formats) != (two.instruction, two.formats):
                return False
            if not (same_start | hidden).all() or not (same_operands or hidden.all()):
                return False
            any_differs = any_differs or not same_operands or not same_start.all()
    return any_differs


def _products(launch: Launch, kernel: Kernel) -> list[_Product]:
    found: list[_Product] = []
    steps: dict[int, Step] = {}
    for at, (instruction, step) in enumerate(zip(kernel.instructions, decode(kernel).steps, strict=True)):
        if instruction.mnemonic.startswith("v_mfma") and not isinstance(step, Stop):
            steps[at] = _recording(at, instruction, step, found)
    launch.run(decode_with(kernel, steps))
    return found


def _recording(at: int, instruction: Instruction, step: Step, found: list[_Product]) -> Step:
    a, b, c = instruction.operands[1:]
    formats = (instruction.modifiers.get("cbsz"), instruction.modifiers.get("blgp"))

    def multiply(wave: Wave) -> None:
        operands = [wave.vectors[one.index : one.index + one.count].tobytes() for one in (a, b)]
        start = _EVERY_CELL_AT_0 + np.float32(c.number)
        if c.is_register:
            start = wave.vectors[c.index : c.index + c.count].view(np.float32).copy()
        found.append(_Product(at, (operands[0], operands[1]), formats, start))
        step(wave)

    return multiply
