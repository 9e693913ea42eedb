"""What a run counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kernel.gfx950.parse import Instruction, Kernel

_MFMA = "v_mfma"


def instruction_class(instruction: Instruction) -> str:
    """ "mfma", "valu", "lds_read", "lds_write", "vmem_load", "vmem_store", "smem", "wait", "barrier",
    "nop", "branch" or "salu"."""
    name = instruction.mnemonic
    if name.startswith("v_"):
        return "mfma" if name.startswith(_MFMA) else "valu"
    if name.startswith("ds_"):
        return "lds_write" if name.startswith("ds_write") else "lds_read"
    if name.startswith(("buffer_", "global_", "scratch_", "flat_")):
        return "vmem_store" if "_store_" in name else "vmem_load"
    if name.startswith(("s_load", "s_buffer_load")):
        return "smem"
    if name.startswith(("s_branch", "s_cbranch")):
        return "branch"
    return {"s_waitcnt": "wait", "s_barrier": "barrier", "s_nop": "nop"}.get(name, "salu")


@dataclass
class RunReport:
    """Counts of one launch, over all its waves.

    ``executed[i]`` is how often instruction i of the kernel was issued (a wave-instruction counts once).
    ``bank_conflicts`` maps an assembly line to (LDS accesses, extra passes), where they were counted.
    ``traces`` are the instruction indices each wave issued, in order, by (workgroup, wave), where they were
    kept.
    """

    kernel: Kernel
    executed: npt.NDArray[np.int64]
    workgroups: int
    waves: int
    bank_conflicts: dict[int, tuple[int, int]] | None = None
    traces: dict[tuple[int, int], npt.NDArray[np.int32]] = field(default_factory=dict)

    @property
    def instructions(self) -> int:
        """Wave-instructions issued."""
        return int(self.executed.sum())

    def by_class(self) -> dict[str, int]:
        """Wave-instructions by ``instruction_class``."""
        return self._sum(instruction_class)

    def by_mnemonic(self) -> dict[str, int]:
        """Wave-instructions by mnemonic."""
        return self._sum(lambda instruction: instruction.mnemonic)

    def _sum(self, key: Callable[[Instruction], str]) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for instruction, executed in zip(self.kernel.instructions, self.executed.tolist(), strict=True):
            counts[key(instruction)] += executed
        return {name: count for name, count in counts.items() if count}
