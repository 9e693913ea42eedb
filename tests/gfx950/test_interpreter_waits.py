"""A register or LDS byte touched before the wait that covers it is an error, for every counter."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from kernel.gfx950 import Memory, MissingWaitError
from tests.gfx950.one_wave import launch

START = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    v_lshlrev_b32_e32 v1, 2, v0
    v_mov_b32_e32 v9, 1
    s_waitcnt lgkmcnt(0)
"""


def run_text(body: str, lds_bytes: int = 1024) -> None:
    memory = Memory()
    source = memory.register_array(np.arange(1024, dtype=np.uint32), "source", writable=False)
    target = memory.register_array(np.zeros(1024, np.uint32), "target")
    arguments = struct.pack("<2q", source.address, target.address)
    launch(START + body, memory, arguments, lds_bytes=lds_bytes, scratch_bytes=16)


VECTOR_LOADS = {
    "global_load_dword v10, v1, s[4:5]": "vmcnt",
    "scratch_load_dword v10, off, off": "vmcnt",
    "ds_read_b32 v10, v1": "lgkmcnt",
    "ds_bpermute_b32 v10, v1, v9": "lgkmcnt",
}
SETUP = "ds_write_b32 v1, v0\nscratch_store_dword off, v0, off\ns_waitcnt vmcnt(0) lgkmcnt(0)\n"


@pytest.mark.parametrize("load", VECTOR_LOADS)
@pytest.mark.parametrize(
    "use", ["v_mov_b32_e32 v11, v10", "v_mov_b32_e32 v10, v9", "v_readfirstlane_b32 s20, v10"]
)
def test_vector_loads(load: str, use: str) -> None:
    counter = VECTOR_LOADS[load]
    other = "lgkmcnt" if counter == "vmcnt" else "vmcnt"
    run_text(f"{SETUP}{load}\ns_waitcnt {counter}(0)\n{use}")
    for wait in ("", f"s_waitcnt {counter}(1)\n", f"s_waitcnt {other}(0)\n"):
        with pytest.raises(MissingWaitError, match="v10 is touched before") as caught:
            run_text(f"{SETUP}{load}\n{wait}{use}")
        assert caught.value.text == use


@pytest.mark.parametrize(
    "use",
    [
        "global_store_dword v1, v10, s[6:7]",
        "ds_write_b32 v1, v10",
        "global_load_dword v12, v10, s[4:5]",
        "global_load_dword v10, v1, s[4:5]",
        "ds_read_b32 v10, v1",
        "v_cmp_eq_u32_e32 vcc, v10, v9",
        "v_cndmask_b32_e64 v12, v9, v10, s[20:21]",
        "v_permlane32_swap_b32_e32 v9, v10",
        "v_mov_b32_dpp v12, v10 row_mirror row_mask:0xf bank_mask:0xf",
        "v_mov_b32_dpp v10, v9 row_mirror row_mask:0xf bank_mask:0xf",
        "v_add_u32_sdwa v12, v9, v10 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:BYTE_0",
        "v_writelane_b32 v10, s20, 3",
        "v_mov_b64_e32 v[12:13], v[10:11]",
        "v_mov_b64_e32 v[10:11], v[12:13]",
        "v_accvgpr_write_b32 a0, v10",
        "scratch_store_dword off, v10, off",
    ],
)
def test_every_way_to_touch_a_register(use: str) -> None:
    setup = (
        SETUP + "s_mov_b64 s[20:21], 0\nv_mov_b32_e32 v11, 0\nv_mov_b32_e32 v12, 0\nv_mov_b32_e32 v13, 0\n"
    )
    load = "v_mov_b32_e32 v8, 0\nds_read_b32 v10, v8\n"  # lane 0's number: a harmless address
    run_text(f"{setup}{load}s_waitcnt lgkmcnt(0)\n{use}")
    with pytest.raises(MissingWaitError, match="v10"):
        run_text(f"{setup}{load}{use}")


def test_vector_memory_finishes_in_order_and_stores_count() -> None:
    two = "global_load_dword v10, v1, s[4:5]\nglobal_load_dword v11, v1, s[4:5]\n"
    run_text(f"{two}s_waitcnt vmcnt(1)\nv_mov_b32_e32 v12, v10")
    with pytest.raises(MissingWaitError, match="v11"):
        run_text(f"{two}s_waitcnt vmcnt(1)\nv_mov_b32_e32 v12, v11")
    behind_a_store = "global_load_dword v10, v1, s[4:5]\nglobal_store_dword v1, v0, s[6:7]\n"
    run_text(f"{behind_a_store}s_waitcnt vmcnt(1)\nv_mov_b32_e32 v12, v10")
    before_a_store = "global_store_dword v1, v0, s[6:7]\nglobal_load_dword v10, v1, s[4:5]\n"
    with pytest.raises(MissingWaitError, match="v10"):
        run_text(f"{before_a_store}s_waitcnt vmcnt(1)\nv_mov_b32_e32 v12, v10")


