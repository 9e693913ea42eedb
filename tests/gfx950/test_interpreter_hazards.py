"""Wait states counted over all paths, and what is too close."""

from __future__ import annotations

import pytest

from kernel.gfx950 import HazardError
from kernel.gfx950.hazards import KINDS, HazardDistance, check_hazards, hazard_distances
from tests.gfx950.one_wave import assemble

MFMA = "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[16:23], v[24:31], v[4:7]"

# kind: (producer, consumer)
PAIRS = {
    "matrix result read by a vector or memory instruction": (MFMA, "v_max_f32_e32 v40, v41, v3"),
    "matrix result overwritten by a vector or memory instruction": (MFMA, "v_mov_b32_e32 v2, 0"),
    "matrix result read as A or B of the next": (
        MFMA,
        "v_mfma_f32_16x16x128_f8f6f4 v[8:11], v[16:23], v[0:7], 0",
    ),
    "matrix result partly read as C of the next": (
        MFMA,
        "v_mfma_f32_16x16x128_f8f6f4 v[8:11], v[16:23], v[24:31], v[2:5]",
    ),
    "C overwritten by a vector instruction": (MFMA, "v_mov_b32_e32 v7, 0"),
    "vector result read by a matrix instruction": ("v_mov_b32_e32 v17, v40", MFMA),
    "vector result read across lanes by dpp": (
        "v_mov_b32_e32 v50, v40",
        "v_mov_b32_dpp v51, v50 row_mirror row_mask:0xf bank_mask:0xf",
    ),
    "vector result read by a lane swap": ("v_mov_b32_e32 v50, v40", "v_permlane32_swap_b32_e32 v51, v50"),
    "vector result read by v_readlane or v_readfirstlane": (
        "v_mov_b32_e32 v50, v40",
        "v_readfirstlane_b32 s20, v50",
    ),
    "transcendental result read by another vector instruction": (
        "v_rcp_f32_e32 v50, v40",
        "v_mul_f32_e32 v51, v50, v40",
    ),
    "part of a register that sdwa wrote, used by a vector instruction": (
        "v_add_u32_sdwa v50, v40, v41 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD",
        "v_mul_f32_e32 v51, v50, v40",
    ),
    "data of a 12- or 16-byte store overwritten by a vector instruction": (
        "global_store_dwordx4 v[10:11], v[50:53], off",
        "v_mov_b32_e32 v53, v40",
    ),
    "data of a 12- or 16-byte store with a scalar offset overwritten by a vector instruction": (
        "buffer_store_dwordx4 v[50:53], v40, s[20:23], s24 offen",
        "v_pk_mul_f32 v[50:51], v[60:61], v[62:63]",
    ),
    "scalar of a vector instruction read by a vector instruction": (
        "v_readfirstlane_b32 s20, v40",
        "v_add_u32_e32 v50, s20, v41",
    ),
    "scalar of a vector instruction read by a memory instruction": (
        "v_readfirstlane_b32 s20, v40",
        "buffer_load_dword v50, v40, s[20:23], 0 offen",
    ),
    "scalar of a vector instruction read as a lane number": (
        "v_readfirstlane_b32 s20, v40",
        "v_readlane_b32 s22, v41, s20",
    ),
    "exec of a vector compare used by dpp": (
        "v_cmpx_eq_u32_e32 vcc, v40, v41",
        "v_mov_b32_dpp v51, v50 row_mirror row_mask:0xf bank_mask:0xf",
    ),
    "exec of a vector compare used by a memory instruction": (
        "v_cmpx_eq_u32_e32 vcc, v40, v41",
        "global_load_dword v50, v[10:11], off",
    ),
    "exec of a vector compare used by a lane access or a matrix instruction": (
        "v_cmpx_eq_u32_e32 vcc, v40, v41",
        "v_readfirstlane_b32 s20, v50",
    ),
    "m0 used by a DMA to LDS": ("s_mov_b32 m0, 0", "buffer_load_dword v40, s[20:23], 0 offen lds"),
}


def distances(body: str) -> dict[str, HazardDistance]:
    return {found.kind: found for found in hazard_distances(assemble(body).kernels["kernel"])}


def test_every_kind_is_tried() -> None:
    assert set(PAIRS) == {kind.name for kind in KINDS}


@pytest.mark.parametrize("kind", PAIRS)
def test_distances(kind: str) -> None:
    producer, consumer = PAIRS[kind]
    needed = distances(f"{producer}\n{consumer}")[kind].needed
    for states in (0, needed - 1, needed):
        gap = f"s_nop {states - 1}\n" if states else ""
        body = f"{producer}\n{gap}{consumer}"
        found = distances(body)[kind]
        assert (found.seen, found.ok) == (states, states >= needed)
        if states < needed:
            with pytest.raises(HazardError, match="wait states after line 2") as caught:
                check_hazards(assemble(body).kernels["kernel"])
            assert caught.value.line == (4 if states else 3)
        else:
            check_hazards(assemble(body).kernels["kernel"])


STORE = "global_store_dwordx4 v[10:11], v[50:53], off"


