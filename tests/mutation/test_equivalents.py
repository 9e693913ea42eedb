"""What calls a mutant equivalent: right about small kernels, and about no mutant that a launch catches."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import pytest

from kernel.backends.flydsl.geometry import prefill_name
from kernel.contract import SUPPORTED_HEADS
from kernel.gfx950 import (
    InterpreterError,
    Kernel,
    Memory,
    OutOfBoundsError,
    Program,
    RunReport,
    Schedule,
    UndefinedReadError,
    run,
)
from tests.gfx950.one_wave import assemble
from tests.mutation.campaign import decides_otherwise
from tests.mutation.campaigns import mutants_of, prefill
from tests.mutation.equivalents import can_be_poisoned, has_no_use, poisoned, writes_what_is_there
from tests.mutation.launch import Launch, WrongScoresError
from tests.mutation.mutants import Mutant, mutated

_START = "s_load_dwordx2 s[4:5], s[0:1], 0x0\nv_lshlrev_b32_e32 v1, 2, v0\ns_waitcnt lgkmcnt(0)\n"


@pytest.mark.parametrize(
    "between",
    [
        "",
        "v_add_u32_e32 v3, v1, v2",
        "s_cbranch_scc0 .LBB0_1\nv_mov_b32_e32 v2, v1\n.LBB0_1:",
        "v_mov_b32_e32 v1, v2",
    ],
)
def test_a_copy_made_again_is_found(between: str) -> None:
    kernel = _kernel(f"v_mov_b32_e32 v1, v2\n{between}\nv_mov_b32_e32 v1, v2")
    assert writes_what_is_there(kernel, len(kernel.instructions) - 2)


@pytest.mark.parametrize(
    "between",
    [
        "v_mov_b32_e32 v1, 3",
        "v_add_u32_e32 v2, v1, v2",
        "s_cbranch_scc0 .LBB0_1\nv_mov_b32_e32 v2, v3\n.LBB0_1:",
        "ds_read_b64 v[2:3], v9",
        "s_or_b64 exec, exec, s[6:7]",
        "v_permlane32_swap_b32_e32 v1, v3",
    ],
)
def test_a_copy_of_something_new_is_not(between: str) -> None:
    kernel = _kernel(f"v_mov_b32_e32 v1, v2\n{between}\nv_mov_b32_e32 v1, v2")
    assert not writes_what_is_there(kernel, len(kernel.instructions) - 2)
    skipped = _kernel("s_cbranch_scc0 .LBB0_1\nv_mov_b32_e32 v1, v2\n.LBB0_1:\nv_mov_b32_e32 v1, v2")
    assert not writes_what_is_there(skipped, len(skipped.instructions) - 2)


_WRONG = 6
"""Mutants with wrong scores that are tried."""
_LANES = (0, 1, 2, 15, 16, 17, 31, 33, 49, 63)
_POISONED = "v_mov_b32_e32 v2, 5"


@pytest.mark.parametrize(
    "after",
    [
        # never read; overwritten; selected away; multiplied and dropped; read from an address nobody needs
        "",
        "v_mov_b32_e32 v2, 6\nglobal_store_dword v1, v2, s[4:5]",
        "v_cmp_gt_u32_e32 vcc, 64, v0\nv_cndmask_b32_e32 v3, v2, v0, vcc\nglobal_store_dword v1, v3, s[4:5]",
        "ds_write_b32 v1, v2\nds_read_b32 v3, v1\ns_waitcnt lgkmcnt(0)\nv_add_u32_e32 v3, 1, v3",
        "ds_write_b32 v1, v2\ns_waitcnt lgkmcnt(0)\nds_write_b32 v1, v0\nds_read_b32 v3, v1\n"
        "s_waitcnt lgkmcnt(0)\nglobal_store_dword v1, v3, s[4:5]",
        "v_readfirstlane_b32 s6, v2\ns_lshl_b32 s6, s6, 2\ns_sub_i32 s6, s6, 20\n"
        "s_load_dword s7, s[4:5], s6\ns_waitcnt lgkmcnt(0)\ns_add_i32 s7, s7, 1",
        "ds_write_b32 v1, v0\ns_waitcnt lgkmcnt(0)\nv_lshlrev_b32_e32 v3, 2, v2\nds_read_b32 v3, v3",
    ],
)
def test_a_result_without_use_may_be_poison(after: str) -> None:
    _run_poisoned(after)


@pytest.mark.parametrize(
    "after",
    [
        "global_store_dword v1, v2, s[4:5]",
        "v_lshlrev_b32_e32 v3, 2, v2\nglobal_store_dword v3, v0, s[4:5]",
        "v_max_u32_e32 v3, v0, v2\nglobal_store_dword v1, v3, s[4:5]",
        "ds_write_b32 v1, v2\nds_read_b32 v3, v1\ns_waitcnt lgkmcnt(0)\nglobal_store_dword v1, v3, s[4:5]",
        "v_lshlrev_b32_e32 v3, 2, v2\nds_write_b32 v3, v0",
        "v_readfirstlane_b32 s6, v2\ns_cmp_lt_i32 s6, 9\ns_cbranch_scc1 .LBB0_1\n.LBB0_1:",
        "v_cmp_eq_u32_e32 vcc, 5, v2\ns_and_saveexec_b64 s[6:7], vcc",
        "v_readfirstlane_b32 s6, v2\ns_mul_i32 s7, s6, 3\nv_mov_b32_e32 v3, s7\n"
        "global_store_dword v1, v3, s[4:5]",
    ],
)
def test_a_result_in_use_may_not(after: str) -> None:
    with pytest.raises(UndefinedReadError):
        _run_poisoned(after)


@pytest.mark.parametrize("part", ["a", "b", "c"])
def test_poison_stays_in_its_row_column_or_cell_of_a_product(part: str) -> None:
    """Lane 17 is row or column 1 of the operands, and row 4 + i, column 1 of C's register i."""
    poison = {"a": "v16", "b": "v24", "c": "v34"}[part]
    zeros = "\n".join(f"v_mov_b32_e32 v{at}, 0" for at in range(16, 36))
    body = (
        f"{zeros}\ns_mov_b64 exec, 0x20000\nv_mov_b32_e32 {poison}, 0\ns_mov_b64 exec, -1\n"
        "v_mfma_f32_16x16x128_f8f6f4 v[36:39], v[16:23], v[24:31], v[32:35]\ns_nop 15\n"
    )
    undefined = set()
    for i in range(4):
        for lane in _LANES:
            store = (
                f"s_lshl_b64 s[8:9], 1, {lane}\ns_mov_b64 exec, s[8:9]\n"
                f"global_store_dword v1, v{36 + i}, s[4:5]"
            )
            try:
                _run_poisoned(store, before=body, of=f"v_mov_b32_e32 {poison}, 0")
            except UndefinedReadError:
                undefined.add((i, lane))
    cells = {(i, lane): (4 * (lane // 16) + i, lane % 16) for i in range(4) for lane in _LANES}
    wanted = {
        "a": {at for at, (row, _) in cells.items() if row == 1},
        "b": {at for at, (_, column) in cells.items() if column == 1},
        "c": {(2, 17)},
    }
    assert undefined == wanted[part]


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("heads", SUPPORTED_HEADS)
def test_no_mutant_that_gives_wrong_scores_is_without_use(heads: int) -> None:
    found = prefill(heads)
    everything = mutants_of(prefill_name(heads))
    caught = 0
    for at in np.random.default_rng(heads).permutation(len(everything)):
        mutant = everything[at]
        launch = _catching(found.kernel, mutant, found.launches[:12])
        if launch is not None:
            assert not has_no_use(found.kernel, mutant, [launch])
            assert not writes_what_is_there(found.kernel, mutant.index)
            caught += 1
        if caught == _WRONG:
            return
    pytest.fail(f"only {caught} mutants give wrong scores")


def _catching(kernel: Kernel, mutant: Mutant, launches: Sequence[Launch]) -> Launch | None:
    """The first launch whose scores a mutant spoils, None if it is caught in another way."""
    for launch in launches:
        try:
            launch.run(mutated(kernel, mutant))
        except WrongScoresError:
            return launch
        except InterpreterError:
            return None
    return None


def _kernel(body: str) -> Kernel:
    return assemble(body).kernels["kernel"]


def _run_poisoned(after: str, *, before: str = _POISONED, of: str = _POISONED) -> None:
    program = assemble(f"{_START}{before}\n{after}\n", lds_bytes=1024)
    (kernel,) = program.kernels.values()
    index = max(at for at, one in enumerate(kernel.instructions) if one.text.strip() == of)
    assert can_be_poisoned(kernel.instructions[index])
    memory = Memory()
    out = memory.register_array(np.zeros(64, np.uint32), "out")
    run(
        Program({kernel.name: poisoned(kernel, index)}),
        kernel.name,
        grid=(1, 1, 1),
        block=(64, 1, 1),
        kernargs=struct.pack("<2q", out.address, 0),
        memory=memory,
    )


# ---- Whether a changed compare is seen to decide otherwise: where it does, and nowhere else ----


class _OneWave:
    """A launch without outputs: lane n of v0 holds n."""

    name = "one wave"

    def run(self, kernel: Kernel) -> RunReport:
        program = Program({kernel.name: kernel})
        return run(
            program, kernel.name, grid=(1, 1, 1), block=(64, 1, 1), kernargs=bytes(16), memory=Memory()
        )

    def under(self, schedule: Schedule) -> Launch:
        return self


class _OutOfBounds(_OneWave):
    """One in which what came of the undefined result was taken for an address."""

    def run(self, kernel: Kernel) -> RunReport:
        raise OutOfBoundsError("no such address")


def test_a_result_that_leads_to_any_error_is_in_use() -> None:
    kernel = _kernel(_POISONED)
    mutant = Mutant("constant shifted", 0, "v_mov_b32_e32 v2, 6")
    assert has_no_use(kernel, mutant, [_OneWave()])
    assert not has_no_use(kernel, mutant, [_OutOfBounds()])


@pytest.mark.parametrize(
    ("before", "compare", "flipped", "different"),
    [
        # lane 5 is the only one whose value is met, and no lane has 64
        ("s_mov_b32 s6, 5", "v_cmp_lt_u32_e32 vcc, s6, v0", "v_cmp_le_u32_e32 vcc, s6, v0", 1),
        ("s_mov_b32 s6, 64", "v_cmp_lt_u32_e32 vcc, s6, v0", "v_cmp_le_u32_e32 vcc, s6, v0", 0),
        ("s_mov_b32 s6, 7", "s_cmp_gt_i32 s6, 7", "s_cmp_ge_i32 s6, 7", 1),
        ("s_mov_b32 s6, 8", "s_cmp_gt_i32 s6, 7", "s_cmp_ge_i32 s6, 7", 0),
        # the result takes the place of what is compared, and both must be told the same: s6 = 64, not the
        # 0 that the first of them leaves there
        ("s_mov_b32 s6, 64", "v_cmp_lt_u32_e64 s[6:7], s6, v0", "v_cmp_le_u32_e64 s[6:7], s6, v0", 0),
        ("s_mov_b32 s6, 5", "v_cmp_lt_u32_e64 s[6:7], s6, v0", "v_cmp_le_u32_e64 s[6:7], s6, v0", 1),
    ],
)
def test_only_what_comes_out_otherwise_counts(
    before: str, compare: str, flipped: str, different: int
) -> None:
    kernel = assemble(f"{before}\n{compare}\n").kernels["kernel"]
    assert decides_otherwise(kernel, Mutant("compare flipped", 1, flipped), _OneWave()) == different


def test_each_trip_of_a_loop_counts() -> None:
    """s6 counts 0, 1, 2, 3: of four trips the one with 2 decides otherwise."""
    body = "s_mov_b32 s6, 0\n.LBB0_1:\ns_cmp_gt_u32 s6, 2\ns_add_i32 s6, s6, 1\ns_cmp_lg_u32 s6, 4\n"
    kernel = assemble(f"{body}s_cbranch_scc1 .LBB0_1\n").kernels["kernel"]
    assert decides_otherwise(kernel, Mutant("compare flipped", 1, "s_cmp_ge_u32 s6, 2"), _OneWave()) == 1


def test_what_is_no_compare_of_code_is_refused() -> None:
    kernel = assemble("s_mov_b32 s6, 5\n").kernels["kernel"]
    with pytest.raises(TypeError, match="no compare"):
        decides_otherwise(kernel, Mutant("deleted", 1, "s_endpgm"), _OneWave())
