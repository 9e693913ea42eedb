"""The control flow of a kernel, for analyses over every path."""

from __future__ import annotations

from collections.abc import Iterator

from kernel.gfx950 import Kernel


def successors(kernel: Kernel, at: int) -> Iterator[int]:
    """Where a wave may be after an instruction."""
    instruction = kernel.instructions[at]
    if instruction.mnemonic.startswith(("s_branch", "s_cbranch")):
        yield kernel.target(instruction)
    if instruction.mnemonic not in ("s_branch", "s_endpgm"):
        yield at + 1
