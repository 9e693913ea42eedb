"""What each memory instruction reads and writes, bounds, and addresses."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import pytest

from kernel.gfx950 import Memory, OutOfBoundsError, RaceError, Schedule, UnsupportedInstructionError
from tests.gfx950.one_wave import launch, run_lanes

_WIDTHS = ("dword", "dwordx2", "dwordx3", "dwordx4")
_NARROW_LOADS = {"ubyte": (1, False), "sbyte": (1, True), "ushort": (2, False), "sshort": (2, True)}
COVERED = {
    f"{head}_{what}_{w}"
    for head in ("global", "buffer", "scratch")
    for what in ("load", "store")
    for w in _WIDTHS
}
COVERED |= {f"{head}_load_{w}" for head in ("global", "buffer") for w in _NARROW_LOADS}
COVERED |= {f"{head}_store_{w}" for head in ("global", "buffer") for w in ("byte", "short")}
COVERED |= {f"global_load_lds_{w}" for w in ("dword", "dwordx3", "dwordx4")}
COVERED |= {
    f"s_{head}_{w}" for head in ("load", "buffer_load") for w in ("dword", "dwordx2", "dwordx4", "dwordx8")
}
COVERED |= {"s_load_dwordx16", "s_buffer_load_dwordx16", "s_waitcnt"}
COVERED |= {f"ds_{what}_{w}" for what in ("read", "write") for w in ("b32", "b64", "b96", "b128")}
COVERED |= {"ds_read_u8", "ds_read_u16", "ds_write_b8", "ds_write_b16"}
COVERED |= {
    f"ds_{what}2{st}_{w}" for what in ("read", "write") for st in ("", "st64") for w in ("b32", "b64")
}

START = """
    s_load_dwordx4 s[4:7], s[0:1], 0x0
    s_waitcnt lgkmcnt(0)
"""
"""s[4:5] the first buffer, s[6:7] the second."""


def two_buffers(
    first: npt.NDArray[np.generic],
    second: npt.NDArray[np.generic],
    body: str,
    *,
    lds_bytes: int = 0,
    schedule: Schedule | None = None,
) -> None:
    memory = Memory()
    a = memory.register_array(first, "first")
    b = memory.register_array(second, "second")
    launch(
        START + body, memory, struct.pack("<2q", a.address, b.address), lds_bytes=lds_bytes, schedule=schedule
    )


def words(count: int, seed: int = 0) -> npt.NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)


DESCRIPTORS = """
    s_mov_b64 s[8:9], s[4:5]
    s_mov_b64 s[12:13], s[6:7]
    s_movk_i32 s10, 0x400
    s_movk_i32 s14, 0x400
    s_mov_b32 s11, 0x27000
    s_mov_b32 s15, 0x27000
