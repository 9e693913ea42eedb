"""Instructions to steps: each is decoded once, the first time its kernel runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from weakref import WeakKeyDictionary

from kernel.gfx950.encodable import check_encodable
from kernel.gfx950.errors import InterpreterError, UnsupportedInstructionError
from kernel.gfx950.form import Builder, Form, Step
from kernel.gfx950.instructions import (
    compare,
    crosslane,
    lane_masks,
    lds_access,
    mfma,
    packed,
    salu,
    scalar_memory,
    scratch,
    valu,
    vector_memory,
)
from kernel.gfx950.parse import Kernel
from kernel.gfx950.wave import Wave


class Stop(Enum):
    """Where a wave stops: at a barrier, until all have come, or at its end."""

    BARRIER = "s_barrier"
    END = "s_endpgm"


@dataclass(frozen=True)
class Decoded:
    """``steps`` in the kernel's order; ``granule`` is 4 where all its memory accesses are whole dwords,
    else 1."""

    steps: tuple[Step | Stop, ...]
    granule: int


def _wait(form: Form) -> Step:
    vector_memory_left = form.number("vmcnt", 63)
    lgkm_left = form.number("lgkmcnt", 15)
    form.number("expcnt", 7)  # exports; there are none in a compute kernel

    def step(wave: Wave) -> None:
        # at its highest value a counter is not waited for
        if vector_memory_left < 63:
            wave.counters.wait_vector_memory(vector_memory_left)
        if lgkm_left < 15:
            wave.counters.wait_lgkm(lgkm_left)

    return step


BUILDERS: dict[str, Builder] = {
    **salu.BUILDERS,
    **lane_masks.BUILDERS,
    **scalar_memory.BUILDERS,
    **valu.BUILDERS,
    **compare.BUILDERS,
    **crosslane.BUILDERS,
    **packed.BUILDERS,
    **mfma.BUILDERS,
    **lds_access.BUILDERS,
    **vector_memory.BUILDERS,
    **scratch.BUILDERS,
    "s_waitcnt": _wait,
}
"""Every mnemonic that is implemented, besides ``s_barrier`` and ``s_endpgm``."""

_NARROW = ("_ubyte", "_sbyte", "_ushort", "_sshort", "_byte", "_short", "_u8", "_u16", "_b8", "_b16")
_DECODED: WeakKeyDictionary[Kernel, Decoded] = WeakKeyDictionary()


def decode(kernel: Kernel) -> Decoded:
    """Raises UnsupportedInstructionError with the line of the first instruction that is not implemented."""
    known = _DECODED.get(kernel)
    if known is None:
        steps = tuple(_decode_one(kernel, index) for index in range(len(kernel.instructions)))
        narrow = any(
            i.mnemonic.endswith(_NARROW) and i.mnemonic.startswith(("ds_", "buffer_", "global_"))
            for i in kernel.instructions
        )
        known = _DECODED[kernel] = Decoded(steps, 1 if narrow else 4)
    return known


def decode_like(kernel: Kernel, known: Kernel) -> Decoded:
    """As ``decode``, for a kernel that differs from a ``known`` one in a few instructions: only these are
    decoded. Labels must be the same, and each instruction must stand where it did."""
    before = decode(known)
    pairs = zip(kernel.instructions, known.instructions, strict=True)
    steps = tuple(
        before.steps[index] if new is old else _decode_one(kernel, index)
        for index, (new, old) in enumerate(pairs)
    )
    decoded = _DECODED[kernel] = Decoded(steps, before.granule)
    return decoded


def decode_with(kernel: Kernel, steps: Mapping[int, Step]) -> Kernel:
    """The kernel, some of its instructions with steps of the caller's, for an analysis of a run."""
    known = decode(kernel)
    copy = replace(kernel)
    _DECODED[copy] = replace(known, steps=tuple(steps.get(at, step) for at, step in enumerate(known.steps)))
    return copy


def _decode_one(kernel: Kernel, index: int) -> Step | Stop:
    instruction = kernel.instructions[index]
    try:
        form = Form(instruction, kernel)
        if instruction.mnemonic in ("s_barrier", "s_endpgm"):
            form.close()
            return Stop(instruction.mnemonic)
        builder = BUILDERS.get(instruction.mnemonic)
        if builder is None:
            raise UnsupportedInstructionError(f"mnemonic {instruction.mnemonic!r} is not implemented")
        step = builder(form)
        form.close()
        check_encodable(instruction)
    except InterpreterError as error:
        raise error.locate(line=instruction.line, text=instruction.text, kernel=kernel.name) from None
    return step
