"""Names of registers, and 64-bit lane masks as integers and as 64 bools."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kernel.gfx950.operands import ACCUMULATORS, EXEC, M0, VCC

LaneMask = npt.NDArray[np.bool_]

_SCALAR_NAMES = {VCC: "vcc_lo", VCC + 1: "vcc_hi", M0: "m0", EXEC: "exec_lo", EXEC + 1: "exec_hi"}


def vector_name(register: int) -> str:
    return f"v{register}" if register < ACCUMULATORS else f"a{register - ACCUMULATORS}"


def scalar_name(register: int) -> str:
    return _SCALAR_NAMES.get(register, f"s{register}")


def mask_of(value: int) -> LaneMask:
    """64 bools from a 64-bit lane mask."""
    return np.unpackbits(np.frombuffer(value.to_bytes(8, "little"), np.uint8), bitorder="little").view(
        np.bool_
    )


def value_of(mask: LaneMask) -> int:
    """The 64-bit lane mask of 64 bools."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")