"""


@pytest.mark.parametrize("dwords", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["pair", "scalar base", "buffer"])
def test_copies_of_every_width(dwords: int, kind: str) -> None:
    width = "dword" + (f"x{dwords}" if dwords > 1 else "")
    registers = f"v[10:{9 + dwords}]" if dwords > 1 else "v10"
    source, target = words(64 * 4 + 4), np.zeros(64 * 4 + 4, np.uint32)
    copy = {
        "scalar base": f"global_load_{width} {registers}, v2, s[4:5] offset:16\ns_waitcnt vmcnt(0)\n"
        f"global_store_{width} v2, {registers}, s[6:7] offset:16 sc0 sc1",
        "pair": "v_lshl_add_u64 v[4:5], v[2:3], 0, s[4:5]\nv_lshl_add_u64 v[6:7], v[2:3], 0, s[6:7]\n"
        f"global_load_{width} {registers}, v[4:5], off offset:16 nt\ns_waitcnt vmcnt(0)\n"
        f"global_store_{width} v[6:7], {registers}, off offset:16",
        "buffer": "s_movk_i32 s10, 0x410\ns_movk_i32 s14, 0x410\n"
        f"buffer_load_{width} {registers}, v2, s[8:11], 0 offen offset:16\ns_waitcnt vmcnt(0)\n"
        "s_mov_b32 s20, 16\n"
        f"buffer_store_{width} {registers}, v2, s[12:15], s20 offen",
    }[kind]
    two_buffers(source, target, f"{DESCRIPTORS}v_lshlrev_b32_e32 v2, 4, v0\nv_mov_b32_e32 v3, 0\n{copy}")
    wanted = np.zeros_like(target)
    for lane in range(64):
        wanted[4 + 4 * lane : 4 + 4 * lane + dwords] = source[4 + 4 * lane : 4 + 4 * lane + dwords]
    np.testing.assert_array_equal(target, wanted)


@pytest.mark.parametrize("kind", _NARROW_LOADS)
@pytest.mark.parametrize("head", ["global", "buffer"])
def test_narrow_loads_and_stores(kind: str, head: str) -> None:
    size, signed = _NARROW_LOADS[kind]
    source, target = words(64, 1), np.full(64, 0xEEEEEEEE, np.uint32)
    where_in = "v2, s[4:5]" if head == "global" else "v2, s[8:11], 0 offen"
    where_out = "v3, v10, s[6:7]" if head == "global" else "v10, v3, s[12:15], 0 offen"
    store = "byte" if size == 1 else "short"
    two_buffers(
        source,
        target,
        f"{DESCRIPTORS}v_mul_u32_u24_e32 v2, {size}, v0\nv_lshlrev_b32_e32 v3, 2, v0\n"
        f"{head}_load_{kind} v10, {where_in}\ns_waitcnt vmcnt(0)\n{head}_store_dword {where_out}\n"
        f"v_lshrrev_b32_e32 v10, 8, v10\ns_waitcnt vmcnt(0)\n{head}_store_{store} {where_out}",
    )
    data = source.tobytes()
    for lane in range(64):
        value = int.from_bytes(data[lane * size : (lane + 1) * size], "little", signed=signed) % 2**32
        low = (value >> 8) % 256**size
        assert int(target[lane]) == value // 256**size * 256**size + low


def test_a_buffer_without_a_data_format_is_refused() -> None:
    with pytest.raises(UnsupportedInstructionError, match="data format 0"):
        two_buffers(
            words(64),
            words(64),
            f"{DESCRIPTORS}s_mov_b32 s11, 0x7000\nbuffer_load_dword v10, off, s[8:11], 0",
        )


def test_a_buffer_ends_where_its_descriptor_says() -> None:
    source, target = words(256, 2), np.full(64, 7, np.uint32)
    body = f"""{DESCRIPTORS}
        s_movk_i32 s10, 0x40
        s_movk_i32 s14, 0x60
        v_lshlrev_b32_e32 v2, 2, v0
        v_mov_b32_e32 v10, 5
        buffer_load_dword v10, v2, s[8:11], 0 offen
        s_waitcnt vmcnt(0)
        buffer_store_dword v10, v2, s[12:15], 0 offen
    """
    two_buffers(source, target, body)
    wanted = np.full(64, 7, np.uint32)
    wanted[:24] = 0
    wanted[:16] = source[:16]
    np.testing.assert_array_equal(target, wanted)


@pytest.mark.parametrize("dwords", [2, 3, 4])
def test_a_load_across_the_end_of_a_buffer_gives_the_dwords_before_it(dwords: int) -> None:
    """Each dword is checked by itself; the one past the allocation is not touched."""
    end = 64 * dwords - 1  # of the last lane all dwords but one
    source = np.zeros((64, dwords), np.uint32)
    source[:] = words(64 * dwords, 3).reshape(64, dwords)
    target = np.full((64, 4), 7, np.uint32)
    body = f"""{DESCRIPTORS}
        s_movk_i32 s10, {4 * end:#x}
        v_mul_u32_u24_e32 v2, {4 * dwords}, v0
        v_lshlrev_b32_e32 v3, 4, v0
        v_mov_b32_e32 v10, 5
        v_mov_b32_e32 v11, 5
        v_mov_b32_e32 v12, 5
        v_mov_b32_e32 v13, 5
        buffer_load_dwordx{dwords} v[10:{9 + dwords}], v2, s[8:11], 0 offen
        s_waitcnt vmcnt(0)
        buffer_store_dwordx4 v[10:13], v3, s[12:15], 0 offen
    """
    two_buffers(source.reshape(-1)[:end].copy(), target.reshape(-1), body)
    wanted = np.full((64, 4), 5, np.uint32)
    wanted[:, :dwords] = source
    wanted[63, dwords - 1] = 0
    np.testing.assert_array_equal(target, wanted)


def test_of_a_buffer_of_one_dword_a_long_load_gives_that() -> None:
    """No lane's second dword lies inside; lanes behind it get 0."""
    source, target = words(1, 4), np.full(4 * 64, 7, np.uint32)
    body = f"""{DESCRIPTORS}
        s_mov_b32 s10, 4
        v_lshlrev_b32_e32 v2, 4, v0
        buffer_load_dwordx4 v[10:13], v2, s[8:11], 0 offen
        s_waitcnt vmcnt(0)
        buffer_store_dwordx4 v[10:13], v2, s[12:15], 0 offen
    """
    two_buffers(source, target, body)
    assert target[0] == source[0]
    assert not target[1:].any()


@pytest.mark.parametrize(
    ("text", "lane"),
    [
        ("buffer_load_dwordx2 v[10:11], v2, s[8:11], 0 offen offset:770", 62),  # not at a dword
        ("buffer_load_ushort v10, v2, s[8:11], 0 offen offset:771", 63),
        ("buffer_store_dwordx2 v[2:3], v2, s[12:15], 0 offen offset:772", 62),
    ],
)
def test_other_accesses_across_the_end_of_a_buffer_are_not_guessed(text: str, lane: int) -> None:
    body = f"{DESCRIPTORS}v_lshlrev_b32_e32 v2, 2, v0\nv_mov_b32_e32 v3, v2\n{text}"
    with pytest.raises(UnsupportedInstructionError, match="cross the end") as caught:
        two_buffers(words(256), words(64), body)
    assert caught.value.lane == lane


def test_descriptors_that_are_not_raw_are_refused() -> None:
    for change in ("s_or_b32 s9, s9, 0x40000", "s_or_b32 s11, s11, 0x800000"):
        body = f"{DESCRIPTORS}{change}\nv_mov_b32_e32 v2, 0\nbuffer_load_dword v10, v2, s[8:11], 0 offen"
        with pytest.raises(UnsupportedInstructionError, match="stride"):
            two_buffers(words(256), words(4), body)
    with pytest.raises(UnsupportedInstructionError, match="idxen"):
        two_buffers(words(4), words(4), f"{DESCRIPTORS}buffer_load_dword v10, v0, s[8:11], 0 idxen")


@pytest.mark.parametrize(
    ("text", "lane"),
    [
        ("global_load_dword v10, v2, s[4:5] offset:4", 63),
        ("global_load_dword v10, v2, s[4:5] offset:-4", 0),
        ("global_store_dword v2, v2, s[4:5] offset:8", 62),
        ("global_load_dword v10, v2, s[4:5] offset:2", 0),
    ],
)
def test_global_accesses_stay_in_their_allocation(text: str, lane: int) -> None:
    memory = Memory()
    block = np.zeros(66, np.uint32)
    inner = memory.register(block.ctypes.data + 4, 256, "scores", keep_alive=block)
    with pytest.raises(OutOfBoundsError) as caught:
        launch(f"{START}v_lshlrev_b32_e32 v2, 2, v0\n{text}", memory, struct.pack("<2q", inner.address, 0))
    assert caught.value.lane == lane
    assert caught.value.workgroup == (0, 0, 0)
    assert caught.value.wave == 0
    assert caught.value.text == text
    assert caught.value.line is not None


def test_lanes_may_reach_into_different_allocations() -> None:
    memory = Memory()
    pieces = [memory.register_array(words(64, seed), f"piece {seed}", writable=False) for seed in range(4)]
    target = np.zeros(64, np.uint32)
    out = memory.register_array(target, "out")
    table = np.array([piece.address for piece in pieces], np.uint64)
    where = memory.register_array(table, "table", writable=False)
    body = f"""{START}
        v_and_b32_e32 v1, 3, v0
        v_lshlrev_b32_e32 v1, 3, v1
        global_load_dwordx2 v[4:5], v1, s[4:5]
        v_lshlrev_b32_e32 v2, 2, v0
        v_mov_b32_e32 v3, 0
        s_waitcnt vmcnt(0)
        v_lshl_add_u64 v[4:5], v[2:3], 0, v[4:5]
        global_load_dword v6, v[4:5], off
        s_waitcnt vmcnt(0)
        global_store_dword v2, v6, s[6:7]
    """
    launch(body, memory, struct.pack("<2q", where.address, out.address))
    for lane in range(64):
        assert target[lane] == words(64, lane % 4)[lane]


def test_read_only_memory_and_lanes_that_disagree() -> None:
    memory = Memory()
    a = memory.register_array(words(64), "pages", writable=False)
    b = memory.register_array(words(64), "scores")
    arguments = struct.pack("<2q", a.address, b.address)
    with pytest.raises(OutOfBoundsError, match="read-only"):
        launch(f"{START}v_mov_b32_e32 v1, 0\nglobal_store_dword v1, v1, s[4:5]", memory, arguments)
    with pytest.raises(RaceError, match="two lanes"):
        launch(f"{START}v_mov_b32_e32 v1, 0\nglobal_store_dword v1, v0, s[6:7]", memory, arguments)
    launch(f"{START}v_mov_b32_e32 v1, 0\nglobal_store_dword v1, v1, s[6:7]", memory, arguments)


def test_unwritten_bytes_are_listed() -> None:
    memory = Memory()
    target = np.zeros(64, np.uint32)
    out = memory.register_array(target, "scores", initialised=False)
    body = f"{START}v_lshlrev_b32_e32 v1, 2, v0\ns_mov_b64 exec, 5\nglobal_store_dword v1, v0, s[4:5]"
    launch(body, memory, struct.pack("<2q", out.address, 0))
    assert out.unwritten().tolist() == [4, 5, 6, 7, *range(12, 256)]


def load_scalars(source: npt.NDArray[np.uint32], count: int, setup: str, load: str, place: str) -> list[int]:
    """The dwords that a scalar load of so many gives; ``load`` is its name without the width."""
    target = np.zeros((16, 64), np.uint32)
    registers = f"s[32:{31 + count}]" if count > 1 else "s32"
    width = "dword" + (f"x{count}" if count > 1 else "")
    stores = "\n".join(
        f"v_mov_b32_e32 v3, s{32 + at}\nglobal_store_dword v1, v3, s[6:7] offset:{256 * at}"
        for at in range(count)
    )
    body = f"{setup}\nv_lshlrev_b32_e32 v1, 2, v0\n{load}_{width} {registers}, {place}\ns_waitcnt lgkmcnt(0)"
    two_buffers(source, target, f"{body}\n{stores}")
    for row in target[:count]:
        assert (row == row[0]).all()
    return [int(row[0]) for row in target[:count]]


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("offset", "first"), [("0x10", 4), ("s20", 2), ("s20 offset:0x8", 4)])
def test_scalar_loads(count: int, offset: str, first: int) -> None:
    source = words(32, 3)
    found = load_scalars(source, count, "s_mov_b32 s20, 8", "s_load", f"s[4:5], {offset}")
    assert found == source[first : first + count].tolist()


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_scalar_buffer_loads_give_zero_past_the_end(count: int) -> None:
    source = words(32, 4)
    setup = f"{DESCRIPTORS}s_movk_i32 s10, 0x14"
    found = load_scalars(source, count, setup, "s_buffer_load", "s[8:11], 0x8")
    assert found == [*source[2:5].tolist(), *[0] * 13][:count]


