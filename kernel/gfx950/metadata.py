"""What the code object says about a kernel: sizes, register counts, which registers are set up at its start.

Three sources, one result: the ``.amdhsa_`` directives and the ``amdhsa.kernels`` notes of assembly text,
and the 64-byte kernel descriptor of a code object (LLVM's AMDGPU usage guide, "Code Object Kernel
Descriptor").
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field, replace

from kernel.gfx950.errors import AssemblySyntaxError, UnsupportedInstructionError


@dataclass(frozen=True)
class KernelArgument:
    """One kernel argument: ``offset`` and ``size`` in bytes within the kernarg segment."""

    offset: int
    size: int
    value_kind: str


@dataclass(frozen=True)
class KernelMetadata:
    """Sizes are bytes a workgroup (``lds_bytes``) or a lane (``scratch_bytes``)."""

    name: str
    lds_bytes: int = 0
    scratch_bytes: int = 0
    kernarg_bytes: int = 0
    user_sgprs: int = 2
    kernarg_pointer: bool = True
    kernarg_preload_dwords: int = 0
    kernarg_preload_offset_dwords: int = 0
    workgroup_id: tuple[bool, bool, bool] = (True, False, False)
    workitem_id_dimensions: int = 1
    vgprs: int = 512
    """Vector registers of a lane, accumulator registers included."""
    accum_offset: int = 256
    """Where the accumulator registers begin in the unified file: a vector register's number is below it."""
    sgprs: int = 102
    ieee_mode: bool = True
    dx10_clamp: bool = True
    arguments: tuple[KernelArgument, ...] = ()
    notes: dict[str, int] = field(default_factory=dict)
    """Integer entries of ``amdhsa.kernels``: ``vgpr_count``, ``agpr_count``, ``vgpr_spill_count``, ..."""


_REQUIRED_VALUES = {
    # what the interpreter takes for granted; anything else would change results
    "user_sgpr_dispatch_ptr": 0,
    "user_sgpr_queue_ptr": 0,
    "user_sgpr_dispatch_id": 0,
    "user_sgpr_private_segment_size": 0,
    "uses_dynamic_stack": 0,
    "system_sgpr_workgroup_info": 0,
    "float_round_mode_32": 0,
    "float_round_mode_16_64": 0,
    "float_denorm_mode_32": 3,
    "float_denorm_mode_16_64": 3,
    "fp16_overflow": 0,
    "tg_split": 0,
}


def from_directives(name: str, directives: dict[str, int]) -> KernelMetadata:
    """``directives`` maps each ``.amdhsa_X`` of a kernel, without the prefix, to its value."""
    for key, wanted in _REQUIRED_VALUES.items():
        if directives.get(key, wanted) != wanted:
            raise UnsupportedInstructionError(
                f".amdhsa_{key} {directives[key]}: only {wanted} is implemented"
            )

    def get(key: str, default: int) -> int:
        return directives.get(key, default)

    kernarg_pointer = bool(get("user_sgpr_kernarg_segment_ptr", 0))
    preload = get("user_sgpr_kernarg_preload_length", 0)
    return KernelMetadata(
        name=name,
        lds_bytes=get("group_segment_fixed_size", 0),
        scratch_bytes=get("private_segment_fixed_size", 0),
        kernarg_bytes=get("kernarg_size", 0),
        user_sgprs=get("user_sgpr_count", 2 * kernarg_pointer + preload),
        kernarg_pointer=kernarg_pointer,
        kernarg_preload_dwords=preload,
        kernarg_preload_offset_dwords=get("user_sgpr_kernarg_preload_offset", 0),
        workgroup_id=(
            bool(get("system_sgpr_workgroup_id_x", 1)),
            bool(get("system_sgpr_workgroup_id_y", 0)),
            bool(get("system_sgpr_workgroup_id_z", 0)),
        ),
        workitem_id_dimensions=get("system_vgpr_workitem_id", 0) + 1,
        vgprs=get("next_free_vgpr", 512),
        accum_offset=get("accum_offset", 256),
        sgprs=get("next_free_sgpr", 102),
        ieee_mode=bool(get("ieee_mode", 1)),
        dx10_clamp=bool(get("dx10_clamp", 1)),
    )


