"""The insert kernel of :mod:`kernel.backends.triton.insert` on Hopper, for bfloat16 keys: a thread a group.

What makes it exact. ``threshold * scale`` has at most seven significant bits, a bfloat16 has eight: a key
equals a threshold or lies at least 2^-8 of it aside. So the quotient may be rounded: by an approximate
reciprocal of the scale, then to float16. Times 2^-14, the values of E2M1 are the upper bits of a float16
(subnormal below 1, where 2^-8 of the lowest threshold, 0.25, is one unit), and the code is the pattern
rounded to bit 9, a half downwards. The group's largest key over 6 equals a midpoint of two scales or lies
2^-8 of it aside in the same way.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from kernel.backends.triton.e4m3 import SCALES_START, TOKEN_BYTES, TOKEN_SCALES, TOKENS
from kernel.backends.triton.launch import launch
from kernel.contract import BLOCK_TOKENS

_KEYS = 32
_WARPS = 8


def _group_asm() -> str:
    """PTX that turns a group ($4 to $11, pairs of bfloat16) into codes (words $0, $1) and a scale ($2)."""
    lines = [
        ".reg .b32 largest, other, low, high, a, b, c, d, codes, signs;",
        ".reg .b16 octets, scale, unused;",
        ".reg .f32 factor, x, y;",
        "max.xorsign.abs.bf16x2 largest, $4, $5;",
        *(f"max.xorsign.abs.bf16x2 largest, largest, ${i};" for i in range(6, 12)),
        "prmt.b32 other, largest, largest, 0x1032;",
        "max.xorsign.abs.bf16x2 largest, largest, other;",
        "and.b32 largest, largest, 0x7FFF0000;",
        "mov.b32 x, largest;",
        "mul.rn.f32 x, x, 0f3E2AAAAB;",  # 1/6
        "max.f32 x, x, 0f3B000000;",  # 2^-9
        "cvt.rn.satfinite.e4m3x2.f32 octets, x, x;",
        "cvt.rn.f16x2.e4m3x2 other, octets;",
        "mov.b32 {scale, unused}, other;",
        "cvt.f32.f16 x, scale;",
        "rcp.approx.ftz.f32 factor, x;",
        "mul.rn.f32 factor, factor, 0f38800000;",  # 2^-14
        "cvt.u32.u16 $2, octets;",
    ]
    for word in range(2):
        for pair, register in enumerate("abcd"):
            # Keys pair and pair + 4 of eight: their codes lie 16 bits apart.
            for key, out in ((pair, "x"), (pair + 4, "y")):
                source = f"${4 + 4 * word + key // 2}"
                lines += [
                    f"and.b32 low, {source}, 0xFFFF0000;" if key % 2 else f"shl.b32 low, {source}, 16;",
                    f"mov.b32 {out}, low;",
                    f"fma.rn.f32 {out}, {out}, factor, 0f00000000;",  # -0 becomes +0
                ]
            lines += [
                f"cvt.rn.f16x2.f32 {register}, y, x;",
                f"min.xorsign.abs.f16x2 {register}, {register}, high;",
                f"add.u32 {register}, {register}, 0x00FF00FF;",
            ]
        lines += [
            "shr.u32 signs, a, 12;",
            "and.b32 signs, signs, 0x00080008;",
            "shr.u32 low, b, 8;",
            "lop3.b32 signs, signs, low, 0x00800080, 0xF8;",
            "shr.u32 low, c, 4;",
            "lop3.b32 signs, signs, low, 0x08000800, 0xF8;",
            "lop3.b32 signs, signs, d, 0x80008000, 0xF8;",
            *(f"and.b32 {register}, {register}, 0x0E000E00;" for register in "abcd"),
            "mad.lo.u32 a, b, 16, a;",
            "mad.lo.u32 c, d, 16, c;",
            "shr.u32 a, a, 9;",
            "shr.u32 c, c, 1;",
            f"lop3.b32 ${word}, a, c, signs, 0xFE;",
        ]
    lines.insert(3, "mov.b32 high, 0x0E000E00;")  # 6 times 2^-14, twice
    return "{" + "\n".join([*lines, "mov.b32 $3, 0;"]) + "}"


_ASM = gl.constexpr(_group_asm())
_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 4 + ["r"] * 8))


@gluon.jit
def _first_half(octets):
    """The first half of the columns of ``[GROUPS, n]``."""
    halves = octets.reshape([octets.shape[0], 2, octets.shape[1] // 2]).permute([0, 2, 1])
    return gl.split(halves)[0]


@gluon.jit
def _last_half(octets):
    """The last half of the columns of ``[GROUPS, n]``."""
    halves = octets.reshape([octets.shape[0], 2, octets.shape[1] // 2]).permute([0, 2, 1])
    return gl.split(halves)[1]


@gluon.jit
def insert_kernel(
    keys_ptr, slots_ptr, pages_ptr, page_lines, num_keys, num_slots, KEYS: gl.constexpr, WARPS: gl.constexpr
):
    GROUPS: gl.constexpr = KEYS * 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [WARPS, 1], [1, 0])
    group = gl.program_id(0).to(gl.int64) * GROUPS + gl.arange(0, GROUPS, layout=gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, 16, layout=gl.SliceLayout(0, LAYOUT))
    present = group < num_keys * 8
    # Launched while the kernel before still runs, which may write the keys or read the pages. What comes next
    # is not launched early: decode programs that wait for this kernel would take the room of a selection.
    gdc_wait()
    slot = gl.load(slots_ptr + group // 8, mask=present, other=-1)
    keys = gl.load(keys_ptr + (group * 16)[:, None] + dim[None, :], mask=present[:, None], other=0.0)
    octets = gl.inline_asm_elementwise(_ASM, _CONSTRAINTS, [keys], gl.uint8, is_pure=True, pack=16)
    codes = _first_half(octets)
    scale = gl.split(_first_half(_first_half(_last_half(octets))))[0]

    slot = gl.convert_layout(slot, scale.type.layout)
    group = gl.convert_layout(group, scale.type.layout)
    page = pages_ptr + (slot // TOKENS) * page_lines * 16
    token = slot % TOKENS
    written = (slot >= 0) & (slot < num_slots)
    gl.store(page + SCALES_START + token * TOKEN_SCALES + group % TOKEN_SCALES, scale, mask=written)
    CODES: gl.constexpr = codes.type.layout
    octet = gl.arange(0, 8, layout=gl.SliceLayout(0, CODES))
    start = gl.convert_layout(page + token * TOKEN_BYTES + group % TOKEN_SCALES * 8, gl.SliceLayout(1, CODES))
    written = gl.convert_layout(written, gl.SliceLayout(1, CODES))
    gl.store(start[:, None] + octet[None, :], codes, mask=written[:, None])


def insert_bfloat16(keys: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    """See :func:`kernel.backends.triton.insert.insert_keys`; ``keys`` are bfloat16, at least one."""
    launch(
        insert_kernel,
        (-(-keys.shape[0] // _KEYS),),
        keys,
        slots,
        pages,
        pages.stride(0) // 16,
        keys.shape[0],
        pages.shape[0] * BLOCK_TOKENS,
        KEYS=_KEYS,
        WARPS=_WARPS,
        num_warps=_WARPS,
        launch_pdl=True,
    )
