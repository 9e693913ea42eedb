"""Registers, spills, scratch and LDS of a compiled kernel, and how many waves of it a SIMD holds."""

from __future__ import annotations

from dataclasses import dataclass

from kernel.gfx950.metadata import KernelMetadata
from kernel.gfx950.report.model import LANES, SIMDS

SIMD_VGPRS = 512
"""Vector registers of a lane on a SIMD, of both kinds, for all its waves."""
_VGPR_GRANULE = 8
SIMD_SGPRS = 800
_SGPR_GRANULE = 16
_MOST_WAVES = 8
"""Waves a SIMD holds at most."""
CU_LDS_BYTES = 160 * 1024
_LDS_GRANULE = 1280
"""Bytes that LDS is handed out in (granulated_lds_size in the user guide of LLVM's AMDGPU back end)."""


@dataclass(frozen=True)
class Resources:
    """What the compiler's output asks for; facts.

    Attributes:
        vgpr: vector registers of a lane, accumulator registers included. agpr: accumulator registers.
        sgpr: scalar registers of a wave. vgpr_spills, sgpr_spills: registers spilled. scratch_bytes: a lane.
        lds_bytes: a workgroup. waves_per_simd: waves that fit a SIMD at once, of whole workgroups.
    """

    vgpr: int
    agpr: int
    sgpr: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int
    lds_bytes: int
    waves_per_simd: int


def resources(metadata: KernelMetadata) -> Resources:
    """Read the compiler's notes.

    Raises:
        KeyError: a note is missing, so the metadata is not that of a whole assembly text or code object.
    """
    notes = metadata.notes
    workgroup_waves = -(-notes["max_flat_workgroup_size"] // LANES)
    return Resources(
        vgpr=notes["vgpr_count"],
        agpr=notes["agpr_count"],
        sgpr=notes["sgpr_count"],
        vgpr_spills=notes["vgpr_spill_count"],
        sgpr_spills=notes["sgpr_spill_count"],
        scratch_bytes=metadata.scratch_bytes,
        lds_bytes=metadata.lds_bytes,
        waves_per_simd=waves_per_simd(
            notes["vgpr_count"], notes["sgpr_count"], metadata.lds_bytes, workgroup_waves
        ),
    )


def waves_per_simd(vgpr: int, sgpr: int, lds_bytes: int, workgroup_waves: int) -> int:
    """Waves of a kernel that a SIMD holds at once, limited by registers and by LDS."""
    by_registers = min(
        SIMD_VGPRS // _granules(vgpr, _VGPR_GRANULE),
        SIMD_SGPRS // _granules(sgpr, _SGPR_GRANULE),
        _MOST_WAVES,
    )
    waves_per_workgroup = -(-workgroup_waves // SIMDS)  # on each SIMD
    workgroups = by_registers // waves_per_workgroup
    if lds_bytes:
        workgroups = min(workgroups, CU_LDS_BYTES // _granules(lds_bytes, _LDS_GRANULE))
    return workgroups * waves_per_workgroup


def _granules(count: int, granule: int) -> int:
    return max(-(-count // granule), 1) * granule