def from_descriptor(
    name: str,
    descriptor: bytes,
    arguments: tuple[KernelArgument, ...] = (),
    notes: dict[str, int] | None = None,
) -> KernelMetadata:
    """From a code object's 64-byte kernel descriptor (the symbol ``name.kd``)."""
    if len(descriptor) != 64:
        raise AssemblySyntaxError(f"kernel descriptor of {name}: {len(descriptor)} bytes, 64 are needed")
    lds, scratch, kernarg = struct.unpack_from("<III", descriptor, 0)
    rsrc3, rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIIHH", descriptor, 44)
    directives = {
        "group_segment_fixed_size": lds,
        "private_segment_fixed_size": scratch,
        "kernarg_size": kernarg,
        "user_sgpr_count": rsrc2 >> 1 & 31,
        "user_sgpr_dispatch_ptr": properties >> 1 & 1,
        "user_sgpr_queue_ptr": properties >> 2 & 1,
        "user_sgpr_kernarg_segment_ptr": properties >> 3 & 1,
        "user_sgpr_dispatch_id": properties >> 4 & 1,
        "user_sgpr_private_segment_size": properties >> 6 & 1,
        "uses_dynamic_stack": properties >> 11 & 1,
        "user_sgpr_kernarg_preload_length": preload & 0x7F,
        "user_sgpr_kernarg_preload_offset": preload >> 7,
        "system_sgpr_workgroup_id_x": rsrc2 >> 7 & 1,
        "system_sgpr_workgroup_id_y": rsrc2 >> 8 & 1,
        "system_sgpr_workgroup_id_z": rsrc2 >> 9 & 1,
        "system_sgpr_workgroup_info": rsrc2 >> 10 & 1,
        "system_vgpr_workitem_id": rsrc2 >> 11 & 3,
        "next_free_vgpr": ((rsrc1 & 63) + 1) * 8,
        "accum_offset": ((rsrc3 & 63) + 1) * 4,
        "float_round_mode_32": rsrc1 >> 12 & 3,
        "float_round_mode_16_64": rsrc1 >> 14 & 3,
        "float_denorm_mode_32": rsrc1 >> 16 & 3,
        "float_denorm_mode_16_64": rsrc1 >> 18 & 3,
        "dx10_clamp": rsrc1 >> 21 & 1,
        "ieee_mode": rsrc1 >> 23 & 1,
        "fp16_overflow": rsrc1 >> 26 & 1,
        "tg_split": rsrc3 >> 16 & 1,
    }
    return replace(from_directives(name, directives), arguments=arguments, notes=notes or {})


_NOTE_ENTRY = re.compile(r"^(?P<indent> *)(?P<item>- )?\.(?P<key>\w+): *(?P<value>.*)$")


def read_notes(lines: list[str]) -> dict[str, tuple[tuple[KernelArgument, ...], dict[str, int]]]:
    """Arguments and integer entries of each kernel in the ``amdhsa.kernels`` notes, by kernel name.

    Reads the one layout LLVM writes: kernels are list items two spaces in, their arguments list items six in.
    """
    kernels: dict[str, tuple[tuple[KernelArgument, ...], dict[str, int]]] = {}
    name = ""
    arguments: list[dict[str, str]] = []
    notes: dict[str, int] = {}

    def close() -> None:
        if name:
            kernels[name] = (
                tuple(KernelArgument(int(a["offset"]), int(a["size"]), a["value_kind"]) for a in arguments),
                dict(notes),
            )

    for line in lines:
        entry = _NOTE_ENTRY.match(line)
        if entry is None:
            continue
        depth, key, value = (
            len(entry["indent"]) + len(entry["item"] or ""),
            entry["key"],
            entry["value"].strip(),
        )
        if depth == 4:
            if entry["item"]:
                close()
                name, arguments, notes = "", [], {}
            if key == "name":
                name = value.strip("'\"")
            elif re.fullmatch(r"-?\d+", value):
                notes[key] = int(value)
        elif depth == 8:
            if entry["item"]:
                arguments.append({})
            arguments[-1][key] = value
    close()
    return kernels