@pytest.mark.parametrize(("width", "dwords"), [("b32", 1), ("b64", 2), ("b96", 3), ("b128", 4)])
def test_lds_copies(width: str, dwords: int) -> None:
    inputs = {f"v{10 + at}": words(64, at) for at in range(dwords)}
    data = f"v[10:{9 + dwords}]" if dwords > 1 else "v10"
    out = f"v[20:{19 + dwords}]" if dwords > 1 else "v20"
    text = f"v_lshlrev_b32_e32 v2, 4, v0\nds_write_{width} v2, {data} offset:32\n"
    text += f"v_xor_b32_e32 v2, 0x3f0, v2\nds_read_{width} {out}, v2 offset:32\ns_waitcnt lgkmcnt(0)"
    names = [f"v{20 + at}" for at in range(dwords)]
    found = run_lanes(text, vectors=inputs, read_vectors=names, lds_bytes=32 + 1024).vectors
    for at in range(dwords):
        np.testing.assert_array_equal(found[f"v{20 + at}"], inputs[f"v{10 + at}"][::-1])


@pytest.mark.parametrize("stride", ["", "st64"])
@pytest.mark.parametrize(("width", "dwords"), [("b32", 1), ("b64", 2)])
def test_lds_pairs(stride: str, width: str, dwords: int) -> None:
    inputs = {f"v{10 + at}": words(64, at) for at in range(2 * dwords)}
    first, second = (
        f"v[{10 + dwords * at}:{9 + dwords * (at + 1)}]" if dwords > 1 else f"v{10 + at}" for at in (0, 1)
    )
    unit = 4 * dwords * (64 if stride else 1)
    far = 8 if stride else 128
    text = f"""
        v_lshlrev_b32_e32 v2, {1 + dwords}, v0
        ds_write2{stride}_{width} v2, {first}, {second} offset0:1 offset1:{far}
        ds_read2{stride}_{width} v[20:{19 + 2 * dwords}], v2 offset0:{far} offset1:1
        v_add_u32_e32 v3, {unit}, v2
        ds_read_{width} {"v[30:31]" if dwords > 1 else "v30"}, v3
        s_waitcnt lgkmcnt(0)
    """
    names = [f"v{20 + at}" for at in range(2 * dwords)] + ["v30"]
    found = run_lanes(text, vectors=inputs, read_vectors=names, lds_bytes=(far + 64) * unit).vectors
    for at in range(dwords):
        np.testing.assert_array_equal(found[f"v{20 + at}"], inputs[f"v{10 + dwords + at}"])
        np.testing.assert_array_equal(found[f"v{20 + dwords + at}"], inputs[f"v{10 + at}"])
    np.testing.assert_array_equal(found["v30"], inputs["v10"])


