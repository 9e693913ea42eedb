"""The kernel argument segment that hipModuleLaunchKernel builds from ``kernelParams``."""

from __future__ import annotations

import ctypes

from kernel.gfx950.metadata import KernelMetadata

_POINTER_SIZE = ctypes.sizeof(ctypes.c_void_p)


def kernarg_segment(
    metadata: KernelMetadata,
    kernel_params: int,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
) -> bytes:
    """The bytes of the segment: explicit arguments copied, hidden ones filled in.

    Args:
        metadata: where each argument lies.
        kernel_params: host address of an array with the address of each explicit argument, in order.
        grid: workgroups.
        block: threads of a workgroup.

    Other hidden arguments (buffers of the runtime, offsets) are zero: this device has no such buffers, and a
    kernel that follows such a pointer goes out of bounds.
    """
    hidden = {"hidden_grid_dims": 3 if grid[2] > 1 else 2 if grid[1] > 1 else 1}
    for axis, workgroups, threads in zip("xyz", grid, block):
        hidden[f"hidden_block_count_{axis}"] = workgroups
        hidden[f"hidden_group_size_{axis}"] = threads
    segment = bytearray(metadata.kernarg_bytes)
    explicit = 0
    for argument in metadata.arguments:
        if argument.value_kind.startswith("hidden_"):
            content = hidden.get(argument.value_kind, 0).to_bytes(argument.size, "little")
        else:
            address = ctypes.c_void_p.from_address(kernel_params + explicit * _POINTER_SIZE).value
            if address is None:
                raise ValueError(
                    f"kernelParams[{explicit}] of {metadata.name} is null: too few arguments were given"
                )
            content = ctypes.string_at(address, argument.size)
            explicit += 1
        segment[argument.offset : argument.offset + argument.size] = content
    return bytes(segment)
