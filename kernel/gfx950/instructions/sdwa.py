"""Sub-dword addressing: sources are bytes or words of registers, and so may the result be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kernel.gfx950.errors import UnsupportedInstructionError
from kernel.gfx950.form import Form, Step, Value, ValueSource
from kernel.gfx950.operands import Operand
from kernel.gfx950.results import write32
from kernel.gfx950.wave import Wave

_SELECTIONS = {
    "BYTE_0": (0, 8),
    "BYTE_1": (8, 8),
    "BYTE_2": (16, 8),
    "BYTE_3": (24, 8),
    "WORD_0": (0, 16),
    "WORD_1": (16, 16),
    "DWORD": (0, 32),
}
"""First bit and number of bits."""


def _selection(form: Form, name: str) -> tuple[int, int]:
    word = form.word(name, "DWORD")
    if word not in _SELECTIONS:
        raise UnsupportedInstructionError(f"{name}:{word}: not a part of a dword")
    return _SELECTIONS[word]


def sdwa_source(form: Form, operand: Operand, at: int, letter: str) -> ValueSource:
    """Source number ``at`` (0 or 1) with its selection."""
    start, bits = _selection(form, f"src{at}_sel")
    if operand.is_accumulator or not operand.is_register:
        raise UnsupportedInstructionError(
            f"operand {operand.text}: an sdwa source is a vector or scalar register"
        )
    whole, half = letter in ("u", "i"), letter == "h" and bits == 16 and not operand.sign_extend
    if operand.negate or operand.absolute or not (whole or half) or (operand.sign_extend and bits == 32):
        raise UnsupportedInstructionError(f"{form.mnemonic} in the sdwa encoding with operand {operand.text}")
    plain = Operand(operand.kind, operand.text, operand.index, operand.count)
    read = form.source(plain, "u")
    if half:
        return lambda wave: (read(wave) >> np.uint32(start)).astype(np.uint16)
    low, up = np.uint32(32 - bits - start), np.uint32(32 - bits)
    if operand.sign_extend:
        cast = np.uint32 if letter == "u" else np.int32
        return lambda wave: ((read(wave) << low).view(np.int32) >> up.view(np.int32)).view(cast)
    if letter == "i":
        return lambda wave: ((read(wave) << low) >> up).view(np.int32)
    return lambda wave: (read(wave) << low) >> up


def sdwa_step(
    form: Form, operands: Sequence[Operand], letters: str, result: str, function: Callable[..., Value]
) -> Step:
    """``function`` of the selected parts; the unused part of the result is cleared, sign-filled or kept."""
    if len(letters) > 2 or result not in ("u", "i", "f"):
        raise UnsupportedInstructionError(f"{form.mnemonic} in the sdwa encoding")
    register = form.vector(operands[0])
    sources = [
        sdwa_source(form, operand, at, letter)
        for at, (operand, letter) in enumerate(zip(operands[1:], letters, strict=True))
    ]
    start, bits = _selection(form, "dst_sel")
    unused = form.word("dst_unused", "UNUSED_PRESERVE")  # LLVM's default
    if unused not in ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE"):
        raise UnsupportedInstructionError(f"dst_unused:{unused}")
    if bits == 32:
        whole = write32(register, result)
        return lambda wave: whole(wave, function(*[source(wave) for source in sources]))
    if result == "f":
        raise UnsupportedInstructionError(f"{form.mnemonic} to a part of a dword")
    put = write32(register, "u")
    part = np.uint32((1 << bits) - 1)
    kept = np.uint32(0xFFFFFFFF) ^ (part << np.uint32(start))

    def step(wave: Wave) -> None:
        out = np.asarray(function(*[source(wave) for source in sources])).view(np.uint32)
        placed = (out & part) << np.uint32(start)
        if unused == "UNUSED_SEXT":
            extended = ((out << np.uint32(32 - bits)).view(np.int32) >> np.int32(32 - bits)).view(np.uint32)
            placed = extended << np.uint32(start)
        elif unused == "UNUSED_PRESERVE":
            if wave.vector_states[register]:
                wave.taint_from(register)
            placed = placed | (wave.u32[register] & kept)
        put(wave, placed)

    return step
