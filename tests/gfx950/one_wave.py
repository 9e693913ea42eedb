"""Runs a few instructions in one wave, with registers loaded before them and stored after them."""

from __future__ import annotations

import struct
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernel.gfx950 import (
    Kernel,
    KernelMetadata,
    Memory,
    Program,
    RunOptions,
    RunReport,
    Schedule,
    parse_program,
    run,
)

ALL_LANES = (1 << 64) - 1
UInt32Array = npt.NDArray[np.uint32]

# registers that the code around the instructions under test keeps for itself
_POINTERS, _SCRATCH_SCALAR, _LANE_OFFSET, _SPARE = "s[88:91]", 92, 250, 251


@dataclass(frozen=True)
class Registers:
    """What the registers asked for held at the end: 64 lanes a vector register, integers for the others."""

    vectors: dict[str, UInt32Array]
    scalars: dict[str, int]


def assemble(
    body: str,
    *,
    lds_bytes: int = 0,
    scratch_bytes: int = 0,
    kernarg_bytes: int = 16,
    workgroup_id: tuple[bool, bool, bool] = (True, False, False),
    workitem_id_dimensions: int = 1,
) -> Program:
    """``body`` as the kernel named "kernel", which ends behind it."""
    known = KernelMetadata(
        name="kernel",
        lds_bytes=lds_bytes,
        scratch_bytes=scratch_bytes,
        kernarg_bytes=kernarg_bytes,
        workgroup_id=workgroup_id,
        workitem_id_dimensions=workitem_id_dimensions,
        vgprs=512,
        accum_offset=256,
    )
    return parse_program("kernel:\n" + body + "\n\ts_endpgm\n", {"kernel": known})


def launch(
    body: str,
    memory: Memory,
    kernargs: bytes,
    *,
    threads: int = 64,
    grid: tuple[int, int, int] = (1, 1, 1),
    lds_bytes: int = 0,
    scratch_bytes: int = 0,
    schedule: Schedule | None = None,
    options: RunOptions | None = None,
) -> RunReport:
    """Assembles and runs ``body``; s[0:1] point at ``kernargs``, s2 is the workgroup, v0 the thread."""
    program = assemble(body, lds_bytes=lds_bytes, scratch_bytes=scratch_bytes, kernarg_bytes=len(kernargs))
    return run(
        program,
        "kernel",
        grid=grid,
        block=(threads, 1, 1),
        kernargs=kernargs,
        memory=memory,
        schedule=schedule,
        options=options,
    )


def run_lanes(
    body: str,
    *,
    vectors: Mapping[str, npt.NDArray[np.generic]] | None = None,
    scalars: Mapping[str, int] | None = None,
    exec_mask: int = ALL_LANES,
    read_vectors: Sequence[str] = (),
    read_scalars: Sequence[str] = (),
    lds_bytes: int = 0,
) -> Registers:
    """``body`` under ``exec_mask`` with the given registers set.

    Names are those of the assembly: "v7", "a3", "s4", "vcc_lo", "m0" and "scc". ``vectors`` have 64 dwords.
    """
    vectors, scalars = vectors or {}, dict(scalars or {})
    scc = scalars.pop("scc", None)
    inputs = np.zeros((max(len(vectors), 1), 64), np.uint32)
    lines = [
        f"s_load_dwordx4 {_POINTERS}, s[0:1], 0x0",
        f"v_lshlrev_b32_e32 v{_LANE_OFFSET}, 2, v0",
        "s_waitcnt lgkmcnt(0)",
    ]
    for at, (name, lanes) in enumerate(vectors.items()):
        inputs[at] = np.ascontiguousarray(lanes).view(np.uint32)
        lines.append(f"s_add_u32 s{_SCRATCH_SCALAR}, s88, {hex(256 * at)}")
        lines.append(f"s_addc_u32 s{_SCRATCH_SCALAR + 1}, s89, 0")
        lines.append(f"global_load_dword {name}, v{_LANE_OFFSET}, s[{_SCRATCH_SCALAR}:{_SCRATCH_SCALAR + 1}]")
    lines.append("s_waitcnt vmcnt(0)")
    lines += [f"s_mov_b32 {name}, {hex(value & 0xFFFFFFFF)}" for name, value in scalars.items()]
    lines += [f"s_mov_b32 s92, {hex(exec_mask & 0xFFFFFFFF)}", f"s_mov_b32 s93, {hex(exec_mask >> 32)}"]
    if scc is not None:
        lines.append("s_cmp_eq_u32 s92, s92" if scc else "s_cmp_lg_u32 s92, s92")
    lines.append("s_mov_b64 exec, s[92:93]")
    lines += body.strip().splitlines()
    lines.append("s_mov_b64 exec, -1")
    results: list[str] = []
    if "scc" in read_scalars:
        lines.append("s_cselect_b32 s95, 1, 0")
    for name in [*read_vectors, *read_scalars]:
        source = name
        if name in read_scalars:
            lines.append(f"v_mov_b32_e32 v{_SPARE}, {'s95' if name == 'scc' else name}")
            source = f"v{_SPARE}"
        lines.append(f"global_store_dword v{_LANE_OFFSET}, {source}, s[90:91]")
        lines += ["s_add_u32 s90, s90, 0x100", "s_addc_u32 s91, s91, 0"]
        results.append(name)
    outputs = np.zeros((max(len(results), 1), 64), np.uint32)
    memory = Memory()
    into = memory.register_array(inputs, "inputs", writable=False)
    out = memory.register_array(outputs, "outputs")
    body_text = "\n".join("\t" + line.strip() for line in lines)
    launch(body_text, memory, struct.pack("<2q", into.address, out.address), lds_bytes=lds_bytes)
    rows = {name: outputs[at].copy() for at, name in enumerate(results)}
    return Registers(
        {name: rows[name] for name in read_vectors}, {name: int(rows[name][0]) for name in read_scalars}
    )


# ---- Small kernels in assembly text, for what reads instructions and runs none ----


def kernel_of(body: str) -> Kernel:
    """A kernel named ``small`` of these instructions and labels."""
    return parse_program(f".type small,@function\nsmall:\n{textwrap.dedent(body)}").kernels["small"]
