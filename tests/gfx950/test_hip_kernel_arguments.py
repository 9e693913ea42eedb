"""The kernel argument segment, byte for byte."""

from __future__ import annotations

import ctypes
import struct

import pytest

from kernel.gfx950.hip.code_object import kernarg_segment
from kernel.gfx950.parse import KernelArgument, KernelMetadata


def params(*values: bytes) -> tuple[int, object]:
    """The address of a ``kernelParams`` array for these argument bytes, and what keeps it alive."""
    buffers = [ctypes.create_string_buffer(value, len(value)) for value in values]
    array = (ctypes.c_void_p * (len(values) + 1))(*(ctypes.addressof(buffer) for buffer in buffers), None)
    return ctypes.addressof(array), (array, buffers)


METADATA = KernelMetadata(
    "k",
    kernarg_bytes=64,
    arguments=(
        KernelArgument(0, 8, "global_buffer"),
        KernelArgument(8, 2, "by_value"),
        KernelArgument(12, 4, "by_value"),  # behind a gap of two bytes
        KernelArgument(16, 4, "hidden_block_count_x"),
        KernelArgument(20, 4, "hidden_block_count_y"),
        KernelArgument(24, 4, "hidden_block_count_z"),
        KernelArgument(28, 2, "hidden_group_size_x"),
        KernelArgument(30, 2, "hidden_group_size_y"),
        KernelArgument(32, 2, "hidden_group_size_z"),
        KernelArgument(40, 8, "hidden_hostcall_buffer"),
        KernelArgument(48, 2, "hidden_grid_dims"),
    ),
)


@pytest.mark.parametrize(
    ("grid", "dimensions"), [((5, 1, 1), 1), ((5, 6, 1), 2), ((5, 6, 7), 3), ((1, 1, 7), 3)]
)
def test_segment(grid: tuple[int, int, int], dimensions: int) -> None:
    address, _alive = params(struct.pack("<Q", 0x0102030405060708), b"\xaa\xbb", struct.pack("<i", -2))
    segment = kernarg_segment(METADATA, address, grid, (64, 2, 3))
    expected = struct.pack(
        "<Q2s2xi3I3H6xQH14x", 0x0102030405060708, b"\xaa\xbb", -2, *grid, 64, 2, 3, 0, dimensions
    )
    assert segment == expected


def test_too_few_arguments() -> None:
    address, _alive = params(b"\0" * 8, b"\0" * 2)
    with pytest.raises(ValueError, match=r"kernelParams\[2\] of k is null: too few arguments"):
        kernarg_segment(METADATA, address, (1, 1, 1), (64, 1, 1))
