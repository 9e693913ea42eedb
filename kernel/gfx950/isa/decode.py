"""Instructions to steps: each is decoded once, the first time its kernel runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from weakref import WeakKeyDictionary

from kernel.gfx950.errors import InterpreterError, UnencodableError, UnsupportedInstructionError
from kernel.gfx950.hazards import destinations
from kernel.gfx950.isa import global_memory, lanes, lds, matrix, scalar, vector
from kernel.gfx950.isa.form import Builder, Form, Step
from kernel.gfx950.parse import EXEC, M0, VCC, Instruction, Kernel, Operand
from kernel.gfx950.wave import Wave

# Whether gfx950 has an encoding for an instruction that the interpreter could execute.
#
# Hand-written assembly can ask for more than the bits of an instruction hold: what no assembler takes must
# not run here either. The rules are those of LLVM 22's assembler for gfx950.

_E64_ONLY = {
    "v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_add3_u32", "v_add_lshl_u32", "v_alignbit_b32",
    "v_alignbyte_b32", "v_and_or_b32", "v_ashrrev_i64", "v_bcnt_u32_b32", "v_bfe_i32", "v_bfe_u32",
    "v_bfi_b32", "v_bfm_b32", "v_bitop3_b32", "v_cvt_pk_bf16_f32", "v_fma_f32", "v_ldexp_f32",
    "v_lshl_add_u32", "v_lshl_add_u64", "v_lshl_or_b32", "v_lshlrev_b64", "v_lshrrev_b64", "v_mad_i32_i24",
    "v_mad_i64_i32", "v_mad_u32_u24", "v_mad_u64_u32", "v_max3_f32", "v_max3_i32", "v_max3_u32",
    "v_mbcnt_hi_u32_b32", "v_mbcnt_lo_u32_b32", "v_med3_f32", "v_med3_i32", "v_med3_u32",
    "v_mfma_f32_16x16x128_f8f6f4", "v_min3_f32", "v_min3_i32", "v_min3_u32", "v_mul_hi_i32", "v_mul_hi_u32",
    "v_mul_lo_u32", "v_or3_b32", "v_perm_b32", "v_pk_add_f32", "v_pk_add_u16", "v_pk_fma_f32",
    "v_pk_lshlrev_b16", "v_pk_lshrrev_b16", "v_pk_max_i16", "v_pk_max_u16", "v_pk_min_i16", "v_pk_min_u16",
    "v_pk_mov_b32", "v_pk_mul_f32", "v_pk_mul_lo_u16", "v_pk_sub_u16", "v_xad_u32",
}  # fmt: skip
_ONE_FORM = ("v_readlane_b32", "v_writelane_b32", "v_readfirstlane_b32", "v_swap_b32", "v_accvgpr_mov_b32")
"""Neither e64, dpp nor sdwa."""
_NO_DPP = ("v_cmp_", "v_cmpx_", "v_permlane", "v_mov_b64")
_NO_SDWA = ("v_permlane", "v_mov_b64", "v_fmac_f32")
_MASK_READERS = ("v_cndmask_b32", "v_addc_co_u32", "v_subb_co_u32", "v_subbrev_co_u32")
_SHIFT_SOURCE = {"v_lshlrev_b64": 0, "v_lshrrev_b64": 0, "v_ashrrev_i64": 0, "v_lshl_add_u64": 1}
"""The one source of 32 bits that these have."""
_WIDE = ("_b64", "_u64", "_i64")


def check_encodable(instruction: Instruction) -> None:
    """Raises UnencodableError with what of the instruction has no bits."""
    for operand in instruction.operands:
        _check_alignment(operand)
    name = instruction.mnemonic
    problem: str | None = None
    if name.startswith("v_"):
        problem = _vector_problem(instruction)
    elif name.startswith(("s_load_", "s_buffer_load_")):
        problem = _special_destination(instruction) or _scalar_offset_problem(instruction)
    elif name.startswith("s_cmpk_") and not instruction.operands[0].is_register:
        problem = f"{instruction.operands[0].text} as the first source: it is a scalar register"
    elif name.startswith("s_cmpk_") and name.endswith("u32") and instruction.operands[1].number < 0:
        problem = f"{instruction.operands[1].text}: the constant is unsigned"
    elif name.startswith("s_"):
        literals = {
            operand.bits32() for operand in instruction.operands if _is_literal(operand, name.endswith(_WIDE))
        }
        problem = "a second literal constant" if len(literals) > 1 else None
    elif name.startswith("ds_"):
        problem = _lds_problem(instruction)
    elif name.startswith("buffer_"):
        *_, address, _resource, offset = instruction.operands
        problem = _address_problem(address) or _literal_among([offset])
    elif name.startswith("scratch_") and instruction.operands[-1].is_constant:
        problem = f"{instruction.operands[-1].text} as its base"
    elif name.startswith("global_") and instruction.operands[-1].index == EXEC:
        problem = "exec as its base"
    if problem is not None:
        raise UnencodableError(f"{_spelled(instruction)} has no encoding with {problem}")


def _check_alignment(operand: Operand) -> None:
    if not operand.is_register or operand.count == 1:
        return
    unit = 2 if operand.kind == "vector" or operand.count == 2 else 4
    if operand.index % unit:
        raise UnencodableError(
            f"operand {operand.text}: {operand.count} {operand.kind} registers start at a multiple of {unit}"
        )


def _vector_problem(instruction: Instruction) -> str | None:
    name, encoding = instruction.mnemonic, instruction.encoding
    missing = (
        (encoding == "e32" and name in _E64_ONLY)
        or (encoding == "e64" and name in _ONE_FORM)
        or (encoding in ("dpp", "sdwa") and (name in _E64_ONLY or name in _ONE_FORM))
        or (encoding == "dpp" and name.startswith(_NO_DPP))
        or (encoding == "sdwa" and (name.startswith(_NO_SDWA) or name.endswith(("_u64", "_i64"))))
    )
    if missing:
        return f"the suffix _{encoding}"
    if name in _ONE_FORM:
        return _lane_problem(instruction)
    sources = instruction.operands[destinations(instruction) :]
    if encoding == "dpp":
        crooked = [operand for operand in sources if operand.kind != "vector"]
        return f"{crooked[0].text} as a source" if crooked else _bus_problem(sources)
    if encoding == "sdwa":
        return _bus_problem(sources)
    if encoding == "e64" or name in _E64_ONLY:
        return _e64_problem(instruction, sources)
    short = _e32_problem(instruction, sources)
    # Without a suffix an assembler takes the long encoding where the short one does not do.
    return short and (short if encoding == "e32" else _e64_problem(instruction, sources))


def _e32_problem(instruction: Instruction, sources: Sequence[Operand]) -> str | None:
    name = instruction.mnemonic
    results = instruction.operands[: destinations(instruction)]
    masks = [operand for operand in results if operand.kind == "scalar"]
    if name in _MASK_READERS:
        masks += sources[2:]
        sources = sources[:2]
    if any(operand.index != VCC for operand in masks):
        return f"{masks[0].text} as a lane mask: it is vcc"
    if instruction.modifiers or any(operand.modified for operand in sources):
        return "a modifier"
    if len(sources) == 2 and (sources[1].kind != "vector" or sources[1].is_accumulator):
        return f"{sources[1].text} as the second source: it is a vector register"
    implied = [Operand("scalar", "vcc", VCC, 2)] if name in _MASK_READERS else []
    return _bus_problem([*sources, *implied])


def _e64_problem(instruction: Instruction, sources: Sequence[Operand]) -> str | None:
    wide = instruction.mnemonic.endswith(_WIDE)
    narrow = _SHIFT_SOURCE.get(instruction.mnemonic)
    literals = [operand for at, operand in enumerate(sources) if _is_literal(operand, wide and at != narrow)]
    return f"the literal constant {literals[0].text}" if literals else _bus_problem(sources)


def _bus_problem(sources: Sequence[Operand]) -> str | None:
    """A vector instruction reads one scalar register or literal, as often as it likes."""
    scalars = {
        (operand.index, operand.count): operand.text for operand in sources if operand.kind == "scalar"
    }
    read = [*scalars.values(), *(operand.text for operand in sources if _is_literal(operand))]
    return (
        f"{' and '.join(read)} as sources: one scalar register or literal is read" if len(read) > 1 else None
    )


def _lane_problem(instruction: Instruction) -> str | None:
    name, operands = instruction.mnemonic, instruction.operands
    if name in ("v_readlane_b32", "v_readfirstlane_b32"):
        if operands[1].is_accumulator:
            return f"{operands[1].text} as a source: it is no accumulator"
        return _special_destination(instruction) or _literal_among(operands[2:])
    if name == "v_writelane_b32":
        lane = [operand for operand in operands[2:] if operand.index != M0]
        return _literal_among(operands[1:]) or _bus_problem([operands[1], *lane])
    return None


def _scalar_offset_problem(instruction: Instruction) -> str | None:
    offset = instruction.operands[2]
    if not offset.is_constant:
        return None
    buffer = instruction.mnemonic.startswith("s_buffer")
    low, high = (0, 1 << 20) if buffer else (-(1 << 20), 1 << 20)
    fits = offset.kind == "integer" and low <= offset.number < high
    return None if fits else f"the offset {offset.text}: from {low} to {high - 1}"


def _lds_problem(instruction: Instruction) -> str | None:
    exchanges, reads = "permute" in instruction.mnemonic, instruction.mnemonic.startswith("ds_read")
    address = instruction.operands[1 if exchanges or reads else 0]
    scalars = [operand.text for operand in instruction.operands if operand.kind != "vector"]
    if scalars:
        return f"{scalars[0]}: its operands are vector registers"
    data = [operand for operand in instruction.operands if operand is not address]
    if len({operand.is_accumulator for operand in data}) > 1:
        return "data in vector registers and in accumulators"
    return _address_problem(address)


def _address_problem(address: Operand) -> str | None:
    vector = address.kind == "vector" and not address.is_accumulator
    return None if vector or address.kind == "off" else f"{address.text} as its address"


def _special_destination(instruction: Instruction) -> str | None:
    result = instruction.operands[0]
    return f"{result.text} as its result" if result.index in (M0, EXEC, EXEC + 1) else None


def _literal_among(operands: Sequence[Operand]) -> str | None:
    return next(
        (f"the literal constant {operand.text}" for operand in operands if _is_literal(operand)), None
    )


def _is_literal(operand: Operand, wide: bool = False) -> bool:
    """Whether a constant takes a dword of its own; ``wide`` instructions have 64-bit sources."""
    return operand.is_constant and not (operand.is_inline if wide else operand.is_inline32)


def _spelled(instruction: Instruction) -> str:
    return instruction.mnemonic + (f"_{instruction.encoding}" if instruction.encoding else "")


class Stop(Enum):
    """Where a wave stops: at a barrier, until all have come, or at its end."""

    BARRIER = "s_barrier"
    END = "s_endpgm"


@dataclass(frozen=True)
class Decoded:
    """``steps`` in the kernel's order; ``granule`` is 4 where all its memory accesses are whole dwords,
    else 1."""

    steps: tuple[Step | Stop, ...]
    granule: int


def _wait(form: Form) -> Step:
    vector_memory_left = form.number("vmcnt", 63)
    lgkm_left = form.number("lgkmcnt", 15)
    form.number("expcnt", 7)  # exports; there are none in a compute kernel

    def step(wave: Wave) -> None:
        # at its highest value a counter is not waited for
        if vector_memory_left < 63:
            wave.counters.wait_vector_memory(vector_memory_left)
        if lgkm_left < 15:
            wave.counters.wait_lgkm(lgkm_left)

    return step


BUILDERS: dict[str, Builder] = {
    **scalar.BUILDERS,
    **scalar.LANE_MASKS_BUILDERS,
    **global_memory.SCALAR_MEMORY_BUILDERS,
    **vector.BUILDERS,
    **lanes.BUILDERS,
    **lanes.CROSSLANE_BUILDERS,
    **matrix.PACKED_BUILDERS,
    **matrix.BUILDERS,
    **lds.BUILDERS,
    **global_memory.BUILDERS,
    **global_memory.SCRATCH_BUILDERS,
    "s_waitcnt": _wait,
}
"""Every mnemonic that is implemented, besides ``s_barrier`` and ``s_endpgm``."""

_NARROW = ("_ubyte", "_sbyte", "_ushort", "_sshort", "_byte", "_short", "_u8", "_u16", "_b8", "_b16")
_DECODED: WeakKeyDictionary[Kernel, Decoded] = WeakKeyDictionary()


def decode(kernel: Kernel) -> Decoded:
    """Raises UnsupportedInstructionError with the line of the first instruction that is not implemented."""
    known = _DECODED.get(kernel)
    if known is None:
        steps = tuple(_decode_one(kernel, index) for index in range(len(kernel.instructions)))
        narrow = any(
            i.mnemonic.endswith(_NARROW) and i.mnemonic.startswith(("ds_", "buffer_", "global_"))
            for i in kernel.instructions
        )
        known = _DECODED[kernel] = Decoded(steps, 1 if narrow else 4)
    return known


def decode_like(kernel: Kernel, known: Kernel) -> Decoded:
    """As ``decode``, for a kernel that differs from a ``known`` one in a few instructions: only these are
    decoded. Labels must be the same, and each instruction must stand where it did."""
    before = decode(known)
    pairs = zip(kernel.instructions, known.instructions, strict=True)
    steps = tuple(
        before.steps[index] if new is old else _decode_one(kernel, index)
        for index, (new, old) in enumerate(pairs)
    )
    decoded = _DECODED[kernel] = Decoded(steps, before.granule)
    return decoded


def decode_with(kernel: Kernel, steps: Mapping[int, Step]) -> Kernel:
    """The kernel, some of its instructions with steps of the caller's, for an analysis of a run."""
    known = decode(kernel)
    copy = replace(kernel)
    _DECODED[copy] = replace(known, steps=tuple(steps.get(at, step) for at, step in enumerate(known.steps)))
    return copy


def _decode_one(kernel: Kernel, index: int) -> Step | Stop:
    instruction = kernel.instructions[index]
    try:
        form = Form(instruction, kernel)
        if instruction.mnemonic in ("s_barrier", "s_endpgm"):
            form.close()
            return Stop(instruction.mnemonic)
        builder = BUILDERS.get(instruction.mnemonic)
        if builder is None:
            raise UnsupportedInstructionError(f"mnemonic {instruction.mnemonic!r} is not implemented")
        step = builder(form)
        form.close()
        check_encodable(instruction)
    except InterpreterError as error:
        raise error.locate(line=instruction.line, text=instruction.text, kernel=kernel.name) from None
    return step
