"""Small mistakes in compiled code: every way that one instruction of a kernel is changed at a time.

A deleted instruction becomes ``s_nop 0``, so that only its effect is missing. What cannot change anything by
construction is not made: operands of commutative instructions are not swapped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kernel.gfx950 import Instruction, Kernel
from kernel.gfx950.launch import decode_like
from kernel.gfx950.parse import parse_instruction

# ---- Mistakes in what moves or counts across lanes: another lane is read, another half is counted ----

_OTHER_LANES = (
    ("row_mirror", "row_half_mirror"),
    ("row_half_mirror", "row_mirror"),
    ("quad_perm:[1,0,3,2]", "quad_perm:[2,3,0,1]"),
    ("quad_perm:[2,3,0,1]", "quad_perm:[3,2,1,0]"),
    ("quad_perm:[3,2,1,0]", "quad_perm:[1,0,3,2]"),
    ("row_ror:8", "row_ror:4"),
    ("row_ror:4", "row_ror:2"),
    ("row_ror:2", "row_ror:1"),
    ("row_ror:1 ", "row_ror:2 "),
)
_OTHER_COUNTS = {
    "v_permlane32_swap": "v_permlane16_swap",
    "v_permlane16_swap": "v_permlane32_swap",
    "v_mbcnt_hi": "v_mbcnt_lo",
    "v_mbcnt_lo": "v_mbcnt_hi",
    "s_bcnt1_i32_b64": "s_ff1_i32_b64",
    "s_ff1_i32_b64": "s_bcnt1_i32_b64",
}


def lane_changes(text: str) -> Iterator[str]:
    """Every such change of an instruction."""
    for one, other in _OTHER_LANES:
        if one in text:
            yield text.replace(one, other)
            break
    for one, other in _OTHER_COUNTS.items():
        if text.startswith(one):
            yield text.replace(one, other, 1)
    median = re.match(r"(v_med3_i32) (v\d+), (v\d+), (v\d+), (v\d+)$", " ".join(text.split()))
    if median is not None:
        name, to, one, two, keep = median.groups()
        yield f"{name} {to}, {one}, {one}, {keep}"
        yield f"{name} {to}, {two}, {two}, {keep}"


NOP_SHORTENED = "nop shortened"
_FLIPPED = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}
_INVERTED_BRANCHES = {
    "scc0": "scc1", "scc1": "scc0", "vccz": "vccnz", "vccnz": "vccz", "execz": "execnz", "execnz": "execz",
}  # fmt: skip
_EXTREMES = {"max": "min", "min": "max"}
_ADD_SUB = {
    "s_add_i32": "s_sub_i32", "s_sub_i32": "s_add_i32", "s_add_u32": "s_sub_u32", "s_sub_u32": "s_add_u32",
    "s_addc_u32": "s_add_u32", "s_subb_u32": "s_sub_u32", "v_add_u32": "v_sub_u32", "v_sub_u32": "v_add_u32",
    "v_subrev_u32": "v_add_u32", "s_and_b64": "s_or_b64", "s_or_b64": "s_and_b64", "s_and_b32": "s_or_b32",
    "s_or_b32": "s_and_b32", "v_and_b32": "v_or_b32", "v_or_b32": "v_and_b32", "v_xor_b32": "v_or_b32",
    "s_xor_b64": "s_or_b64", "s_mul_hi_u32": "s_mul_i32", "s_lshl_b32": "s_lshr_b32",
    "s_lshr_b32": "s_lshl_b32",
    "s_ashr_i32": "s_lshr_b32", "v_lshlrev_b32": "v_lshrrev_b32", "v_lshrrev_b32": "v_lshlrev_b32",
}  # fmt: skip
_ORDERED = (
    # mnemonic, the two operands whose order matters
    ("v_mfma_", 1, 2), ("v_perm_b32", 1, 2), ("v_cndmask_b32", 1, 2),
    ("s_cselect_b", 1, 2), ("s_sub_", 1, 2), ("v_sub", 1, 2), ("s_lshl_b32", 1, 2),
    ("v_lshlrev", 1, 2), ("v_lshrrev", 1, 2), ("v_lshl_add_u32", 1, 3), ("v_lshl_or", 1, 3),
    ("v_and_or", 1, 3), ("v_bfe_u32", 1, 2), ("v_permlane", 0, 1),
)  # fmt: skip
_DELETED = ("s_barrier", "s_waitcnt", "ds_write", "global_store", "s_mov", "v_mov", "v_readfirstlane",
            "s_load", "global_load", "buffer_load", "ds_read", "s_add", "v_add", "s_min", "s_max",
            "s_and", "s_or")  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """Instruction ``index`` as ``text``, "" if it is left out; ``operator`` is the kind of mistake."""

    operator: str
    index: int
    text: str


def mutants(kernel: Kernel) -> list[Mutant]:
    """Every mutant of a kernel, in the order of its instructions."""
    found: dict[tuple[int, str], Mutant] = {}
    for index, instruction in enumerate(kernel.instructions):
        for operator, text in _changes(instruction):
            found.setdefault((index, text), Mutant(operator, index, text))
    return list(found.values())


def mutated(kernel: Kernel, mutant: Mutant) -> Kernel:
    """The kernel with one instruction changed."""
    old = kernel.instructions[mutant.index]
    if not mutant.text:
        labels = {name: at - (at > mutant.index) for name, at in kernel.labels.items()}
        left = [one for one in kernel.instructions if one is not old]
        return replace(kernel, instructions=left, labels=labels)
    new = parse_instruction(mutant.text, old.line, old.address)
    instructions = list(kernel.instructions)
    instructions[mutant.index] = replace(new, text=f"{mutant.text}  (was {old.text})")
    result = replace(kernel, instructions=instructions)
    decode_like(result, kernel)
    return result


def _changes(instruction: Instruction) -> Iterator[tuple[str, str]]:
    name, text = instruction.mnemonic, instruction.text.strip()
    word, _, rest = text.replace("\t", " ").partition(" ")
    if name == "s_waitcnt":
        yield from _weaker_waits(instruction)
    if name == "s_nop":
        states = int(instruction.operands[0].number)
        yield NOP_SHORTENED, f"s_nop {states - 1}" if states else ""
        return
    yield from (("lanes changed", other) for other in lane_changes(text))
    if name.startswith(_DELETED):
        yield "deleted", "s_nop 0"
    yield from ((operator, f"{other} {rest}") for operator, other in _other_mnemonics(name, word))
    pieces = [piece.strip() for piece in rest.split(",")]
    yield from ((operator, f"{word} {', '.join(other)}") for operator, other in _other_operands(name, pieces))
    yield from _other_modifiers(name, text)


def _weaker_waits(instruction: Instruction) -> Iterator[tuple[str, str]]:
    counts = {name: value for name, value in instruction.modifiers.items() if isinstance(value, int)}
    for name, value in counts.items():
        weaker = {**counts, name: value + 1}
        yield f"{name} weakened", "s_waitcnt " + " ".join(f"{key}({left})" for key, left in weaker.items())
        others = {key: left for key, left in counts.items() if key != name}
        if others:
            yield f"{name} dropped", "s_waitcnt " + " ".join(f"{key}({left})" for key, left in others.items())


def _other_mnemonics(name: str, word: str) -> Iterator[tuple[str, str]]:
    compare = re.match(r"([sv]_cmp[kx]?_)(lt|le|gt|ge|eq|lg|ne)(_\w+)", word)
    if compare is not None:
        head, relation, tail = compare.groups()
        differs = "lg" if name.startswith("s_") else "ne"
        flipped = _FLIPPED.get(relation) or (differs if relation == "eq" else "eq")
        yield "compare flipped", head + flipped + tail
    if name.startswith("s_cbranch_"):
        yield "branch inverted", "s_cbranch_" + _INVERTED_BRANCHES[name.removeprefix("s_cbranch_")]
    extreme = re.search(r"max|min", name)
    if extreme is not None:
        yield "extreme swapped", word.replace(extreme[0], _EXTREMES[extreme[0]], 1)
    if name in _ADD_SUB:
        yield "operation changed", word.replace(name, _ADD_SUB[name], 1)
    if name == "v_med3_i32":
        yield "operation changed", word.replace("v_med3", "v_max3", 1)
        yield "operation changed", word.replace("v_med3", "v_min3", 1)


def _other_operands(name: str, pieces: list[str]) -> Iterator[tuple[str, list[str]]]:
    for start, one, two in _ORDERED:
        if name.startswith(start):
            swapped = list(pieces)
            tails = [re.sub(r"^\S+", "", pieces[at]) for at in (one, two)]  # modifiers stay where they are
            heads = [pieces[at].split()[0] for at in (one, two)]
            swapped[one], swapped[two] = heads[1] + tails[0], heads[0] + tails[1]
            if swapped != pieces:
                yield "operands swapped", swapped
    if name.startswith(("s_waitcnt", "s_cbranch", "s_branch", "s_endpgm", "s_barrier", "v_mfma")):
        return
    first = 0 if name.startswith("s_cmp") else 1
    for at in range(first, len(pieces)):
        head, _, tail = pieces[at].partition(" ")
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", head):
            for other in _other_constants(name, int(head, 0)):
                shifted = f"{other & 0xFFFFFFFF:#x}" if not -16 <= other <= 64 else str(other)
                yield "constant shifted", [*pieces[:at], f"{shifted} {tail}".strip(), *pieces[at + 1 :]]


def _other_constants(name: str, value: int) -> set[int]:
    """Masks lose a bit: one more could be a bit that is never set."""
    without_top = value - (1 << max(value.bit_length() - 1, 0))
    if re.search("_and_|bitop3", name):
        return {without_top, value & (value - 1)}
    step = 4 if name.startswith("s_load") else 1
    return {value + step, without_top} if value > 64 else {value + step}


def _other_modifiers(name: str, text: str) -> Iterator[tuple[str, str]]:
    offset = re.search(r" offset:(-?\d+)", text)
    if name.startswith(("ds_", "global_", "buffer_")):
        step = {"b64": 8, "b128": 16, "dwordx4": 16}.get(name.rsplit("_", 1)[1], 4)
        if offset is None:
            yield "offset shifted", f"{text} offset:{step}"
        else:
            moved = int(offset[1]) + step
            yield "offset shifted", text.replace(offset[0], f" offset:{moved}")
            if moved != step:
                yield "offset dropped", text.replace(offset[0], "")
    if name.startswith("v_mfma"):
        yield "A read as E5M2", f"{text} cbsz:1"
        yield "B read as E5M2", f"{text} blgp:1"
        if text.endswith(", 0"):
            yield "C started at 1", f"{text[:-1]}1.0"
        else:
            yield "C started at 0", re.sub(r", [va]\[\d+:\d+\]$", ", 0", text)
    table = re.search(r"bitop3:(0x[0-9a-f]+)", text)
    if table is not None and not re.search(r", (0x)?\d", text):  # beside a constant some inputs never occur
        for bit in (0, 3, 6):
            yield "truth table", text.replace(table[1], f"{int(table[1], 16) ^ 1 << bit:#x}")
    select = re.search(r"src([01])_sel:BYTE_(\d)", text)
    if select is not None:
        other = select[0].replace(f"BYTE_{select[2]}", f"BYTE_{(int(select[2]) + 1) % 4}")
        yield "byte shifted", text.replace(select[0], other)