def test_narrow_lds_accesses() -> None:
    value = words(64, 5)
    text = """
        v_lshlrev_b32_e32 v2, 2, v0
        ds_write_b32 v2, v10
        ds_write_b8 v2, v11 offset:1
        ds_write_b16 v2, v11 offset:2
        ds_read_u8 v20, v2 offset:1
        ds_read_u16 v21, v2
        ds_read_b32 v22, v2
        s_waitcnt lgkmcnt(0)
    """
    other = words(64, 6)
    found = run_lanes(
        text, vectors={"v10": value, "v11": other}, read_vectors=["v20", "v21", "v22"], lds_bytes=256
    )
    whole = (value & 0xFF) | (other & 0xFF) << np.uint32(8) | (other & 0xFFFF) << np.uint32(16)
    np.testing.assert_array_equal(found.vectors["v20"], other & 0xFF)
    np.testing.assert_array_equal(found.vectors["v21"], whole & 0xFFFF)
    np.testing.assert_array_equal(found.vectors["v22"], whole)


def test_lds_addresses_wrap_in_32_bits() -> None:
    text = """
        v_lshlrev_b32_e32 v2, 2, v0
        v_subrev_u32_e32 v3, 32, v2
        ds_write_b32 v3, v10 offset:32
        ds_read_b32 v5, v2
        s_waitcnt lgkmcnt(0)
    """
    found = run_lanes(text, vectors={"v10": words(64)}, read_vectors=["v5"], lds_bytes=256)
    np.testing.assert_array_equal(found.vectors["v5"], words(64))


