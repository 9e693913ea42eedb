"""Pages on Hopper: brought to shared memory, and turned into keys in the registers of a warpgroup.

A thread takes 16 bytes of codes (32 dims) of a token and their two scales, and makes of them what a
warpgroup's matrix instruction wants from it as left operand, without a shuffle:

    lane of four     0             1             2             3
    bytes of codes   0..15         16..31        32..47        48..63       of a token, 64 contiguous bytes
    scales           0, 1          2, 3          4, 5          6, 7
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

# The integer lanes are what limits decode (64 a cycle and multiprocessor on Hopper, half of the float lanes),
# so a scale's eight E4M3 magnitudes come from a table (two registers), and a nibble of codes selects one by
# prmt. The four magnitudes of even dims and of odd dims are put together, where their signs are one shift
# away or in place. All bytes of a table row have the scale's sign in bit 7; the code's is added to it.
_WORD = """
    and.b32 w, WORD, 0x77777777;
    prmt.b32 x, m0, m1, w;
    mul.hi.u32 w, w, 65536;
    prmt.b32 y, m0, m1, w;
    prmt.b32 even, x, y, 0x6420;
    prmt.b32 odd, x, y, 0x7531;
    mul.lo.u32 w, WORD, 16;
    lop3.b32 even, even, w, 0x80808080, 0x78;
    lop3.b32 odd, odd, WORD, 0x80808080, 0x78;
"""
_WIDEN = """
    mov.b32 {ha, hb}, SOURCE;
    cvt.rn.f16x2.e4m3x2 FIRST, ha;
    cvt.rn.f16x2.e4m3x2 SECOND, hb;
