"""Every mnemonic that the interpreter knows is tested by definition somewhere."""

from __future__ import annotations

from kernel.gfx950.isa.decode import BUILDERS
from tests.gfx950 import (
    test_interpreter_compare,
    test_interpreter_lanes,
    test_interpreter_matrix,
    test_interpreter_memory,
    test_interpreter_scalar,
    test_interpreter_vector_float,
    test_interpreter_vector_integer,
)


def test_every_mnemonic_has_a_test() -> None:
    covered: set[str] = set()
    for module in (
        test_interpreter_compare,
        test_interpreter_lanes,
        test_interpreter_matrix,
        test_interpreter_memory,
        test_interpreter_scalar,
        test_interpreter_vector_float,
        test_interpreter_vector_integer,
    ):
        covered |= module.COVERED
    assert set(BUILDERS) == covered
