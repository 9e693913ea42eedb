"""The table of instructions: whole rows only, one for each mnemonic, and nothing runs without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from kernel.backends.flydsl.geometry import kernel_names
from kernel.gfx950 import (
    Instruction,
    Kernel,
    UnencodableError,
    UnsupportedInstructionError,
    hazard_distances,
    parse_program,
)
from kernel.gfx950.hazards import register_use, successors
from kernel.gfx950.isa import INSTRUCTIONS, is_dma, lookup, row_of
from kernel.gfx950.isa.table import Row, assemble
from kernel.gfx950.launch import decode
from kernel.gfx950.parse import parse_instruction
from kernel.gfx950.report.model import count_classes, lds_lane_bytes, model_clocks, natural_loops
from kernel.gfx950.report.timeline import replay_steps
from tests.gfx950 import compiled

ADD = lookup("v_add_u32")
FIELDS = [field.name for field in fields(Row) if field.name != "mnemonic"]


EVERY_COMMIT = (
    "score_prefill_h4",
    "score_decode_h4",
    "topk_scan_k16",
    "topk_group_k16_b1024",
    "insert_bf16",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in EVERY_COMMIT else pytest.mark.nightly)
        for name in kernel_names()
    ],
)
def test_every_instruction_of_the_shipped_kernels_has_a_row(name: str) -> None:
    kernel = parse_program(compiled.assembly(name)).kernels[name]
    assert {instruction.mnemonic for instruction in kernel.instructions} <= INSTRUCTIONS.keys()
    decode(kernel)


@pytest.mark.parametrize("lacking", FIELDS)
def test_a_row_that_lacks_a_field_is_refused_by_name(lacking: str) -> None:
    given = {name: getattr(ADD, name) for name in FIELDS if name != lacking}
    with pytest.raises(TypeError, match=f"^v_new_b32: its row lacks {lacking}$"):
        Row("v_new_b32", **given)


@pytest.mark.parametrize("name", ["kind", "hazard"])
def test_a_class_that_nobody_counts_is_refused(name: str) -> None:
    given: dict[str, Any] = {field: getattr(ADD, field) for field in FIELDS} | {name: "texture"}
    with pytest.raises(ValueError, match=f"^v_new_b32: {name} = 'texture': one of"):
        Row("v_new_b32", **given)


def test_a_mnemonic_has_one_row() -> None:
    assert assemble([ADD], [lookup("v_sub_u32")]).keys() == {"v_add_u32", "v_sub_u32"}
    with pytest.raises(ValueError, match=r"^v_add_u32 has two rows$"):
        assemble([ADD], [replace(ADD, keeps=True)])


def test_rows_agree_with_themselves() -> None:
    for mnemonic, row in INSTRUCTIONS.items():
        assert row.mnemonic == mnemonic
        vector = row.kind in ("valu", "mfma")
        assert vector == mnemonic.startswith("v_")
        assert bool(row.suffixes) == vector
        assert (row.kind == "mfma") == (row.hazard == "matrix of 8 passes")
        assert vector or row.hazard == "none"
        memory = row.kind.startswith(("lds_", "vmem_"))
        assert (row.lane_bytes > 0) == (memory and "permute" not in mnemonic)
        assert not row.keeps or row.destinations


UNKNOWN = replace(
    parse_instruction("v_mov_b32_e32 v0, v1", 7), mnemonic="v_new_b32", text="v_new_b32_e32 v0, v1"
)
READERS: list[Callable[[Instruction], object]] = [
    row_of,
    is_dma,
    register_use,
    lds_lane_bytes,
    lambda instruction: count_classes([instruction]),
    lambda instruction: model_clocks([instruction]),
    lambda instruction: decode(Kernel("small", [instruction])),
    lambda instruction: hazard_distances(Kernel("small", [instruction])),
    lambda instruction: natural_loops(Kernel("small", [instruction])),
    lambda instruction: list(successors(Kernel("small", [instruction]), 0)),
    lambda instruction: replay_steps(Kernel("small", [instruction]), [0], {}),
]


@pytest.mark.parametrize("read", READERS)
def test_what_has_no_row_is_refused_with_its_line(read: Callable[[Instruction], object]) -> None:
    with pytest.raises(
        UnsupportedInstructionError, match="mnemonic 'v_new_b32' is not implemented"
    ) as caught:
        read(UNKNOWN)
    assert (caught.value.line, caught.value.text) == (7, UNKNOWN.text)


def test_the_parser_refuses_what_has_no_row() -> None:
    with pytest.raises(UnsupportedInstructionError, match="'v_new_b32'") as caught:
        parse_program("small:\n\ts_nop 0\n\tv_new_b32_e32 v0, v1\n\ts_endpgm\n")
    assert (caught.value.line, caught.value.text) == (3, "v_new_b32_e32 v0, v1")


@pytest.mark.parametrize("text", ["s_add_u32_e32 s0, s1, s2", "ds_read_b32_e64 v0, v1", "s_nop_e32 0"])
def test_only_vector_instructions_have_encoding_suffixes(text: str) -> None:
    with pytest.raises(UnencodableError, match="no encoding with the suffix _e"):
        decode(Kernel("small", [parse_instruction(text, 1)]))