@pytest.mark.parametrize(
    ("text", "lane"),
    [
        ("ds_write_b32 v2, v0 offset:4", 63),
        ("ds_read_b64 v[10:11], v2", 1),
        ("ds_read_b128 v[10:13], v3 offset:16", 15),
    ],
)
def test_lds_bounds_and_alignment(text: str, lane: int) -> None:
    body = f"v_lshlrev_b32_e32 v2, 2, v0\nv_lshlrev_b32_e32 v3, 4, v0\n{text}"
    with pytest.raises(OutOfBoundsError, match="LDS") as caught:
        run_lanes(body, lds_bytes=256)
    assert caught.value.lane == lane


@pytest.mark.parametrize("dwords", [1, 2, 3, 4])
def test_scratch(dwords: int) -> None:
    width = "dword" + (f"x{dwords}" if dwords > 1 else "")
    data, out = (f"v[{at}:{at + dwords - 1}]" if dwords > 1 else f"v{at}" for at in (10, 20))
    target = np.zeros((4, 64), np.uint32)
    memory = Memory()
    region = memory.register_array(target, "out")
    fill = "\n".join(f"v_add_u32_e32 v{10 + at}, {at * 7}, v0" for at in range(dwords))
    stores = "\n".join(f"global_store_dword v1, v{20 + at}, s[4:5] offset:{256 * at}" for at in range(dwords))
    body = f"""{START}
        v_lshlrev_b32_e32 v1, 2, v0
        {fill}
        s_mov_b32 s20, 4
        scratch_store_{width} off, {data}, s20 offset:4
        scratch_load_{width} {out}, off, off offset:8
        s_waitcnt vmcnt(0)
        {stores}
    """
    launch(body, memory, struct.pack("<2q", region.address, 0), scratch_bytes=8 + 4 * dwords)
    for at in range(dwords):
        np.testing.assert_array_equal(target[at], np.arange(64) + 7 * at)
    with pytest.raises(OutOfBoundsError, match="scratch"):
        launch(body, memory, struct.pack("<2q", region.address, 0), scratch_bytes=4 + 4 * dwords)