"""


def _sixteen_keys(exact: bool) -> str:
    """PTX that turns eight bytes of codes and a table row into 16 keys: for each word the even dims, then
    the odd ones."""
    outputs = 8 if exact else 4
    lines = [
        ".reg .b32 m0, m1, w, x, y, even, odd;",
        ".reg .b16 ha, hb;",
        f"mov.b64 {{m0, m1}}, ${outputs + 2};",
    ]
    out = 0
    for word in (f"${outputs}", f"${outputs + 1}"):
        lines.append(_WORD.replace("WORD", word))
        for source in ("even", "odd"):
            if exact:
                widen = _WIDEN.replace("SOURCE", source)
                lines.append(widen.replace("FIRST", f"${out}").replace("SECOND", f"${out + 1}"))
                out += 2
            else:
                lines.append(f"mov.b32 ${out}, {source};")
                out += 1
    return "{" + "\n".join(lines) + "}"


def _constraints(outputs: int) -> str:
    return ",".join(["=&r"] * outputs + ["r"] * 2 + ["l"] * 8)


_EXACT_ASM = gl.constexpr(_sixteen_keys(exact=True))
_EXACT_CONSTRAINTS = gl.constexpr(_constraints(8))
_FAST_ASM = gl.constexpr(_sixteen_keys(exact=False))
_FAST_CONSTRAINTS = gl.constexpr(_constraints(4))


# From a token's two scales, a pair of bytes, to their table rows, all by multiplications: the float lanes do
# them, which have time. A multiplier known to be 8 would become additions of the integer lanes. The table
# lies at a multiple of its size, so that the upper half of an address is the table's.
_ROWS_ASM = gl.constexpr("""{
    .reg .b32 first, second, low, high;
    .reg .b64 cell;
    mul.hi.u32 second, $2, 0x1000000;
    mad.lo.s32 first, second, -256, $2;
    mov.b64 {low, high}, $4;
    mad.lo.u32 first, first, $3, low;
    mad.lo.u32 second, second, $3, low;
    mov.b64 cell, {first, high};
    ld.global.nc.b64 $0, [cell];
    mov.b64 cell, {second, high};
    ld.global.nc.b64 $1, [cell];
}""")
ROW_BYTES = 8
"""Bytes of a table row."""


def magnitude_rows(lut: torch.Tensor) -> torch.Tensor:
    """The table ``[256]`` int64 of a look-up table ``[256, 8]`` uint8: its rows, the scale's sign in every
    byte, at an address that is a multiple of 2,048."""
    rows = lut.clone()
    rows[128:] |= 0x80
    size = rows.numel()
    room = torch.empty(2 * size, dtype=torch.uint8, device=lut.device)
    start = -room.data_ptr() % size
    table = room[start : start + size]
    table.copy_(rows.flatten())
    return table.view(torch.int64)


@gluon.jit
def bring_page(pages_ptr, page_lines, page_id, num_pages, codes, scales, wanted):
    """Ask for a page, in a group of asynchronous copies of its own.

    A page id is kept inside the cache: those of a captured launch were not checked.
    """
    CODES: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    SCALES: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    page_id = gl.minimum(gl.maximum(page_id, 0), num_pages - 1)
    page = pages_ptr + page_id.to(gl.int64) * page_lines * 16  # so that the compiler knows the alignment
    token = gl.arange(0, 128, layout=gl.SliceLayout(1, CODES))
    octet = gl.arange(0, 64, layout=gl.SliceLayout(0, CODES))
    line = gl.arange(0, 16, layout=gl.SliceLayout(1, SCALES))
    pair = gl.arange(0, 32, layout=gl.SliceLayout(0, SCALES))
    if wanted:
        async_copy.async_copy_global_to_shared(codes, page + (token[:, None] * 64 + octet[None, :]))
        first = (page + 8192).to(gl.pointer_type(gl.uint16), bitcast=True)
        async_copy.async_copy_global_to_shared(scales, first + (line[:, None] * 32 + pair[None, :]))
    async_copy.commit_group()


@gluon.jit
def take_half(codes, scales, table_of_scales_ptr, row_bytes):
    """Codes ``[64, 64]`` and the table rows ``[64, 8]`` of the scales of half a page that is there, as the
    threads want them."""
    CODES: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
        lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
    # Eight tokens a line of 64 bytes, two scales an element.
    SCALES: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[1, 0]],
        lane_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]],
        warp_bases=[[2, 0], [4, 0]],
        block_bases=[],
        shape=[8, 32],
    )
    SPREAD: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 1, 0], [8, 0, 0]],
        lane_bases=[[0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[64, 8, 8],
    )
    first, second = gl.inline_asm_elementwise(
        _ROWS_ASM,
        "=&l,=&l,r,r,l",
        [scales.load(SCALES).to(gl.uint32), row_bytes, table_of_scales_ptr.to(gl.int64)],
        (gl.int64, gl.int64),
        is_pure=True,
        pack=1,
    )
    rows = gl.join(first, second).reshape([64, 8])
    rows = gl.convert_layout(rows, gl.SliceLayout(2, SPREAD), assert_trivial=True)
    return codes.load(CODES), rows


@gluon.jit
def half_keys(codes, rows, MMA: gl.constexpr, EXACT: gl.constexpr):
    """The keys of half a page ``[64, 128]`` as the left operand, in the order of dims of
    :mod:`kernel.backends.triton.e4m3`.

    Args:
        codes: ``[64, 64]`` uint8.
        rows: ``[64, 8]`` int64, the table rows of the scales.
    """
    spread = rows.expand_dims(2).broadcast_to([64, 8, 8]).reshape([64, 64])
    spread = gl.convert_layout(spread, codes.type.layout, assert_trivial=True)
    if EXACT:
        first, second = gl.inline_asm_elementwise(
            _EXACT_ASM, _EXACT_CONSTRAINTS, [codes, spread], (gl.float16, gl.float16), is_pure=True, pack=8
        )
    else:
        first, second = gl.inline_asm_elementwise(
            _FAST_ASM,
            _FAST_CONSTRAINTS,
            [codes, spread],
            (gl.float8e4nv, gl.float8e4nv),
            is_pure=True,
            pack=8,
        )
    W: gl.constexpr = 2 if EXACT else 4
    # first holds the keys of a group's first word, second those of its second.
    keys = gl.join(first, second).reshape([64, 8, 8, 2]).permute([0, 1, 3, 2]).reshape([64, 4, 32 // W, W])
    keys = keys.permute([0, 2, 1, 3]).reshape([64, 128])
    return gl.convert_layout(
        keys, gl.DotOperandLayout(operand_index=0, parent=MMA, k_width=W), assert_trivial=True
    )
