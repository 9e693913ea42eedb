"""Scalar instructions, results and scc, against the ISA's definition written with Python integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kernel.gfx950 import UndefinedReadError, UnsupportedInstructionError
from tests.gfx950.one_wave import run_lanes

M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def s32(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


def s64(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def field(x: int, at: int, width: int) -> str:
    """Bits of x from ``at``, lowest first."""
    return f"{x:064b}"[::-1][at : at + width]


def number(digits: str) -> int:
    return int(digits[::-1] or "0", 2)


def signed_field(x: int, at: int, width: int) -> int:
    digits = f"{x:032b}"[::-1][at : at + width]
    return number(digits) - (1 << len(digits) if digits[-1:] == "1" else 0)


def leading_signs(x: int) -> int:
    digits = f"{x:032b}"
    return digits.find("1" if digits[0] == "0" else "0")


Result = Callable[..., int]


def not_zero(result: int) -> int:
    return int(result != 0)


# mnemonic: (source widths and result width, result of the sources, whether scc = result is not zero)
PLAIN: dict[str, tuple[str, Result, bool]] = {
    "s_lshl_b32": ("ww:w", lambda a, b: a << b % 32, True),
    "s_lshr_b32": ("ww:w", lambda a, b: a >> b % 32, True),
    "s_ashr_i32": ("ww:w", lambda a, b: s32(a) >> b % 32, True),
    "s_lshl_b64": ("qw:q", lambda a, b: a << b % 64, True),
    "s_lshr_b64": ("qw:q", lambda a, b: a >> b % 64, True),
    "s_ashr_i64": ("qw:q", lambda a, b: s64(a) >> b % 64, True),
    "s_bfe_u32": ("ww:w", lambda a, b: number(f"{a:032b}"[::-1][b % 32 : b % 32 + (b >> 16) % 128]), True),
    "s_bfe_i32": ("ww:w", lambda a, b: signed_field(a, b % 32, (b >> 16) % 128), True),
    "s_bfe_u64": ("qw:q", lambda a, b: number(field(a, b % 64, (b >> 16) % 128)), True),
    "s_bfm_b32": ("ww:w", lambda a, b: (2 ** (a % 32) - 1) << b % 32, False),
    "s_bfm_b64": ("ww:q", lambda a, b: (2 ** (a % 64) - 1) << b % 64, False),
    "s_not_b32": ("w:w", lambda a: a ^ M32, True),
    "s_not_b64": ("q:q", lambda a: a ^ M64, True),
    "s_mul_i32": ("ww:w", lambda a, b: a * b, False),
    "s_mul_hi_u32": ("ww:w", lambda a, b: a * b // 2**32, False),
    "s_mul_hi_i32": ("ww:w", lambda a, b: s32(a) * s32(b) >> 32, False),
    "s_abs_i32": ("w:w", lambda a: abs(s32(a)), True),
    "s_brev_b32": ("w:w", lambda a: int(f"{a:032b}"[::-1], 2), False),
    "s_brev_b64": ("q:q", lambda a: int(f"{a:064b}"[::-1], 2), False),
    "s_bcnt0_i32_b32": ("w:w", lambda a: f"{a:032b}".count("0"), True),
    "s_bcnt0_i32_b64": ("q:w", lambda a: f"{a:064b}".count("0"), True),
    "s_bcnt1_i32_b32": ("w:w", lambda a: f"{a:032b}".count("1"), True),
    "s_bcnt1_i32_b64": ("q:w", lambda a: f"{a:064b}".count("1"), True),
    "s_ff1_i32_b32": ("w:w", lambda a: f"{a:032b}"[::-1].find("1"), False),
    "s_ff1_i32_b64": ("q:w", lambda a: f"{a:064b}"[::-1].find("1"), False),
    "s_ff0_i32_b32": ("w:w", lambda a: f"{a:032b}"[::-1].find("0"), False),
    "s_flbit_i32_b32": ("w:w", lambda a: f"{a:032b}".find("1"), False),
    "s_flbit_i32_b64": ("q:w", lambda a: f"{a:064b}".find("1"), False),
    "s_flbit_i32": ("w:w", leading_signs, False),
    "s_sext_i32_i8": ("w:w", lambda a: a % 256 - 256 * (a >> 7 & 1), False),
    "s_sext_i32_i16": ("w:w", lambda a: a % 65536 - 65536 * (a >> 15 & 1), False),
    "s_pack_ll_b32_b16": ("ww:w", lambda a, b: a % 65536 + (b % 65536 << 16), False),
    "s_pack_lh_b32_b16": ("ww:w", lambda a, b: a % 65536 + (b >> 16 << 16), False),
    "s_pack_hh_b32_b16": ("ww:w", lambda a, b: (a >> 16) + (b >> 16 << 16), False),
}
for _name, _function in {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}.items():
    PLAIN[f"s_{_name}_b32"] = ("ww:w", _function, True)
    PLAIN[f"s_{_name}_b64"] = ("qq:q", _function, True)

# result and scc of (a, b, scc before); None where scc depends on nothing that is promised
CARRYING: dict[str, tuple[Callable[[int, int, int], int], Callable[[int, int, int], int | None]]] = {
    "s_add_u32": (lambda a, b, _c: a + b, lambda a, b, _c: int(a + b > M32)),
    "s_addc_u32": (lambda a, b, c: a + b + c, lambda a, b, c: int(a + b + c > M32)),
    "s_sub_u32": (lambda a, b, _c: a - b, lambda a, b, _c: int(a < b)),
    "s_subb_u32": (lambda a, b, c: a - b - c, lambda a, b, c: int(a - b - c < 0)),
    "s_add_i32": (lambda a, b, _c: a + b, lambda a, b, _c: int(s32((a + b) & M32) != s32(a) + s32(b))),
    "s_sub_i32": (lambda a, b, _c: a - b, lambda a, b, _c: int(s32((a - b) & M32) != s32(a) - s32(b))),
    "s_min_i32": (lambda a, b, _c: min(s32(a), s32(b)), lambda a, b, _c: int(s32(a) < s32(b))),
    "s_min_u32": (lambda a, b, _c: min(a, b), lambda a, b, _c: int(a < b)),
    "s_max_i32": (
        lambda a, b, _c: max(s32(a), s32(b)),
        lambda a, b, _c: None if a == b else int(s32(a) > s32(b)),
    ),
    "s_max_u32": (lambda a, b, _c: max(a, b), lambda a, b, _c: None if a == b else int(a > b)),
    "s_lshl1_add_u32": (lambda a, b, _c: 2 * a + b, lambda a, b, _c: int(2 * a + b > M32)),
    "s_lshl2_add_u32": (lambda a, b, _c: 4 * a + b, lambda a, b, _c: int(4 * a + b > M32)),
    "s_lshl3_add_u32": (lambda a, b, _c: 8 * a + b, lambda a, b, _c: int(8 * a + b > M32)),
    "s_lshl4_add_u32": (lambda a, b, _c: 16 * a + b, lambda a, b, _c: int(16 * a + b > M32)),
    "s_absdiff_i32": (lambda a, b, _c: abs(s32(a) - s32(b)), lambda a, b, _c: int(a != b)),
}
COMPARES: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}
SAVEEXEC = ("and", "or", "xor", "andn2", "orn2", "nand", "nor", "xnor")
COVERED = {
    *PLAIN,
    *CARRYING,
    "s_movk_i32",
    "s_addk_i32",
    "s_mulk_i32",
    "s_mov_b32",
    "s_mov_b64",
    "s_nop",
    "s_sleep",
}
COVERED |= {f"s_cmp_{name}_{kind}" for name in COMPARES for kind in ("i32", "u32")} | {
    "s_cmp_eq_u64",
    "s_cmp_lg_u64",
}
COVERED |= {f"s_cmpk_{name}_{kind}" for name in COMPARES for kind in ("i32", "u32")} | {"s_setprio"}
COVERED |= {f"s_bitcmp{bit}_b{width}" for bit in (0, 1) for width in (32, 64)}
COVERED |= {f"s_bitset{bit}_b{width}" for bit in (0, 1) for width in (32, 64)}
COVERED |= {f"s_{name}_b{width}" for name in ("cselect", "cmov") for width in (32, 64)}
COVERED |= {f"s_{name}_saveexec_b64" for name in SAVEEXEC} | {"s_branch"}
COVERED |= {f"s_cbranch_{name}" for name in ("scc0", "scc1", "vccz", "vccnz", "execz", "execnz")}

SPECIAL = [0, 1, 2, 31, 32, 33, 63, 64, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0x80000001, M32]
SPECIAL += [0x00100004, 0x001F0000, 0x0020001C, 0x00080010]


def pairs(seed: int, count: int = 9) -> list[tuple[int, int]]:
    rng = np.random.default_rng(seed)
    values = [int(x) for x in rng.integers(0, 1 << 32, 4, dtype=np.uint64)]
    chosen = [(int(a), int(b)) for a, b in rng.choice([*SPECIAL, *values], (count, 2))]
    return [*chosen, (M32, M32), (0, 0), (M32, 0)]


def wide(a: int, b: int) -> int:
    return a | b << 32


@pytest.mark.parametrize("name", PLAIN)
def test_plain(name: str) -> None:
    shape, function, sets_scc = PLAIN[name]
    sources, _, result = shape.partition(":")
    for number_, (a, b) in enumerate(pairs(len(name))):
        scalars = {"s20": a, "s21": b, "s22": b, "s23": a, "scc": number_ % 2}
        texts = [
            f"s[{20 + 2 * at}:{21 + 2 * at}]" if w == "q" else f"s{20 + 2 * at}"
            for at, w in enumerate(sources)
        ]
        values = [wide(a, b) if sources[0] == "q" else a, wide(b, a) if sources[-1] == "q" else b][
            : len(sources)
        ]
        destination = "s[30:31]" if result == "q" else "s30"
        found = run_lanes(
            f"s_mov_b32 s31, 0\n{name} {destination}, {', '.join(texts)}",
            scalars=scalars,
            read_scalars=["s30", "s31", "scc"],
        ).scalars
        wanted = function(*values) & (M64 if result == "q" else M32)
        assert wide(found["s30"], found["s31"]) == wanted, [hex(v) for v in values]
        assert found["scc"] == (not_zero(wanted) if sets_scc else number_ % 2)


@pytest.mark.parametrize("name", CARRYING)
def test_carrying(name: str) -> None:
    result, scc = CARRYING[name]
    for at, (a, b) in enumerate(pairs(len(name))):
        wanted_scc = scc(a, b, at % 2)
        names = ["s30"] if wanted_scc is None else ["s30", "scc"]
        scalars = {"s20": a, "s21": b, "scc": at % 2}
        found = run_lanes(f"{name} s30, s20, s21", scalars=scalars, read_scalars=names).scalars
        assert found["s30"] == result(a, b, at % 2) & M32
        assert found.get("scc") == wanted_scc


def test_scc_of_equal_maxima_may_not_be_read() -> None:
    with pytest.raises(UndefinedReadError, match="scc"):
        run_lanes("s_max_i32 s30, s20, s20\ns_cselect_b32 s31, 1, 0", scalars={"s20": 4})


@pytest.mark.parametrize("kind", ["i32", "u32", "u64"])
def test_compares(kind: str) -> None:
    for name, function in COMPARES.items():
        if kind == "u64" and name not in ("eq", "lg"):
            continue
        for a, b in [*pairs(3), (5, 5)]:
            sources = "s[20:21], s[22:23]" if kind == "u64" else "s20, s22"
            x, y = (
                (wide(a, b), wide(b, a)) if kind == "u64" else (s32(a), s32(b)) if kind == "i32" else (a, b)
            )
            scalars = {"s20": a, "s21": b, "s22": b, "s23": a}
            found = run_lanes(f"s_cmp_{name}_{kind} {sources}", scalars=scalars, read_scalars=["scc"])
            assert found.scalars["scc"] == int(function(x, y))


def test_constants_of_16_bits() -> None:
    for text, x in (("0x7fff", 0x7FFF), ("0x8000", -0x8000), ("-5", -5), ("0xffff", -1)):
        for a, _ in pairs(4, 1):
            scalars = {"s20": a, "s21": a, "scc": 1}
            found = run_lanes(
                f"s_mulk_i32 s21, {text}\ns_movk_i32 s22, {text}\ns_addk_i32 s20, {text}",
                scalars=scalars,
                read_scalars=["s20", "s21", "s22", "scc"],
            ).scalars
            assert found["s20"] == (a + x) & M32
            assert found["s21"] == (a * x) & M32
            assert found["s22"] == x & M32
            assert found["scc"] == int(not -(2**31) <= s32(a) + x < 2**31)
            for name, function in COMPARES.items():
                for kind in ("i32",) if text == "-5" else ("i32", "u32"):
                    left, right = (s32(a), x) if kind == "i32" else (a, x & 0xFFFF)
                    text_ = f"s_cmpk_{name}_{kind} s20, {text}"
                    got = run_lanes(text_, scalars={"s20": a}, read_scalars=["scc"]).scalars["scc"]
                    assert got == int(function(left, right))


@pytest.mark.parametrize("width", [32, 64])
def test_single_bits(width: int) -> None:
    value = 0x8123_4567_89AB_CDE1
    source = "s[20:21]" if width == 64 else "s20"
    for bit in (0, 1, 31, 32, 63, 95):
        scalars = {"s20": value & M32, "s21": value >> 32, "s22": bit}
        state = (value if width == 64 else value & M32) >> bit % width & 1
        for wanted in (0, 1):
            found = run_lanes(
                f"s_bitcmp{wanted}_b{width} {source}, s22", scalars=scalars, read_scalars=["scc"]
            )
            assert found.scalars["scc"] == int(state == wanted)
            text = f"s_bitset{wanted}_b{width} {source}, s22"
            after = run_lanes(text, scalars=scalars, read_scalars=["s20", "s21"]).scalars
            mask = 1 << bit % width
            assert wide(after["s20"], after["s21"]) == (value | mask if wanted else value & ~mask)


def test_moves() -> None:
    scalars = {"s20": 7, "s21": 8, "s22": 9, "s23": 10}
    for scc in (0, 1):
        text = """
            s_cselect_b32 s30, s20, s22
            s_cselect_b64 s[32:33], s[20:21], s[22:23]
            s_mov_b64 s[34:35], s[20:21]
            s_cmov_b32 s34, s23
            s_mov_b64 s[36:37], -2
            s_cmov_b64 s[36:37], s[22:23]
            s_nop 3
            s_sleep 1
            s_setprio 2
        """
        names = ["s30", "s32", "s33", "s34", "s35", "s36", "s37", "scc"]
        found = run_lanes(text, scalars={**scalars, "scc": scc}, read_scalars=names).scalars
        wanted = [7, 7, 8, 10, 8, 9, 10, 1] if scc else [9, 9, 10, 7, 8, M32 - 1, M32, 0]
        assert list(found.values()) == wanted


@pytest.mark.parametrize("name", SAVEEXEC)
@pytest.mark.parametrize("same", [False, True])
def test_saveexec(name: str, same: bool) -> None:
    before, mask = 0xFF00_FF00_1234_5678, 0x0F0F_FFFF_0000_9999
    destination = "s[20:21]" if same else "s[30:31]"
    text = f"s_{name}_saveexec_b64 {destination}, s[20:21]\ns_mov_b64 s[32:33], exec\n"
    text += f"s_mov_b64 s[34:35], {destination}"
    scalars = {"s20": mask & M32, "s21": mask >> 32}
    names = ["s32", "s33", "s34", "s35", "scc"]
    found = run_lanes(text, scalars=scalars, exec_mask=before, read_scalars=names).scalars
    wanted = PLAIN[f"s_{name}_b64"][1](mask, before) & M64
    assert wide(found["s32"], found["s33"]) == wanted
    assert wide(found["s34"], found["s35"]) == before
    assert found["scc"] == not_zero(wanted)


@pytest.mark.parametrize(
    ("branch", "setup", "taken"),
    [
        ("s_branch", "", True),
        ("s_cbranch_scc1", "s_cmp_eq_u32 s20, s20", True),
        ("s_cbranch_scc1", "s_cmp_lg_u32 s20, s20", False),
        ("s_cbranch_scc0", "s_cmp_eq_u32 s20, s20", False),
        ("s_cbranch_scc0", "s_cmp_lg_u32 s20, s20", True),
        ("s_cbranch_vccz", "s_mov_b64 vcc, 0", True),
        ("s_cbranch_vccz", "s_mov_b64 vcc, 1", False),
        ("s_cbranch_vccnz", "s_mov_b64 vcc, 0", False),
        ("s_cbranch_vccnz", "s_mov_b64 vcc, 1", True),
        ("s_cbranch_execz", "s_mov_b64 exec, 0", True),
        ("s_cbranch_execz", "s_mov_b64 exec, 2", False),
        ("s_cbranch_execnz", "s_mov_b64 exec, 0", False),
        ("s_cbranch_execnz", "s_mov_b64 exec, 2", True),
    ],
)
def test_branches(branch: str, setup: str, taken: bool) -> None:
    text = f"s_mov_b32 s30, 1\n{setup}\n{branch} .LBB0_1\ns_mov_b32 s30, 2\n.LBB0_1:"
    found = run_lanes(text, scalars={"s20": 3}, read_scalars=["s30"]).scalars
    assert found["s30"] == (1 if taken else 2)


def test_a_loop_counts() -> None:
    text = "s_mov_b32 s30, 0\n.LBB0_1:\ns_add_i32 s30, s30, 3\ns_cmp_lt_i32 s30, 30\ns_cbranch_scc1 .LBB0_1"
    assert run_lanes(text, read_scalars=["s30"]).scalars["s30"] == 30


def test_halves_of_exec_and_wide_literals_are_refused() -> None:
    for text in ("s_mov_b32 exec_lo, 1", "s_mov_b64 s[30:31], 0x80000000", "s_add_u32 s30, s30, -s31"):
        with pytest.raises(UnsupportedInstructionError):
            run_lanes(text, scalars={"s30": 1, "s31": 1})