@pytest.mark.parametrize("dma", ["early", "late"])
@pytest.mark.parametrize(("width", "dwords"), [("dword", 1), ("dwordx3", 3), ("dwordx4", 4)])
@pytest.mark.parametrize("head", ["buffer", "global"])
def test_dma_to_lds(dma: str, width: str, dwords: int, head: str) -> None:
    source, target = words(1024, 7), np.zeros(64 * dwords, np.uint32)
    load = {
        "buffer": f"buffer_load_{width} v2, s[8:11], 0 offen offset:16 lds",
        "global": f"global_load_lds_{width} v2, s[4:5] offset:16",
    }[head]
    body = f"""{DESCRIPTORS}
        s_movk_i32 s10, 0x1000
        v_mul_u32_u24_e32 v2, 16, v0
        v_sub_u32_e32 v3, 0x3f0, v2
        s_mov_b32 m0, 48
        v_mov_b32_e32 v2, v3
        {load}
        v_mul_u32_u24_e32 v4, {4 * dwords}, v0
        s_waitcnt vmcnt(0)
    """
    for at in range(dwords):
        body += f"\nds_read_b32 v{10 + at}, v4 offset:{64 + 4 * at}"
    body += "\ns_waitcnt lgkmcnt(0)"
    for at in range(dwords):
        body += f"\nglobal_store_dword v4, v{10 + at}, s[6:7] offset:{4 * at}"
    schedule = Schedule(dma="early" if dma == "early" else "late")
    two_buffers(source, target, body, lds_bytes=64 + 256 * dwords, schedule=schedule)
    for lane in range(64):
        first = (1008 - 16 * lane + 16) // 4
        np.testing.assert_array_equal(
            target[dwords * lane : dwords * lane + dwords], source[first : first + dwords]
        )


def test_regions_may_not_overlap() -> None:
    memory = Memory()
    block = np.zeros(64, np.uint32)
    memory.register_array(block, "one")
    with pytest.raises(ValueError, match="overlaps 'one'"):
        memory.register(block.ctypes.data + 8, 4, "two")
    with pytest.raises(ValueError, match="size = 0"):
        memory.register(block.ctypes.data, 0, "none")


def test_a_runtime_may_resolve_addresses() -> None:
    block = np.zeros(64, np.uint32)
    base = block.ctypes.data
    memory = Memory(resolve=lambda address: (base, 256) if base <= address < base + 256 else None)
    body = f"{START}v_lshlrev_b32_e32 v1, 2, v0\nglobal_store_dword v1, v0, s[4:5]"
    launch(body, memory, struct.pack("<2q", base, 0))
    np.testing.assert_array_equal(block, np.arange(64))
    with pytest.raises(OutOfBoundsError):
        launch(body, memory, struct.pack("<2q", base + 4, 0))