@pytest.mark.parametrize(
    ("producer", "consumer", "needed"),
    [
        # Every form of the kinds above that LLVM treats alike.
        (MFMA, "ds_read_b32 v3, v40", 12),
        (MFMA, "global_load_dword v3, v[10:11], off", 12),
        ("v_cmp_eq_u32_e32 vcc, v40, v41", "v_mov_b32_e32 v50, vcc_lo", 2),
        ("v_cmp_eq_u32_e32 vcc, v40, v41", "v_cndmask_b32_e32 v50, v42, v43, vcc", 2),
        ("v_cmp_eq_u32_e64 s[20:21], v40, v41", "v_cndmask_b32_e64 v50, v42, v43, s[20:21]", 2),
        ("v_add_co_u32_e32 v50, vcc, v40, v41", "v_addc_co_u32_e32 v51, vcc, v42, v43, vcc", 2),
        ("v_readfirstlane_b32 s20, v40", "v_writelane_b32 v50, s20, 3", 2),
        ("v_readlane_b32 s20, v40, 3", "v_cmp_eq_u32_e32 vcc, s20, v41", 2),
        ("v_cmpx_eq_u32_e32 vcc, v40, v41", "v_mov_b32_e32 v50, exec_lo", 2),
        ("v_cmpx_eq_u32_e32 vcc, v40, v41", "v_readlane_b32 s20, v50, 3", 4),
        ("v_cmpx_eq_u32_e32 vcc, v40, v41", "v_writelane_b32 v50, s30, 3", 4),
        ("v_cmpx_eq_u32_e32 vcc, v40, v41", "v_permlane32_swap_b32_e32 v51, v50", 4),
        ("v_cmpx_eq_u32_e32 vcc, v40, v41", MFMA, 4),
        ("v_cmpx_eq_u32_e32 vcc, v40, v41", "buffer_store_dword v50, v40, s[20:23], 0 offen", 5),
        ("global_store_dwordx3 v10, v[50:52], s[20:21]", "v_mov_b32_e32 v52, v40", 2),
        ("buffer_store_dwordx4 v[50:53], v40, s[20:23], 0 offen", "v_mov_b32_e32 v50, v40", 2),
        ("scratch_store_dwordx4 off, v[50:53], s20", "v_mov_b32_e32 v50, v40", 2),
        (STORE, "v_permlane32_swap_b32_e32 v51, v60", 2),
        (STORE, "v_mfma_f32_16x16x128_f8f6f4 v[50:53], v[16:23], v[24:31], v[4:7]", 2),
        ("v_mov_b32_sdwa v50, v40 dst_sel:BYTE_1 dst_unused:UNUSED_PAD", "v_mov_b32_e32 v50, v41", 1),
        # What the hardware takes care of.
        ("v_rcp_f32_e32 v50, v40", "v_rcp_f32_e32 v51, v50", 0),
        ("v_rcp_f32_e32 v50, v40", "v_mov_b32_e32 v50, v41", 0),
        ("v_mov_b32_sdwa v50, v40 dst_sel:DWORD src0_sel:WORD_1", "v_mov_b32_e32 v51, v50", 0),
        (STORE, "ds_read_b32 v50, v40", 0),
        (STORE, "v_mov_b32_e32 v54, v40", 0),
        ("global_store_dwordx2 v[10:11], v[50:51], off", "v_mov_b32_e32 v50, v40", 0),
        ("buffer_store_dwordx2 v[50:51], v40, s[20:23], s24 offen", "v_mov_b32_e32 v50, v40", 0),
        ("ds_write_b128 v10, v[50:53]", "v_mov_b32_e32 v50, v40", 0),
        ("v_cmpx_eq_u32_e32 vcc, v40, v41", "ds_read_b32 v50, v42", 0),
        ("v_cmpx_eq_u32_e32 vcc, v40, v41", "v_mov_b32_e32 v50, v42", 0),
        ("v_readfirstlane_b32 s20, v40", "s_mov_b32 s30, s20", 0),
        ("v_readfirstlane_b32 s20, v40", "s_load_dword s30, s[20:21], 0x0", 0),
        ("s_mov_b32 s20, 0", "v_mov_b32_e32 v50, s20", 0),
        ("s_mov_b64 exec, s[20:21]", "v_readfirstlane_b32 s30, v50", 0),
    ],
)
def test_wait_states_as_llvm_inserts_them(producer: str, consumer: str, needed: int) -> None:
    """Numbers of LLVM 22's hazard recogniser for gfx950 (``llc -run-pass=post-RA-hazard-rec``)."""
    gap = f"s_nop {needed - 1}\n" if needed else ""
    check_hazards(assemble(f"{producer}\n{gap}{consumer}").kernels["kernel"])
    if needed:
        gap = f"s_nop {needed - 2}\n" if needed > 1 else ""
        with pytest.raises(HazardError, match=f"{needed} are needed") as caught:
            check_hazards(assemble(f"{producer}\n{gap}{consumer}").kernels["kernel"])
        assert caught.value.text == consumer


def test_unrelated_registers_are_no_hazard() -> None:
    assert all(
        found.seen is None
        for found in distances(f"{MFMA}\nv_mov_b32_e32 v16, 0\nv_mov_b32_e32 v60, v61").values()
    )


def test_accumulating_into_the_same_registers_needs_nothing() -> None:
    same = "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[16:23], v[24:31], v[0:3]"
    check_hazards(assemble(f"{same}\n{same}").kernels["kernel"])


def test_the_shortest_path_counts_round_a_loop() -> None:
    body = f"""
        s_nop 0
    .LBB0_1:
        v_max_f32_e32 v40, v40, v0
        s_nop 9
        {MFMA}
        s_nop 5
        s_cbranch_scc1 .LBB0_1
        s_nop 15
        v_max_f32_e32 v41, v40, v1
    """
    found = distances(body)["matrix result read by a vector or memory instruction"]
    assert (found.seen, found.needed) == (7, 12)
