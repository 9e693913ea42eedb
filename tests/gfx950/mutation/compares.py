"""How often a changed compare decides otherwise than the compare that it stands for."""

from __future__ import annotations

from kernel.gfx950 import Kernel
from kernel.gfx950.hazards import register_use
from kernel.gfx950.isa.decode import Stop, decode, decode_with
from kernel.gfx950.wave import Wave
from tests.gfx950.mutation.launch import Launch
from tests.gfx950.mutation.mutants import Mutant, mutated

COMPARES = ("s_cmp", "v_cmp_")


def decides_otherwise(kernel: Kernel, mutant: Mutant, launch: Launch) -> int:
    """Executions of the compare, in a run of the kernel as it is, that come out otherwise as changed."""
    ours, theirs = (decode(one).steps[mutant.index] for one in (kernel, mutated(kernel, mutant)))
    if isinstance(ours, Stop) or isinstance(theirs, Stop):
        raise TypeError(f"{mutant.text}: no compare")
    written = [at for file, at in register_use(kernel.instructions[mutant.index]).writes if file == "s"]
    different = 0

    def compare(wave: Wave) -> None:
        nonlocal different
        before = [wave.scalars[at] for at in written]  # a compare may write over what it compares
        theirs(wave)
        changed = wave.scc, [wave.scalars[at] for at in written]
        for at, value in zip(written, before, strict=True):
            wave.scalars[at] = value
        ours(wave)
        different += changed != (wave.scc, [wave.scalars[at] for at in written])

    launch.run(decode_with(kernel, {mutant.index: compare}))
    return different
