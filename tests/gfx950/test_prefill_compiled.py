"""What the compiler makes of the prefill scorer must not get worse: registers, spills, LDS, loops' counts."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from kernel.contract import SUPPORTED_HEADS
from kernel.gfx950 import Kernel
from kernel.gfx950.hip import simulated_device
from kernel.gfx950.run_report import instruction_class
from tests.gfx950.prefill import scored
from tests.support.calls import random_call

MAX_VGPRS = 196
"""Up to 256, two waves share a SIMD."""
MAX_LDS_BYTES = 34_816
MAX_VALU = 845
"""Vector instructions of the unmasked loop for four blocks and a wave; 837 in its body."""
MAX_UNMASKED_INSTRUCTIONS = 1_321
MAX_DIAGONAL_VALU = 215
MAX_WHOLE_VALU = 240


@pytest.fixture(scope="module", params=SUPPORTED_HEADS)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    """The kernel as it was launched: disassembled from its code object."""
    heads: int = request.param
    scored(random_call([(5, 2)], heads))
    launch = simulated_device().launches[-1]
    assert launch.kernel == f"score_prefill_h{heads}"
    return launch.report.kernel


def sections(kernel: Kernel) -> list[Counter[str]]:
    """Instructions by class of every stretch that is entered at its start only and left at its end only."""
    branches = {i + 1 for i, found in enumerate(kernel.instructions) if instruction_class(found) == "branch"}
    edges = sorted({0, len(kernel.instructions), *kernel.labels.values(), *branches})
    return [Counter(map(instruction_class, kernel.instructions[a:b])) for a, b in itertools.pairwise(edges)]


def with_mfma(kernel: Kernel, count: int) -> Counter[str]:
    """The one section with so many MFMAs."""
    (found,) = (section for section in sections(kernel) if section["mfma"] == count)
    return found


def test_two_waves_fit_a_simd_without_a_spill(kernel: Kernel) -> None:
    assert kernel.metadata is not None
    assert kernel.metadata.notes["vgpr_count"] <= MAX_VGPRS
    assert kernel.metadata.notes["agpr_count"] == 0
    assert kernel.metadata.notes["vgpr_spill_count"] == 0
    assert kernel.metadata.notes["sgpr_spill_count"] == 0
    assert kernel.metadata.scratch_bytes == 0


def test_two_workgroups_fit_the_lds(kernel: Kernel) -> None:
    assert kernel.metadata is not None
    assert kernel.metadata.lds_bytes <= MAX_LDS_BYTES


def test_the_unmasked_loop_is_bound_by_the_matrix_unit(kernel: Kernel) -> None:
    """256 MFMAs of 32 clocks against 4 clocks of each vector instruction; LDS and page loads as designed."""
    loop = with_mfma(kernel, 256)
    assert loop["valu"] <= MAX_VALU
    assert sum(loop.values()) <= MAX_UNMASKED_INSTRUCTIONS
    assert (loop["lds_read"], loop["lds_write"], loop["vmem_load"], loop["barrier"]) == (80, 16, 12, 4)
    assert loop["vmem_store"] == 0


def test_the_careful_blocks_are_bound_by_the_matrix_unit(kernel: Kernel) -> None:
    """A block seen whole has 64 MFMAs, an aligned diagonal one 43: the others' keys are all in the future."""
    assert with_mfma(kernel, 64)["valu"] <= MAX_WHOLE_VALU
    assert with_mfma(kernel, 43)["valu"] <= MAX_DIAGONAL_VALU