def test_a_register_may_be_loaded_again_while_a_load_of_it_is_in_flight() -> None:
    """Vector memory loads write in order: the later one's wait counts, and its data stay."""
    first = "global_load_dwordx2 v[10:11], v1, s[4:5]\n"
    second = "global_load_dword v10, v1, s[4:5] offset:4\n"
    run_text(f"{first}{second}s_waitcnt vmcnt(0)\nglobal_store_dword v1, v10, s[6:7]")
    run_text(f"{first}{second}s_waitcnt vmcnt(1)\nv_mov_b32_e32 v12, v11")
    with pytest.raises(MissingWaitError, match="v10"):
        run_text(f"{first}{second}s_waitcnt vmcnt(1)\nv_mov_b32_e32 v12, v10")
    one_lane = f"s_mov_b64 exec, 1\n{second}s_waitcnt vmcnt(0)\ns_mov_b64 exec, -1\n"
    run_text(f"{first}{one_lane}v_add_u32_e32 v12, v10, v11")
    with pytest.raises(MissingWaitError, match="v10"):
        run_text(f"{SETUP}ds_read_b32 v10, v1\n{second}")
    with pytest.raises(MissingWaitError, match="v10"):
        run_text(f"{SETUP}{second}ds_read_b32 v10, v1")


def test_lds_operations_finish_in_order() -> None:
    body = f"{SETUP}ds_read_b32 v10, v1\nds_read_b32 v11, v1\nds_write_b32 v1, v9\ns_waitcnt lgkmcnt(1)\n"
    run_text(f"{body}v_add_u32_e32 v12, v10, v11")
    with pytest.raises(MissingWaitError, match="v11"):
        run_text(f"{body.replace('lgkmcnt(1)', 'lgkmcnt(2)')}v_add_u32_e32 v12, v10, v11")


def test_scalar_loads_return_in_any_order() -> None:
    load = "s_load_dword s20, s[4:5], 0x0\n"
    use = "s_add_u32 s21, s20, 1"
    run_text(f"{load}s_waitcnt lgkmcnt(0)\n{use}")
    for text in (
        f"{load}{use}",
        f"{load}s_mov_b32 s20, 1",
        f"{load}v_mov_b32_e32 v10, s20",
        f"{load}s_mov_b32 s21, s20",
    ):
        with pytest.raises(MissingWaitError, match="s20"):
            run_text(text)
    # one later operation is left: it may be the load
    for two in (f"{load}s_load_dword s22, s[4:5], 0x4\n", f"{SETUP}{load}ds_read_b32 v10, v1\n"):
        with pytest.raises(MissingWaitError, match="s20"):
            run_text(f"{two}s_waitcnt lgkmcnt(1)\n{use}")


def test_a_scalar_load_does_not_cover_an_lds_read_before_it() -> None:
    body = f"{SETUP}ds_read_b32 v10, v1\ns_load_dword s20, s[4:5], 0x0\n"
    run_text(f"{body}s_waitcnt lgkmcnt(0)\nv_mov_b32_e32 v11, v10")
    with pytest.raises(MissingWaitError, match="v10"):
        run_text(f"{body}s_waitcnt lgkmcnt(1)\nv_mov_b32_e32 v11, v10")


def test_waits_at_the_counters_highest_value_do_nothing() -> None:
    with pytest.raises(MissingWaitError):
        run_text("global_load_dword v10, v1, s[4:5]\ns_waitcnt vmcnt(63) lgkmcnt(15)\nv_mov_b32_e32 v11, v10")


def test_raw_wait_immediates() -> None:
    run_text(
        f"{SETUP}ds_read_b32 v10, v1\nglobal_load_dword v11, v1, s[4:5]\ns_waitcnt 0\n"
        "v_add_u32_e32 v12, v10, v11"
    )
    with pytest.raises(MissingWaitError, match="v10"):  # vmcnt(0) alone
        run_text(f"{SETUP}ds_read_b32 v10, v1\ns_waitcnt 0x0f70\nv_mov_b32_e32 v12, v10")


DMA = "s_mov_b32 m0, 0\nglobal_load_lds_dword v1, s[4:5]\n"


def test_dma_must_be_waited_for() -> None:
    run_text(f"{DMA}s_waitcnt vmcnt(0)\nds_read_b32 v10, v1")
    for use in ("ds_read_b32 v10, v1", "ds_write_b32 v1, v0", "s_waitcnt lgkmcnt(0)\nds_read_b32 v10, v1"):
        with pytest.raises(MissingWaitError, match="DMA to it is in flight"):
            run_text(DMA + use)
    run_text(f"{DMA}ds_write_b32 v1, v0 offset:256")


def test_dma_may_not_overwrite_what_an_lds_read_in_flight_reads() -> None:
    body = "ds_write_b32 v1, v0\nds_read_b32 v10, v1\n"
    run_text(f"{body}s_waitcnt lgkmcnt(0)\n{DMA}")
    with pytest.raises(MissingWaitError, match="DMA overwrites"):
        run_text(body + DMA)


def test_the_message_says_which_load() -> None:
    with pytest.raises(
        MissingWaitError, match=r"the load of line 7 .*kernel kernel, workgroup \(0, 0, 0\), wave 0"
    ):
        run_text("global_load_dword v10, v1, s[4:5]\nv_mov_b32_e32 v11, v10")
