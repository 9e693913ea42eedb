"""Whether a changed compare is seen to decide otherwise: where it does, and nowhere else."""

from __future__ import annotations

import pytest

from kernel.gfx950 import Kernel, Memory, Program, RunReport, Schedule, run
from tests.gfx950.mutation.compares import decides_otherwise
from tests.gfx950.mutation.launch import Launch
from tests.gfx950.mutation.mutants import Mutant
from tests.gfx950.one_wave import assemble


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
